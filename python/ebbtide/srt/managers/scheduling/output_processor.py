"""What becomes of a step's result: request state, finish reasons, and the messages that go out."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ebbtide.srt.managers.io_struct import (
    FinishReason,
    RequestOutput,
    RequestStart,
    TokenLogprobs,
    TokenOutput,
)
from ebbtide.srt.managers.scheduling.load_meter import LoadMeter
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.scheduling.scheduled_batch import ScheduledBatch
from ebbtide.srt.managers.scheduling.step_log import StepLog
from ebbtide.srt.model_executor.batch_plan import PositionLogprobs, StepResult

# How much of the prompt's end the detokenizer sees: enough to know whether the first token joins on to it.
PROMPT_TAIL = 8


class OutputProcessor:
    """Applies step results to requests, and builds the outputs that the API process is owed.

    Args:
        step_log: told of every forward pass.

    Attributes:
        meter: counts both.
        num_aborts: messages with aborted requests so far.
    """

    def __init__(self, policy: SchedulePolicy, step_log: StepLog, dp_rank: int = 0) -> None:
        self.meter = LoadMeter(policy)
        self.num_aborts = 0
        self._policy = policy
        self._step_log = step_log
        self._dp_rank = dp_rank

    def commit(self, batch: ScheduledBatch, result: StepResult) -> TokenOutput | None:
        """Advance every request of the batch by the step that has run."""
        commit = self._policy.commit
        outputs: list[RequestOutput] = []
        finished: list[Req] = []
        plan = batch.plan
        num_new = plan.num_new_R.tolist()
        samples = plan.samples_R.tolist()
        self._policy.note_committed()
        num_sampled = sum(samples)
        self.meter.note_step(num_sampled)
        for index, (req, kv) in enumerate(zip(batch.requests, batch.holds, strict=True)):
            if req.kv is not kv:
                continue
            req.num_in_flight -= samples[index]
            req.note_kv(commit, kv.num_computed)
            if result.input_logprobs is not None:
                self._collect_input_logprobs(req, result.input_logprobs[index])
            self._policy.note_computed(req, num_new[index])
            if samples[index]:
                self._append(req, result, index, commit.version)
            elif req.max_new_tokens == 0 and kv.num_computed == req.num_tokens:
                req.finish = FinishReason("length", length=0)
            if req.finish is not None:
                finished.append(req)
                outputs.append(self.output(req))
            elif req.stream_interval is not None and samples[index] and self._is_due(req):
                outputs.append(self.output(req))
        if finished:
            self._policy.finish_running(finished)
        self._step_log.note_step(num_sampled)
        if not outputs:
            return None
        return TokenOutput(weight_version=commit.version, outputs=outputs, dp_rank=self._dp_rank)

    def end(self, ended: Iterable[tuple[Req, FinishReason]]) -> TokenOutput | None:
        """The last outputs of requests that have been ended from outside."""
        outputs = []
        for req, reason in ended:
            req.finish = reason
            outputs.append(self.output(req))
        if not outputs:
            return None
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
            logprobs=req.new_logprobs if req.spec.logprobs is not None else None,
            prefill_starts=req.prefill_starts if req.prefill_changed else None,
        )
        req.num_emitted = len(req.spec.output_ids)
        req.has_started_output = True
        req.versions_changed = req.kv_versions_changed = req.prefill_changed = False
        req.new_logprobs = []
        return output

    def _append(self, req: Req, result: StepResult, index: int, version: str) -> None:
        """Append the sampled token, and find out whether the request ends with it."""
        token_id = result.token_ids[index]
        req.note_sampled(version)
        output_ids = req.spec.output_ids
        if not output_ids:
            req.first_token_s = time.monotonic()
        output_ids.append(token_id)
        mask = req.spec.mask
        if mask is not None and not mask.accept(token_id):
            req.finish = FinishReason("abort", message="the grammar allows no token here", status_code=500)
            return
        if result.output_logprobs is not None:
            logprobs = result.output_logprobs[index]
            if logprobs is not None:
                req.new_logprobs.append(_token_logprobs(token_id, logprobs))
        if token_id in req.spec.stop_ids and not req.spec.params.ignore_eos:
            req.finish = FinishReason("stop", matched=token_id)
            return
        if req.stop_strings is not None:
            matched = req.stop_strings.push(token_id)
            if matched is not None:
                req.finish = FinishReason("stop", matched=matched)
                return
        if len(output_ids) >= req.max_new_tokens:
            req.finish = FinishReason("length", length=req.max_new_tokens)

    def _is_due(self, req: Req) -> bool:
        """The first token goes out at once, then one output every `stream_interval` tokens."""
        assert req.stream_interval is not None
        return not req.has_started_output or len(req.spec.output_ids) - req.num_emitted >= req.stream_interval

    def _collect_input_logprobs(self, req: Req, predicted: list[PositionLogprobs] | None) -> None:
        logprobs = req.spec.logprobs
        if predicted is None or logprobs is None or logprobs.start is None or req.has_input_logprobs:
            return
        prompt_ids = req.spec.prompt_ids
        collected = req.input_logprobs
        for position in predicted:
            collected.append(_token_logprobs(prompt_ids[logprobs.start + len(collected)], position))

    def _start(self, req: Req) -> RequestStart:
        self.meter.note_started(req)
        params = req.spec.params
        prompt_ids = req.spec.prompt_ids
        has_input_logprobs = req.spec.logprobs is not None and req.spec.logprobs.start is not None
        return RequestStart(
            prompt_tokens=len(prompt_ids),
            cached_tokens=req.cached_tokens or 0,
            prompt_tail=prompt_ids[-PROMPT_TAIL:],
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            no_stop_trim=params.no_stop_trim,
            stop_strings=params.stop_strings,
            input_logprobs=req.input_logprobs if has_input_logprobs else None,
            queue_time_s=(req.started_s if req.started_s is not None else time.monotonic()) - req.arrival_s,
            first_token_latency_s=None if req.first_token_s is None else req.first_token_s - req.arrival_s,
        )


def _token_logprobs(token_id: int, logprobs: PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprobs.token, logprobs.top, logprobs.chosen)
