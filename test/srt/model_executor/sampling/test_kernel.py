# ruff: noqa: E402
"""Triton's choice against torch's: compiled where there is a CUDA device, interpreted elsewhere."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # Read when Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from fixtures.logprobs import PositionLogprobs, by_position

from ebbtide.srt.model_executor.batch_plan import LogprobSpec, SampleSpec, StepResult
from ebbtide.srt.model_executor.sampling.choosing import Chooser, HostChooser, mixed_seeds, uniforms
from ebbtide.srt.model_executor.sampling.kernel import KernelChooser
from ebbtide.srt.model_executor.sampling.logprobs import LOWEST
from ebbtide.srt.model_executor.sampling.sampler import MAX_LISTED, Sampler, SupportReader
from ebbtide.srt.model_executor.sampling.score_kernels import token_logprobs
from ebbtide.srt.sampling_params import SamplingParams

# Three tiles, the last one not full.
VOCAB = 4500
GREEDY = SamplingParams(temperature=0.0)
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": VOCAB - 1},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 200, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.999, "min_p": 0.02},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.9, "temperature": 3.0},
]


def logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def chosen_by_kernels(
    scores_SV: Tensor, params: Sequence[SamplingParams], noise: Sequence[float]
) -> tuple[list[int], list[float], list[float]]:
    """Tokens, their logprobs, and the rows' logsumexp."""
    chooser = KernelChooser(params, scores_SV.shape[1], DEVICE)
    chosen = chooser.choose(scores_SV.to(DEVICE), np.array(noise))
    assert chosen.norm_S1 is not None
    return chosen.tokens_S.tolist(), chosen.logprobs_S.tolist(), chosen.norm_S1.squeeze(1).tolist()


def chosen_on_host(scores_SV: Tensor, params: Sequence[SamplingParams], noise: Sequence[float]) -> list[int]:
    chooser = HostChooser(params, scores_SV.shape[1], torch.device("cpu"))
    tokens: list[int] = chooser.choose(scores_SV.float().clone(), np.array(noise)).tokens_S.tolist()
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 2048, VOCAB])
def test_draws_are_those_of_the_host(vocab_size: int, dtype: torch.dtype) -> None:
    num_rows = 12
    scores = logits(num_rows, vocab_size).to(dtype)
    params = [SamplingParams(temperature=0.5 + row / 5) for row in range(num_rows)]
    noise = uniforms(mixed_seeds(range(num_rows)), np.zeros(num_rows, dtype=np.int64)).tolist()

    tokens, logprobs, norms = chosen_by_kernels(scores, params, noise)

    assert tokens == chosen_on_host(scores, params, noise)
    temperature = torch.tensor([each.temperature for each in params]).unsqueeze(1)
    expected = (scores.float() / temperature).log_softmax(-1)
    assert logprobs == pytest.approx(
        [expected[row, token].item() for row, token in enumerate(tokens)], abs=1e-4
    )
    assert norms == pytest.approx((scores.float() / temperature).logsumexp(-1).tolist(), abs=1e-4)


def test_greedy_rows_take_the_lowest_of_the_best_ids() -> None:
    scores = logits(3).bfloat16()
    # Twice in one tile and again in the next; at the end of the last tile; a whole row of equals.
    scores[0, [100, 1500, 3000]] = 40.0
    scores[1, VOCAB - 1] = 40.0
    scores[2] = 1.0

    tokens, logprobs, _ = chosen_by_kernels(scores, [GREEDY] * 3, [-1.0] * 3)

    assert tokens == [100, VOCAB - 1, 0]
    assert logprobs == pytest.approx([-math.log(3), 0.0, -math.log(VOCAB)], abs=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0 - 2.0**-53])
def test_the_ends_of_the_noise_lead_to_tokens_that_can_be_chosen(noise: float) -> None:
    scores = torch.full((4, VOCAB), -math.inf)
    # Whole tiles of nothing before, between and behind.
    for row, ids in enumerate(([0], [VOCAB - 1], [2100, 2200], [5, 4400])):
        scores[row, ids] = 1.0

    tokens, logprobs, _ = chosen_by_kernels(scores, [SamplingParams()] * 4, [noise] * 4)

    second = noise >= 0.5
    assert tokens == [0, VOCAB - 1, 2200 if second else 2100, 4400 if second else 5]
    assert logprobs == pytest.approx([0.0, 0.0, -math.log(2), -math.log(2)], abs=1e-5)


def test_mass_far_below_the_best_token_is_drawn_as_often_as_it_should_be() -> None:
    # 2048 tokens in one tile share 1e-9 of the mass; noise just above the rest must find each of them.
    scores = torch.full((3, 2 * 2048), math.log(1e-9 / 2048))
    scores[:, :2048] = -math.inf
    scores[:, 0] = 0.0
    noise = [(1.0 + share * 1e-9) / (1.0 + 1e-9) for share in (0.25, 0.5, 0.75)]

    tokens, _, _ = chosen_by_kernels(scores, [SamplingParams()] * 3, noise)

    assert tokens == pytest.approx([2048 + 512, 2048 + 1024, 2048 + 1536], abs=2)


@pytest.mark.parametrize(
    ("filters", "is_coarse"),
    [(FILTERS[1], False), (FILTERS[4], False), (FILTERS[-1], False), (FILTERS[1], True), (FILTERS[-3], True)],
    ids=str,
)
def test_filters_keep_what_the_host_keeps(filters: dict[str, Any], is_coarse: bool) -> None:
    scores = logits(1, seed=7)
    if is_coarse:
        # Full of equal scores, at the cut too; a logit's rounding is the same on both sides.
        scores = scores.round()
    params = SamplingParams(**filters)
    # The ends find the first and the last id that is kept; what lies between, how much is.
    noise = [0.0, 0.5, 1.0 - 2.0**-53]
    rows = scores.expand(len(noise), -1).contiguous()

    tokens, logprobs, _ = chosen_by_kernels(rows, [params] * len(noise), noise)

    assert tokens == chosen_on_host(rows, [params] * len(noise), noise)
    # Logprobs are those before the filters.
    expected = (scores / params.temperature).log_softmax(-1)[0, tokens].tolist()
    assert logprobs == pytest.approx(expected, abs=1e-4)


def test_what_filters_leave_is_listed_or_told_by_bits_as_on_the_host() -> None:
    params = [SamplingParams(**filters) for filters in FILTERS]
    coarse = (FILTERS[1], FILTERS[-3])
    scores = torch.cat([logits(len(params), seed=7), logits(len(coarse), seed=7).round()]).bfloat16()
    params += [SamplingParams(**filters) for filters in coarse]
    params.append(GREEDY)
    scores = torch.cat([scores, scores[:1]])
    specs = [SampleSpec(each, 0, frozenset(), [], [], returns_support=True) for each in params]
    noise = [0.5] * len(coarse + tuple(FILTERS)) + [-1.0]

    def supports(chooser: Chooser, scores_SV: Tensor) -> dict[int, tuple[list[int], float]]:
        chosen = chooser.choose(scores_SV, np.array(noise))
        launched = SupportReader(specs, VOCAB, scores_SV.device).read(scores_SV, chosen)
        found = launched.result(chosen.tokens_S.cpu().numpy())
        ids = np.split(found.ids, found.ends_G[:-1])
        logprobs = found.logprobs_G.tolist()
        return {
            row: (own.tolist(), logprob) for row, own, logprob in zip(found.rows, ids, logprobs, strict=True)
        }

    by_kernels = supports(KernelChooser(params, VOCAB, DEVICE), scores.to(DEVICE))
    on_host = supports(HostChooser(params, VOCAB, torch.device("cpu")), scores.float())

    # Far more than are listed, and all that top-k lists.
    assert len(on_host[5][0]) > MAX_LISTED
    assert len(on_host[1][0]) == 50
    assert by_kernels.keys() == on_host.keys() == set(range(len(params)))
    for row, (ids, logprob) in on_host.items():
        assert by_kernels[row][0] == ids, params[row]
        assert by_kernels[row][1] == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}], ids=str
)
def test_broken_rows_give_valid_tokens_and_harm_no_other(params: dict[str, Any]) -> None:
    scores, noise = logits(6), [0.3, 0.9, 0.9, 0.9, 0.9, 0.6]
    sampling = [SamplingParams(**params)] * 6
    healthy = chosen_by_kernels(scores[[0, 5]], sampling[:2], [0.3, 0.6])
    for row, broken in enumerate((math.nan, math.inf, -math.inf), 1):
        scores[row, 2500] = broken
    scores[4] = -math.inf

    tokens, logprobs, _ = chosen_by_kernels(scores, sampling, noise)

    assert ([tokens[0], tokens[5]], [logprobs[0], logprobs[5]]) == healthy[:2]
    assert all(0 <= token < VOCAB for token in tokens)
    assert math.isnan(logprobs[1])
    assert math.isnan(logprobs[2])
    assert math.isfinite(logprobs[3])
    assert logprobs[3] > LOWEST == pytest.approx(logprobs[4])


@pytest.mark.parametrize("temperature", [2e-6, 1.7e308])
def test_extreme_temperatures_give_finite_logprobs(temperature: float) -> None:
    scores = logits(1) * 50
    params = SamplingParams(temperature=temperature)

    tokens, logprobs, _ = chosen_by_kernels(scores, [params], [0.5])

    if temperature < 1:
        assert (tokens, logprobs) == ([int(scores.argmax())], [0.0])
    else:
        assert logprobs == pytest.approx([-math.log(VOCAB)], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 3 * 8192 + 5])
def test_logprobs_of_given_tokens_are_those_of_the_log_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    scores = logits(5, vocab_size).to(dtype)
    scores[1, : vocab_size - 1] = -math.inf  # nothing but the last block, and that far below zero
    scores[1, vocab_size - 1] = -500.0
    scores[2, 3] = math.nan
    scores[3] = -math.inf
    token_ids = torch.tensor([vocab_size // 2, vocab_size - 1, 2, 4, 0])

    logprobs_M, norm_M1 = token_logprobs(scores.to(DEVICE), token_ids.to(DEVICE))

    expected = scores.float().log_softmax(-1)[torch.arange(5), token_ids]
    assert logprobs_M[[0, 1, 4]].tolist() == pytest.approx(expected[[0, 1, 4]].tolist(), abs=1e-4)
    assert norm_M1[[0, 1, 4], 0].tolist() == pytest.approx(
        scores.float().logsumexp(-1)[[0, 1, 4]].tolist(), abs=1e-4
    )
    assert not logprobs_M[2:4].isfinite().any()


# What follows goes through the sampler: what is put into the kernels, and what comes back to the host.


def spec(
    output: Sequence[int] = (), *, seed: int = 0, logprobs: LogprobSpec | None = None, **params: Any
) -> SampleSpec:
    return SampleSpec(
        SamplingParams(**params), seed, frozenset({5, 2600}), [1, 2, 2300], list(output), logprobs
    )


def run(sampler: Sampler, scores: Tensor, specs: list[SampleSpec], device: torch.device) -> StepResult:
    positions = np.array([len(each.output_ids) for each in specs])
    launched = sampler.launch(scores.clone().to(device), specs, positions)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return launched.result()


def entries(sampled: StepResult, specs: list[SampleSpec]) -> list[PositionLogprobs | None]:
    """What each row asked for; nothing where none did."""
    return (
        by_position(sampled.output_logprobs, [each.logprobs for each in specs])
        if sampled.output_logprobs
        else []
    )


def many_specs() -> list[SampleSpec]:
    """One of each kind."""
    return [
        spec(seed=1),
        spec(temperature=0.0, logprobs=LogprobSpec(top=3)),
        spec([7, 2300, 7], seed=-5, repetition_penalty=1.3, logprobs=LogprobSpec(token_ids=(7, 2300))),
        spec([3], seed=4, frequency_penalty=0.5, presence_penalty=0.2, top_p=0.9, logprobs=LogprobSpec()),
        spec(
            seed=9, logit_bias={4000: 6.0, 1: -3.0}, min_p=0.01, logprobs=LogprobSpec(top=1, token_ids=(1,))
        ),
        spec(seed=11, min_new_tokens=3, top_k=40, temperature=0.8, logprobs=LogprobSpec(token_ids=(5, 2600))),
    ]


def test_steps_of_a_changing_batch_are_those_of_the_host() -> None:
    on_device, on_host = many_specs(), many_specs()
    sampler = Sampler(VOCAB, DEVICE, KernelChooser)
    sampler.warm_up(torch.float32)
    reference = Sampler(VOCAB, torch.device("cpu"))
    batches = [[0, 1, 2, 3, 4, 5]] * 2 + [[5, 3, 2], [2, 3, 5, 0, 1], [1], [0, 4]]

    for index, rows in enumerate(batches):
        scores = logits(len(rows), seed=100 + index)
        given = run(sampler, scores, [on_device[row] for row in rows], DEVICE)
        wanted = run(reference, scores, [on_host[row] for row in rows], torch.device("cpu"))
        assert given.token_ids == wanted.token_ids
        assert (given.output_logprobs is None) == (wanted.output_logprobs is None)
        specs = [on_host[row] for row in rows]
        for ours, theirs in zip(entries(given, specs), entries(wanted, specs), strict=True):
            if ours is None or theirs is None:
                continue
            assert ours.token == pytest.approx(theirs.token, abs=1e-4)
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert [token for _, token in ours.top] == [token for _, token in theirs.top]
            assert [value for value, _ in ours.top] == pytest.approx(
                [value for value, _ in theirs.top], abs=1e-4
            )
        for row, token in zip(rows, given.token_ids, strict=True):
            on_device[row].output_ids.append(token)
            on_host[row].output_ids.append(token)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
class TestOnAGpu:
    """At the sizes of real models, and what an interpreter cannot show."""

    VOCAB = 151_936

    def test_a_large_batch_is_sampled_as_on_the_host(self) -> None:
        num_rows = 256
        scores = logits(num_rows, self.VOCAB).bfloat16()
        kinds = [{"temperature": 0.0}, {}, {"top_p": 0.95}, {"top_k": 50}]
        params = [SamplingParams(**kinds[row % 4]) for row in range(num_rows)]
        noise = uniforms(mixed_seeds(range(num_rows)), np.ones(num_rows, dtype=np.int64))
        noise[::4] = -1.0

        tokens, logprobs, _ = chosen_by_kernels(scores, params, noise.tolist())

        expected = chosen_on_host(scores, params, noise.tolist())
        # Sums in another order may cross the noise at the neighbour.
        assert sum(ours != theirs for ours, theirs in zip(tokens, expected, strict=True)) <= 2
        gathered = scores.float().log_softmax(-1)[torch.arange(num_rows), tokens]
        assert logprobs == pytest.approx(gathered.tolist(), abs=1e-3)

    def test_launching_never_waits_for_the_device(self) -> None:
        sampler = Sampler(self.VOCAB, DEVICE)
        specs = many_specs()
        scores = logits(len(specs), self.VOCAB).bfloat16().to(DEVICE)
        positions = np.array([len(each.output_ids) for each in specs])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = sampler.launch(scores.clone(), specs, positions)
            second = sampler.launch(scores[:3].clone(), specs[:3], positions[:3])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()

        assert first.result().token_ids[:3] == second.result().token_ids

    def test_results_of_two_launches_in_flight_are_their_own(self) -> None:
        sampler = Sampler(self.VOCAB, DEVICE)
        specs = [spec(temperature=0.0, logprobs=LogprobSpec()) for _ in range(64)]
        all_scores = [logits(64, self.VOCAB, seed=seed).to(DEVICE) for seed in range(6)]
        expected = [scores.argmax(-1).tolist() for scores in all_scores]
        launched = [sampler.launch(scores, specs, np.zeros(64, np.int64)) for scores in all_scores]
        torch.cuda.synchronize()

        assert [each.result().token_ids for each in launched] == expected
