"""Models with sliding windows: requests many windows long hold little more than the pages of their windows.

Whatever happens to those pages meanwhile, tokens are those of transformers, in float32; so with latents.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import GEMMA3
from fixtures.full_rank import DISTURBANCES, Conversations, Rank, models, park, prompt
from fixtures.references import Reference
from safetensors.torch import save
from torch import Tensor

from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    PauseMode,
    UpdateWeightsFromTensorReqInput,
)

PAGE_SIZE = 8
WINDOW = 24
# Of latents pages are as large as of keys and values.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {**GEMMA3, "sliding_window": WINDOW},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "DeepseekV3ForCausalLM": {"kv_lora_rank": 960, "qk_rope_head_dim": 64, "head_dim": 64},
}
PROMPTS = [prompt(1, 110), prompt(2, 61), prompt(3, 9), prompt(4, 24)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    return models(tmp_path_factory, MODELS)


def held_pages(rank: Rank, rid: str) -> list[int]:
    """In each group of layers; none if the request has yet to be admitted again."""
    req = rank.scheduler.policy.find(rid)
    assert req is not None
    if req.kv is None or not req.kv.is_prefilled:
        return []
    return [len(pages) - first for pages, first in zip(req.kv.pages, req.kv.firsts, strict=True)]


def update(rank: Rank) -> None:
    """Other weights and back, before anything is computed anew; then the same in place, under requests."""
    own = rank.values
    rank.apply(PauseGenerationReqInput(mode=PauseMode.RETRACT))
    for factor in (0.9, 1.0):
        send(rank, {name: tensor * factor for name, tensor in own.items()})
    rank.apply(ContinueGenerationReqInput())
    rank.turn(3)
    send(rank, own, pause_mode=PauseMode.IN_PLACE, flush_cache=False)


def send(rank: Rank, weights: dict[str, Tensor], **fields: Any) -> None:
    payload = {"serialized_named_tensors": [save(weights)], "load_format": "safetensors"}
    reply = rank.apply(UpdateWeightsFromTensorReqInput(**payload, **fields))
    assert reply.success, reply


@pytest.mark.parametrize(
    ("architecture", "disturbances"),
    [
        ("Gemma3ForCausalLM", ()),
        ("Gemma3ForCausalLM", (*DISTURBANCES, update)),
        *itertools.product(("MistralForCausalLM", "DeepseekV3ForCausalLM"), ((), (park,))),
    ],
)
def test_requests_many_windows_long_have_transformers_tokens_whatever_happens_to_their_pages(
    model_of: Callable[[str], tuple[Path, Reference]],
    architecture: str,
    disturbances: tuple[Callable[[Rank], Any], ...],
) -> None:
    path, reference = model_of(architecture)
    rank = Rank(path)
    allocator, windows = rank.scheduler.policy.allocator, rank.runner.kv_pool.groups.windows
    assert set(windows) <= {None, WINDOW}
    first = Conversations(rank, reference, PROMPTS, 100)
    first.disturb(*disturbances)
    rank.turn(10)
    assert any(held_pages(rank, rid) for rid in first.rids)
    for rid, ids in zip(first.rids, PROMPTS, strict=True):
        num_tokens = len(ids) + len(rank.tokens[rid])
        for window, num_held in zip(windows, held_pages(rank, rid), strict=False):
            most = -(-num_tokens // PAGE_SIZE) if window is None else WINDOW // PAGE_SIZE + 3
            assert num_held <= most
    first.end()

    # The next turn of each begins with what the cache has, as what a prompt ends with is there too.
    then = first.next_turns(10)
    if not disturbances:
        rank.turn(1)
        turns = [len(ids) + len(rank.tokens[rid]) for rid, ids in zip(first.rids, PROMPTS, strict=True)]
        expected = [(length - 1) // PAGE_SIZE * PAGE_SIZE for length in turns]
        expected += [len(ids) // PAGE_SIZE * PAGE_SIZE for ids in PROMPTS[:2]]
        assert [rank.cached_tokens(rid) for rid in then.rids] == expected
    then.end()
    rank.scheduler.policy.cache.flush()
    assert not allocator.held
    rank.kv.close()
    rank.store.arena.close()
    assert rank.vm.taken_bytes == 0
