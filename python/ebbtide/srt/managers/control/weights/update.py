"""Weight updates: decode, check everything, stage, and commit between two forward passes.

At most one session is open at a time. An update outside a session is a session of its own.
Source: control_semantics section 2.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    KVMemory,
    Operation,
    OutOfStep,
    Requests,
    Superseded,
    Work,
)
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.operations import Line, Operations, Stages, in_turn
from ebbtide.srt.managers.control.pace import Pace, Ranks, Wake, ending_rank
from ebbtide.srt.managers.control.pause import Generation
from ebbtide.srt.managers.control.weights import TrialPass, Weights, WritePlan
from ebbtide.srt.managers.control.weights.arrival import Arrivals, Contents, GroupRequests, Pieces
from ebbtide.srt.managers.control.weights.checks import CanaryTrials
from ebbtide.srt.managers.control.weights.commit_terms import (
    CommitConditions,
    CommitTerms,
    Counts,
    announced_names,
    require_base,
)
from ebbtide.srt.managers.control.weights.session import Burst, InPlace, WeightSession
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    AnyReply,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PauseMode,
    RetractCause,
    SessionReport,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput,
    WeightSessionReqOutput,
    WeightUpdateRequest,
)

logger = logging.getLogger(__name__)

# After how many seconds a session is looked at again if its deadline passes while it awaits a verdict.
LOOK_AGAIN_S: Final = 1.0


@dataclass
class WeightUpdates:
    """The state machine of weight updates: one at a time, the oldest first.

    Attributes:
        version: of the weights that serve.
        model_path, load_format: the last folder that the weights were loaded from.
        timeout_s: the limit of updates and sessions that name none.
        trials: runs canaries.
    """

    _weights: Weights
    _kv: KVMemory
    _memory: MemoryOccupation
    _generation: Generation
    _requests: Requests
    _operations: Operations
    _ranks: Ranks
    _set_deadline: Callable[[str, float], None]
    _pace: Pace
    _wake: Wake
    _trial_pass: TrialPass
    _: KW_ONLY
    version: str
    model_path: str
    load_format: str
    timeout_s: float
    _session: WeightSession | None = field(default=None, init=False)
    _why_closed: str = field(default="none was begun", init=False)
    _awaits_verdict: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._content = self._memory.content
        self._new_session = partial(
            WeightSession, self._weights, self._kv, self._content, self._ranks, self._pace
        )
        self._session_ids = (f"weight-session-{number}" for number in itertools.count())
        self._line = Line()
        self._conditions = CommitConditions(self._generation, self._memory, self._requests)
        self.trials = CanaryTrials(self._trial_pass, self._memory, self._ranks)
        self._arrivals = Arrivals(self._weights, self._ranks, self._pace, self._wake, self._require_open_for)
        self.handlers: HandlerTable = {
            UpdateWeightFromDiskReqInput: self.update,
            UpdateWeightsFromTensorReqInput: self.update,
            UpdateWeightsFromDistributedReqInput: self.update,
            UpdateWeightsFromIPCReqInput: self.update,
            BeginWeightUpdateReqInput: self.begin,
            EndWeightUpdateReqInput: self.end,
            AbortWeightUpdateReqInput: self.abort,
            UpdateWeightVersionReqInput: self.set_version,
            **GroupRequests(self._weights, self._ranks, self._wake).handlers,
        }
        self._memory.on_weights_release.append(self._end_for_release)
        self._requests.serve(self.version, is_update=False)

    def update(self, request: WeightUpdateRequest) -> Operation:
        """Carry out one update: as a session of its own, or as a part of the open one."""
        contents = Contents(announced_names(request))
        operation = self._conditions.answered(partial(self._update, request, contents))
        try:
            return (yield from operation)
        except Exception as error:
            # A refused update leaves the open session incomplete.
            session = self._session
            if session is not None and request.session_id in (None, session.session_id):
                session.refused.add(str(error), contents.names)
            raise

    def begin(self, request: BeginWeightUpdateReqInput) -> Operation:
        """Open a session, after the updates that came before."""
        self._refuse_second_session()
        with self._line.turn() as has_come:
            yield from in_turn(has_come, "no session was opened", 409)
            self._refuse_second_session()
            deadline_id = next(self._session_ids)
            self._session = self._new_session(deadline_id, request.session_id)
        timeout_s = request.timeout_s if request.timeout_s is not None else self.timeout_s
        self._set_deadline(deadline_id, timeout_s)
        return WeightSessionReqOutput(changed=True, message="A weight update session is open.")

    def end(self, request: EndWeightUpdateReqInput) -> Operation:
        """Commit the open session."""
        self._require_session()
        self._require_named(request, 409)
        return self._conditions.answered(partial(self._end, request))

    def abort(self, request: AbortWeightUpdateReqInput) -> AnyReply:
        """Discard the open session, and the updates under way in it."""
        changed = self._session is not None
        self._abort_session("aborted by abort_weight_update")
        message = "The session was discarded." if changed else "No session was open."
        if changed and (num_missing := len(self._memory.content.missing)):
            message += f" No request runs: {num_missing} parameters are stale until an update writes them."
        return WeightSessionReqOutput(changed=changed, message=message)

    def set_version(self, request: UpdateWeightVersionReqInput) -> Operation:
        """Give the weights another version, after earlier requests; in a session, at its commit.

        If only some replicas have an open session, those reply while the others are prepared: all refuse.
        """
        version, message = request.new_version, f"Weight version updated to {request.new_version}."
        with self._line.turn() as has_come:
            yield from in_turn(has_come, "the version stays", 400)
            if self._session is not None:
                self._session.version = version
                message = f"Weight version {version} takes effect with the session."
            else:
                yield Activity.BOUNDARY
                yield Activity.PREPARED
                if request.abort_all_requests:
                    self._generation.stop_requests(PauseMode.ABORT, RetractCause.UPDATE)
                self._serve(version, is_update=False)
        return UpdateWeightVersionReqOutput(new_version=version, message=message)

    @property
    def is_under_way(self) -> bool:
        """Whether an update is under way or waits, or a session is open."""
        return self._session is not None or not self._line.is_empty

    def expire(self, deadline_id: str) -> None:
        if self._session is None or self._session.deadline_id != deadline_id:
            return
        if self._awaits_verdict:
            self._set_deadline(deadline_id, LOOK_AGAIN_S)  # Other replicas may be committing it now.
        else:
            logger.warning(
                "a weight update session was open longer than weight_update_timeout_s, and is aborted"
            )
            self._abort_session("it was open longer than weight_update_timeout_s")

    def report(self) -> SessionReport | None:
        session = self._session
        if session is None:
            return None
        return SessionReport(opened_at=session.opened_at, num_tensors_staged=session.counts.num_tensors)

    def _update(
        self, request: WeightUpdateRequest, contents: Contents, stages: Stages
    ) -> Work[UpdateWeightsReqOutput]:
        with self._line.turn() as has_come, ExitStack() as opened:
            parts = yield from self._arrivals.open(request, opened, contents)
            stages.end("decode")
            terms = self._terms(request, request.flush_cache)
            if self._session is None:
                self._conditions.check(terms)
            while not has_come():
                yield Activity.WAITING
            stages.end("wait")
            self._require_open_for(request)
            plan = None if isinstance(parts, Pieces) else parts
            if plan is not None:
                self._require_fit(plan)
            if self._session is not None:
                before = self._session.counts
                yield from self._take(parts, self._session, terms)
                if isinstance(parts, Pieces):
                    parts.finish()
                return self._staged(self._session, terms, before, plan)
            session = opened.enter_context(closing(self._new_session()))
            yield from self._take(parts, session, terms, opened)
            session.require_complete()
            with self._conditions.draining(terms):
                outcome = yield from self._commit(session, terms, stages)
                if isinstance(parts, Pieces):
                    parts.finish()
                return (yield from self._conclude(session, outcome, plan))

    def _require_fit(self, plan: WritePlan) -> None:
        """Refuse, before the first byte, a delta of other weights, or a plan that is incomplete by itself."""
        pending = None if self._session is None else self._session.version
        require_base(plan.base_version, self.version, pending)
        if self._session is None and plan.incomplete:
            raise RequestRejected(plan.incomplete)

    def _take(
        self,
        parts: WritePlan | Pieces,
        session: WeightSession,
        terms: CommitTerms,
        opened: ExitStack | None = None,
    ) -> Work[None]:
        """Write all parts of an update. A burst is only prepared here; `_commit` writes it.

        Args:
            opened: given if the update is a session of its own. If that is written in place, running requests
                are drained before the first byte; for a single plan, draining begins while it is prepared.
        """
        before = session.counts.num_tensors
        is_whole, is_alone = not isinstance(parts, Pieces), opened is not None

        def write(plan: WritePlan) -> Work[None]:
            yield from self._arrivals.receive(plan, session, terms)
            if opened is not None and is_whole:
                opened.enter_context(self._conditions.draining(terms))
            nobody_waits = self._conditions.nobody_waits
            yield from session.prepare(plan, terms, is_alone=is_alone and is_whole, nobody_waits=nobody_waits)
            if isinstance(session.state, Burst):
                return
            if (
                opened is not None
                and isinstance(session.state, InPlace)
                and session.counts.num_tensors == before
            ):
                opened.enter_context(self._conditions.draining(terms))
                yield from self._conditions.ready(terms)
            yield from session.write(plan, terms)

        try:
            yield from parts.take(write) if isinstance(parts, Pieces) else write(parts)
        except RequestRejected as refusal:
            if session.is_staged or session.counts.num_tensors == before:
                raise
            # A refusal would say that nothing was written.
            raise EngineError(f"the update broke off half-way: {refusal.message}") from refusal

    def _staged(
        self, session: WeightSession, terms: CommitTerms, before: Counts, plan: WritePlan | None
    ) -> UpdateWeightsReqOutput:
        session.flush_cache |= terms.flush_cache
        session.version = terms.version or session.version
        session.folder = terms.folder or session.folder
        counts = Counts(*map(operator.sub, session.counts, before))
        message = f"Staged {counts.num_tensors} tensors."
        if not session.is_staged:
            message = f"Wrote {counts.num_tensors} tensors in place: nothing runs before end_weight_update."
        return session.reply(self.version, message, counts, plan, is_committed=False)

    def _end(self, request: EndWeightUpdateReqInput, stages: Stages) -> Work[UpdateWeightsReqOutput]:
        with self._line.turn() as has_come:
            while not has_come():
                yield Activity.WAITING
            stages.end("wait")
            self._memory.require_weights(400)
            session = self._require_session()
            self._require_named(request, 409)
            if not request.allow_incomplete:
                session.require_complete()
            flush_cache = session.flush_cache if request.flush_cache is None else request.flush_cache
            terms = self._terms(request, flush_cache)
            self._conditions.check(terms)
            if terms.canary is not None:
                session.require_copy()
            with self._conditions.draining(terms):
                outcome = yield from self._commit(session, terms, stages)
            self._session = None
            self._why_closed = "it was ended already"
            with closing(session):
                return (yield from self._conclude(session, outcome))

    def _commit(self, session: WeightSession, terms: CommitTerms, stages: Stages) -> Work[tuple[str, int]]:
        """Complete the session, wait for a pass boundary and the verdict of all replicas, and commit it.

        Weights, version and cache change together. Returns the reply's message, and how many requests were
        kept waiting.
        """
        yield from session.complete()
        stages.end("stage")
        yield from self._conditions.ready(terms)
        if not isinstance(session.state, Burst):
            yield Activity.BOUNDARY
        stages.end("drain")
        tried: list[str] = []
        if terms.canary is not None:
            tried.append((yield from self.trials.run(terms.canary, session.trial)))
            stages.end("canary")
        mode = self._conditions.mode(terms)
        # Nothing is refused from here on. If several replicas commit together, wait for all of them.
        self._awaits_verdict = True
        try:
            yield Activity.PREPARED
        finally:
            self._awaits_verdict = False
        stages.end("vote")
        if isinstance(session.state, Burst):
            # A burst cannot be undone from its first byte on, so it waits for the verdict.
            yield from session.write(session.state.plan, terms)
            stages.end("write")
        version = terms.version if terms.version is not None else session.version
        folder = terms.folder or session.folder
        message = [f"Updated {session.counts.num_tensors} tensors."]
        if version is not None:
            message.append(f"Weight version updated to {version}.")
        with session.stall.measure():
            num_paused = self._requests.num_running
            self._conditions.stop_requests(terms, mode)
            session.commit()
            with ending_rank("other weights serve than this rank says"):
                for commit in session.joined:
                    commit()
                self._serve(version if version is not None else self.version)
                if folder is not None:
                    self.model_path, self.load_format = folder
                if terms.flush_cache:
                    self._requests.flush_cache()
        stages.end("commit")
        return " ".join([*message, *tried]), num_paused

    def _terms(
        self, request: WeightUpdateRequest | EndWeightUpdateReqInput, flush_cache: bool
    ) -> CommitTerms:
        mode = request.pause_mode if request.pause_mode is not None else PauseMode.WAIT
        folder, refuses_nonfinite = None, self._weights.refuses_nonfinite
        if request.canary is not None:
            self.trials.check(request.canary)
        if isinstance(request, WeightUpdateRequest):
            if request.abort_all_requests:
                mode = PauseMode.ABORT
            if request.refuse_nonfinite is not None:
                refuses_nonfinite = request.refuse_nonfinite
        if isinstance(request, UpdateWeightFromDiskReqInput):
            folder = request.model_path, request.load_format or "auto"
        version = None if request.weight_version is None else str(request.weight_version)
        return CommitTerms(mode, flush_cache, version, request.canary, refuses_nonfinite, folder)

    def _require_open_for(self, request: WeightUpdateRequest) -> None:
        self._memory.require_weights(400)
        self._require_named(request)
        if request.canary is not None and self._session is not None:
            raise RequestRejected("canary: a session is open: give it to end_weight_update")

    def _require_session(self) -> WeightSession:
        if self._session is None:
            raise RequestRejected(
                f"no weight update session is open ({self._why_closed}): begin_weight_update first", 409
            )
        return self._session

    def _require_named(
        self, request: WeightUpdateRequest | EndWeightUpdateReqInput, status: int = 400
    ) -> None:
        """Refuse a request that names another session than the open one: it would be committed at once."""
        if request.session_id is not None:
            self.session_named(request.session_id, status)

    def session_named(self, session_id: str, status: int = 409) -> WeightSession:
        """The open session of this name. Raises RequestRejected: none is open, or another one."""
        if self._session is None or self._session.session_id != session_id:
            why = self._why_closed if self._session is None else "another session is open"
            raise RequestRejected(f"the session {session_id[:200]!r} is not open ({why})", status)
        return self._session

    def _refuse_second_session(self) -> None:
        if self._session is not None:
            raise RequestRejected(
                "a weight update session is open: end_weight_update or abort_weight_update first", 409
            )

    def _conclude(
        self, session: WeightSession, outcome: tuple[str, int], plan: WritePlan | None = None
    ) -> Work[UpdateWeightsReqOutput]:
        """After the commit, finish and give memory back, letting forward passes run first; returns the reply.

        If no request runs, the copy is given back in one piece when the session is closed: retracted requests
        must prefill first anyway. The sender's memory is unmapped after the reply, since that takes the
        driver milliseconds. A deadline, cancellation or failure does not undo the commit.
        """
        is_waited_for = self._generation.paused is None and self._requests.num_running > 0
        try:
            if is_waited_for:
                # Let a pass run before the rest is done.
                yield Activity.WORKING if session.is_staged else Activity.COPYING
            yield from session.finish()
            if is_waited_for:
                yield from session.release()
        except OutOfStep:
            raise
        except (DeadlinePassed, RequestRejected, EngineError) as error:
            logger.warning("the rest of a committed update is finished without further turns: %r", error)
            yield from session.finish()
        self._operations.go_on(session.detach(plan))
        message, num_paused = outcome
        reply = session.reply(
            self.version, message, session.counts, plan, is_committed=True, num_paused=num_paused
        )
        logger.info(
            "weights updated: version=%s tensors=%d bytes=%d staged=%s stall_ms=%.1f",
            *(reply.weight_version, reply.num_tensors, reply.num_bytes, reply.staged, reply.stall_ms),
        )
        return reply

    def _serve(self, version: str, *, is_update: bool = True) -> None:
        self.version = version
        self._requests.serve(version, is_update=is_update)

    def _abort_session(self, why: str) -> None:
        session = self._session
        if session is None:
            return
        self._session = None
        self._why_closed = why
        for kind in (WeightUpdateRequest, EndWeightUpdateReqInput):
            status = 409 if kind is EndWeightUpdateReqInput else 400
            message = f"the weight update session was discarded: {why}"
            self._operations.cancel(kind, Superseded(message, status))
        session.close()

    def _end_for_release(self) -> None:
        why = "the weights were released in between"
        self._abort_session(why)
        self._operations.cancel(WeightUpdateRequest, Superseded(f"{why}: resume them, then update again"))
