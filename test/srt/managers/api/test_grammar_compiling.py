"""Grammars compiled in another process: whatever one of them takes, the others are compiled."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.deadlines import HANG_S
from fixtures.scripted_engine import Engine, scripted
from fixtures.servers import wait_until

from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.api.grammar_compiling import (
    CompilerProcess,
    CompilerStart,
    FairTurns,
    GrammarCompiling,
)
from ebbtide.srt.managers.text import grammar
from ebbtide.srt.managers.text.grammar import GrammarCompiler, GrammarShelf, Vocabulary
from ebbtide.srt.managers.text.tokenizer import load_tokenizer
from ebbtide.srt.managers.wire.generation import LoadGrammar
from ebbtide.srt.sampling_params import GrammarSpec, SamplingParams
from ebbtide.srt.server_args import ServerArgs

QUICK = GrammarSpec("choice", 'root ::= "yes" | "no"')
# It is within all bounds, and takes minutes.
SLOW = GrammarSpec("regex", "|".join(f"[a-z]{{1,{count}}}{count}" for count in range(300, 900)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")
    return resolve(ServerArgs(model_path=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def process(config: EngineConfig) -> Iterator[CompilerProcess]:
    process = CompilerProcess(CompilerStart.of(config))
    yield process
    process.close()


def forks(process: CompilerProcess) -> str:
    assert process.pid is not None
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


def test_clients_have_turns_one_after_the_other_and_small_grammars_of_each_first() -> None:
    async def run() -> list[str]:
        turns, told = FairTurns(1), []
        go = asyncio.Event()

        async def work(name: str) -> None:
            async with turns.turn(name[0], int(name[1])):
                await go.wait()
                told.append(name)

        names = ("a9", "a3", "a2", "a1", "b2", "c1", "b1")
        tasks = [asyncio.create_task(work(name)) for name in names]
        await asyncio.sleep(0)
        tasks[2].cancel()
        go.set()
        await asyncio.wait(tasks)
        async with turns.turn("d", 0):  # what was waited for in vain is free
            return told

    assert asyncio.run(asyncio.wait_for(run(), HANG_S)) == ["a9", "a1", "b1", "c1", "a3", "b2"]


def test_a_grammar_that_takes_too_long_is_ended_and_others_are_not(process: CompilerProcess) -> None:
    async def run() -> None:
        slow = asyncio.create_task(process.compile(SLOW, [], 600.0))
        assert await process.compile(QUICK, [], HANG_S)
        assert not slow.done()
        slow.cancel()
        assert await process.compile(SLOW, [], 0.5) is None
        assert await process.compile(QUICK, [], HANG_S)

    asyncio.run(run())
    wait_until(lambda: not forks(process), "no compile is left")


def test_a_grammar_that_nobody_waits_for_is_ended(process: CompilerProcess) -> None:
    async def run() -> None:
        slow = asyncio.create_task(process.compile(SLOW, [], 600.0))
        await asyncio.to_thread(wait_until, lambda: process.pid and forks(process), "it compiles")
        slow.cancel()

    asyncio.run(run())
    wait_until(lambda: not forks(process), "no compile is left")


def test_a_process_that_was_killed_is_started_again_and_ends_a_grammar_that_takes_too_much_memory(
    config: EngineConfig, process: CompilerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        slow = asyncio.create_task(process.compile(SLOW, [], 600.0))
        await asyncio.to_thread(wait_until, lambda: process.pid and forks(process), "it compiles")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: process.has_ended, "it has ended")
        slow.cancel()
        with pytest.raises(RequestRejected, match="recurses too deeply, or takes more than 16777216 bytes"):
            await process.compile(SLOW, [], 600.0)
        assert await process.compile(QUICK, [], HANG_S)

    # What is started next is told so.
    monkeypatch.setattr(process, "_start", replace(CompilerStart.of(config), memory_bytes=1 << 24))
    asyncio.run(run())


def test_a_process_that_ends_before_it_compiles_is_an_error(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = CompilerProcess(CompilerStart.of(config))
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(process, "_running", lambda: ours)

    async def run() -> None:
        compiling = asyncio.create_task(process.compile(QUICK, [], HANG_S))
        await asyncio.sleep(0)
        theirs.close()
        with pytest.raises(EngineError, match="the process that does it has ended"):
            await compiling

    asyncio.run(run())


def test_requests_for_the_same_grammar_share_its_compile(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[GrammarSpec] = []
    gate = asyncio.Event()

    async def compile(self: Any, spec: GrammarSpec, continued_ids: Any, limit_s: float) -> bytes | None:
        compiled.append(spec)
        await gate.wait()
        return None if spec is SLOW and limit_s < 20 else spec.text.encode()

    monkeypatch.setattr(CompilerProcess, "compile", compile)

    async def run() -> None:
        compiling = GrammarCompiling(CompilerStart.of(config))

        def ask(spec: GrammarSpec, client: str = "a") -> asyncio.Task[bytes]:
            return asyncio.create_task(compiling.compiled(spec, (), client))

        first, second, alone = ask(QUICK), ask(QUICK), ask(SLOW)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert compiled == [QUICK, SLOW]
        first.cancel()
        alone.cancel()
        await asyncio.wait([first, alone])
        gate.set()
        assert await second == QUICK.text.encode()
        assert await ask(QUICK) == QUICK.text.encode()
        assert compiled == [QUICK, SLOW]
        # It begins again where it has more time.
        assert await ask(SLOW) == SLOW.text.encode()
        assert compiled == [QUICK, SLOW, SLOW, SLOW]

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_json_has_no_more_whitespace_than_the_server_says(config: EngineConfig) -> None:
    spec = SamplingParams.from_dict({"json_schema": {"type": "array", "items": {"type": "integer"}}}).grammar
    assert spec is not None
    tokenizer = load_tokenizer(config.model)
    eos_token_ids = config.model.eos_token_ids | tokenizer.eos_token_ids
    vocabulary = Vocabulary(tokenizer, config.model.vocab_size, eos_token_ids)
    shelf = GrammarShelf(vocabulary)
    arguments: dict[str, dict[str, Any]] = {
        "free": {},
        "few": {"constrained_json_max_whitespace_cnt": 2},
        "none": {"constrained_json_disable_any_whitespace": True},
    }
    for name, given in arguments.items():
        start = CompilerStart.of(replace(config, server_args=replace(config.server_args, **given)))
        compiled = GrammarCompiler(vocabulary, start.has_whitespace, start.most_whitespace).compile(spec)
        shelf.load(LoadGrammar(key=name, compiled=compiled))

    def allow(text: str) -> list[str]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [name for name in arguments if all(map(shelf.mask(name, lambda: None).accept, ids))]

    assert allow("[1, 2]") == ["free", "few", "none"]
    assert allow("[1,\n\t2]") == ["free", "few"]
    assert allow("[1,\r\t\r\t2]") == ["free"]


@scripted()
async def test_ranks_have_a_grammar_before_what_keeps_to_it_and_only_as_many_as_fit(engine: Engine) -> None:
    compiled = {"a+": b"a" * 30, "b+": b"b" * 30, "c+": b"c" * 50, "d+": b"d" * 100}

    async def compile(self: GrammarCompiling, spec: GrammarSpec, continued_ids: Any, client: str) -> bytes:
        return compiled[spec.text]

    async def loads(regex: str) -> list[tuple[bytes, list[str]]]:
        await engine.manager.prepare({"input_ids": [1], "sampling_params": {"regex": regex, "n": 2}})
        *loads, first, second = await engine.some()
        assert first.grammar == second.grammar == GrammarSpec("regex", regex).key
        assert not loads or loads[0].key == first.grammar
        return [(load.compiled, [names[key] for key in load.dropped]) for load in loads]

    names = {GrammarSpec("regex", regex).key: regex for regex in compiled}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "MAX_KEPT_BYTES", 100)
        patch.setattr(GrammarCompiling, "compiled", compile)
        assert await loads("a+") == [(compiled["a+"], [])]
        assert await loads("b+") == [(compiled["b+"], [])]
        assert await loads("a+") == []
        assert await loads("c+") == [(compiled["c+"], ["b+"])]
        assert await loads("d+") == [(compiled["d+"], ["a+", "c+"])]
        assert await loads("a+") == [(compiled["a+"], ["d+"])]


@scripted()
async def test_a_request_whose_grammar_compiles_ends_with_the_engine(engine: Engine) -> None:
    async def compile(self: GrammarCompiling, *asked: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarCompiling, "compiled", compile)
        fields = {"input_ids": [1], "sampling_params": {"regex": "a"}}
        asking = asyncio.create_task(engine.manager.prepare(fields))
        await asyncio.sleep(0)
        engine.manager.fail("it has gone")
        with pytest.raises(EngineError, match="it has gone"):
            await asking
