"""What updates bring, on all ranks: with the request, through a group, or piece by piece from senders."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeAlias

from ebbtide.srt.errors import RequestRejected, drop_frames, first_few
from ebbtide.srt.managers.control.pace import Pace, Wake, look_until
from ebbtide.srt.managers.control.phases import at_once
from ebbtide.srt.managers.control.ports import Activity, DeadlinePassed, OutOfStep, Ranks, Work
from ebbtide.srt.managers.control.weight_ports import Conversation, IncomingWeights, Weights
from ebbtide.srt.managers.control.weights.commit_terms import check_fields
from ebbtide.srt.managers.control.weights.session import WeightSession
from ebbtide.srt.managers.io_struct import PiecewiseRequest, Refusal, WeightUpdateRequest
from ebbtide.srt.managers.wire.reply_merging import merge_refusals

MAX_ERRORS: Final = 20


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

    def open(
        self, request: WeightUpdateRequest, opened: ExitStack, contents: Contents
    ) -> Work[IncomingWeights]:
        """What comes with the request, fit to be written on every rank."""

        def read() -> Work[_Heard]:
            # It is read before anything is refused, so that closing it gives the sender's memory back, and
            # so that it is known what was refused.
            try:
                _, incoming = yield from self._pace.turns(self._weights.open(request), Activity.COPYING)
            except RequestRejected as refusal:
                return _Heard(refusal=refusal)
            opened.enter_context(closing(incoming))
            try:
                check_fields(request)
                self._check(request)
                _refuse_problems(incoming)
            except RequestRejected as refusal:
                return _Heard(incoming, refusal=refusal)
            return _Heard(incoming)

        heard, facts = yield from self._ranks.survey(Activity.COPYING, read(), lambda heard: heard.fact)
        incoming = heard.incoming
        if incoming is not None and _are_alike(facts):
            contents.names = incoming.sent
        refusal = _refusal(facts)
        if refusal is not None:
            raise refusal
        assert incoming is not None, "what cannot be read is refused"
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

    def meet(self, request: PiecewiseRequest, opened: ExitStack) -> Work[Pieces]:
        """Every rank's sender."""

        def met() -> Conversation:
            check_fields(request)
            self._check(request)
            return opened.enter_context(closing(self._weights.converse(request)))

        sender = yield from self._ranks.phase(Activity.COPYING, at_once(met))
        return Pieces(sender, self._ranks, self._pace, self._wake)


@dataclass
class Contents:
    """What an update is to write.

    Attributes:
        names: as `IncomingWeights.sent`, the same on all ranks; None as long as they are not known.
    """

    names: frozenset[str] | None = None


@dataclass(frozen=True)
class _Heard:
    """What a rank's sender has said.

    Attributes:
        incoming: None at the end, or where it cannot be read.
        is_over: the sender says nothing more, and waits for nothing.
        refusal: why it cannot be taken.
    """

    incoming: IncomingWeights | None = None
    is_over: bool = False
    refusal: RequestRejected | None = None

    @property
    def fact(self) -> _Fact:
        summary = "the end" if self.incoming is None else _summary_of(self.incoming)
        if self.refusal is None:
            return summary, None
        return summary, (self.refusal.message, self.refusal.status, self.refusal.fields)


# A summary; and of a refusal the message, the status, and the further fields.
_Fact: TypeAlias = tuple[str, tuple[str, int, dict[str, Any]] | None]


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
                _refuse_problems(incoming)
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


def _summary_of(incoming: IncomingWeights) -> str:
    """What must be the same on every rank."""
    names = _sum_of(incoming.names)
    return f"{incoming.num_tensors} tensors ({incoming.num_ignored} ignored, names {names:08x})"


@lru_cache(maxsize=16)
def _sum_of(names: frozenset[str]) -> int:
    return zlib.crc32("\n".join(sorted(names)).encode())


def _refuse_problems(incoming: IncomingWeights) -> None:
    """Refuse tensors that do not fit the model, and list them."""
    problems = incoming.problems
    if problems:
        listed = first_few([f"{problem['name']}: {problem['reason']}" for problem in problems], "; ")
        raise RequestRejected(
            f"{len(problems)} of {incoming.num_tensors + incoming.num_ignored} tensors do not fit the model, "
            f"nothing was written: {listed}",
            errors=problems[:MAX_ERRORS],
            num_errors=len(problems),
        )


def refuse_halves(incoming: IncomingWeights) -> None:
    """Refuse, where nothing follows, tensors of which others are a part."""
    if incoming.halves:
        lacking = sorted({other for other, _ in incoming.halves.values()})
        raise RequestRejected(
            f"{len(incoming.halves)} tensors do not come with what belongs to them, nothing was written: "
            f"expected with them {first_few(lacking)}. In a session they may follow"
        )


def _loss(overwritten: frozenset[str]) -> str:
    """What a refusal adds about parameters that the update had overwritten in its session."""
    if not overwritten:
        return ""
    return (
        f". {len(overwritten)} of its parameters had been written in this session before: they count as not "
        "written, and keep their live values unless they are sent again"
    )


def _are_alike(facts: list[_Fact]) -> bool:
    """Whether all ranks were given the same."""
    return len({summary for summary, _ in facts}) == 1


def _refusal(facts: list[_Fact]) -> RequestRejected | None:
    """What stands against what was given, on whichever rank: the same on all of them."""
    refusals = {
        rank: Refusal(message=told[0], status=told[1], fields=told[2])
        for rank, (_, told) in enumerate(facts)
        if told is not None
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


def _failure_of(work: Work[None]) -> Work[Exception | None]:
    """Do the work; returns how it failed, if it did. A deadline or a cancellation thrown in goes on up."""
    with closing(work):
        while True:
            try:
                progress = next(work)
            except StopIteration:
                return None
            except OutOfStep:
                raise
            except Exception as error:
                drop_frames(error)
                return error
            yield progress
