"""Applies the result of a step: request state, finish reasons, and the messages that go out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.managers.io_struct import (
    FinishReason,
    LogprobColumns,
    RequestOutput,
    RequestStart,
    RoutedExperts,
    StreamedTokens,
    TokenOutput,
)
from ebbtide.srt.managers.scheduling.load_meter import LoadMeter
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.running_rows import PLAIN_STREAM, ScheduledBatch
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.scheduling.versions import Commit
from ebbtide.srt.model_executor.batch_plan import LogprobSpec, Routes, StepResult

logger = logging.getLogger(__name__)

NOT_FINITE = FinishReason("abort", message="logits are not finite")
NOTHING_ALLOWED = FinishReason(
    "abort",
    message="sampling_params: the grammar, bad_words and allowed_token_ids leave no token that may come here",
    status_code=400,
)
# Tokens before the output that the detokenizer gets: enough to decode the first output token after them.
TAIL = 8


@dataclass(eq=False)
class OutputProcessor:
    """Applies step results to requests, and builds the outputs for the API process.

    Shapes: R requests of the batch, L of them live, S of them sampled, P plain streams, O other outputs.

    Args:
        meter: counts sampled tokens and prefix-cache hits.

    Attributes:
        num_aborts: how many messages with aborted requests were made so far.
    """

    _policy: SchedulePolicy
    _meter: LoadMeter
    _dp_rank: int
    num_aborts: int = field(default=0, init=False)
    # Stop ids of all requests so far: a set this small makes the search for candidates cheap.
    _stop_ids: set[int] = field(default_factory=set, init=False)

    def commit(self, batch: ScheduledBatch, result: StepResult) -> TokenOutput | None:
        """Advance every request of the batch by the step that has run."""
        policy, plan = self._policy, batch.plan
        policy.note_committed()
        num_sampled = int(np.count_nonzero(plan.samples_R))
        live_R = policy.rows.serial[plan.page_rows_R] == batch.serials_R
        nonfinite = self._end_nonfinite(batch, result, live_R)
        sampled = np.flatnonzero(live_R & plan.samples_R)
        tokens_S = np.array(result.token_ids, dtype=np.int64)[sampled]
        if result.routes is not None:
            _add_routes(batch, result.routes, np.flatnonzero(live_R))
        looked_at = self._advance(batch, result, np.flatnonzero(live_R), sampled, tokens_S)
        for index, token_id in zip(sampled.tolist(), tokens_S.tolist(), strict=True):
            plan.specs[index].output_ids.append(token_id)
        if result.supports is not None:
            for place, index in enumerate(result.supports.rows):
                if live_R[index]:
                    batch.requests[index].new_supports.append(result.supports, place)
        ended = nonfinite | self._find_ended(batch, live_R, sampled, tokens_S)
        rows_S = plan.page_rows_R[sampled]
        is_plain_S = policy.rows.stream_kind[rows_S] == PLAIN_STREAM
        is_plain_S &= ~np.isin(sampled, list(ended | looked_at))
        self._keep_logprobs(batch.requests, result, sampled[~is_plain_S], rows_S[~is_plain_S])
        streamed = self._streamed(batch.requests, result, sampled[is_plain_S], rows_S[is_plain_S])
        output = self._outputs(batch, sampled[~is_plain_S], ended, streamed)
        if ended:
            self._finish([batch.requests[index] for index in sorted(ended)])
        self._meter.note_step(len(plan.input_ids_T), num_sampled)
        return output

    def _end_nonfinite(
        self, batch: ScheduledBatch, result: StepResult, live_R: NDArray[np.bool_]
    ) -> set[int]:
        """Count rows of logits that are not finite. Returns the indices of requests that end with this.

        They are removed from `live_R`, so nothing else of this step counts for them.
        """
        ended: set[int] = set()
        for index, num_rows in result.num_nonfinite.items():
            if live_R[index]:
                req = batch.requests[index]
                req.num_nonfinite += num_rows
                if self._policy.config.ends_nonfinite:
                    req.finish = NOT_FINITE
                    ended.add(index)
        live_R[list(ended)] = False
        if ended:
            version = self._policy.commit.version
            logger.warning("logits are not finite: ended=%d weight_version=%s", len(ended), version)
        return ended

    def _advance(
        self,
        batch: ScheduledBatch,
        result: StepResult,
        live: NDArray[np.int64],
        sampled: NDArray[np.int64],
        tokens_S: NDArray[np.int64],
    ) -> set[int]:
        """Count what was computed and sampled.

        Returns the indices of requests that took the slow way, object by object: those in prefill, and all
        requests at their first step under new weights.
        """
        rows, commit, plan = self._policy.rows, self._policy.commit, batch.plan
        rows_L, sampled_rows_S = plan.page_rows_R[live], plan.page_rows_R[sampled]
        unsettled = live[rows.settled[rows_L] != commit.number].tolist()
        rows.in_flight[sampled_rows_S] -= 1
        rows.last_token[sampled_rows_S] = tokens_S
        for index in unsettled:
            req = batch.requests[index]
            req.note_kv(commit, int(plan.starts_R[index]))
            if index in result.input_logprobs and not req.has_input_logprobs:
                predicted = result.input_logprobs[index]
                req.input_logprobs.extend(predicted, 0, len(predicted.tokens_N))
        rows.computed[rows_L] += plan.num_new_R[live]
        for index in unsettled:
            req = batch.requests[index]
            self._policy.note_computed(req)
            if plan.samples_R[index]:
                self._note_first_sampled(req, commit)
        return set(unsettled)

    def _note_first_sampled(self, req: Req, commit: Commit) -> None:
        """Note that a request samples for the first time after its prefill, or under these weights."""
        req.note_sampled(commit.version)
        if len(req.spec.output_ids) == req.num_continued:
            req.first_token_s = time.monotonic()
        if not req.spec.params.ignore_eos:
            self._stop_ids |= req.spec.stop_ids
        self._policy.rows.settled[req.hold.row] = commit.number

    def _find_ended(
        self,
        batch: ScheduledBatch,
        live_R: NDArray[np.bool_],
        sampled: NDArray[np.int64],
        tokens_S: NDArray[np.int64],
    ) -> set[int]:
        """Find the requests that end with this step, and set why; returns their indices."""
        rows, plan = self._policy.rows, batch.plan
        rows_R = plan.page_rows_R
        is_whole_R = rows.planned[rows_R] - rows.in_flight[rows_R] >= rows.limit[rows_R]
        is_computed_R = rows.computed[rows_R] >= rows.limit[rows_R]
        candidates = set(np.flatnonzero(live_R & is_whole_R & (plan.samples_R | is_computed_R)).tolist())
        stops_S = np.isin(tokens_S, list(self._stop_ids))
        candidates |= set(sampled[stops_S].tolist())
        candidates |= set(sampled[rows.is_followed[rows_R[sampled]] > 0].tolist())
        ended: set[int] = set()
        for index in candidates:
            req = batch.requests[index]
            req.finish = _finish_reason(req, is_sampled=bool(plan.samples_R[index]))
            if req.finish is not None:
                ended.add(index)
        return ended

    def _finish(self, ended: list[Req]) -> None:
        nonfinite = [req.hold.pages for req in ended if req.num_nonfinite]
        dropped = {page for groups in nonfinite for pages in groups for page in pages}
        self._policy.finish(ended)
        if dropped:
            # NaN in a cached page would reach the logits of every request that reuses it.
            self._policy.cache.drop(dropped)

    def _streamed(
        self,
        requests: list[Req],
        result: StepResult,
        plain_P: NDArray[np.int64],
        rows_P: NDArray[np.int32],
    ) -> list[StreamedTokens]:
        """The outputs of streams with one new token and nothing else, grouped by the logprobs they want."""
        streamed = []
        for plain, _, spec in self._alike(requests, plain_P, rows_P):
            indices = plain.tolist()
            token_ids = []
            for index in indices:
                requests[index].num_emitted += 1
                token_ids.append(result.token_ids[index])
            columns = None
            if spec is not None:
                assert result.output_logprobs is not None
                columns = LogprobColumns.of(result.output_logprobs.part(plain, spec))
            streamed.append(StreamedTokens([requests[index].rid for index in indices], token_ids, columns))
        return streamed

    def _keep_logprobs(
        self,
        requests: list[Req],
        result: StepResult,
        sampled: NDArray[np.int64],
        rows_S: NDArray[np.int32],
    ) -> None:
        """Keep the logprobs of tokens that are not sent by `_streamed` now."""
        if result.output_logprobs is None:
            return
        for indices, rows, spec in self._alike(requests, sampled, rows_S):
            if spec is not None:
                positions = result.output_logprobs.part(indices, spec)
                self._policy.rows.logprobs.add(positions, requests, indices, rows)

    def _alike(
        self, requests: list[Req], indices_P: NDArray[np.int64], rows_P: NDArray[np.int32]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32], LogprobSpec | None]]:
        """Group requests by the number of logprobs that they want: yields indices, rows, and the spec."""
        kinds_P = self._policy.rows.logprob_kind[rows_P]
        for kind in np.unique(kinds_P).tolist():
            indices = indices_P[kinds_P == kind]
            yield indices, rows_P[kinds_P == kind], requests[indices[0]].spec.logprobs

    def _outputs(
        self,
        batch: ScheduledBatch,
        others: NDArray[np.int64],
        ended: set[int],
        streamed: list[StreamedTokens],
    ) -> TokenOutput | None:
        """The message after this step: the plain streams, and other requests that are due or have ended."""
        rows, rows_O = self._policy.rows, batch.plan.page_rows_R[others]
        known_O = rows.planned[rows_O] - rows.in_flight[rows_O]
        is_due_O = (rows.stream_kind[rows_O] > 0) & (known_O >= rows.next_output[rows_O])
        rows.next_output[rows_O[is_due_O]] = (known_O + rows.output_interval[rows_O])[is_due_O]
        due = ended.union(others[is_due_O].tolist())
        outputs = [self.output(batch.requests[index]) for index in sorted(due)]
        if not outputs and not streamed:
            return None
        return TokenOutput(
            weight_version=self._policy.commit.version,
            outputs=outputs,
            streamed=tuple(streamed),
            dp_rank=self._dp_rank,
        )

    def end(self, ended: Sequence[tuple[Req, FinishReason]]) -> TokenOutput:
        """The last outputs of one or more requests that were ended from outside."""
        outputs = []
        for req, reason in ended:
            req.finish = reason
            outputs.append(self.output(req))
        self.num_aborts += 1
        return TokenOutput(
            weight_version=self._policy.commit.version,
            outputs=outputs,
            dp_rank=self._dp_rank,
            abort_number=self.num_aborts,
        )

    def output(self, req: Req) -> RequestOutput:
        """What is new about a request since its last output."""
        output = RequestOutput(
            req.rid,
            req.spec.output_ids[req.num_emitted :],
            finish=req.finish,
            start=None if req.has_started_output else self._start(req),
            version_starts=list(req.version_starts) if req.versions_changed else None,
            kv_versions=list(req.kv_versions) if req.kv_versions_changed else None,
            num_retractions=req.num_retractions,
            logprobs=self._policy.rows.logprobs.take(req),
            prefill_starts=req.prefill_starts if req.prefill_changed else None,
            routed_experts=_routed_experts(req) if req.finish is not None else None,
            supports=req.new_supports.take() if req.spec.returns_support else None,
            num_nonfinite=req.num_nonfinite,
            adapter_starts=list(req.adapter_starts) if req.versions_changed and req.adapter_starts else None,
        )
        req.num_emitted = len(req.spec.output_ids)
        req.has_started_output = True
        req.versions_changed = req.kv_versions_changed = req.prefill_changed = False
        return output

    def _start(self, req: Req) -> RequestStart:
        self._meter.note_started(req)
        params, arrival_s = req.spec.params, req.given.arrival_s
        num_prompt = len(req.spec.prompt_ids)
        num_given = num_prompt + req.num_continued
        tail_start = max(0, num_given - TAIL)
        has_input_logprobs = req.spec.logprobs is not None and req.spec.logprobs.start is not None
        return RequestStart(
            prompt_tokens=num_given,
            cached_tokens=req.cached_tokens or 0,
            prompt_tail=req.tokens(tail_start, num_prompt),
            continued_tail=req.tokens(max(tail_start, num_prompt), num_given),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            no_stop_trim=params.no_stop_trim,
            stop_strings=params.stop_strings,
            input_logprobs=req.input_logprobs.columns() if has_input_logprobs else None,
            queue_time_s=(req.started_s if req.started_s is not None else time.monotonic()) - arrival_s,
            first_token_latency_s=None if req.first_token_s is None else req.first_token_s - arrival_s,
        )


def _add_routes(batch: ScheduledBatch, routes: Routes, live: NDArray[np.int64]) -> None:
    """Give each request the experts of its tokens."""
    plan = batch.plan
    ends = plan.num_new_R.cumsum()
    firsts, starts = ends - plan.num_new_R, plan.starts_R
    for index in live.tolist():
        batch.requests[index].routes.add(int(starts[index]), routes[firsts[index] : ends[index]])


def _routed_experts(req: Req) -> RoutedExperts | None:
    """The experts of all computed tokens. The last token was never an input, so it has none."""
    start, end = req.given.routed_experts_start, min(req.num_tokens - 1, req.routes.end)
    if start is None or end <= start:
        return None
    rows_TLK = np.ascontiguousarray(req.routes.between(start, end))
    num_tokens, num_layers, top_k = rows_TLK.shape
    return RoutedExperts(rows_TLK.tobytes(), (num_tokens, num_layers, top_k), str(rows_TLK.dtype))


def _finish_reason(req: Req, *, is_sampled: bool) -> FinishReason | None:
    """Why a request ends with its last token; None: it goes on."""
    spec = req.spec
    if is_sampled:
        token_id = spec.output_ids[-1]
        if spec.mask is not None and not spec.mask.accept(token_id):
            return NOTHING_ALLOWED
        if token_id in spec.stop_ids and not spec.params.ignore_eos:
            return FinishReason("stop", matched=token_id)
        if req.stop_strings is not None:
            matched = req.stop_strings.push(token_id)
            if matched is not None:
                return FinishReason("stop", matched=matched)
    if len(spec.output_ids) >= req.given.max_new_tokens:
        return FinishReason("length", length=req.given.max_new_tokens - req.num_continued)
    return None
