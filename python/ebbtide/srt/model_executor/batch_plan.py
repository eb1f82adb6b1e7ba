"""What the scheduler asks of a model runner, and what it gets back. Plain data: no torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.errors import EngineError
from ebbtide.srt.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """Which logprobs a request wants.

    Attributes:
        start: first prompt position whose logprob is returned; None for none of the prompt.
        top: how many of the most likely tokens per position.
        token_ids: ids whose logprobs are returned at every position.
    """

    start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()


# [T, L, K]: the experts of each token in each hidden layer, best first; zeros where a layer has none.
Routes: TypeAlias = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Supports:
    """Which tokens could have been sampled in G rows of a step, as flat arrays.

    Attributes:
        rows: the G rows; in the result of a step, indices of requests.
        ids: int32, the token ids of all rows, row by row, ascending within a row.
        ends_G: int64, where each row's ids end in `ids`.
        logprobs_G: float32, logprob of the sampled token among the ids of its row.
    """

    rows: Sequence[int]
    ids: NDArray[np.int32]
    ends_G: NDArray[np.int64]
    logprobs_G: NDArray[np.float32]


class TokenMask(Protocol):
    """Which tokens may come next, updated with each output token."""

    def fill(self, others: Sequence[Self], words_MW: NDArray[np.int32]) -> None:
        """Set bit i % 32 of word i // 32 in the first row for each token i that may come next, and clear all
        other bits; do the same in the next rows for `others`. All masks of an engine are of one class.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Note a sampled token; returns whether it was allowed."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow."""
        ...


@dataclass(slots=True, eq=False)
class SampleSpec:
    """How one request is sampled. There is one object per request, and it is compared by identity.

    Attributes:
        params: checked and resolved parameters.
        seed: noise depends on this and the output position alone.
        stop_ids: EOS and stop_token_ids; they are masked for the first `params.min_new_tokens` tokens.
        prompt_ids: the prompt (repetition penalty).
        output_ids: the request's live output list, appended to by the scheduler after each step.
        logprobs: None when the request wants none.
        mask: None: every token may come.
        returns_support: whether to return which tokens could have been sampled.
    """

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: LogprobSpec | None = None
    mask: TokenMask | None = None
    returns_support: bool = False

    @property
    def needs_output_ids(self) -> bool:
        """Whether the next token depends on the ids of all tokens before it (penalties)."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )


# Stands in `BatchPlan.input_ids_T` for a token that is not on the host yet.
SAMPLED_BEFORE = -1


@dataclass(slots=True)
class BatchPlan:
    """One forward pass over R requests and T new tokens.

    A plan may be launched while the step before it still runs. An input token that this step samples is
    `SAMPLED_BEFORE`: the runner takes what was last sampled for the same page row.

    Attributes:
        input_ids_T: int64, the new tokens of all requests, concatenated.
        page_rows_R: int32, each request's row in the PageTable.
        starts_R: int32, tokens whose KV each request already has.
        num_new_R: int32, new tokens of each request, ≥ 1; their sum is T. A decode step is 1.
        samples_R: bool, whether a token is sampled after the request's last new token. False for all but the
            last chunk of a chunked prefill, and for scoring without output.
        num_outputs_R: int64, output tokens of each request before this step, those in flight included.
        specs: per request.
        given_routes: by index of the request, the experts that its first new tokens take in place of the
            router's choice, [tokens, L, K].
        adapters_R: int32, the slot of each request's adapter; −1: it has none; None: no request has one.
        copies_before, copies_after: copies of states before and after the pass, in order: (slot, target
            slot).
    """

    input_ids_T: NDArray[np.int64]
    page_rows_R: NDArray[np.int32]
    starts_R: NDArray[np.int32]
    num_new_R: NDArray[np.int32]
    samples_R: NDArray[np.bool_]
    num_outputs_R: NDArray[np.int64]
    specs: list[SampleSpec]
    given_routes: Mapping[int, Routes] = field(default_factory=dict)
    adapters_R: NDArray[np.int32] | None = None
    copies_before: Sequence[tuple[int, int]] = ()
    copies_after: Sequence[tuple[int, int]] = ()

    @classmethod
    def of_prompt(cls, spec: SampleSpec, row: int = 0, adapter_slot: int | None = None) -> Self:
        """A pass over one whole prompt, in this row of the page table."""
        return cls(
            input_ids_T=np.array(spec.prompt_ids, dtype=np.int64),
            page_rows_R=np.full(1, row, dtype=np.int32),
            starts_R=np.zeros(1, dtype=np.int32),
            num_new_R=np.full(1, len(spec.prompt_ids), dtype=np.int32),
            samples_R=np.full(1, spec.params.max_new_tokens != 0),
            num_outputs_R=np.zeros(1, dtype=np.int64),
            specs=[spec],
            adapters_R=None if adapter_slot is None else np.full(1, adapter_slot, dtype=np.int32),
        )

    @property
    def is_decode(self) -> bool:
        """Whether every request adds exactly one token and samples."""
        return len(self.input_ids_T) == len(self.num_new_R) and bool(self.samples_R.all())

    def ordered(self, order_R: NDArray[np.int64]) -> BatchPlan:
        """The same decode step with its requests in another order."""
        return BatchPlan(
            input_ids_T=self.input_ids_T[order_R],
            page_rows_R=self.page_rows_R[order_R],
            starts_R=self.starts_R[order_R],
            num_new_R=self.num_new_R[order_R],
            samples_R=self.samples_R[order_R],
            num_outputs_R=self.num_outputs_R[order_R],
            specs=[self.specs[request] for request in order_R.tolist()],
            adapters_R=None if self.adapters_R is None else self.adapters_R[order_R],
        )


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Logprobs at N positions, as arrays. −∞ is the lowest float32.

    Attributes:
        tokens_N: float32, of the tokens at these positions.
        top_NK, top_ids_NK: float32 and int32, the most likely tokens, best first. K is the largest
            `LogprobSpec.top` of the positions; None: all are 0.
        chosen_NC: float32, of `LogprobSpec.token_ids`, in that order, padded to the longest; None: all are
            empty.
    """

    tokens_N: NDArray[np.float32]
    top_NK: NDArray[np.float32] | None = None
    top_ids_NK: NDArray[np.int32] | None = None
    chosen_NC: NDArray[np.float32] | None = None

    @property
    def columns(self) -> tuple[NDArray[Any] | None, ...]:
        return self.tokens_N, self.top_NK, self.top_ids_NK, self.chosen_NC

    def part(self, rows: slice | NDArray[np.int64], spec: LogprobSpec) -> LogprobArrays:
        """The positions of these rows, with only the logprobs that `spec` asks for."""
        tops = slice(spec.top)
        return LogprobArrays(
            self.tokens_N[rows],
            self.top_NK[rows, tops] if self.top_NK is not None and spec.top else None,
            self.top_ids_NK[rows, tops] if self.top_ids_NK is not None and spec.top else None,
            self.chosen_NC[rows, : len(spec.token_ids)]
            if self.chosen_NC is not None and spec.token_ids
            else None,
        )

    def spread(self, places: Sequence[int], num_positions: int) -> LogprobArrays:
        """The same positions, placed among `num_positions`; the others are zeros."""

        def spread(column: NDArray[Any] | None) -> NDArray[Any] | None:
            if column is None:
                return None
            wide = np.zeros((num_positions, *column.shape[1:]), dtype=column.dtype)
            wide[list(places)] = column
            return wide

        if list(places) == list(range(num_positions)):
            return self
        tokens_N, *others = (spread(column) for column in self.columns)
        assert tokens_N is not None
        return LogprobArrays(tokens_N, *others)

    @staticmethod
    def joined(pieces: Sequence[LogprobArrays]) -> LogprobArrays:
        """The positions of all pieces, which must have the same columns."""
        tokens_N, *others = (
            None if columns[0] is None else np.concatenate(columns)
            for columns in zip(*(piece.columns for piece in pieces), strict=True)
        )
        assert tokens_N is not None
        return LogprobArrays(tokens_N, *others)


@dataclass(slots=True)
class StepResult:
    """The result of one forward pass.

    Attributes:
        token_ids: the sampled id of each request of the plan; −1 if `samples_R` is false.
        output_logprobs: one position per request, for the sampled token; undefined for requests that sampled
            nothing or want no logprobs; None: no request wants any. Log-softmax over the whole vocabulary
            after penalties, logit_bias and temperature (greedy: temperature 1), before top-k, top-p and min-p
            (wire_api section 2.3).
        input_logprobs: by index of the request, for the prompt tokens that this step's logits predict:
            absolute prompt positions max(start, starts) + 1 .. starts + num_new, as far as they are in the
            prompt. (The first requested position has no logprob.) Log-softmax of the raw logits.
        routes: the experts of all tokens of the plan; None: they are not recorded.
        supports: of the requests that sampled and want it; None: no request does.
        num_nonfinite: by index of the request, how many rows of logits held NaN or +∞; requests without are
            left out. Tokens and logprobs of such rows mean nothing. (−∞ is the score of masked tokens.)
    """

    token_ids: list[int]
    output_logprobs: LogprobArrays | None = None
    input_logprobs: dict[int, LogprobArrays] = field(default_factory=dict)
    routes: Routes | None = None
    supports: Supports | None = None
    num_nonfinite: dict[int, int] = field(default_factory=dict)


class PendingStep(Protocol):
    """A forward pass that has been launched."""

    def wait(self) -> StepResult:
        """Block until the results are on the host."""
        ...


class PassOutOfMemory(EngineError):
    """A device has too little memory for a forward pass. Launched parts of it have run.

    With several ranks, all of them raise it, before anything was launched.
    """


# Called between the launch of a forward pass and the making of its token masks.
BeforeMasks: TypeAlias = Callable[[], None] | None


class Runner(Protocol):
    """Runs forward passes. `ModelRunner` is the real one; a null runner serves tests and benchmarks."""

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> PendingStep:
        """Launch a step.

        Args:
            before_masks: called after the launch of the forward pass and before the masks are made, if any
                request has a mask.

        PassOutOfMemory: recurrent states of its requests may have changed, and their KV from `starts_R` on.
        Nothing else has. The step may be launched again, whole or in parts.
        """
        ...

    def forget_room(self) -> None:
        """Let the next pass of several ranks check again that all of them have memory for it.

        All ranks must call it between the same two passes.
        """
        ...
