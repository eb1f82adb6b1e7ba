"""Models whose layers keep a state of each request: it follows its request wherever that goes.

Whatever happens meanwhile, tokens are those of transformers, in float32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.full_rank import CHUNK, DISTURBANCES, SHAPE, Conversations, Rank, models, park, prompt
from fixtures.real_rank import RealRank
from fixtures.references import Reference, check_greedy_spans

from ebbtide.srt.device import CpuDevice
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GetLoadReqInput,
    PauseGenerationReqInput,
    PauseMode,
    Refusal,
    UpdateWeightFromDiskReqInput,
)
from ebbtide.srt.model_executor import kv_sizing

INTERVAL = 32
PROMPTS = [prompt(1, 110), prompt(2, 61), prompt(3, 9), prompt(4, 24), prompt(5, 1)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    return models(tmp_path_factory, {})


@pytest.fixture
def path(model_of: Callable[[str], tuple[Path, Reference]]) -> Path:
    return model_of("Qwen3_5ForCausalLM")[0]


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sizing, "CHECKPOINT_TOKENS", INTERVAL)
    monkeypatch.setattr(kv_sizing, "MIN_CHECKPOINTS", 40)


@pytest.mark.parametrize(
    ("architecture", "chunk_size", "disturbances"),
    [
        ("Qwen3_5ForCausalLM", 512, ()),
        ("Qwen3_5ForCausalLM", 512, DISTURBANCES),
        # Its prompts come in parts.
        ("NemotronHForCausalLM", 20, ()),
        ("NemotronHForCausalLM", 20, (park,)),
    ],
)
def test_requests_have_transformers_tokens_whatever_happens_to_their_states(
    model_of: Callable[[str], tuple[Path, Reference]],
    architecture: str,
    chunk_size: int,
    disturbances: tuple[Callable[[Rank], Any], ...],
) -> None:
    path, reference = model_of(architecture)
    rank = Rank(path, chunked_prefill_size=chunk_size)
    first = Conversations(rank, reference, PROMPTS)
    rank.turn(10)  # all prompts are in
    first.disturb(*disturbances)
    first.end()
    # The next turn of each begins with a checkpoint, and so does a prompt that leaves another.
    then = first.next_turns(24)
    if not disturbances:
        rank.turn(20)
        assert [rank.cached_tokens(rid) for rid in then.rids] == [160, 96, 64, 64, 32, 104, 56]
    then.end()


def test_states_leave_the_kv_cache_half_of_the_memory_unless_a_number_of_requests_is_given(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_sizing, "MIN_CHECKPOINTS", 8)
    weight_bytes = RealRank(path).runner.weight_store.arena.resident_bytes
    free_bytes = 4 * CHUNK
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: free_bytes)
    fraction = (weight_bytes + 3.1 * CHUNK) / (weight_bytes + free_bytes)
    sized = {"max_total_tokens": None, "mem_fraction_static": fraction, "page_size": 8}

    rank = RealRank(path, **sized)
    assert rank.runner.kv_pool.layout.num_chunks(rank.runner.kv_pool.num_pages) == 2
    assert rank.runner.kv_pool.arena.num_bytes == 3 * CHUNK
    [load] = rank.apply(GetLoadReqInput()).loads
    # 64 states fill the other chunk: one is to spare, and one for every four requests is a checkpoint.
    assert load.max_running_requests == 51
    assert "at most 51 requests run at once" in caplog.text

    pool = RealRank(path, max_running_requests=60, **sized).runner.kv_pool
    assert (pool.states.slots.num_rows, pool.layout.num_chunks(pool.num_pages)) == (60, 1)
    free_bytes = CHUNK
    for given, reason in (({}, "states of 1 requests"), ({"max_running_requests": 64}, "states of 64 req")):
        with pytest.raises(ConfigurationError, match=f"{reason}.* lower max_running_requests"):
            RealRank(path, **sized, **given)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT], ids=str)
def test_an_update_in_the_middle_keeps_states_or_computes_them_anew(
    model_of: Callable[[str], tuple[Path, Reference]], tmp_path: Path, mode: PauseMode
) -> None:
    architecture = "Qwen3_5ForCausalLM"
    path, reference = model_of(architecture)
    other = make_checkpoint(tmp_path, architecture, seed=1, **SHAPE)
    rank = Rank(path)
    rids = [rank.generate(ids, 30) for ids in PROMPTS]
    rank.turn(15)
    rank.apply(PauseGenerationReqInput(mode=mode))
    before = [len(rank.tokens[rid]) for rid in rids]
    assert min(before) > 5
    reply = rank.apply(
        UpdateWeightFromDiskReqInput(model_path=str(other), flush_cache=mode is PauseMode.RETRACT)
    )
    assert not isinstance(reply, Refusal), reply
    rank.apply(ContinueGenerationReqInput())
    rank.run()
    references = {"old": reference, "new": Reference(other)}
    for rid, ids, count in zip(rids, PROMPTS, before, strict=True):
        spans = [("old", 0, count), ("new", count, 30)]
        versions = [{"version": name, "start": start, "end": end} for name, start, end in spans]
        output = {"output_ids": rank.tokens[rid], "meta_info": {"weight_versions": versions}}
        check_greedy_spans(references, ids, output, recomputes_kv=mode is PauseMode.RETRACT)
