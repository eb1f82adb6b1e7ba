"""Weights on their way in: written to a copy of the live ones, or in place, not served before the commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import structs

from ebbtide.srt.errors import EngineError, RequestRejected, first_few
from ebbtide.srt.managers.control.pace import Pace, Stall, is_burst
from ebbtide.srt.managers.control.phases import at_once
from ebbtide.srt.managers.control.ports import (
    Activity,
    CopyStream,
    DeadlinePassed,
    OutOfStep,
    Ranks,
    Slices,
    Superseded,
    Work,
)
from ebbtide.srt.managers.control.weight_content import Valid, WeightContent
from ebbtide.srt.managers.control.weight_ports import IncomingWeights, Lender, Staging, Weights
from ebbtide.srt.managers.control.weights.lacking import Lacking
from ebbtide.srt.managers.io_struct import UpdateWeightsReqOutput, WeightUpdateRequest
from ebbtide.srt.slices import finish

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The memory of so many buckets of a session stays mapped, in case that the next ones lie in it.
MAX_MAPPED: Final = 4


class WeightSession:
    """What one commit will change. `close` before the commit is the rollback.

    Source: control_semantics section 2.

    Attributes:
        lacks: what was to come to it and has not.
        deadline_id: of the deadline at which it is aborted; None for the session of a single request.
        session_id: what its client calls it.
        names: the checkpoint names that have been written whole.
        nonfinite: what holds NaN or Inf of that, on any rank.
        is_staged: False once anything was written in place, on all ranks then.
        canary_message: how a trial of it went.
        is_on_trial: a canary wants it to be staged: it is written to a copy or not at all.
        refuses_nonfinite: the update under way is refused if it holds NaN or Inf.
        version, flush_cache, folder: what the updates asked for; `folder` is (model_path, load_format).
    """

    def __init__(
        self,
        weights: Weights,
        lender: Lender,
        content: WeightContent,
        ranks: Ranks,
        pace: Pace,
        deadline_id: str | None = None,
        session_id: str | None = None,
    ) -> None:
        self.deadline_id = deadline_id
        self.session_id = session_id
        self.opened_at = time.time()
        self.names: frozenset[str] = frozenset()
        self.nonfinite: frozenset[str] = frozenset()
        self.num_tensors = 0
        self.num_ignored = 0
        self.num_bytes = 0
        self.version: str | None = None
        self.flush_cache = False
        self.folder: tuple[str, str] | None = None
        self.is_staged = True
        self.is_on_trial = self.refuses_nonfinite = False
        self.canary_message = ""
        self.stall = Stall()
        self._is_spoilt = False
        self.lacks = Lacking()
        self._weights = weights
        self._lender = lender
        self._content = content
        self._ranks = ranks
        self._pace = pace
        self._staging: Staging | None = None
        self._unmap: list[Slices[None]] = []
        # Its copies are launched, and may not have run.
        self._unfinished: IncomingWeights | None = None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tensors that were written, tensors that were ignored, and bytes."""
        return self.num_tensors, self.num_ignored, self.num_bytes

    def reply(
        self, version: str, message: str, counts: tuple[int, int, int], *, is_committed: bool
    ) -> UpdateWeightsReqOutput:
        """What is said of an update of the session, or of all of it.

        Args:
            version: that serves.
            counts: as `counts`.
        """
        num_tensors, num_ignored, num_bytes = counts
        content = self._content.report()
        return UpdateWeightsReqOutput(
            weight_version=version,
            committed=is_committed,
            staged=self.is_staged,
            num_tensors=num_tensors,
            num_ignored=num_ignored,
            num_bytes=num_bytes,
            stall_ms=0.0,
            num_paused_requests=0,
            content=content.content,
            num_missing=content.num_missing,
            message=message,
        )

    def message(self, version: str | None) -> str:
        """What its commit is answered with. `version`: of the weights from then on; None: as before."""
        told = [f"Updated {self.num_tensors} tensors."]
        if version is not None:
            told.append(f"Weight version updated to {version}.")
        return " ".join([*told, *filter(None, [self.canary_message])])

    def concluded(self, reply: UpdateWeightsReqOutput) -> UpdateWeightsReqOutput:
        """The reply to its commit, completed and logged once `finish` has returned."""
        logger.info(
            "weights updated: version=%s tensors=%d bytes=%d staged=%s stall_ms=%.1f",
            reply.weight_version,
            reply.num_tensors,
            reply.num_bytes,
            self.is_staged,
            self.stall.longest_s * 1e3,
        )
        return self.with_outcome(reply)

    def with_outcome(self, reply: UpdateWeightsReqOutput) -> UpdateWeightsReqOutput:
        """The reply with the fields that are known only once the copies have run."""
        message = f"{reply.message} {_told_of(self.nonfinite)}" if self.nonfinite else reply.message
        return structs.replace(
            reply, stall_ms=self.stall.longest_s * 1e3, num_nonfinite=len(self.nonfinite), message=message
        )

    def heed(self, request: WeightUpdateRequest) -> None:
        """Write what comes next as this update wants it."""
        asked = request.refuse_nonfinite
        self.is_on_trial = request.canary is not None
        self.refuses_nonfinite = self._weights.refuses_nonfinite if asked is None else asked

    @property
    def overwrites_what_serves(self) -> bool:
        """Whether the next write goes into live weights that are whole."""
        return not self.is_staged and isinstance(self._content.state, Valid)

    def require_copy(self) -> None:
        """Refuse to look at new weights first where the old ones cannot be brought back."""
        if not self.is_staged or not isinstance(self._content.state, Valid):
            raise RequestRejected(
                "canary, refuse_nonfinite: there is no second copy of the weights to look at: the old ones "
                "could not come back. Stale weights must first be written without a canary; where memory is "
                "missing, release kv_cache during the update or see update_staging"
            )

    def trial(self, run: Callable[[], T]) -> Work[T]:
        """Call `run` while the copy serves, and bring the old weights back; returns its result."""

        def exchanged() -> T:
            with self.stall.measure():
                if self._staging is None:
                    return run()
                self._staging.commit()
                try:
                    return run()
                finally:
                    self._ranks.certainly(self._staging.roll_back)

        return at_once(exchanged)

    def prepare(
        self, incoming: IncomingWeights, *, is_all: bool = False, nobody_waits: bool = False
    ) -> Work[None]:
        """Find room for these tensors, and open the memory they are in. To be called ahead of each `write`.

        Tensors in memory that this device reads may be written in place, in one burst: that holds forward
        passes up no longer than exchanging a copy does, so no copy is made.

        Args:
            is_all: nothing else is going to be written.
            nobody_waits: no forward pass runs, and none is held up.

        Raises:
            RequestRejected: they need a copy, and there is none; or what the copy holds is unknown.
        """
        self._require_sound()
        self._require_base(incoming)
        can_burst = is_all and not (incoming.needs_copy or self.is_on_trial or self.refuses_nonfinite)
        near_bytes = incoming.near_bytes if can_burst else None
        bursts = near_bytes is not None and (nobody_waits or is_burst(near_bytes))
        yield from self._make_room(incoming, bursts=bursts)
        if self._staging is not None and (incoming.scales or not incoming.is_sent):
            # Opening a delta launches work on the device, which belongs with the copies.
            copies = self._weights.copies if incoming.is_delta else None
            yield from self._do(incoming.open(self._staging), Activity.COPYING, copies)

    def _make_room(self, incoming: IncomingWeights, *, bursts: bool = False) -> Work[None]:
        """Take a copy, or none if the live weights hold nothing to keep and can be written to."""
        if self._staging is None and incoming.num_tensors > 0:
            yield from self._take_room(bursts=bursts)
            if self.is_staged:
                # The pass that waited for it is launched first. In a session it ends, too: else its tokens
                # would wait for what the host does for the updates that have come.
                yield Activity.COPYING
                if self.deadline_id is not None:
                    yield Activity.COPYING
        if self.is_on_trial or (self.refuses_nonfinite and self.overwrites_what_serves):
            self.require_copy()
        if incoming.needs_copy and not self.is_staged:
            raise RequestRejected(
                "nothing was written: a custom weight loader changes a copy of the live weights, and there "
                "is none. Stale weights must first be written whole, by an update without a custom loader; "
                "where memory for a copy is missing, release kv_cache during the update"
            )

    def _take_room(self, *, bursts: bool) -> Work[None]:
        """Take a copy in memory that is free or lent easily, else in all that can be lent, else none."""
        is_staged = False
        bursts = bursts and not self._weights.requires_copy
        try:
            if isinstance(self._content.state, Valid) and not (yield from self._all(bursts)):
                yield Activity.BOUNDARY
                self._lender.set_aside()
                is_staged = yield from self._stage()
                if not is_staged:
                    yield Activity.BOUNDARY
                    if self._lender.set_aside(hard=True) or self._weights.requires_copy:
                        is_staged = yield from self._stage(is_last=True)
            if not is_staged:
                yield from self._find_room(in_place=True)
        except BaseException:
            self.close()
            raise
        self.is_staged = is_staged

    def _all(self, holds: bool) -> Work[bool]:
        """Whether it holds on every rank."""
        _, facts = yield from self._ranks.survey(Activity.COPYING, at_once(lambda: holds), bool)
        return all(facts)

    def _stage(self, *, is_last: bool = False) -> Work[bool]:
        """Take a copy on all ranks, or on none if one has no memory for it; returns whether there is one."""
        finding = self._find_room(in_place=False, is_last=is_last)
        staging, found = yield from self._ranks.survey(Activity.WORKING, finding, lambda made: made.is_staged)
        if not all(found):
            staging.close()
            self._lender.take_back()
        return all(found)

    def _find_room(self, *, in_place: bool, is_last: bool = True) -> Work[Staging]:
        def room() -> Slices[Staging]:
            if not in_place:
                self._lender.hand_over()
            return (yield from self._weights.stage(in_place=in_place, is_last=is_last))

        _, self._staging = yield from self._pace.turns(room(), Activity.WORKING, self.stall)
        return self._staging

    def expect(self, incoming: IncomingWeights) -> Work[frozenset[str]]:
        """Find room for what others are about to send, and have it received there if nothing serves from it.

        Returns the names that count as written no more: what is received overwrites them.

        Raises:
            RequestRejected: what the copy holds is unknown.
        """
        self._require_sound()
        yield from self._make_room(incoming)
        is_hidden = self.is_staged or not isinstance(self._content.state, Valid)
        if self._staging is None or incoming.needs_copy or not is_hidden:
            return frozenset()
        if not incoming.is_sent or not incoming.receive_into(self._staging):
            return frozenset()
        if not self.is_staged:
            yield Activity.BOUNDARY
            self._lose(incoming)
        overwritten = self.names & _touched(incoming)
        self.names -= overwritten
        return overwritten

    def write(self, incoming: IncomingWeights, *, waits: bool = True) -> Work[int]:
        """Write one update's tensors, which were prepared; returns their bytes.

        If it fails, they count as not written; live weights that serve are then lost, which is no refusal.

        Args:
            waits: False: the copies go into live weights that serve. They are launched behind the forward
                pass under way; this returns at its end, and the commit follows at once. The next pass is
                launched behind the copies, and behind that comes `finish`.
        """
        self._unfinished = None if waits else incoming
        if incoming.needs_copy and self._staging is not None:
            yield from self._complete(self._staging)
        elif incoming.is_delta and self._staging is not None:
            yield from self._lay_base(incoming, self._staging)
        else:
            self.names -= _touched(incoming)
            self.lacks.forget(incoming)
        staging = self._staging
        num_bytes = 0 if staging is None else (yield from self._copy(incoming, staging))
        self.names = _union(self.names, _union(incoming.names, self.lacks.note_written(incoming)))
        self._is_spoilt = False
        self.num_tensors += incoming.num_tensors
        self.num_ignored += incoming.num_ignored
        self.num_bytes += num_bytes
        if not waits:
            with self.stall.apart():
                yield Activity.BOUNDARY
        return num_bytes

    def _copy(self, incoming: IncomingWeights, staging: Staging) -> Work[int]:
        serves = isinstance(self._content.state, Valid)
        if self._unfinished is not None:
            # No boundary is needed: the copies are launched behind the forward pass under way.
            self._lose(incoming)
        elif not self.is_staged:
            yield Activity.BOUNDARY
            self._lose(incoming)
        # A change that breaks off half-way leaves the copy in a state that nobody knows.
        self._is_spoilt = incoming.needs_copy or incoming.is_delta
        is_beside = self.is_staged or self._unfinished is not None
        kind = Activity.COPYING if is_beside else Activity.WORKING
        work = self._copied(incoming, staging, kind)
        try:
            (num_bytes, _), found = yield from self._ranks.survey(kind, work, lambda copied: copied[1])
        except RequestRejected as refusal:
            if self.is_staged or not serves or isinstance(refusal, Superseded):
                raise
            raise EngineError(f"the update broke off half-way: {refusal.message}") from refusal
        nonfinite = frozenset[str]().union(*found)
        if self.refuses_nonfinite and nonfinite:
            raise RequestRejected(
                f"refuse_nonfinite: nothing of this update serves. {_told_of(nonfinite)}",
                num_nonfinite=len(nonfinite),
            )
        self._note_nonfinite(incoming, nonfinite)
        if incoming.is_sent and self._unfinished is None:
            incoming.close()
        return num_bytes

    def _copied(
        self, incoming: IncomingWeights, staging: Staging, kind: Activity
    ) -> Work[tuple[int, list[str]]]:
        """Copy on this rank; returns the bytes, and the tensors that hold NaN or Inf."""
        slices, copies, waits = incoming.write(staging), self._weights.copies, self._unfinished is None
        num_bytes, _ = yield from self._pace.turns(slices, kind, self.stall, copies, waits=waits)
        nonfinite = incoming.nonfinite() if waits else []
        if not (incoming.is_sent or self.stall.lasts):
            self._keep_mapped(incoming)
        return num_bytes, nonfinite

    def finish(self) -> Work[None]:
        """After the commit, wait for the copies that `write` launched and did not wait for.

        Raises:
            OutOfStep: they failed, and what serves is a mixture.
        """
        incoming, self._unfinished = self._unfinished, None
        if incoming is None:
            return

        def finished() -> Work[list[str]]:
            yield from self._pace.behind(self._weights.copies)
            return incoming.nonfinite()

        try:
            _, found = yield from self._ranks.survey(Activity.COPYING, finished(), lambda names: names)
        except (DeadlinePassed, RequestRejected):
            # What serves already is not given up: the rest is waited for in one piece.
            incoming.finish()
            found = [incoming.nonfinite()]
        except Exception as error:
            raise OutOfStep(f"weights that serve could not be written: {error}") from error
        self.stall.end()
        self._note_nonfinite(incoming, frozenset[str]().union(*found))

    def _lay_base(self, incoming: IncomingWeights, staging: Staging) -> Work[None]:
        """Bring what a delta changes into the copy, and check the sums that its tensors will have."""
        if self.is_staged:
            untouched = self._weights.names - (incoming.names - self.names)
            yield from self._do(staging.complete(untouched), Activity.COPYING, self._weights.copies)
            self.names |= incoming.names
        copies = self._weights.copies
        summing = self._pace.turns(incoming.sum_up(staging), Activity.COPYING, self.stall, copies)
        _, shares = yield from self._ranks.survey(Activity.COPYING, summing, lambda _: dict(incoming.sums()))
        incoming.check_sums(shares)

    def _require_base(self, incoming: IncomingWeights) -> None:
        missing = (incoming.names - self.names) & self._content.missing if incoming.is_delta else frozenset()
        if missing:
            raise RequestRejected(
                f"nothing was written: a delta changes what is there, and {len(missing)} of its parameters "
                f"are stale ({first_few(sorted(missing))}): send them whole",
                409,
            )

    def _keep_mapped(self, incoming: IncomingWeights) -> None:
        """Let the sender use its memory again, and leave it mapped for now.

        The next bucket often comes in the same memory, and unmapping it has to wait until no pass runs.
        """
        self._unmap.append(incoming.detach())
        if len(self._unmap) > MAX_MAPPED:
            finish(self._unmap.pop(0))

    def _note_nonfinite(self, incoming: IncomingWeights, names: frozenset[str]) -> None:
        if self.nonfinite or names:
            self.nonfinite = (self.nonfinite - incoming.sent) | names
        if names:
            logger.warning("a weight update: %s", _told_of(self.nonfinite))

    def _lose(self, incoming: IncomingWeights) -> None:
        """From here to the commit the live weights are a mixture, which no forward pass may see."""
        if isinstance(self._content.state, Valid):
            self.stall.begin()
        self._content.lose(_touched(incoming))

    def complete(self) -> Work[None]:
        """Fill what was not written with the live weights, so that the copy is whole.

        Raises:
            RequestRejected: what the copy holds is unknown.
        """
        self._require_sound()
        if self._staging is not None and self.is_staged and not self.names >= self._weights.names:
            yield from self._complete(self._staging)

    def _complete(self, staging: Staging) -> Work[None]:
        yield from self._do(staging.complete(self.names), Activity.COPYING, self._weights.copies)

    def commit(self) -> None:
        """Make the weights that were written the live ones."""
        if self._staging is not None:
            self._ranks.certainly(self._staging.commit)
        self._content.note_written(self.names)
        if self._unfinished is None:
            self.stall.end()

    def release(self) -> Work[None]:
        """After the commit, return the copy's memory to those who lent it, and the rest to the system."""
        if self._staging is not None and self.is_staged:
            self._ranks.certainly(self._staging.repay)
            self._ranks.certainly(self._lender.take_back)
            yield from self._do(self._staging.release(), Activity.WORKING)

    def detach(self, incoming: IncomingWeights | None = None) -> Work[None]:
        """After the commit, let the sender use its memory again; returns what has yet to unmap it."""
        mapped, self._unmap = self._unmap, []
        if incoming is not None:
            try:
                mapped.append(incoming.detach())
            except (RequestRejected, EngineError) as error:
                logger.warning("memory of an update is given back late, at its end: %r", error)
        return self._end(mapped)

    def _end(self, mapped: list[Slices[None]]) -> Work[None]:
        yield from self._do(_one_by_one(mapped), Activity.WORKING)

    def close(self) -> None:
        """Give back the copy, and unmap what is still mapped of the senders' memory."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._lender.take_back()
        while self._unmap:
            finish(self._unmap.pop())

    def _require_sound(self) -> None:
        if self._is_spoilt:
            raise RequestRejected(
                "an update that changes the copy failed in this session, and may have left its work half "
                "done: abort_weight_update, then begin again"
            )

    def _do(self, slices: Slices[None], kind: Activity, copies: CopyStream | None = None) -> Work[int]:
        """Do work on all ranks, as one phase; returns the bytes of this rank."""
        work = self._pace.turns(slices, kind, self.stall, copies)
        num_bytes, _ = yield from self._ranks.phase(kind, work)
        return num_bytes


def _told_of(nonfinite: frozenset[str]) -> str:
    """Which tensors hold NaN or Inf, as a sentence."""
    return f"{len(nonfinite)} tensors hold NaN or Inf: {first_few(sorted(nonfinite))}."


def _one_by_one(all_slices: list[Slices[None]]) -> Slices[None]:
    for slices in all_slices:
        yield from slices


def _touched(incoming: IncomingWeights) -> frozenset[str]:
    """The names whose old values are gone once the update has begun to write."""
    return _union(incoming.names, frozenset(weight for _, weight in incoming.halves.values()))


def _union(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """The union, without a copy where one set is empty: names are many, and no pass runs meanwhile."""
    return first | second if first and second else first or second
