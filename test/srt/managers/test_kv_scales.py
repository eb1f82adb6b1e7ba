"""A KV cache in FP8 through sleeps, updates and resizes: its scales stay, or follow what was seen.

A real model in this process, as in test_borrowed_staging.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.full_rank import KV, SHAPE, Rank, prompt
from fixtures.references import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseMode,
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from ebbtide.srt.managers.wire.weight_requests import Canary
from ebbtide.srt.mem_cache.kv_scales import KVScales

TOKENS = 100


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "LlamaForCausalLM", **SHAPE)


@pytest.fixture(scope="module")
def scaled(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with scales beside them."""
    folder = make_checkpoint(tmp_path_factory.mktemp("scaled"), "LlamaForCausalLM", **SHAPE)
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(2.0**-5)
        for layer in range(2)
        for side in "kv"
    }
    save_file(load_file(path / "model.safetensors") | scales, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def louder(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with other keys."""
    folder = make_checkpoint(tmp_path_factory.mktemp("louder"), "LlamaForCausalLM", **SHAPE)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 16
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path, kv_cache_dtype="fp8_e4m3")


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(path: Path, **args: Any) -> Rank:
        made.append(Rank(path, kv_cache_dtype="fp8_e4m3", **args))
        return made[-1]

    yield make
    for rank in made:
        rank.kv.close()
        rank.store.arena.close()


def scales_of(rank: Rank) -> KVScales:
    scales = rank.runner.kv_pool.scales
    assert scales is not None
    return scales


def update(path: Path, **fields: Any) -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput(model_path=str(path), **{"pause_mode": PauseMode.RETRACT} | fields)


def run_one(rank: Rank, seed: int, num_tokens: int) -> None:
    rank.generate(prompt(seed, num_tokens - 2), 2)
    rank.run()


def answers(rank: Rank) -> list[list[int]]:
    """Of prompts that nobody has computed yet, and of the same with their prefixes in the cache."""
    assert rank.apply(FlushCacheReqInput()).fully_flushed
    rids = []
    for _ in range(2):
        rids += [rank.generate(prompt(seed, 40), 12) for seed in range(3)]
        rank.run()
    return [rank.tokens[rid] for rid in rids]


@pytest.mark.parametrize("mode", ["checkpoint", "calibrate"])
def test_sleeps_updates_and_resizes_leave_the_scales_and_the_streams_as_they_were(
    make_rank: Callable[..., Rank], scaled: Path, reference: Reference, mode: str
) -> None:
    given = {"kv_cache_calibration_tokens": 100} if mode == "calibrate" else {}
    rank = make_rank(scaled, kv_cache_scales=mode, **given)
    scales = scales_of(rank)
    assert scales.scales_G2K.unique().tolist() == [2.0**-5]
    if mode == "calibrate":
        run_one(rank, 1, 150)
    before = answers(rank)
    kept = scales.scales_G2K.clone()
    assert (kept.unique().tolist() == [2.0**-5]) is (mode == "checkpoint")
    addresses = [scales.scales_G2K.data_ptr(), scales.inverses_G2K.data_ptr()]
    prompts = [prompt(seed, 40) for seed in range(3)]
    rids = [rank.generate(tokens, TOKENS) for tokens in prompts]
    storm = (
        [ReleaseMemoryOccupationReqInput(KV, preserve=Preserve.LIVE), ResumeMemoryOccupationReqInput(KV)],
        [update(scaled, pause_mode=PauseMode.IN_PLACE, flush_cache=False)],
        [ResizeMemoryOccupationReqInput(num_tokens=1024), ResizeMemoryOccupationReqInput(num_tokens=2048)],
        [ReleaseMemoryOccupationReqInput(), ResumeMemoryOccupationReqInput(), update(scaled)],
        [PauseGenerationReqInput(mode=PauseMode.RETRACT), FlushCacheReqInput(), ContinueGenerationReqInput()],
        [update(scaled)],
    )
    for requests in storm:
        rank.turn(7)
        for request in requests:
            reply = rank.apply(request)
            assert reply.success, reply
        assert torch.equal(scales.scales_G2K, kept)
        assert torch.equal(scales.inverses_G2K, 1 / kept)
    rank.run()
    assert addresses == [scales.scales_G2K.data_ptr(), scales.inverses_G2K.data_ptr()]
    for rid, tokens in zip(rids, prompts, strict=True):
        assert len(rank.tokens[rid]) == TOKENS
        assert reference.accepts(tokens, rank.tokens[rid])
    assert answers(rank) == before


def largest_held(rank: Rank) -> Tensor:
    """Of what the pool holds, per layer, side and head."""
    pool = rank.runner.kv_pool
    pages = sorted(rank.scheduler.policy.allocator.held)
    return torch.stack(
        [
            torch.stack(
                [side[pages].float().abs().amax((0, 1, 3)) for side in (pool.k(layer), pool.v(layer))]
            )
            for layer in range(pool.layout.num_layers)
        ]
    )


@pytest.mark.parametrize("mode", ["calibrate", "recalibrate"])
def test_calibrated_scales_follow_what_was_seen_once_the_pool_is_empty(
    make_rank: Callable[..., Rank], path: Path, louder: Path, reference: Reference, mode: str
) -> None:
    rank = make_rank(path, kv_cache_scales=mode, kv_cache_calibration_tokens=100)
    scales = scales_of(rank)
    run_one(rank, 1, 90)
    rank.apply(FlushCacheReqInput())
    assert scales.scales_G2K.unique().tolist() == [1.0], "too few tokens were seen"
    run_one(rank, 1, 150)
    seen = largest_held(rank)
    live = rank.generate(prompt(2, 20), 30)
    rank.turn(3)
    for request in (
        FlushCacheReqInput(),
        ReleaseMemoryOccupationReqInput(KV, preserve=Preserve.LIVE),
        ResumeMemoryOccupationReqInput(KV),
    ):
        rank.apply(request)
        assert scales.scales_G2K.unique().tolist() == [1.0], "KV of a stream has them"
    rank.run()
    assert reference.accepts(prompt(2, 20), rank.tokens[live])

    assert rank.apply(FlushCacheReqInput()).fully_flushed

    calibrated = scales.scales_G2K.clone()
    assert torch.equal(calibrated, calibrated.log2().round().exp2())
    used = seen / calibrated
    # FP8 has rounded what the pool held by up to a sixteenth.
    assert bool(((used > 112 * 15 / 16) & (used < 224 * 17 / 16)).all())
    again = rank.generate(prompt(3, 60), 60)
    rank.run()
    assert reference.accepts(prompt(3, 60), rank.tokens[again])
    # Weights with other keys: they are for those that are asked to follow.
    assert rank.apply(update(louder)).success
    assert torch.equal(scales.scales_G2K, calibrated), "nothing was seen yet of these weights"
    run_one(rank, 4, 150)
    rank.apply(ReleaseMemoryOccupationReqInput(KV))
    ratio = scales.scales_G2K / calibrated
    if mode == "recalibrate":
        assert bool(((ratio[0, 0] >= 8) & (ratio[0, 0] <= 32)).all())
    else:
        assert bool((ratio == 1).all())


def test_where_only_commits_empty_the_pool_scales_follow_with_them(
    make_rank: Callable[..., Rank], path: Path, louder: Path
) -> None:
    rank = make_rank(path, kv_cache_scales="recalibrate", kv_cache_calibration_tokens=100)
    after_commit = []
    for folder in (louder, louder, path, path):
        run_one(rank, 1, 150)
        assert rank.apply(update(folder)).success
        after_commit.append(scales_of(rank).scales_G2K[0, 0].clone())
    # A commit brings those of what the weights before it showed.
    quiet, loud, still_loud, quiet_again = after_commit
    assert not torch.equal(quiet, torch.ones_like(quiet))
    assert bool(((loud / quiet >= 8) & (loud / quiet <= 32)).all())
    assert torch.equal(still_loud, loud)
    assert torch.equal(quiet_again, quiet)


def test_weights_on_trial_are_not_what_scales_follow(make_rank: Callable[..., Rank], path: Path) -> None:
    rank = make_rank(path, kv_cache_scales="calibrate", kv_cache_calibration_tokens=8)
    refused = rank.apply(update(path, canary=Canary(input_ids=[1, 2, 3], logprobs=[0.0, 0.0, 0.0])))
    assert not refused.success
    assert not scales_of(rank)._largest_G2K.any()


def test_numbers_that_are_none_do_not_reach_the_scales() -> None:
    scales = KVScales(torch.ones(1, 2, 2), calibration_tokens=2)
    scales.begin()
    x = torch.tensor([[[1.0, -3.0], [0.0, 0.0]], [[float("nan"), 2.0], [float("inf"), 0.0]]])
    scales.of(0).record(x, x)
    assert scales.settle()
    assert not scales.settle()
    assert scales.scales_G2K.tolist() == [[[2.0**-6, 1.0], [2.0**-6, 1.0]]]
