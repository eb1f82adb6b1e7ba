"""The loop: messages in, one forward pass, outputs out. Control requests run between two forward passes.

With overlap, the next step is planned and launched before the results of the step in flight are read, so the
device never waits for the host. If a replica has several ranks, each of them runs this loop with the same
messages, and so makes the same forward passes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

from msgspec.structs import replace

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.control_plane import ControlPlane
from ebbtide.srt.managers.control.pace import Pace
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    ControlCall,
    DetokenizerInput,
    Expire,
    FinishReason,
    LoadGrammar,
    TokenizedGenerateReqInput,
    TurnInput,
    Verdict,
)
from ebbtide.srt.managers.scheduling.admission import PassLimit
from ebbtide.srt.managers.scheduling.live_requests import (
    RUNNING,
    SLOW_MASKS,
    WAITING,
    LiveRequests,
    TimeLimits,
)
from ebbtide.srt.managers.scheduling.load_meter import LoadMeter
from ebbtide.srt.managers.scheduling.lockstep import Demand, RankInbox
from ebbtide.srt.managers.scheduling.output_processor import TAIL, OutputProcessor
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.running_rows import ScheduledBatch
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.text.grammar import BannedSequences, GrammarShelf, TokenRules
from ebbtide.srt.managers.text.tokenizer import IncrementalDetokenizer, StopStringMatcher, Tokenizer
from ebbtide.srt.managers.wire.channel import SendEnd
from ebbtide.srt.managers.wire.generation import MASKS_AT_ONCE
from ebbtide.srt.managers.wire.message import Decision
from ebbtide.srt.model_executor.batch_plan import (
    LogprobSpec,
    PassOutOfMemory,
    PendingStep,
    Runner,
    SampleSpec,
)

logger = logging.getLogger(__name__)

# How long the loop waits for memory before each retry of a pass of one token: a minute in all.
MEMORY_WAITS_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, *[1.6] * 36)
# The id of the deadline that ends such a wait.
MEMORY_WAIT: Final = "memory-wait"
WAITS_FOR_MEMORY: Final = "a forward pass of one token has found too little device memory, and is tried again"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A forward pass in flight. `at_s`: when it was launched, on the monotonic clock."""

    batch: ScheduledBatch
    step: PendingStep
    at_s: float


@dataclass(eq=False)
class Scheduler:
    """One rank's loop.

    Args:
        outputs: the channel to the detokenizer; to the API process if there is no tokenizer.
        pace: told how long forward passes take.
        meter: told when no forward pass may run.
        tokenizer: for stop strings; None if the engine handles token ids only.
        eos_token_ids: of the model and its tokenizer.
        overlap: whether a step is launched before the previous one is committed.
        grammars: None if there is no tokenizer.

    Attributes:
        activity: what the loop is doing, and since when (monotonic seconds); None: it waits for messages. The
            watchdog reads it.
    """

    _inbox: RankInbox
    _outputs: SendEnd[DetokenizerInput]
    policy: SchedulePolicy
    _processor: OutputProcessor
    _requests: LiveRequests
    _limits: TimeLimits
    _runner: Runner
    control: ControlPlane
    _pace: Pace
    _meter: LoadMeter
    _: KW_ONLY
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    overlap: bool = False
    grammars: GrammarShelf | None = None

    def __post_init__(self) -> None:
        self.activity: tuple[str, float] | None = None
        self._in_flight: _Launched | None = None
        self._waits_for_memory = False
        self._told: tuple[bool, int] | None = None
        self._committed_s = 0.0
        self._num_arrived = 0

    def run(self) -> None:
        """Run until the process ends. While there is nothing to do, the loop sleeps in its inbox."""
        self.answer()
        while True:
            self.turn()

    def turn(self) -> None:
        """Run one turn, which all ranks run with the same messages, or this rank's own work between turns."""
        self.activity = None
        messages = self._inbox.receive(self.demand)
        self._begin("a turn of the loop")
        if messages is not None:
            for message in messages:
                self._handle(message)
            if self._allows_forward:
                self._forward()
                if self.policy.adapters.wanted is not None:
                    self.control.adapters.fetch_wanted()
            else:
                # What keeps the next pass from running may be queued behind the pass in flight: commit that.
                self._settle()
                self._pace.note_idle()
                if not self.control.can_run and self.policy.has_work:
                    self._meter.note_blocked(self.control.reason)
            if self._told != self._to_tell:
                self.answer()
            if self.control.any_pending:
                self._begin("the work of control requests")
                self.control.advance(self._settle)
                self.answer()
        # Replies of other ranks are about to come: do not make them wait for a long slice of work.
        if not self._inbox.awaits_replies:
            self.control.ranks.work()

    def _begin(self, what: str) -> None:
        self.activity = (what, time.monotonic())

    def answer(self) -> None:
        """Send the state, if it has changed, and the replies that are due."""
        self._told = self._to_tell
        report = self.control.report()
        if self._waits_for_memory:
            reasons = [report.reason] if report.reason else []
            report = replace(report, can_run=False, reason="; ".join([*reasons, WAITS_FOR_MEMORY]))
        self._inbox.answer(report, self._processor.num_aborts)

    @property
    def _to_tell(self) -> tuple[bool, int]:
        """The parts of the reported state that change without a control request."""
        return self._waits_for_memory, self.policy.page_store.num_bytes

    @property
    def demand(self) -> Demand:
        """What the loop would do if no further message came."""
        can_forward = self._allows_forward and self.policy.has_work
        if can_forward or self._in_flight is not None or self.control.operations.is_working:
            return Demand.TURN
        return Demand.WORK if self.control.ranks.is_working else Demand.NOTHING

    @property
    def _allows_forward(self) -> bool:
        return self.control.allows_forward and not self._waits_for_memory

    @property
    def is_runnable(self) -> bool:
        """Whether there is anything to do without any further message."""
        return self.demand is not Demand.NOTHING

    def _handle(self, message: TurnInput) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self._admit(message)
            case AbortGeneration():
                self._requests.abort([message.rid], message.message)
            case LoadGrammar():
                self._shelf().load(message)
            case ControlCall():
                self._begin(f"{type(message.request).__name__} {message.id}")
                if not message.request.row.is_beside:
                    self._settle()
                self.control.apply(message, self._settle)
                self.answer()
            case Verdict():
                self._settle()
                self.control.apply(message, self._settle)
                self.answer()
            case Expire() if message.id == MEMORY_WAIT:
                self._waits_for_memory = False
            case Expire():
                self._settle()
                if not self._limits.expire(message.id):
                    self.control.expire(message.id)
                self.answer()
            case Decision():
                if self.control.ranks.decide(message):
                    self._runner.forget_room()

    def _forward(self) -> None:
        batch = self.policy.next_batch()
        if batch is None:
            self._pace.note_idle()
        launched = self._launch(batch) if batch is not None else None
        if self.overlap:
            self._in_flight, launched = launched, self._in_flight
        self._commit(launched)

    def _launch(self, batch: ScheduledBatch) -> _Launched | None:
        if self.control.memory.restore_cuda_graph():
            self.answer()
        self._begin(f"a forward pass (requests={len(batch.requests)})")
        now = time.monotonic()
        for req in batch.admitted:
            if req.started_s is None:
                req.started_s = now
                self._limits.note(RUNNING, req.arrival)
        try:
            # Grammar masks depend on the tokens of the step in flight, so it is committed before they are
            # made. By then the device already has the new pass to work on.
            step = self._runner.launch(batch.plan, before_masks=self._settle)
        except PassOutOfMemory as error:
            self._undo(batch, error)
            return None
        self.policy.pass_limit.note_fitting()
        return _Launched(batch, step, now)

    def _undo(self, batch: ScheduledBatch, error: PassOutOfMemory) -> None:
        """Take back a pass that found too little memory.

        Smaller passes are tried next. If even one token finds no room, the loop waits and retries. A request
        whose single token finds no room through all the waits is aborted; no other request is.
        """
        self._settle()
        self.policy.undo(batch)
        num_waits = self.policy.pass_limit.num_waits
        logger.warning(
            "a forward pass found too little device memory: tokens=%d requests=%d waits=%d: %s. Give memory "
            "back that others hold, or start with a smaller mem_fraction_static or chunked_prefill_size",
            *(len(batch.plan.input_ids_T), len(batch.requests), num_waits, error),
        )
        if num_waits > len(MEMORY_WAITS_S):
            self.policy.pass_limit = PassLimit()
            message = f"Aborted: for a minute one token of it found too little device memory: {error}"
            self._requests.abort([req.rid for req in batch.requests], message)
        elif num_waits:
            self._waits_for_memory = True
            self._inbox.set_deadline(MEMORY_WAIT, MEMORY_WAITS_S[num_waits - 1])

    def _settle(self) -> None:
        """Commit the step in flight, so that what follows may change what a step reads."""
        launched, self._in_flight = self._in_flight, None
        self._commit(launched)

    def _commit(self, launched: _Launched | None) -> None:
        if launched is None:
            return
        self._begin(f"a forward pass (requests={len(launched.batch.requests)})")
        result = launched.step.wait()
        now = time.monotonic()
        began = max(launched.at_s, self._committed_s, self._pace.copied_at_s)
        self._pace.note_step(now - began, is_disturbed=self.control.any_pending)
        self._committed_s = now
        output = self._processor.commit(launched.batch, result)
        if output is not None:
            self._outputs.send(output)

    def _rules(self, message: TokenizedGenerateReqInput) -> TokenRules | None:
        note_slow = partial(self._limits.note, SLOW_MASKS, self._num_arrived)
        grammar = None if message.grammar is None else self._shelf().mask(message.grammar, note_slow)
        banned = BannedSequences(message.banned) if message.banned else None
        return None if grammar is None and banned is None else TokenRules(grammar, banned)

    def _shelf(self) -> GrammarShelf:
        assert self.grammars is not None, "the API process has refused grammars where there is no tokenizer"
        return self.grammars

    def _admit(self, message: TokenizedGenerateReqInput) -> None:
        req = self._request(message)
        try:
            if message.adapter is not None:
                req.adapter = self.policy.adapters.resolve(message.adapter)
            req.pass_over(message.continued_ids)
            self.policy.admit(req)
            self._limits.note(WAITING, req.arrival)
        except RequestRejected as error:
            reason = FinishReason("abort", message=error.message, status_code=error.status)
            self._outputs.send(self._processor.end([(req, reason)]))

    def _request(self, message: TokenizedGenerateReqInput) -> Req:
        params = message.sampling_params
        logprobs = None
        if message.return_logprob:
            logprobs = LogprobSpec(message.logprob_start, message.top_logprobs_num, message.token_ids_logprob)
        stop_strings = None
        if params.stop_strings:
            # The API process has refused stop strings where there is no tokenizer.
            assert self.tokenizer is not None
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                message.input_ids[-TAIL:],
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
            stop_strings = StopStringMatcher(detokenizer, params.stop_strings)
        self._num_arrived += 1
        return Req(
            message,
            arrival=self._num_arrived,
            spec=SampleSpec(
                params=params,
                seed=message.seed,
                stop_ids=self.eos_token_ids | params.stop_token_id_set,
                prompt_ids=message.input_ids,
                output_ids=[],
                logprobs=logprobs,
                returns_support=message.wants_supports,
                mask=self._rules(message),
            ),
            stream_interval=_output_interval(message),
            stop_strings=stop_strings,
            given_routes=None if message.given_routes is None else message.given_routes.rows,
        )


def _output_interval(message: TokenizedGenerateReqInput) -> int | None:
    """After how many tokens an output is sent; None: everything is sent at the end."""
    if message.stream:
        return message.stream_interval
    return MASKS_AT_ONCE if message.return_sampling_mask else None
