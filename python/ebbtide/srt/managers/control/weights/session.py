"""New weights from their first byte to the commit: written to a copy of the live weights, or in place."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from msgspec import UNSET

from ebbtide.srt.errors import EngineError, RequestRejected, first_few
from ebbtide.srt.managers.control import (
    Activity,
    CopyStream,
    DeadlinePassed,
    KVMemory,
    OutOfStep,
    Superseded,
    Work,
)
from ebbtide.srt.managers.control.memory_occupation import WeightContent
from ebbtide.srt.managers.control.pace import Pace, Ranks, Stall, at_once, ending_rank, is_burst
from ebbtide.srt.managers.control.weights import How, Staging, Weights, WritePlan
from ebbtide.srt.managers.control.weights.commit_terms import (
    CommitTerms,
    Counts,
    RefusedUpdates,
    describe_nonfinite,
)
from ebbtide.srt.managers.io_struct import UpdateWeightsReqOutput
from ebbtide.srt.slices import Slices, finish

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How many buckets of a session stay mapped, since the next ones often come in the same memory.
MAX_MAPPED: Final = 4


@dataclass(frozen=True)
class Empty:
    """Nothing is written, and no place to write is chosen."""


@dataclass(frozen=True)
class Staged:
    """Updates are written to a second copy of the weights."""

    staging: Staging


@dataclass(frozen=True)
class InPlace:
    """Updates are written to the live weights. No pass runs from the first byte to the commit."""

    staging: Staging


@dataclass(frozen=True)
class Burst:
    """One plan is written to serving weights between two forward passes, without waiting on the host.

    Its copies are queued behind the pass in flight, and the next pass behind the copies.
    """

    staging: Staging
    plan: WritePlan


@dataclass(frozen=True)
class Unsound:
    """A patch or a custom loader failed half-way: the contents of the copy are unknown."""

    staging: Staging


SessionState: TypeAlias = Empty | Staged | InPlace | Burst | Unsound


@dataclass
class WeightSession:
    """All that one commit changes. An update outside a session is a session of its own.

    `close` before the commit is the rollback. Source: control_semantics section 2.

    Args:
        deadline_id: the deadline at which it is aborted; None: it is the session of a single update.
        session_id: the client's name for it; None: the client gave none.

    Attributes:
        names: the checkpoint names that are written completely.
        nonfinite: the tensors that hold NaN or Inf on any rank.
        counts: tensors and bytes written so far.
        stall: how long it has kept forward passes from running.
        refused: its updates that were refused.
        version, flush_cache, folder: what its updates asked for, see `CommitTerms`.
        joined: called at the commit, in the same turn: commits of adapters.
        held: closed at the end of the session.
    """

    _weights: Weights
    _kv: KVMemory
    _content: WeightContent
    _ranks: Ranks
    _pace: Pace
    deadline_id: str | None = None
    session_id: str | None = None
    opened_at: float = field(default_factory=time.time, init=False)
    state: SessionState = field(default=Empty(), init=False)
    names: frozenset[str] = field(default=frozenset(), init=False)
    nonfinite: frozenset[str] = field(default=frozenset(), init=False)
    counts: Counts = field(default=Counts(), init=False)
    stall: Stall = field(default_factory=Stall, init=False)
    refused: RefusedUpdates = field(default_factory=RefusedUpdates, init=False)
    version: str | None = field(default=None, init=False)
    flush_cache: bool = field(default=False, init=False)
    folder: tuple[str, str] | None = field(default=None, init=False)
    joined: list[Callable[[], object]] = field(default_factory=list, init=False)
    held: ExitStack = field(default_factory=ExitStack, init=False)
    _unmap: list[Slices[None]] = field(default_factory=list, init=False)

    @property
    def is_staged(self) -> bool:
        """False if it writes to the live weights; the same on all ranks."""
        return not isinstance(self.state, InPlace | Burst)

    @property
    def _staging(self) -> Staging | None:
        return None if isinstance(self.state, Empty) else self.state.staging

    def reply(
        self,
        version: str,
        message: str,
        counts: Counts,
        plan: WritePlan | None,
        *,
        is_committed: bool,
        num_paused: int = 0,
    ) -> UpdateWeightsReqOutput:
        """The reply to an update of the session, or to its commit, after the copies have run.

        Args:
            version: of the weights that serve.
            plan: of an update that has only one. For a delta, the reply says whether its base was checked.
        """
        content = self._content.report()
        delta = plan if plan is not None and plan.how is How.PATCH else None
        return UpdateWeightsReqOutput(
            weight_version=version,
            committed=is_committed,
            staged=self.is_staged,
            **counts._asdict(),
            stall_ms=self.stall.longest_s * 1e3,
            num_paused_requests=num_paused,
            content=content.content,
            num_missing=content.num_missing,
            num_nonfinite=len(self.nonfinite),
            base_checked=UNSET if delta is None else delta.base_version is not None,
            message=f"{message} {describe_nonfinite(self.nonfinite)}" if self.nonfinite else message,
        )

    def require_complete(self) -> None:
        """Refuse to commit while tensors are missing: parts of others, or of refused updates."""
        if self._staging is not None:
            self._staging.require_complete()
        self.refused.require_none()

    def prepare(
        self, plan: WritePlan, terms: CommitTerms, *, is_alone: bool = False, nobody_waits: bool = False
    ) -> Work[None]:
        """Choose where a plan is written, and map the memory of its tensors. Call it before each `write`.

        If this device can read the tensors, they may be written in place as a burst: that delays forward
        passes no longer than exchanging a copy does, and needs no copy.

        Args:
            is_alone: nothing else will be written before the commit.
            nobody_waits: no forward pass runs or waits.

        RequestRejected: the plan needs a copy and there is none, or the contents of the copy are unknown.
        """
        self._require_sound()
        self._require_base(plan)
        needs_copy = plan.how is How.LOAD or terms.canary is not None or terms.refuses_nonfinite
        near_bytes = None if needs_copy or not is_alone else plan.near_bytes
        bursts = near_bytes is not None and (nobody_waits or is_burst(near_bytes))
        yield from self._require_staging(plan, terms, bursts=bursts)
        if isinstance(self.state, InPlace) and is_alone and self._serves:
            self.state = Burst(self.state.staging, plan)
        if self._staging is not None and plan.opens:
            # Opening a delta launches work on the device, on the stream of the copies.
            copies = self._weights.copies if plan.how is How.PATCH else None
            yield from self._do(plan.open(self._staging), Activity.COPYING, copies)

    def expect(self, plan: WritePlan, terms: CommitTerms) -> Work[frozenset[str]]:
        """Choose where broadcasts are written, and receive them there directly if nothing serves from it.

        Returns the names that no longer count as written, because they are overwritten.
        """
        self._require_sound()
        yield from self._require_staging(plan, terms)
        staging = self._staging
        if staging is None or plan.how is How.LOAD or not (self.is_staged or not self._serves):
            return frozenset()
        if not plan.is_sent or not plan.receive_into(staging):
            return frozenset()
        if not self.is_staged:
            yield Activity.BOUNDARY
            self._lose(plan)
        overwritten = self.names & plan.touched
        self.names -= overwritten
        return overwritten

    def require_copy(self) -> None:
        """Refuse a trial of new weights if the old ones could not be brought back."""
        if not self.is_staged or not self._serves:
            raise RequestRejected(
                "canary, refuse_nonfinite: there is no second copy of the weights to look at: the old ones "
                "could not come back. Stale weights must first be written without a canary; where memory is "
                "missing, release kv_cache during the update or see update_staging"
            )

    @property
    def _serves(self) -> bool:
        """Whether the live weights are valid."""
        return self._content.is_valid

    def _require_sound(self) -> None:
        if isinstance(self.state, Unsound):
            raise RequestRejected(
                "an update that changes the copy failed in this session, and may have left its work half "
                "done: abort_weight_update, then begin again"
            )

    def _require_base(self, plan: WritePlan) -> None:
        is_patch = plan.how is How.PATCH
        missing = (plan.names - self.names) & self._content.missing if is_patch else frozenset()
        if missing:
            raise RequestRejected(
                f"nothing was written: a delta changes what is there, and {len(missing)} of its parameters "
                f"are stale ({first_few(sorted(missing))}): send them whole",
                409,
            )

    def _require_staging(self, plan: WritePlan, terms: CommitTerms, *, bursts: bool = False) -> Work[None]:
        """Choose the staging at the first write, and refuse a plan that needs a copy if there is none."""
        if isinstance(self.state, Empty) and plan.num_tensors > 0:
            yield from self._choose_staging(bursts=bursts and not self._weights.requires_copy)
            if self.is_staged:
                # Let the pass that waited for the copy run first. In a session, let it end too: otherwise its
                # tokens would wait while the host works on further updates.
                yield Activity.COPYING
                if self.deadline_id is not None:
                    yield Activity.COPYING
        overwrites = not self.is_staged and self._serves
        if terms.canary is not None or (terms.refuses_nonfinite and overwrites):
            self.require_copy()
        if plan.how is How.LOAD and not self.is_staged:
            raise RequestRejected(
                "nothing was written: a custom weight loader changes a copy of the live weights, and there "
                "is none. Stale weights must first be written whole, by an update without a custom loader; "
                "where memory for a copy is missing, release kv_cache during the update"
            )

    def _choose_staging(self, *, bursts: bool) -> Work[None]:
        """Take a copy in free and easily borrowed memory; else in all that can be borrowed; else none."""
        is_staged = False
        try:
            bursting = self._ranks.survey(Activity.COPYING, at_once(lambda: bursts), bool)
            if self._serves and not all((yield from bursting)[1]):
                yield Activity.BOUNDARY
                self._kv.set_aside()
                is_staged = yield from self._try_copy()
                if not is_staged:
                    yield Activity.BOUNDARY
                    if self._kv.set_aside(hard=True) or self._weights.requires_copy:
                        is_staged = yield from self._try_copy(is_last=True)
            if not is_staged:
                yield from self._open_staging(in_place=True)
        except BaseException:
            self.close()
            raise

    def _try_copy(self, *, is_last: bool = False) -> Work[bool]:
        """Take a copy on all ranks, or on none; returns whether there is one."""
        finding = self._open_staging(in_place=False, is_last=is_last)
        staging, found = yield from self._ranks.survey(Activity.WORKING, finding, lambda made: made.is_staged)
        if not all(found):
            staging.close()
            self.state = Empty()
            self._kv.take_back()
        return all(found)

    def _open_staging(self, *, in_place: bool, is_last: bool = True) -> Work[Staging]:
        def room() -> Slices[Staging]:
            if not in_place:
                self._kv.hand_over()
            return (yield from self._weights.stage(in_place=in_place, is_last=is_last))

        _, staging = yield from self._pace.turns(room(), Activity.WORKING, self.stall)
        self.state = InPlace(staging) if in_place else Staged(staging)
        return staging

    def write(self, plan: WritePlan, terms: CommitTerms) -> Work[None]:
        """Write the tensors of a plan that was prepared.

        If it fails, they count as missing. If serving weights were overwritten, that is an EngineError and no
        refusal. The copies of a burst are only launched: the commit follows at once, and `finish` waits.
        """
        staging, num_bytes = self._staging, 0
        if staging is not None and plan.how is How.LOAD:
            yield from self._do(staging.complete(self.names), Activity.COPYING, self._weights.copies)
        elif staging is not None and plan.how is How.PATCH:
            yield from self._lay_base(plan, staging)
        else:
            self.names -= plan.touched
            if staging is not None:
                plan.begin(staging)
        if staging is not None:
            num_bytes = yield from self._copy(plan, staging, terms)
            self.names |= plan.end(staging)
        self.names |= plan.names
        self.refused.make_up(plan.sent | plan.names)
        added = plan.num_tensors, plan.num_ignored, num_bytes
        self.counts = Counts(*map(operator.add, self.counts, added))
        if isinstance(self.state, Burst):
            with self.stall.apart():
                yield Activity.BOUNDARY

    def _copy(self, plan: WritePlan, staging: Staging, terms: CommitTerms) -> Work[int]:
        serves, is_in_place = self._serves, not self.is_staged
        waits = not isinstance(self.state, Burst)
        if is_in_place:
            if waits:  # a burst is queued behind the forward pass in flight
                yield Activity.BOUNDARY
            self._lose(plan)
        kind = Activity.WORKING if is_in_place and waits else Activity.COPYING
        work = self._copied(plan, staging, kind, waits=waits)
        try:
            (num_bytes, _), found = yield from self._ranks.survey(kind, work, lambda copied: copied[1])
            nonfinite = frozenset[str]().union(*found)
            if terms.refuses_nonfinite and nonfinite:
                raise RequestRejected(
                    f"refuse_nonfinite: nothing of this update serves. {describe_nonfinite(nonfinite)}",
                    num_nonfinite=len(nonfinite),
                )
        except BaseException as error:
            if plan.how is not How.COPY:
                self.state = Unsound(staging)
            is_refusal = isinstance(error, RequestRejected) and not isinstance(error, Superseded)
            if is_refusal and is_in_place and serves:
                raise EngineError(f"the update broke off half-way: {error}") from error
            raise
        self._note_nonfinite(plan, nonfinite)
        if plan.is_sent and waits:
            plan.close()
        return num_bytes

    def _copied(
        self, plan: WritePlan, staging: Staging, kind: Activity, *, waits: bool
    ) -> Work[tuple[int, list[str]]]:
        """Copy on this rank; returns the bytes, and the tensors that hold NaN or Inf."""
        copies = self._weights.copies
        num_bytes, _ = yield from self._pace.turns(
            plan.write(staging), kind, self.stall, copies, waits=waits, cost=plan.cost
        )
        nonfinite = plan.nonfinite() if waits else []
        if not (plan.is_sent or self.stall.lasts):
            # The sender may reuse its memory. It stays mapped for now: the next bucket often comes in the
            # same memory, and unmapping has to wait until no pass runs.
            self._unmap.append(plan.detach())
            if len(self._unmap) > MAX_MAPPED:
                finish(self._unmap.pop(0))
        return num_bytes, nonfinite

    def _lay_base(self, plan: WritePlan, staging: Staging) -> Work[None]:
        """Copy the tensors that a delta changes into the copy, and check the checksums they will have."""
        copies = self._weights.copies
        if self.is_staged:
            untouched = self._weights.names - (plan.names - self.names)
            yield from self._do(staging.complete(untouched), Activity.COPYING, copies)
            self.names |= plan.names
        patch = plan.patch
        assert patch is not None
        summing = self._pace.turns(patch.sum_up(staging), Activity.COPYING, self.stall, copies)
        _, shares = yield from self._ranks.survey(Activity.COPYING, summing, lambda _: dict(patch.sums()))
        # In a phase, since the senders of other ranks may have named other checksums.
        yield from self._ranks.phase(Activity.COPYING, at_once(lambda: patch.check_sums(shares)))

    def _note_nonfinite(self, plan: WritePlan, names: frozenset[str]) -> None:
        self.nonfinite = (self.nonfinite - plan.sent) | names
        if names:
            logger.warning("a weight update: %s", describe_nonfinite(self.nonfinite))

    def _lose(self, plan: WritePlan) -> None:
        """Mark the live weights as stale: until the commit they are a mixture that no pass may see."""
        if self._serves:
            self.stall.begin()
        self._content.lose(plan.touched)

    def complete(self) -> Work[None]:
        """Fill what was not written from the live weights, so that the copy is complete."""
        self._require_sound()
        if isinstance(self.state, Staged) and not self.names >= self._weights.names:
            copies = self._weights.copies
            yield from self._do(self.state.staging.complete(self.names), Activity.COPYING, copies)

    def trial(self, run: Callable[[], T]) -> Work[T]:
        """Call `run` while the copy is live, then bring the old weights back; returns its result."""

        def exchanged() -> T:
            with self.stall.measure():
                if self._staging is None:
                    return run()
                self._staging.commit()
                try:
                    return run()
                finally:
                    with ending_rank("the weights that were tried out serve, and do not go"):
                        self._staging.roll_back()

        return at_once(exchanged)

    def commit(self) -> None:
        """Make the weights that were written the live ones."""
        if self._staging is not None:
            self._ranks.certainly(self._staging.commit)
        self._content.note_written(self.names)
        if not isinstance(self.state, Burst):
            self.stall.end()

    def finish(self) -> Work[None]:
        """After the commit, wait for the copies of a burst. OutOfStep: they failed, and a mixture serves."""
        if not isinstance(self.state, Burst):
            return
        plan = self.state.plan
        self.state = InPlace(self.state.staging)

        def finished() -> Work[list[str]]:
            yield from self._pace.behind(self._weights.copies)
            return plan.nonfinite()

        try:
            _, found = yield from self._ranks.survey(Activity.COPYING, finished(), lambda names: names)
        except (DeadlinePassed, RequestRejected):
            # The new weights serve already. Wait for the rest in one piece.
            plan.finish()
            found = [plan.nonfinite()]
        except Exception as error:
            raise OutOfStep(f"weights that serve could not be written: {error}") from error
        self.stall.end()
        self._note_nonfinite(plan, frozenset[str]().union(*found))

    def release(self) -> Work[None]:
        """After the commit, return the copy's memory: lent chunks to the KV cache, the rest to the system."""
        if isinstance(self.state, Staged):
            self._ranks.certainly(self.state.staging.repay)
            self._ranks.certainly(self._kv.take_back)
            yield from self._do(self.state.staging.release(), Activity.WORKING)

    def detach(self, plan: WritePlan | None) -> Work[None]:
        """After the commit, let senders use their memory again; returns work that unmaps it."""
        mapped, self._unmap = self._unmap, []
        try:
            if plan is not None:
                mapped.append(plan.detach())
        except Exception as error:
            logger.warning("memory of an update is given back late, at its end: %r", error)

        def unmap() -> Slices[None]:
            for slices in mapped:
                yield from slices

        return self._do(unmap(), Activity.WORKING)

    def close(self) -> None:
        """Give back the copy, and unmap the senders' memory. Idempotent."""
        self.held.close()
        if self._staging is not None:
            self._ranks.certainly(self._staging.close)
            self.state = Empty()
        self._ranks.certainly(self._kv.take_back)
        while self._unmap:
            finish(self._unmap.pop())

    def _do(self, slices: Slices[None], kind: Activity, copies: CopyStream | None = None) -> Work[None]:
        yield from self._ranks.phase(kind, self._pace.turns(slices, kind, self.stall, copies))
