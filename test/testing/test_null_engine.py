"""The engine without a model behaves as one with a model, as far as a controller can see."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from ebbtide import Client
from ebbtide.srt.entrypoints.http_server import welcome
from ebbtide.testing import NullRunner
from ebbtide.testing.null_engine import NullEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[NullEngine]:
    with NullEngine(max_running_requests=8) as engine:
        yield engine


def test_one_rl_step(engine: NullEngine) -> None:
    params = {"max_new_tokens": 6, "sampling_seed": 3}
    before = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    assert before["output_ids"] == [NullRunner().token(3, position, 0) for position in range(6)]
    assert engine.release_memory_occupation()["freed_bytes"] == {
        "weights": 2000,
        "kv_cache": 5000,
        "cuda_graph": 100,
    }
    assert engine.resume_memory_occupation(["weights"])["weights"]["content"] == "stale"
    assert engine.memory_occupation()["can_run"] is False
    assert engine.update_weights_from_disk("5", weight_version="1")["content"] == "valid"
    engine.resume_memory_occupation(["kv_cache"])
    after = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]


@pytest.mark.parametrize("top", [0, 2])
def test_a_stream_has_the_logprobs_that_it_asks_for(engine: NullEngine, top: int) -> None:
    chunks = engine.generate(
        input_ids=[1, 2],
        sampling_params={"max_new_tokens": 3},
        return_logprob=True,
        top_logprobs_num=top,
        stream=True,
    )
    *_, last = chunks
    meta = last["meta_info"]
    assert [triple[1] for triple in meta["output_token_logprobs"]] == last["output_ids"]
    assert [len(tokens) for tokens in meta.get("output_top_logprobs") or []] == ([top] * 3 if top else [])


def test_its_processes_need_no_torch() -> None:
    """Half of what a start would cost."""
    code = "import sys, ebbtide.testing.null_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_server_that_is_ready_says_what_it_serves_and_where(engine: NullEngine) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(welcome(engine._service))
    said = captured.get()
    assert all(one in said for one in ("null", "kv_cache", "/dashboard", "ebbtide chat"))


def test_an_engine_in_python_serves_http_beside_its_own_callers(engine: NullEngine) -> None:
    with Client(engine.serve_http()) as client:
        asked = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}
        assert client.generate(**asked)["output_ids"] == engine.generate(**asked)["output_ids"]
        assert client.pause_generation("in_place")["changed"] is True
        engine.continue_generation()
