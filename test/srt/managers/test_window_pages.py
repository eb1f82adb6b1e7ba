"""Models with sliding windows: requests many windows long hold little more than the pages of their windows.

Whatever happens to those pages meanwhile, tokens are those of transformers, in float32; so with latents.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import GEMMA2, GEMMA3, make_checkpoint
from fixtures.full_rank import KV, SHAPE, Rank, prompt
from fixtures.references import Reference
from safetensors.torch import save
from torch import Tensor

from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    PauseMode,
    Preserve,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)

PAGE_SIZE = 8
WINDOW = 24
# Of latents pages are as large as of keys and values.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {**GEMMA2, "sliding_window": WINDOW},
    "Gemma3ForCausalLM": {**GEMMA3, "sliding_window": WINDOW},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "DeepseekV3ForCausalLM": {"kv_lora_rank": 960, "qk_rope_head_dim": 64, "head_dim": 64},
}
PROMPTS = [prompt(1, 110), prompt(2, 61), prompt(3, 9), prompt(4, 24)]


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**SHAPE, **MODELS[request.param]}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param, **config)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def held_pages(rank: Rank, rid: str) -> list[int]:
    """In each group of layers; none if the request has yet to be admitted again."""
    req = rank.scheduler.policy.find(rid)
    assert req is not None
    if req.kv is None or not req.kv.is_prefilled:
        return []
    return [len(pages) - first for pages, first in zip(req.kv.pages, req.kv.firsts, strict=True)]


def retract(rank: Rank) -> None:
    rank.apply(PauseGenerationReqInput(mode=PauseMode.RETRACT))
    rank.apply(ContinueGenerationReqInput())


def release(rank: Rank, preserve: Preserve) -> None:
    reply = rank.apply(ReleaseMemoryOccupationReqInput(tags=KV, preserve=preserve))
    assert not isinstance(reply, Refusal), reply
    assert reply.num_parked == (0 if preserve is Preserve.NONE else len(PROMPTS))
    rank.apply(ResumeMemoryOccupationReqInput(tags=KV))


def resize(rank: Rank) -> None:
    """To the least size and back: pages move to other chunks, and requests that have no room are parked."""
    policy = rank.scheduler.policy
    most = policy.tokens_of(policy.allocator.num_pages)
    refusal = rank.apply(ResizeMemoryOccupationReqInput(num_tokens=most + 1))
    for num_tokens in (refusal.fields["least_tokens"], most):
        reply = rank.apply(ResizeMemoryOccupationReqInput(num_tokens=num_tokens, preserve=Preserve.LIVE))
        assert not isinstance(reply, Refusal), reply
        rank.turn(3)


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


DISTURBANCES: dict[str, Callable[[Rank], None]] = {
    "nothing": lambda rank: None,
    "retract": retract,
    "release": lambda rank: release(rank, Preserve.NONE),
    "park": lambda rank: release(rank, Preserve.LIVE),
    "park with the cache": lambda rank: release(rank, Preserve.ALL),
    "resize": resize,
    "update": update,
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_requests_many_windows_long_have_transformers_tokens_whatever_happens_to_their_pages(
    path: Path, reference: Reference, disturbance: str
) -> None:
    rank = Rank(path)
    allocator, windows = rank.scheduler.policy.allocator, rank.runner.kv_pool.groups.windows
    assert set(windows) <= {None, WINDOW}
    rids = [rank.generate(ids, 90) for ids in PROMPTS]
    for _ in range(2):
        rank.turn(30)
        DISTURBANCES[disturbance](rank)
    rank.turn(10)
    assert any(held_pages(rank, rid) for rid in rids)
    for rid, ids in zip(rids, PROMPTS, strict=True):
        num_tokens = len(ids) + len(rank.tokens[rid])
        for window, num_held in zip(windows, held_pages(rank, rid), strict=False):
            most = -(-num_tokens // PAGE_SIZE) if window is None else WINDOW // PAGE_SIZE + 3
            assert num_held <= most
    rank.run()
    for rid, ids in zip(rids, PROMPTS, strict=True):
        assert len(rank.tokens[rid]) == 90
        assert reference.accepts(ids, rank.tokens[rid])

    # The next turn of each conversation begins with what the cache has, and a sample of it goes its own way.
    follow_ups = [[*ids, *rank.tokens[rid], *prompt(5, 10)] for rid, ids in zip(rids, PROMPTS, strict=True)]
    # What a prompt ends with is there too, as long as nobody needed the room.
    branches = [[*PROMPTS[0], *prompt(6, 30)], [*PROMPTS[1], *prompt(7, 30)]]
    later = [rank.generate(ids, 20) for ids in (*follow_ups, *branches)]
    rank.turn(1)
    requests = [rank.scheduler.policy.find(rid) for rid in later]
    cached = [req.cached_tokens or 0 for req in requests if req is not None]
    if disturbance == "nothing":
        expected = [(len(ids) - 10 - 1) // PAGE_SIZE * PAGE_SIZE for ids in follow_ups]
        assert cached[: len(follow_ups)] == expected
        assert cached[len(follow_ups) :] == [len(ids) // PAGE_SIZE * PAGE_SIZE for ids in PROMPTS[:2]]
    rank.run()
    for rid, ids in zip(later, (*follow_ups, *branches), strict=True):
        assert reference.accepts(ids, rank.tokens[rid])
    rank.scheduler.policy.cache.flush()
    assert not allocator.held
    rank.kv.close()
    rank.store.arena.close()
    assert rank.vm.taken_bytes == 0
