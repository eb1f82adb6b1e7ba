"""What updates bring, on all ranks: with the request, through a group, or piece by piece from senders."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.pace import Pace, Wake, look_until
from ebbtide.srt.managers.control.phases import at_once
from ebbtide.srt.managers.control.ports import (
    Activity,
    Conversation,
    DeadlinePassed,
    IncomingWeights,
    OutOfStep,
    Ranks,
    Weights,
    Work,
)
from ebbtide.srt.managers.control.weights.session import WeightSession
from ebbtide.srt.managers.control.weights.terms import check_fields, refuse_problems, summary_of
from ebbtide.srt.managers.io_struct import UpdateWeightsFromIPCReqInput, WeightUpdateRequest


class Arrivals:
    """Gets hold of what an update brings.

    Args:
        check: refuses a request that the present state does not allow.
    """

    def __init__(
        self,
        weights: Weights,
        ranks: Ranks,
        pace: Pace,
        wake: Wake,
        check: Callable[[WeightUpdateRequest], None],
    ) -> None:
        self._weights = weights
        self._ranks = ranks
        self._pace = pace
        self._wake = wake
        self._check = check

    def open(self, request: WeightUpdateRequest, opened: ExitStack) -> Work[IncomingWeights]:
        """What comes with the request, fit to be written on every rank."""

        def checked() -> Work[IncomingWeights]:
            # Opened before anything is refused: closing it gives the sender's memory back.
            _, incoming = yield from self._pace.turns(self._weights.open(request), Activity.COPYING)
            opened.enter_context(closing(incoming))
            check_fields(request)
            self._check(request)
            refuse_problems(incoming)
            return incoming

        incoming, summaries = yield from self._ranks.survey(Activity.COPYING, checked(), summary_of)
        if len(set(summaries)) > 1:
            raise RequestRejected(
                "nothing was written: every rank must be given the same tensors, or its own parts of them, "
                f"under the same names. They were given {'; '.join(summaries)}"
            )
        return incoming

    def receive(self, incoming: IncomingWeights, session: WeightSession) -> Work[None]:
        """Wait for what others send, where the session has a place for it; forward passes go on meanwhile."""
        if not incoming.is_sent:
            return
        overwritten = yield from session.expect(incoming)
        try:
            yield from self._ranks.phase(Activity.WAITING, look_until(incoming.arrived, self._wake))
        except DeadlinePassed:
            incoming.abandon()
            message = (
                "the update was given up at its deadline, nothing of it is served: its tensors had not all "
                "arrived, and their group was left. init_weights_update_group joins a new one"
            )
            raise RequestRejected(message + _loss(overwritten)) from None
        except RequestRejected as refusal:
            incoming.abandon()
            raise RequestRejected(
                refusal.message + _loss(overwritten), refusal.status, **refusal.fields
            ) from None
        except BaseException:
            incoming.abandon()
            raise

    def meet(self, request: UpdateWeightsFromIPCReqInput, opened: ExitStack) -> Work[Pieces]:
        """Every rank's sender."""

        def met() -> Conversation:
            check_fields(request)
            self._check(request)
            return opened.enter_context(closing(self._weights.converse(request.zmq_handles)))

        sender = yield from self._ranks.phase(Activity.COPYING, at_once(met))
        return Pieces(sender, self._ranks, self._pace, self._wake)


@dataclass(frozen=True)
class _Heard:
    """What a rank's sender has said.

    Attributes:
        incoming: None at the end.
        is_over: the sender says nothing more, and waits for nothing.
        refusal: why it cannot be taken.
    """

    incoming: IncomingWeights | None = None
    is_over: bool = False
    refusal: RequestRejected | None = None

    @property
    def fact(self) -> _Fact:
        problem = "" if self.refusal is None else self.refusal.message
        fields = {} if self.refusal is None else self.refusal.fields
        return "the end" if self.incoming is None else summary_of(self.incoming), problem, fields


# A summary, the problem, and what else a refusal says of it.
_Fact: TypeAlias = tuple[str, str, dict[str, Any]]


@dataclass
class Pieces:
    """An update's tensors as every rank's sender brings them.

    Senders wait for each other: one that has an answer may speak again only when all of them have one. So
    what is wrong on one rank is answered on all, and each sender is heard to its end.
    """

    _sender: Conversation
    _ranks: Ranks
    _pace: Pace
    _wake: Wake
    _heard: _Heard = field(default_factory=_Heard)

    def take(self, write: Callable[[IncomingWeights], Work[None]]) -> Work[None]:
        """Write each piece, and answer it. Returns when everything has come; `finish` answers that.

        Raises:
            RequestRejected: a sender gave up, or the deadline has passed, or a piece does not fit.
        """
        while (incoming := (yield from self._next())) is not None:
            with closing(incoming):
                failure = yield from _failure_of(write(incoming))
            if failure is not None:
                yield from self._refuse(failure)
            self._sender.answer()

    def finish(self) -> None:
        """The senders may go: what they brought serves, or is staged."""
        self._sender.answer()

    def _next(self) -> Work[IncomingWeights | None]:
        """The same on all ranks; None: everything has come."""
        try:
            _, facts = yield from self._ranks.survey(Activity.WAITING, self._hear(), lambda heard: heard.fact)
        except DeadlinePassed:
            raise RequestRejected(
                "the update was given up at its deadline, nothing of it is served: it had not all come"
            ) from None
        refusal = _refusal(facts)
        if refusal is not None:
            yield from self._refuse(refusal)
        return self._heard.incoming

    def _hear(self) -> Work[_Heard]:
        try:
            yield from look_until(self._sender.poll, self._wake)
        except RequestRejected as refusal:
            self._heard = _Heard(is_over=True, refusal=refusal)
            return self._heard
        _, incoming = yield from self._pace.turns(self._sender.piece(), Activity.COPYING)
        self._heard = _Heard(incoming)
        if incoming is not None:
            try:
                refuse_problems(incoming)
            except RequestRejected as refusal:
                self._heard = _Heard(incoming, refusal=refusal)
        return self._heard

    def _refuse(self, failure: Exception) -> Work[NoReturn]:
        """Tell all senders, and hear them out: one would wait for ever where nobody listens any more."""
        with suppress(DeadlinePassed):
            yield from self._ranks.phase(Activity.WAITING, self._hear_out(str(failure)))
        raise failure

    def _hear_out(self, problem: str) -> Work[None]:
        heard, self._heard = self._heard, _Heard(is_over=True)
        if heard.is_over:
            return
        self._sender.answer(problem)
        if heard.incoming is None:
            return
        heard.incoming.close()
        del heard
        with suppress(RequestRejected):
            while True:
                yield from look_until(self._sender.poll, self._wake)
                self._sender.answer(problem)


def _loss(overwritten: frozenset[str]) -> str:
    """What an update that has failed took from those ahead of it in the same session."""
    if not overwritten:
        return ""
    return (
        f". {len(overwritten)} of its parameters had been written in this session before: they count as not "
        "written, and keep their live values unless they are sent again"
    )


def _refusal(facts: list[_Fact]) -> RequestRejected | None:
    """What stands against a piece, on whichever rank: the same on all of them."""
    problems = [(rank, problem, fields) for rank, (_, problem, fields) in enumerate(facts) if problem]
    if problems:
        rank, problem, fields = problems[0]
        is_alike = all(other == problem for _, other, _ in facts)
        return RequestRejected(problem if is_alike else f"rank {rank}: {problem}", 400, **fields)
    summaries = [summary for summary, _, _ in facts]
    if len(set(summaries)) > 1:
        return RequestRejected(
            f"every rank must be brought the same tensors. They were brought {'; '.join(summaries)}"
        )
    return None


def _failure_of(work: Work[None]) -> Work[Exception | None]:
    """How the work failed; what is thrown in, a deadline or a cancellation, ends it and goes on up."""
    with closing(work):
        while True:
            try:
                progress = next(work)
            except StopIteration:
                return None
            except OutOfStep:
                raise
            except Exception as error:
                _let_go(error)
                return error
            yield progress


def _let_go(error: BaseException | None) -> None:
    """Of the sender's memory: the frames that failed may hold tensors, and the error is kept for a while."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
