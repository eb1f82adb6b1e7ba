"""`Engine` in Python: plain, asynchronous, streaming, from many threads, several at once, and at its end."""

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures.deadlines import HANG_S, wait_until
from fixtures.servers import is_alive

from ebbtide import Engine, SamplingParams, ServerArgs
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.this_process import NUM_FROZEN_BY_OWNER
from ebbtide.testing.null_engine import NullEngine

SEEDED: dict[str, Any] = {"sampling_seed": 1, "max_new_tokens": 8, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[NullEngine]:
    with NullEngine() as engine:
        yield engine


def pids_of(engine: NullEngine) -> list[int]:
    return list(engine._service.pids.values())


# ----------------------------------------------------------------------------------------------- generation


def test_parameters_in_any_form_give_the_same(engine: NullEngine) -> None:
    ids = engine.generate(input_ids=[1, 2], sampling_params=SEEDED)["output_ids"]
    assert engine.generate(None, SamplingParams(**SEEDED), [1, 2])["output_ids"] == ids
    params = [SamplingParams(**SEEDED), SEEDED]
    batch = engine.generate(input_ids=[[1, 2]] * 2, sampling_params=params, rid=["x", "y"])
    assert [one["output_ids"] for one in batch] == [ids, ids]
    assert [one["meta_info"]["id"] for one in batch] == ["x", "y"]
    assert len(engine.generate(input_ids=[1, 2], sampling_params={**SEEDED, "n": 3})) == 3


def test_plain_calls_in_an_event_loop_name_their_twin(engine: NullEngine) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"await its twin `async_generate\("):
            engine.generate("tide")
        with pytest.raises(RuntimeError, match=r"await its twin `async_flush_cache\("):
            engine.flush_cache()

    asyncio.run(main())


def test_every_method_has_a_twin_of_the_same_signature() -> None:
    coroutines = {name for name in dir(EngineClass) if name.startswith("async_")}
    assert len(coroutines) > 12
    for name in coroutines:
        plain = getattr(EngineClass, name.removeprefix("async_"))
        assert inspect.signature(plain) == inspect.signature(getattr(EngineClass, name))
        assert not inspect.iscoroutinefunction(plain)
        assert plain.__doc__


def test_threads_get_their_own_answers(engine: NullEngine) -> None:
    asked = [{"input_ids": [1], "sampling_params": {**SEEDED, "sampling_seed": seed}} for seed in range(16)]
    alone = [engine.generate(**one)["output_ids"] for one in asked]
    barrier = threading.Barrier(len(asked))

    def ask(one: dict[str, Any]) -> Any:
        barrier.wait()
        *_, last = engine.generate(**one, stream=True)
        assert engine.memory_occupation()["can_run"]
        return last["output_ids"]

    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(ask, asked)) == alone


# -------------------------------------------------------------------------------------------------- lifetime


def test_shutdown_ends_what_waits_and_refuses_what_comes() -> None:
    engine = NullEngine()
    pids = pids_of(engine)
    engine.pause_generation("in_place")
    stream = engine.generate(input_ids=[5], stream=True)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(engine.generate, input_ids=[5])
        wait_until(lambda: engine.pause_generation("in_place")["num_queued"] == 2, "both requests wait")
        # From two threads at once, and again.
        pool.submit(engine.shutdown)
        engine.shutdown()
        assert not any(is_alive(pid) for pid in pids)
        with pytest.raises(EngineError, match="shut down"):
            waiting.result()
    for call in (
        lambda: engine.generate(input_ids=[5]),
        engine.flush_cache,
        engine.model_info,
        engine.memory_occupation,
        lambda: engine.weight_version,
        lambda: next(stream),
    ):
        with pytest.raises(EngineError, match="shut down"):
            call()
    engine.shutdown()


def test_a_dead_process_is_an_error_that_names_it_and_garbage_is_ended() -> None:
    pids = use_until_a_process_dies()
    # Nobody has called `shutdown`: the engine is garbage.
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)), "its processes have gone")


def use_until_a_process_dies() -> list[int]:
    engine = NullEngine(dp_size=2)
    pids = engine._service.pids
    engine.pause_generation("in_place")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, input_ids=[5])
        wait_until(lambda: engine.pause_generation("in_place")["num_queued"] == 1, "the request waits")
        victim = next(iter(pids))
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(EngineError, match=f"the {victim} process was ended by SIGKILL"):
            waiting.result()
    with pytest.raises(EngineError, match="SIGKILL"):
        engine.generate(input_ids=[5])
    return list(pids.values())


def test_a_fork_of_the_caller_is_told_so_and_leaves_the_engine_alone() -> None:
    with NullEngine() as engine:
        stream = engine.generate(input_ids=[5], sampling_params=ENDLESS, stream=True)
        next(stream)
        forked = os.fork()
        if forked == 0:
            # Ends the fork if it hangs.
            signal.alarm(int(HANG_S))
            try:
                refused = f"belongs to process {os.getppid()}, and this is a fork"
                for call in (lambda: engine.generate(input_ids=[5]), engine.model_info, lambda: next(stream)):
                    with pytest.raises(EngineError, match=refused):
                        call()
                stream.close()
                engine.shutdown()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(forked, 0)[1] == 0
        next(stream)
        assert len(engine.generate(input_ids=[5], sampling_params=SEEDED)["output_ids"]) == 8


@pytest.mark.filterwarnings("error")
def test_a_stream_that_outlives_its_engine_is_dropped_without_a_word() -> None:
    # As callers find it: all tests have it frozen.
    gc.unfreeze()
    with NullEngine() as engine:
        stream = engine.generate(input_ids=[5], sampling_params=ENDLESS, stream=True)
        next(stream)
        is_frozen = gc.get_freeze_count() >= NUM_FROZEN_BY_OWNER
    is_thawed = gc.get_freeze_count() < NUM_FROZEN_BY_OWNER
    gc.freeze()
    assert is_frozen
    assert is_thawed
    del stream
    gc.collect()


def test_an_engine_in_an_event_loop() -> None:
    async def main() -> list[int]:
        async with NullEngine() as engine:
            asked: Any = {"input_ids": [1, 2, 3], "sampling_params": SEEDED}
            answer, other = await asyncio.gather(*(engine.async_generate(**asked) for _ in range(2)))
            assert "text" not in answer
            assert len(answer["output_ids"]) == 8
            stream = await engine.async_generate(**asked, stream=True)
            [*_, last] = [chunk async for chunk in stream]
            assert last["output_ids"] == answer["output_ids"] == other["output_ids"]
            assert (await engine.async_model_info())["weight_version"] == "default"
            with pytest.raises(RequestRejected, match="skip_tokenizer_init"):
                await engine.async_generate("tide")
            return pids_of(engine)

    [pid] = asyncio.run(main())
    assert not is_alive(pid)


def test_a_start_that_is_interrupted_before_there_is_a_loop_ends_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Mock()
    monkeypatch.setattr(NullEngine, "_start", lambda engine, args: service)
    monkeypatch.setattr("ebbtide.srt.entrypoints.engine.LoopThread", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        NullEngine()
    service.shutdown.assert_called_once()


def test_arguments_that_do_not_exist_are_type_errors() -> None:
    with pytest.raises(TypeError, match="modell_path"):
        Engine(modell_path="x")
    with pytest.raises(TypeError, match="dtype"):
        Engine(server_args=ServerArgs(model_path="x"), dtype="float32")
