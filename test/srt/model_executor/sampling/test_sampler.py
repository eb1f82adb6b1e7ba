"""The sampler against a naive reference, and its statistics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.logprobs import PositionLogprobs, by_position
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import LogprobSpec, SampleSpec, StepResult
from ebbtide.srt.model_executor.sampling.adjustments import TokenMasks
from ebbtide.srt.model_executor.sampling.choosing import Chosen, Filters, invert_cdf, mixed_seeds, uniforms
from ebbtide.srt.model_executor.sampling.logprobs import LOWEST
from ebbtide.srt.model_executor.sampling.sampler import Sampler
from ebbtide.srt.sampling_params import SamplingParams

VOCAB = 12
# Upper 1e-4 quantile of chi-square with 11 degrees of freedom: the draws are seeded, so this is no lottery.
CHI_SQUARE_BOUND = 37.4


def spec(
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    logprobs: LogprobSpec | None = None,
    **params: Any,
) -> SampleSpec:
    return SampleSpec(
        SamplingParams(**params), seed, frozenset(stop_ids), list(prompt), list(output), logprobs
    )


def noise_of(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    return uniforms(mixed_seeds(seeds), np.array(positions, dtype=np.int64))


def logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 2


def new_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, torch.device("cpu"))


def step(sampler: Sampler, scores: Tensor, specs: list[SampleSpec]) -> StepResult:
    """One step of requests whose outputs are all on the host."""
    positions = np.array([len(each.output_ids) for each in specs])
    return sampler.launch(scores.clone(), specs, positions).result()


def sample(scores: Tensor, *specs: SampleSpec) -> list[int]:
    return step(new_sampler(scores.shape[1]), scores, list(specs)).token_ids


def only_logprobs(scores: Tensor, *specs: SampleSpec) -> list[PositionLogprobs]:
    return logprobs_of(step(new_sampler(scores.shape[1]), scores, list(specs)), specs)


def logprobs_of(sampled: StepResult, specs: Sequence[SampleSpec]) -> list[PositionLogprobs]:
    """Of the requests that asked for some."""
    assert sampled.output_logprobs is not None
    entries = by_position(sampled.output_logprobs, [each.logprobs for each in specs])
    return [entry for entry in entries if entry is not None]


def adjusted(row: Tensor, each: SampleSpec) -> list[float]:
    """What wire_api calls the distribution that is sampled, written down token by token."""
    params, scores = each.params, row.tolist()
    for token in range(len(scores)):
        if token in each.prompt_ids or token in each.output_ids:
            penalty = params.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = each.output_ids.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in each.stop_ids and len(each.output_ids) < params.min_new_tokens:
            scores[token] = -math.inf
        if not params.is_greedy:
            scores[token] /= params.temperature
    total = math.log(sum(math.exp(score) for score in scores))
    return [score - total for score in scores]


def kept_by_reference(probs: list[float], params: SamplingParams) -> set[int]:
    """Top-k, then top-p of what is left, then min-p, written down one after the other."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k != -1:
        order = order[: params.top_k]
    mass, total, nucleus = 0.0, sum(probs[token] for token in order), []
    for token in order:
        if mass >= params.top_p * total and params.top_p < 1.0:
            break
        nucleus.append(token)
        mass += probs[token]
    least = params.min_p * probs[order[0]]
    return {token for token in nucleus if probs[token] >= least}


def chi_square(counts: list[int], probs: list[float]) -> float:
    num_draws = sum(counts)
    return sum(
        (count - num_draws * prob) ** 2 / (num_draws * prob)
        for count, prob in zip(counts, probs, strict=True)
    )


def draw_many(row: Tensor, num_draws: int, **params: Any) -> list[int]:
    """Counts per token over requests that differ in their seeds alone."""
    specs = [spec(seed=seed, **params) for seed in range(num_draws)]
    chosen = sample(row.expand(num_draws, -1), *specs)
    return [chosen.count(token) for token in range(len(row))]


def test_greedy_takes_the_most_likely_token_among_random_rows() -> None:
    scores = logits(3)
    specs = [spec(temperature=0.0), spec(temperature=1.0, seed=5), spec(temperature=1e-7)]

    chosen = sample(scores, *specs)

    assert [chosen[0], chosen[2]] == [int(scores[0].argmax()), int(scores[2].argmax())]
    assert chosen[1] == sample(scores[1:2], specs[1])[0]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    row = logits(1, seed=1)[0]

    counts = draw_many(row, 20_000, temperature=temperature)

    assert chi_square(counts, (row / temperature).softmax(-1).tolist()) < CHI_SQUARE_BOUND


def test_filtered_draws_are_renormalised() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()

    counts = draw_many(row, 20_000, top_k=3, top_p=0.7)

    # The first two of 4/9, 3/9 and 2/9 reach 0.7.
    assert counts[2:] == [0, 0]
    assert chi_square(counts[:2], [4 / 7, 3 / 7]) < 15.1


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    is_coarse=st.booleans(),
    top_k=st.sampled_from([-1, 1, 2, 5, 64, 100, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_keep_what_the_reference_keeps(
    seed: int, is_coarse: bool, top_k: int, top_p: float, min_p: float
) -> None:
    scores = logits(2, vocab_size=150, seed=seed)
    # Coarse scores are full of equal probabilities.
    probs = (scores.round() if is_coarse else scores).double().softmax(-1)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    other = SamplingParams(top_p=0.9999)

    kept = Filters([params, other], 150).support(probs)

    for row, each in enumerate((params, other)):
        assert set(kept[row].nonzero().flatten().tolist()) == kept_by_reference(probs[row].tolist(), each)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top", [1, 2, 3, VOCAB])
def test_the_chosen_token_is_the_first_of_those_that_are_as_likely(temperature: float, top: int) -> None:
    scores = torch.full((1, VOCAB), -3.0)
    scores[0, [2, 5, 7, 10]] = 4.0
    for seed in range(20):
        each = spec(seed=seed, temperature=temperature, top_k=4, logprobs=LogprobSpec(top=top))
        result = step(new_sampler(), scores, [each])
        [entry] = logprobs_of(result, [each])
        assert entry.top[0] == (entry.token, result.token_ids[0])
        assert len({token_id for _, token_id in entry.top}) == top
        assert [value for value, _ in entry.top] == sorted((value for value, _ in entry.top), reverse=True)


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    scores = logits(4)
    specs = [spec(seed=seed, output=[0] * seed) for seed in range(4)]

    together = sample(scores, *specs)

    assert together == [sample(scores[row : row + 1], specs[row])[0] for row in range(4)]
    assert together[::-1] == sample(scores.flip(0), *specs[::-1])
    # What others drop, and a top-k beyond the vocabulary, change nothing.
    beside = [spec(seed=seed, output=[0] * seed, top_k=10**12) for seed in range(4)]
    beside += [spec(seed=9, top_k=1), spec(seed=9, temperature=3.0, min_p=0.9)]
    assert sample(torch.cat((scores, scores[:2])), *beside)[:4] == together


def test_noise_is_uniform_and_differs_by_seed_and_position() -> None:
    num = 10_000
    by_seed = noise_of(range(-num // 2, num // 2), [0] * num)
    by_position = noise_of([-(2**63)] * num, range(num))

    for values in (by_seed, by_position):
        counts = [int(((values >= k / 10) & (values < (k + 1) / 10)).sum()) for k in range(10)]
        assert chi_square(counts, [0.1] * 10) < 33.7
        assert len(set(values.tolist())) == num
    assert not set(by_seed.tolist()) & set(noise_of(range(-num // 2, num // 2), [1] * num).tolist())


def test_no_seed_is_another_seed_shifted() -> None:
    # The increment of the underlying generator: added to an unmixed seed it would be a step of its sequence.
    num, increment = 1000, 0x9E3779B97F4A7C15
    first, second = noise_of([3] * num, range(num)), noise_of([3 + increment] * num, range(num))

    assert not set(first.tolist()) & set(second.tolist())


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=2, max_size=8),
    noise=st.floats(0.0, 1.0 - 2.0**-53),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], noise: float) -> None:
    if not any(weights):
        weights[-1] = 1.0

    token = int(invert_cdf(torch.tensor([weights]), torch.tensor([noise], dtype=torch.float64))[0])

    assert weights[token] > 0.0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -1.5},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.4},
        {"logit_bias": {3: 4.0, 0: -2.0}},
        {"min_new_tokens": 5},
        {"temperature": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_adjusted_distribution(params: dict[str, Any]) -> None:
    wanted = LogprobSpec(token_ids=tuple(range(VOCAB)))
    plain = spec([4], [2], logprobs=wanted)
    each = spec([1, 2, 2, 9], [3, 3, 9, 5], stop_ids=[0, 7], logprobs=wanted, **params)
    sampler, scores = new_sampler(), logits(2, seed=4)

    # Three steps of one batch: what is kept between steps has to follow the output.
    for _ in range(3):
        result = step(sampler, scores, [plain, each])
        entries = logprobs_of(result, (plain, each))
        for row, (one, entry) in enumerate(zip((plain, each), entries, strict=True)):
            expected = [max(value, LOWEST) for value in adjusted(scores[row], one)]
            assert entry.chosen == pytest.approx(expected, abs=1e-5)
            assert entry.token == pytest.approx(expected[result.token_ids[row]], abs=1e-5)
            one.output_ids.append(result.token_ids[row])


def test_penalties_follow_requests_as_the_batch_changes() -> None:
    wanted = LogprobSpec(token_ids=tuple(range(VOCAB)))
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    specs = [spec([row, 8], [row + 1], seed=row, logprobs=wanted, **penalties) for row in range(4)]
    sampler, scores = new_sampler(), logits(4, seed=6)
    batches = [[0], [1], [0, 1], [1, 0], [1, 0, 2], [2, 1], [2, 3], [2, 3, 1, 0], [3]]

    for batch in batches:
        rows = [specs[row] for row in batch]
        result = step(sampler, scores[batch], rows)
        for index, (one, entry) in enumerate(zip(rows, logprobs_of(result, rows), strict=True)):
            assert entry.chosen == pytest.approx(adjusted(scores[batch[index]], one), abs=1e-5)
            one.output_ids.append(result.token_ids[index])


def test_a_request_chooses_among_its_allowed_ids_and_no_other_does() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[:, 5] = 50.0
    # The minimum keeps a stop id out, allowed or not.
    allowed = [[2, 7], None, [5, 8]]
    specs = [
        spec(allowed_token_ids=ids, stop_ids=[5], min_new_tokens=99 if row == 2 else 0, seed=row)
        for row, ids in enumerate(allowed)
    ]
    sampler, chosen = new_sampler(), [set[int](), set[int](), set[int]()]
    for _ in range(40):
        tokens = step(sampler, scores, specs).token_ids
        for each, ids, token_id in zip(specs, chosen, tokens, strict=True):
            each.output_ids.append(token_id)
            ids.add(token_id)
    assert chosen == [{2, 7}, {5}, {8}]
    wanted = LogprobSpec(token_ids=(2, 5), top=0)
    entry = only_logprobs(scores[:1], spec(allowed_token_ids=[2, 7], logprobs=wanted))[0]
    assert entry.chosen == [pytest.approx(math.log(0.5)), LOWEST]


class Mask(SimpleNamespace):
    """Allows these tokens. Implements `TokenMask`."""

    def fill(self, others: Sequence["Mask"], words_MW: NDArray[np.int32]) -> None:
        for mask, words_W in zip((self, *others), words_MW, strict=True):
            words_W[:] = np.packbits(mask.allowed_V, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_leave_what_they_allow_as_it_is(dtype: torch.dtype) -> None:
    scores = logits(3, vocab_size=150).to(dtype)
    allowed = np.random.default_rng(1).random((2, 160)) < 0.3
    masks: list[Any] = [Mask(allowed_V=allowed[0]), None, Mask(allowed_V=allowed[1])]
    specs = [SampleSpec(SamplingParams(), 0, frozenset(), [], [], mask=mask) for mask in masks]
    expected = scores.clone()
    expected[[0, 2]] = scores[[0, 2]].masked_fill(~torch.from_numpy(allowed[:, :150]), -math.inf)

    TokenMasks(specs, 150, torch.device("cpu")).apply(scores)

    assert torch.equal(scores, expected)


def test_each_request_gets_its_own_number_of_top_and_chosen_tokens() -> None:
    scores = logits(3)
    entries = only_logprobs(
        scores,
        spec(logprobs=LogprobSpec(top=2)),
        spec(logprobs=LogprobSpec(token_ids=(4, 4, 1))),
        spec(logprobs=LogprobSpec(top=1, token_ids=(2,))),
    )
    expected = scores.log_softmax(-1)

    assert [len(entry.top) for entry in entries] == [2, 0, 1]
    assert [token for _, token in entries[0].top] == scores[0].topk(2).indices.tolist()
    assert entries[1].chosen == pytest.approx(expected[1, [4, 4, 1]].tolist(), abs=1e-5)
    assert entries[2].chosen == pytest.approx([expected[2, 2].item()], abs=1e-5)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}]
)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_of_what_the_mode_says(mode: str, filters: dict[str, Any]) -> None:
    scores = logits(3)
    wanted = LogprobSpec(top=VOCAB)
    # The second row asks for none, the third is greedy: nothing is dropped there.
    rows = [
        spec(temperature=1.7, repetition_penalty=1.3, seed=4, logprobs=wanted, **filters),
        spec(top_k=2),
        spec(temperature=0.0, logprobs=wanted, **filters),
    ]
    sampler = Sampler(VOCAB, torch.device("cpu"), logprobs_mode=mode)
    result = step(sampler, scores, rows)
    assert result.output_logprobs is not None
    entries = by_position(result.output_logprobs, [each.logprobs for each in rows])
    for row in (0, 2):
        entry = entries[row]
        assert entry is not None
        if mode == "raw_logprobs":
            expected = scores[row].log_softmax(-1)
        else:
            expected = torch.tensor(adjusted(scores[row], rows[row]))
            if filters and row == 0:
                kept = Filters([rows[row].params], VOCAB).support(expected.exp().unsqueeze(0))[0]
                expected = expected.masked_fill(~kept, -math.inf).log_softmax(-1)
        told = {token: value for value, token in entry.top}
        for token in range(VOCAB):
            assert told[token] == pytest.approx(max(expected[token].item(), LOWEST), abs=1e-5)
        assert entry.token == pytest.approx(told[result.token_ids[row]])
    # Tokens do not depend on it.
    assert result.token_ids == step(new_sampler(), scores, rows).token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.7e308},
        {"temperature": 2e-6},
        {"repetition_penalty": 5e-324},
        {"logit_bias": {2: 1.7e308}},
        {"logit_bias": {2: -1.7e308}},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 1.7e308, "min_new_tokens": 1},
    ],
    ids=str,
)
def test_extreme_parameters_give_tokens_and_finite_logprobs(params: dict[str, Any]) -> None:
    wanted = LogprobSpec(top=VOCAB)
    entry = only_logprobs(logits(1) * 50, spec(stop_ids=[0], logprobs=wanted, **params))[0]

    assert math.isfinite(entry.token)
    assert all(math.isfinite(value) for value, _ in entry.top)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_broken_logits_of_one_request_harm_no_other(broken: float, params: dict[str, Any]) -> None:
    scores = logits(3)
    scores[1] = broken
    specs = [spec(seed=row, logprobs=LogprobSpec(top=2), **params) for row in range(3)]

    result = step(new_sampler(), scores, specs)

    assert [result.token_ids[row] for row in (0, 2)] == [
        sample(scores[row : row + 1], specs[row])[0] for row in (0, 2)
    ]
    assert 0 <= result.token_ids[1] < VOCAB
    assert list(result.num_nonfinite) == ([] if broken == -math.inf else [1])
    entry = logprobs_of(result, specs)[1]
    assert [entry.token, *(value for value, _ in entry.top)] == [LOWEST] * 3


class Unfiltered:
    """Chooses without memory for rows of the vocabulary, as kernels do."""

    def __init__(self, *args: Any) -> None: ...
    def choose(self, scores_SV: Tensor, noise_S: NDArray[np.float64]) -> Chosen:
        num_rows = len(scores_SV)
        packed = torch.zeros(Chosen.packed_size(num_rows), dtype=torch.int64)
        return Chosen(packed, num_rows, torch.zeros(num_rows, 1), torch.ones(num_rows, 1))


def memory_of(act: Callable[[], Any]) -> tuple[int, int]:
    """The bytes that torch takes at most, and those of them that it has not given back."""
    taken = most = 0
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        act()
    assert profiler.kineto_results is not None
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most, taken


# By whether all scores become float32 for it. Else kernels read those of 16 bits as they are.
TAKING: dict[bool, dict[str, dict[str, Any]]] = {
    True: {
        "a bias": {"logit_bias": {1: 1.0}},
        "biases": {"logit_bias": dict.fromkeys(range(4096), 1.0)},
        "a stop": {"stop_ids": [1], "min_new_tokens": 9},
        "stops": {"stop_ids": range(4000), "min_new_tokens": 9},
        "repetition": {"repetition_penalty": 1.2},
        "frequency": {"frequency_penalty": 0.2, "presence_penalty": 0.1},
        "long prompt": {"repetition_penalty": 1.2, "prompt": [1] * 9999},
        "allowed": {"allowed_token_ids": [1, 2]},
        "all allowed": {"allowed_token_ids": list(range(4096))},
    },
    False: {
        "nothing": {},
        "mask": {"mask": SimpleNamespace(fill=lambda others, words_MW: words_MW.fill(-1))},
        "logprobs": {"logprobs": LogprobSpec()},
        "top logprobs": {"logprobs": LogprobSpec(top=20)},
        "all logprobs": {"logprobs": LogprobSpec(top=4096)},
        "logprobs of ids": {"logprobs": LogprobSpec(token_ids=tuple(range(4096)))},
        "logprobs of filtered": {"logprobs": LogprobSpec(), "top_p": 0.9},
        "support": {"returns_support": True},
    },
}


@pytest.mark.parametrize(
    ("are_copied", "kind", "mode"),
    [(are_copied, kind, "scaled") for are_copied, kinds in TAKING.items() for kind in kinds]
    + [(False, kind, f"{mode}_logprobs") for kind in TAKING[False] for mode in ("raw", "processed")],
)
def test_a_launch_takes_and_keeps_no_more_than_it_has_said(are_copied: bool, kind: str, mode: str) -> None:
    fields = dict(TAKING[are_copied][kind])
    extra = {name: fields.pop(name) for name in ("mask", "returns_support") if name in fields}
    scores_SV = torch.zeros(16, 4096, dtype=torch.bfloat16 if are_copied else torch.float32)
    for num_taking in (16, 8):
        sampler, kept = Sampler(4096, torch.device("cpu"), Unfiltered, mode), 0
        rows = [replace(spec(**fields), **extra) if row < num_taking else spec() for row in range(16)]
        for specs in (rows, rows, rows[1:] + rows[:1], [spec() for _ in rows]):
            said = sampler.room_bytes(specs)
            with torch.inference_mode():
                launch = partial(sampler.launch, scores_SV, specs, np.ones(16, dtype=np.int64))
                taken, left = memory_of(launch)
            small = 100 * len(specs)
            assert kept + taken <= said + small
            kept += left
            assert kept <= sampler.room_bytes([]) + small
        sampler.room_bytes(rows)
        sampler.forget()
        assert sampler.room_bytes([]) == 0
