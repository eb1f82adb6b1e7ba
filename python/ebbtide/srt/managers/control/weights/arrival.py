"""Gets the plans of an update on all ranks: one with the request, or several from senders, piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

from ebbtide.srt.errors import EngineError, RequestRejected, drop_frames, first_few
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    Operation,
    OutOfStep,
    Overruled,
    Superseded,
    Work,
)
from ebbtide.srt.managers.control.pace import Pace, Ranks, Wake, at_once, look_until
from ebbtide.srt.managers.control.weights import Conversation, Weights, WritePlan
from ebbtide.srt.managers.control.weights.commit_terms import CommitTerms, is_piecewise
from ebbtide.srt.managers.control.weights.session import WeightSession
from ebbtide.srt.managers.io_struct import (
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    PiecewiseRequest,
    Refusal,
    WeightsUpdateGroupReqOutput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.wire.merging import MAX_ERRORS, merge_refusals

Write: TypeAlias = Callable[[WritePlan], Work[None]]
# What other ranks learn of a plan: a summary; and if it is refused, the message, status and fields.
_Fact: TypeAlias = tuple[str, tuple[str, int, dict[str, Any]] | None]


@dataclass
class Arrivals:
    """Opens updates on all ranks. `check` refuses a request that the present state does not allow."""

    _weights: Weights
    _ranks: Ranks
    _pace: Pace
    _wake: Wake
    _check: Callable[[WeightUpdateRequest], None]

    def open(
        self, request: WeightUpdateRequest, opened: ExitStack, contents: Contents
    ) -> Work[WritePlan | Pieces]:
        """Open an update: its plan, checked on every rank, or its senders if it comes piece by piece.

        Args:
            opened: closes the plan or the senders at the end of the update.
            contents: gets the names of the plan, also if it is refused.
        """
        if is_piecewise(request):
            return (yield from self._meet(request, opened))

        def read() -> Work[_Received]:
            # Read it before refusing anything: then closing it gives the sender's memory back, and the names
            # of what was refused are known.
            try:
                _, plan = yield from self._pace.turns(self._weights.open(request), Activity.COPYING)
            except RequestRejected as refusal:
                return _Received(refusal=refusal)
            opened.enter_context(closing(plan))
            return _Received.of(plan, lambda: self._check_request(request))

        received, facts = yield from self._ranks.survey(Activity.COPYING, read(), _Received.fact)
        if received.plan is not None and _are_alike(facts):
            contents.names = received.plan.sent
        refusal = _refusal(facts)
        if refusal is not None:
            raise refusal
        assert received.plan is not None, "what cannot be read is refused"
        return received.plan

    def receive(self, plan: WritePlan, session: WeightSession, terms: CommitTerms) -> Work[None]:
        """Wait for broadcasts, received directly into the session if it allows; forward passes go on."""
        if not plan.is_sent:
            return
        overwritten = yield from session.expect(plan, terms)
        try:
            yield from self._ranks.phase(Activity.WAITING, look_until(plan.arrived, self._wake))
        except BaseException as error:
            plan.abandon()
            if isinstance(error, DeadlinePassed):
                raise RequestRejected(
                    "the update was given up at its deadline, nothing of it is served: its tensors had not "
                    "all arrived, and their group was left. init_weights_update_group joins a new one"
                    + _loss(overwritten)
                ) from None
            if isinstance(error, RequestRejected):
                message = error.message + _loss(overwritten)
                raise RequestRejected(message, error.status, **error.fields) from None
            raise

    def _meet(self, request: PiecewiseRequest, opened: ExitStack) -> Work[Pieces]:
        def met() -> Conversation:
            self._check_request(request)
            return opened.enter_context(closing(self._weights.converse(request)))

        sender = yield from self._ranks.phase(Activity.COPYING, at_once(met))
        return Pieces(sender, self._ranks, self._pace, self._wake)

    def _check_request(self, request: WeightUpdateRequest) -> None:
        self._check(request)


@dataclass
class Contents:
    """The names that an update is to write, as in `WritePlan.sent`; None until they are known."""

    names: frozenset[str] | None = None


@dataclass(frozen=True)
class _Received:
    """What a rank has received from its sender.

    Attributes:
        plan: None: the end has come, or it could not be read.
        is_over: the sender sends nothing more, and waits for no answer.
        refusal: why it is refused; None: it is not.
    """

    plan: WritePlan | None = None
    is_over: bool = False
    refusal: RequestRejected | None = None

    @classmethod
    def of(cls, plan: WritePlan, check: Callable[[], None] = lambda: None) -> _Received:
        """A plan, refused if `check` raises or if it does not fit the model."""
        try:
            check()
            _refuse_problems(plan)
        except RequestRejected as refusal:
            return cls(plan, refusal=refusal)
        return cls(plan)

    def fact(self) -> _Fact:
        """What the other ranks need to know."""
        summary = "the end" if self.plan is None else _summary_of(self.plan)
        if self.refusal is None:
            return summary, None
        return summary, (self.refusal.message, self.refusal.status, self.refusal.fields)


@dataclass
class Pieces:
    """An update's plans, one per piece, from the sender of every rank.

    Senders wait for each other: one that was answered goes on only when all were answered. So a problem of
    one rank is answered to all senders, and each sender is answered until it ends.
    """

    _sender: Conversation
    _ranks: Ranks
    _pace: Pace
    _wake: Wake
    _received: _Received = field(default_factory=_Received)

    def take(self, write: Write) -> Work[None]:
        """Write and answer each piece, until the end has come; `finish` answers the end."""
        while (plan := (yield from self._next())) is not None:
            failure: Exception | None = None
            with closing(plan):
                try:
                    yield from write(plan)
                except (OutOfStep, DeadlinePassed, Overruled, Superseded):
                    raise
                except Exception as error:
                    drop_frames(error)
                    failure = error
            if failure is not None:
                yield from self._refuse(failure)
            self._sender.answer()

    def finish(self) -> None:
        """Answer the end: everything serves, or is staged."""
        self._sender.answer()

    def _next(self) -> Work[WritePlan | None]:
        """The next piece, of the same tensors on all ranks; None: the end has come."""
        try:
            _, facts = yield from self._ranks.survey(Activity.WAITING, self._receive(), _Received.fact)
        except DeadlinePassed:
            raise RequestRejected(
                "the update was given up at its deadline, nothing of it is served: it had not all come"
            ) from None
        refusal = _refusal(facts)
        if refusal is not None:
            yield from self._refuse(refusal)
        return self._received.plan

    def _receive(self) -> Work[_Received]:
        try:
            yield from look_until(self._sender.poll, self._wake)
        except RequestRejected as refusal:
            self._received = _Received(is_over=True, refusal=refusal)
            return self._received
        _, plan = yield from self._pace.turns(self._sender.piece(), Activity.COPYING)
        self._received = _Received() if plan is None else _Received.of(plan)
        return self._received

    def _refuse(self, failure: Exception) -> Work[NoReturn]:
        """Answer all senders with the failure until they end, since an unanswered one would wait for ever."""
        with suppress(DeadlinePassed):
            yield from self._ranks.phase(Activity.WAITING, self._answer_all(str(failure)))
        raise failure

    def _answer_all(self, problem: str) -> Work[None]:
        received, self._received = self._received, _Received(is_over=True)
        if received.is_over:
            return
        self._sender.answer(problem)
        if received.plan is None:
            return
        received.plan.close()
        del received
        with suppress(RequestRejected):
            while True:
                yield from look_until(self._sender.poll, self._wake)
                self._sender.answer(problem)


def _summary_of(plan: WritePlan) -> str:
    """A summary that is equal on two ranks if their plans have the same consequences."""
    names, base = _sum_of(plan.names), plan.base_version
    told = f"{plan.num_tensors} tensors ({plan.num_ignored} ignored, names {names:08x}, {plan.how.value}"
    told += "" if base is None else f" of version {base[:200]!r}"
    return f"{told}; {plan.incomplete})" if plan.incomplete else f"{told})"


@lru_cache(maxsize=16)
def _sum_of(names: frozenset[str]) -> int:
    return zlib.crc32("\n".join(sorted(names)).encode())


def _refuse_problems(plan: WritePlan) -> None:
    """Refuse a plan whose tensors do not fit the model; the refusal lists them."""
    problems = plan.problems
    if problems:
        listed = first_few([f"{problem['name']}: {problem['reason']}" for problem in problems], "; ")
        raise RequestRejected(
            f"{len(problems)} of {plan.num_tensors + plan.num_ignored} tensors do not fit the model, "
            f"nothing was written: {listed}",
            errors=problems[:MAX_ERRORS],
            num_errors=len(problems),
        )


def _loss(overwritten: frozenset[str]) -> str:
    """What a refusal adds about parameters of the session that the update has overwritten."""
    if not overwritten:
        return ""
    return (
        f". {len(overwritten)} of its parameters had been written in this session before: they count as not "
        "written, and keep their live values unless they are sent again"
    )


def _are_alike(facts: list[_Fact]) -> bool:
    return len({summary for summary, _ in facts}) == 1


def _refusal(facts: list[_Fact]) -> RequestRejected | None:
    """The refusal if any rank has refused, or the ranks were given different tensors; the same on all."""
    refusals = {
        rank: Refusal(message=refused[0], status=refused[1], fields=refused[2])
        for rank, (_, refused) in enumerate(facts)
        if refused is not None
    }
    if refusals:
        merged = merge_refusals(refusals, len(facts))
        return RequestRejected(merged.message, merged.status, **merged.fields)
    if not _are_alike(facts):
        return RequestRejected(
            "every rank must be given the same tensors, or its own parts of them, under the same names. They "
            f"were given {'; '.join(summary for summary, _ in facts)}"
        )
    return None


@dataclass
class GroupRequests:
    """Handles the control requests about broadcast groups. All ranks join or none does; all leave."""

    _weights: Weights
    _ranks: Ranks
    _wake: Wake

    def __post_init__(self) -> None:
        self.handlers: HandlerTable = {
            InitWeightsUpdateGroupReqInput: self.init,
            DestroyWeightsUpdateGroupReqInput: self.destroy,
        }

    def init(self, request: InitWeightsUpdateGroupReqInput) -> Operation:
        """Join a group. A live group of that name is left first."""
        with ExitStack() as if_refused:
            try:
                replaced = yield from self._on_all_ranks(self._join(request, if_refused))
            except EngineError as error:
                raise RequestRejected(f"the group {request.group_name} was not joined: {error}") from error
            if_refused.pop_all()
        message = f"Joined the group {request.group_name}."
        return WeightsUpdateGroupReqOutput(changed=True, replaced=replaced, message=message)

    def destroy(self, request: DestroyWeightsUpdateGroupReqInput) -> Operation:
        """Leave a group. Updates that wait for broadcasts in it are refused."""
        was_there = yield from self._on_all_ranks(self._leave(request.group_name))
        if not was_there:
            message = f"There is no group {request.group_name}."
            return WeightsUpdateGroupReqOutput(changed=False, message=message)
        return WeightsUpdateGroupReqOutput(changed=True, message=f"Left the group {request.group_name}.")

    def _on_all_ranks(self, work: Work[bool]) -> Work[bool]:
        """Do the work on all ranks; returns whether any rank returned True."""
        try:
            _, answers = yield from self._ranks.survey(Activity.WAITING, work, bool)
        except DeadlinePassed:
            raise EngineError("not every rank was done with it in time") from None
        return any(answers)

    def _join(self, request: InitWeightsUpdateGroupReqInput, if_refused: ExitStack) -> Work[bool]:
        replaced = request.group_name in self._weights.group_names()
        with closing(self._weights.join_group(request)) as joining:
            yield from look_until(lambda: next(joining, None) is None, self._wake)
        if_refused.callback(self._weights.leave_group, request.group_name)
        return replaced

    def _leave(self, name: str) -> Work[bool]:
        has_left = self._weights.leave_group(name)
        if has_left is None:
            return False
        yield from look_until(has_left, self._wake)
        return True
