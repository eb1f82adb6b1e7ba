"""One request as the scheduler sees it: its tokens, its KV pages, and the weight versions behind both."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.adapters import AdapterVersion
from ebbtide.srt.managers.io_struct import FinishReason, LogprobList, RetractCause
from ebbtide.srt.managers.scheduling.routes import RouteRows
from ebbtide.srt.managers.scheduling.versions import Commit
from ebbtide.srt.managers.text.tokenizer import StopStringMatcher
from ebbtide.srt.managers.wire.generation import SupportList, TokenizedGenerateReqInput
from ebbtide.srt.mem_cache.radix_cache import Namespace, PrefixLease
from ebbtide.srt.model_executor.batch_plan import LogprobSpec, Routes, SampleSpec

# Tokens per chunk up to which a client counts as a stream. One that takes more at a time does not need them
# at an even pace.
LONGEST_STREAM_INTERVAL: Final = 16


class Phase(Enum):
    """Where a request stands. RUNNING ones alone have KV on the device; WAITING ones may on the host."""

    HELD = auto()  # waits for a weight version
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class KVCounts:
    """Columns by page-table row: how many tokens of the request in that row have KV.

    Attributes:
        launched: tokens whose KV is computed or in flight.
        computed: tokens whose KV is computed.
        in_flight: output tokens that steps in flight are sampling.
    """

    def __init__(self, num_rows: int) -> None:
        self.launched, self.computed, self.in_flight = np.zeros((3, num_rows), dtype=np.int64)


@dataclass(slots=True)
class KVHold:
    """The KV of a running request. It is given back as a whole, when the request ends or is retracted.

    Attributes:
        lease: pins the pages that belong to the prefix cache: the first `len(lease)` of each group.
        pages: the pages of each group, in token order.
        firsts: the index of the first page that is still held, by group: sliding windows free earlier ones.
        row: the request's row in the page table.
        rows: columns of numbers, indexed by `row`.
        is_prefilled: whether every token that the request had at its admission is computed.
        is_mixed: some KV was computed with another adapter, so it is not shared.
        commit_starts: (commit, first token) per span of KV that this request computed itself.
        ends: token counts after which the recurrent state is kept for others, besides each `interval` tokens:
            the end of a cached prefix without a checkpoint, and the last whole page before the last token.
        checkpoints: token count → slot with the state after that many tokens, once they are computed.
    """

    lease: PrefixLease
    pages: list[list[int]]
    firsts: list[int]
    row: int
    rows: KVCounts
    is_prefilled: bool = False
    is_mixed: bool = False
    commit_starts: list[tuple[Commit, int]] = field(default_factory=list)
    ends: tuple[int, ...] = ()
    checkpoints: dict[int, int] = field(default_factory=dict)

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the pages."""
        return int(self.rows.computed[self.row])

    @property
    def num_launched(self) -> int:
        """The same, with the tokens that a step in flight computes."""
        return int(self.rows.launched[self.row])


@dataclass(frozen=True, slots=True)
class ParkedKV:
    """KV of a waiting request in host memory.

    Attributes:
        slots: page-store slots by group, one per page, in token order.
        state: page-store slots of the recurrent state; empty if no layer has one.
        firsts: as in `KVHold`: the page index of the first slot, by group.
        num_computed: tokens whose KV is in the slots.
        is_prefilled, is_mixed: as in `KVHold`.
        commit_starts: as in `KVHold`, but for all of the KV.
    """

    slots: list[list[int]]
    state: list[int]
    firsts: list[int]
    num_computed: int
    is_prefilled: bool
    is_mixed: bool
    commit_starts: list[tuple[Commit, int]]


@dataclass(slots=True, eq=False)
class Req:
    """A request from arrival to its last token.

    Attributes:
        given: the request's message.
        arrival: position in the order of arrival; retracted requests come back in this order.
        spec: how it is sampled.
        stream_interval: output tokens between two outputs; None: one output at the end.
        adapter: the adapter version that it runs on; None: the base model.
        new_supports: which tokens could have been sampled, per output token that was not sent yet.
        routes: the experts of its tokens, if they are recorded.
        given_routes: the experts that the first prompt tokens take, in place of the router's choice.
        head_start: how many earlier requests it may overtake in the queue.
        lost: why it lost its KV, and the KV of how many tokens; None: it did not, or has pages again.
        first_update: how many updates were committed when it began to run; None before.
        cached_tokens: prompt tokens taken from the prefix cache at the first prefill; None before it.
        num_continued: output tokens that it began with, from the request that it continues.
        num_emitted: output tokens sent so far, the continued ones included.
        num_nonfinite: rows of its logits so far that held NaN or +∞.
        version_starts: (weight version, index among the new output tokens) per span of the output.
        adapter_starts: the same for adapter versions, by label.
        kv_versions: versions of the weights that computed the KV used so far, oldest first.
        prefill_starts: (weight version, first token) per span of the prompt, as of the last prefill.
        input_logprobs: of the prompt from `LogprobSpec.start` on; complete after the first prefill.
        unsent_logprobs: of output tokens that were not sent yet and are no longer in `OutputLogprobs`.
    """

    given: TokenizedGenerateReqInput
    arrival: int
    spec: SampleSpec
    stream_interval: int | None
    stop_strings: StopStringMatcher | None = None
    adapter: AdapterVersion | None = None
    head_start: int = 0
    new_supports: SupportList = field(default_factory=SupportList)
    routes: RouteRows = field(default_factory=RouteRows)
    given_routes: Routes | None = None

    phase: Phase = Phase.WAITING
    kv: KVHold | None = None
    parked: ParkedKV | None = None
    lost: tuple[RetractCause, int] | None = None
    finish: FinishReason | None = None
    num_retractions: int = 0
    first_update: int | None = None
    cached_tokens: int | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    has_started_output: bool = False
    num_continued: int = 0
    num_emitted: int = 0
    num_nonfinite: int = 0
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    versions_changed: bool = False
    adapter_starts: list[tuple[str, int]] = field(default_factory=list)
    kv_versions: list[str] = field(default_factory=list)
    kv_versions_changed: bool = False
    prefill_starts: list[tuple[str, int]] = field(default_factory=list)
    prefill_changed: bool = False
    unsent_logprobs: list[bytes] = field(default_factory=list)
    input_logprobs: LogprobList = field(init=False)
    rid: str = field(init=False)

    def __post_init__(self) -> None:
        self.rid = self.given.rid
        spec = self.spec.logprobs or LogprobSpec()
        self.input_logprobs = LogprobList(spec.top, len(spec.token_ids))
        self.reset_input_logprobs()

    def reset_input_logprobs(self) -> None:
        """Drop the logprobs of a prefill that was not completed."""
        self.input_logprobs.clear()
        logprobs = self.spec.logprobs
        if logprobs is not None and logprobs.start is not None and logprobs.start < len(self.spec.prompt_ids):
            # Clients expect a triple for the first position too, though its own logprob is always null.
            self.input_logprobs.append_nothing()

    def pass_over(self, continued_ids: list[int]) -> None:
        """Begin after output that exists already. Stop strings in it do not end the request.

        Raises:
            RequestRejected: 400, the request's grammar does not allow it.
        """
        self.spec.output_ids += continued_ids
        self.num_continued = self.num_emitted = len(continued_ids)
        if self.stop_strings is not None:
            self.stop_strings.pass_over(continued_ids)
        mask = self.spec.mask
        if mask is None or not continued_ids:
            return
        if not all(map(mask.accept, continued_ids)):
            raise RequestRejected("continue_from: the grammar does not allow what is to be continued")
        if mask.has_ended:
            raise RequestRejected("continue_from: the output has ended as its grammar says: nothing follows")

    @property
    def cache_namespace(self) -> Namespace:
        """Which requests it shares cached prefixes with, leaving weight versions aside."""
        shared = self.given.cache_namespace
        return shared if self.adapter is None else (*shared, self.adapter.namespace)

    @property
    def adapter_name(self) -> str | None:
        """The adapter whose share of the engine it takes, whatever its version; None: the base model."""
        return None if self.adapter is None else self.adapter.name

    @property
    def hold(self) -> KVHold:
        """Its KV. AssertionError: it does not run."""
        assert self.kv is not None, "a request that does not run holds nothing"
        return self.kv

    @property
    def has_kv(self) -> bool:
        """Whether any of its tokens has KV, in the pool or in host memory."""
        return self.kv is not None or self.parked is not None

    @property
    def was_retracted(self) -> bool:
        """Whether its KV was taken away. It is then admitted ahead of requests that never had any."""
        return self.num_retractions > 0 or self.parked is not None

    @property
    def is_streamed(self) -> bool:
        """Whether its tokens are sent so few at a time that its reader notices one long pass."""
        return self.stream_interval is not None and self.stream_interval <= LONGEST_STREAM_INTERVAL

    @property
    def num_to_come(self) -> int:
        """Output tokens that it may still generate."""
        return self.given.max_new_tokens - len(self.spec.output_ids)

    def num_to_come_within(self, window: int | None) -> int:
        """The same, counting only its first `window` tokens."""
        return self.num_to_come if window is None else max(0, min(self.num_to_come, window - self.num_tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.spec.prompt_ids) + len(self.spec.output_ids)

    @property
    def num_in_flight(self) -> int:
        """Output tokens that steps in flight are sampling."""
        return 0 if self.kv is None else int(self.kv.rows.in_flight[self.kv.row])

    @property
    def num_missing(self) -> int:
        """Tokens of a running request whose KV is neither computed nor in flight."""
        return self.num_tokens - self.hold.num_launched

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) of prompt and output together."""
        prompt, output = self.spec.prompt_ids, self.spec.output_ids
        if end <= len(prompt):
            return prompt[start:end]
        if start >= len(prompt):
            return output[start - len(prompt) : end - len(prompt)]
        return prompt[start:] + output[: end - len(prompt)]

    @property
    def reusable_tokens(self) -> int:
        """How many tokens may come from the prefix cache. The last one must be computed, since the next token
        is sampled after it, and so must tokens whose logprobs are still wanted."""
        limit = self.num_tokens - 1
        logprobs = self.spec.logprobs
        if logprobs is not None and logprobs.start is not None and not self.has_input_logprobs:
            limit = min(limit, logprobs.start)
        return limit

    @property
    def has_input_logprobs(self) -> bool:
        """Whether all wanted logprobs of the prompt are there; true if none are wanted."""
        logprobs = self.spec.logprobs
        if logprobs is None or logprobs.start is None:
            return True
        return len(self.input_logprobs) == len(self.spec.prompt_ids) - logprobs.start

    def note_sampled(self, version: str) -> None:
        """Note the weights that sampled the next output token: open a span if the version has changed."""
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.spec.output_ids) - self.num_continued))
            self.versions_changed = True
        label = None if self.adapter is None else self.adapter.label
        if label is not None and (not self.adapter_starts or self.adapter_starts[-1][0] != label):
            self.adapter_starts.append((label, len(self.spec.output_ids) - self.num_continued))
            self.versions_changed = True

    def note_kv(self, commit: Commit, first_token: int) -> None:
        """Note that these weights compute the KV from `first_token` on."""
        starts = self.hold.commit_starts
        if not starts or starts[-1][0] != commit:
            starts.append((commit, first_token))
        self.note_kv_used(commit.version)

    def note_kv_used(self, version: str) -> None:
        if version not in self.kv_versions:
            self.kv_versions.append(version)
            self.kv_versions_changed = True
