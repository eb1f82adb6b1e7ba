"""Which requests run next, and with which pages. Plain Python: every decision is testable without torch.

Nothing here reads a clock or the device, so ranks that get the same messages make the same decisions.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control import ParkingPlan
from ebbtide.srt.managers.control.adapters import AdapterBook
from ebbtide.srt.managers.io_struct import FinishReason, RetractCause
from ebbtide.srt.managers.scheduling.admission import GrowthReserve, PassLimit, PrefillShare, WaitingRequests
from ebbtide.srt.managers.scheduling.request import KVHold, Phase, Req
from ebbtide.srt.managers.scheduling.request_pages import RequestPages
from ebbtide.srt.managers.scheduling.running_rows import ScheduledBatch
from ebbtide.srt.managers.scheduling.versions import Commit, ServedVersions, Standing
from ebbtide.srt.mem_cache.radix_cache import PrefixLease

if TYPE_CHECKING:
    from ebbtide.srt.config import ScheduleConfig


# How many earlier requests the next turn of a conversation may overtake. It is bounded, so none starves.
NEXT_TURN_OVERTAKES: Final = 256
# How many requests one step may skip because they wait for another request to compute their prefix.
MAX_DEFERRED: Final = 128


@dataclass(eq=False)
class SchedulePolicy:
    """The waiting queue, the running requests, and the pages they share.

    Requests that wait for another weight version are `held`, outside of the queue.

    A batch counts as launched once `next_batch` has returned it. The next batch may be planned before it is
    committed: then it is known how many tokens it samples, but not which ids. Pages that are freed while a
    step in flight still writes to them may be reused at once, since later steps run after it.

    Invariant: the pages that are free, cached, or held by running requests alone add up to the pool.
    """

    config: ScheduleConfig
    pages: RequestPages
    adapters: AdapterBook

    def __post_init__(self) -> None:
        pages, config = self.pages, self.config
        self.allocator, self.cache, self.table = pages.allocator, pages.cache, pages.table
        self.page_size, self.page_store, self.rows = pages.page_size, pages.page_store, pages.rows
        self.num_groups = len(pages.windows)
        self.holds_admission = False
        self.held: list[Req] = []
        self.pass_limit = PassLimit()
        self.waiting = WaitingRequests(config.policy, config.max_running_per_adapter)
        self.running: list[Req] = []
        # Requests that ran until others needed their pages. A drain waits for them too.
        self.set_back: set[Req] = set()
        self._versions = ServedVersions("")
        self._rows_R: NDArray[np.int64] | None = None
        self._live: dict[str, Req] = {}
        self._num_in_flight = 0
        self._reserve = GrowthReserve(pages.page_size)
        self._share = PrefillShare(config)

    # ------------------------------------------------------------------------------------------ requests

    @property
    def commit(self) -> Commit:
        """The weights that serve."""
        return self.pages.commit

    @property
    def longest_pages(self) -> int:
        """Pages of the longest request that is possible."""
        return int(self.table.array.shape[1]) * self.num_groups

    def pages_of(self, num_tokens: int) -> int:
        """Pages that `num_tokens` of a request take, in all groups of layers together."""
        return -(-num_tokens // self.page_size) * self.num_groups

    def tokens_of(self, num_pages: int) -> int:
        """Tokens that `num_pages` hold, if no sliding window frees any of them."""
        return num_pages * self.page_size // self.num_groups

    @property
    def has_work(self) -> bool:
        return bool(self.running or (self.waiting.lines and not self.holds_admission) or self.set_back)

    @property
    def queued(self) -> list[Req]:
        """All requests that do not run: waiting and held ones."""
        return [*chain.from_iterable(self.waiting.lines.values()), *self.held]

    @property
    def live(self) -> list[Req]:
        """All requests, running or not."""
        return [*self.running, *self.queued]

    def find(self, rid: str) -> Req | None:
        return self._live.get(rid)

    def admit(self, req: Req) -> None:
        """Queue a request.

        Raises:
            RequestRejected: 503, the queue is full; 409, the version that it asks for has passed.
        """
        self._require_place(req.adapter_name)
        standing = self._versions.standing(req.given.contract)
        if standing is Standing.PASSED:
            raise RequestRejected(self._versions.why_passed(req.given.contract), status=409)
        self._live[req.rid] = req
        if req.adapter is not None:
            self.adapters.join(req.adapter)
        if self.config.policy == "fcfs" and self._is_next_turn(req):
            req.head_start = NEXT_TURN_OVERTAKES
        if standing is Standing.NOT_YET:
            req.phase = Phase.HELD
            self.held.append(req)
        else:
            self._enqueue(req)

    def _require_place(self, adapter: str | None) -> None:
        limit = self.config.max_queued_requests
        if limit is None:
            return
        num_queued = self.waiting.num_of(adapter) + sum(req.adapter_name == adapter for req in self.held)
        if num_queued >= limit:
            whose = "" if adapter is None else f" for the adapter {adapter!r}"
            raise RequestRejected(
                f"the queue is full: max_queued_requests is {limit}, and so many requests{whose} wait", 503
            )

    def _is_next_turn(self, req: Req) -> bool:
        """Whether at least half of the prompt is cached: there is little to compute, and an agent waits."""
        return 2 * len(self.pages.matched(req)) * self.page_size >= req.num_tokens

    def serve(self, commit: Commit, *, is_update: bool) -> list[tuple[Req, FinishReason]]:
        """Note the weights that serve from now on; returns the requests that end with this, and why.

        Args:
            is_update: the weights are others, and not the same under another version. A request that has KV
                of the former weights then keeps it, gives it up, or ends, as its contract says.
        """
        self.pages.commit = commit
        self._versions.note(commit.version, is_update=is_update)
        ended: list[tuple[Req, FinishReason]] = []
        for req in self.live:
            loses_kv = is_update and req.has_kv
            reason = self._versions.why_ended(req.given.contract, req.first_update, loses_kv=loses_kv)
            if reason is not None:
                ended.append((req, reason))
            elif is_update and req.given.contract.on_update == "recompute":
                self.give_up_kv(req)
        self.finish([req for req, _ in ended])
        ready = [req for req in self.held if self._versions.standing(req.given.contract) is Standing.HOLDS]
        for req in ready:
            self.held.remove(req)
            self._enqueue(req)
        return ended

    def finish(self, requests: Sequence[Req]) -> None:
        """End requests, in any phase. The prefix cache takes over what it wants of their KV."""
        for req in requests:
            match req.phase:
                case Phase.HELD:
                    self.held.remove(req)
                case Phase.WAITING:
                    self.waiting.remove(req)
                    self.pages.drop_parked(req)
                case _:
                    self._release(req, publish=True)
            req.phase = Phase.FINISHED
            self.set_back.discard(req)
            del self._live[req.rid]
            if req.adapter is not None:
                self.adapters.leave(req.adapter)
        self.running = [req for req in self.running if req.phase is Phase.RUNNING]
        self._rows_R = None

    def _release(self, req: Req, *, publish: bool) -> None:
        self.pages.release(req, publish=publish)
        self.waiting.stop(req)
        if req.adapter is not None:
            self.adapters.stop(req.adapter)

    def retract_all(self, cause: RetractCause) -> int:
        """Take the KV of all requests away, also in host memory; returns how many had any.

        They wait again, ahead of all others.
        """
        retracted = [req for req in self.queued if req.parked is not None] + self.running
        for req in retracted:
            self.retract(req, cause)
        self.set_back.clear()
        return len(retracted)

    def give_up_kv(self, req: Req) -> None:
        """Drop a request's KV: it was computed by weights that no longer serve."""
        if req.has_kv:
            self.retract(req, RetractCause.UPDATE)

    def plan_parking(self, max_pages: int, *, with_cache: bool) -> ParkingPlan:
        """Choose what of the pool is kept in `max_pages` of host memory. Nothing changes yet.

        Args:
            with_cache: keep the prefix cache too, if all of it fits beside the requests.
        """
        rids: set[str] = set()
        pages: set[int] = set()
        for req in self.running:
            computed = self.pages.computed(req)
            num_pages = len(pages) + sum(page not in pages for page in computed)
            if num_pages > max_pages:
                break
            pages.update(computed)
            rids.add(req.rid)
        held = self.allocator.held
        if self.pages.states is not None:
            slots = self.pages.state_slots(self.running)
            held = held.union(*map(self.pages.states.slots.pages, slots))
        keeps_cache = with_cache and len(rids) == len(self.running) and len(held) <= max_pages
        return ParkingPlan(frozenset(rids), sorted(held if keeps_cache else pages), keeps_cache)

    def park(self, plan: ParkingPlan) -> int:
        """Drop all KV but that of the plan; returns how many requests were retracted."""
        retracted = [req for req in self.running if req.rid not in plan.rids]
        for req in retracted:
            self.retract(req, RetractCause.RELEASE)
        self.set_back.clear()
        if not plan.keeps_cache:
            self.cache.flush()
            if self.pages.states is not None:
                self.pages.drop_checkpoints(self.running)
        return len(retracted)

    def park_request(self, req: Req, slots: list[int]) -> None:
        """Take the pages of a running request, whose contents were copied to these slots of the page store.

        When the request is admitted again, it goes on from the copy.
        """
        self.pages.park(req, slots)
        self._leave(req)
        self._enqueue(req)

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Note that the contents of pages have moved to free ones. `target_of`: old page → new page."""
        self.allocator.move(target_of)
        self.cache.relocate(target_of)
        for req in self.running:
            self.pages.relocate(req.hold, target_of)

    def borrow_pages(self, num_pages: int) -> list[int] | None:
        """Pages for something else than a request; the caller frees them. None: the pool has too few.

        If too few are free, the youngest running requests are retracted.
        """
        while (pages := self.pages.allocate(num_pages)) is None and self.running:
            self._reserve.note_retraction()
            self.retract(self.running[-1], RetractCause.POOL)
        return pages

    @property
    def holds_kv(self) -> bool:
        """Whether there is KV of any token, in the pool or in host memory."""
        return bool(self.allocator.held) or any(req.parked is not None for req in self.queued)

    def flush_cache(self) -> int:
        """Empty the prefix cache, except for what running requests use; returns the tokens freed."""
        return self.tokens_of(self.cache.flush())

    # ------------------------------------------------------------------------------------------- batches

    def next_batch(self) -> ScheduledBatch | None:
        """The next forward pass: a token for every decoding request, and chunks of prompts up to the limits.

        Retracts the youngest running requests while the pool has no page for the next token of an older one,
        so the oldest always makes progress. None: nothing can run, or not before the step in flight is
        committed.
        """
        if not self.has_work or self._must_commit_first() or not self._grow_running():
            return None
        room = self.config.max_running_requests - len(self.running)
        upcoming = self.waiting.first(room)
        if self.holds_admission:
            upcoming = [req for req in upcoming if req in self.set_back]
        rows_R = self._running_rows()
        missing_R = self.rows.missing(rows_R)
        # Decode rows (one token) come first, so that kernels find rows of a kind side by side.
        decoding = np.flatnonzero(missing_R == 1)[: self.pass_limit.num_tokens]
        requests = [self.running[index] for index in decoding.tolist()]
        prefilling = [self.running[index] for index in np.flatnonzero(missing_R > 1).tolist()]
        num_streams = self.rows.num_streamed(rows_R[decoding])
        room = self.pass_limit.num_tokens - len(decoding)
        chunks, budget = self._share.of_running(prefilling, upcoming, num_streams, room)
        admitted: list[Req] = []
        for req in self._admissible() if budget > 0 and upcoming else ():
            admitted.append(req)
            chunks[req] = self._share.of_admitted(req, budget, room)
            budget -= chunks[req]
            if budget <= 0:
                break
        self._reserve.note_step()
        chunks = self._share.short_first(chunks)
        chunks = {req: self.pages.up_to_checkpoint(req, chunk) for req, chunk in chunks.items()}
        requests += chunks
        if not requests:
            return None
        others = [req.hold.row for req in requests[len(decoding) :]]
        batch_rows_R = np.concatenate([rows_R[decoding], np.array(others, dtype=np.int64)])
        num_new_R = np.ones(len(requests), dtype=np.int64)
        num_new_R[len(decoding) :] = list(chunks.values())
        plan = self.rows.plan(requests, batch_rows_R, num_new_R)
        if self.pages.states is not None:
            ends_R = self.rows.launched[batch_rows_R]
            plan.copies_before, plan.copies_after = self.pages.state_copies(requests, ends_R)
        self._num_in_flight += 1
        return ScheduledBatch(requests, self.rows.serial[batch_rows_R], plan, admitted)

    def note_committed(self) -> None:
        """Note that the oldest batch in flight has run."""
        self._num_in_flight -= 1

    def undo(self, batch: ScheduledBatch) -> None:
        """Take back the only batch in flight, which found too little memory. The next one is smaller."""
        self.note_committed()
        self.rows.undo(batch.plan)
        self.pass_limit.note_failed(batch.plan.num_new_R, batch.requests[0].arrival)
        # Some layers have updated their recurrent states already; a second run would update them twice.
        for req in [] if self.pages.states is None else list(self.running):
            self.retract(req, RetractCause.MEMORY)

    def note_computed(self, req: Req) -> None:
        """Note that a step has computed more KV of a request. A complete prompt is published at once."""
        kv = req.hold
        if kv.is_prefilled:
            return
        if kv.num_computed == req.num_tokens:
            kv.is_prefilled = True
            req.prefill_starts = self.pages.prefill_starts(req)
            req.prefill_changed = True
            self.pages.publish(req)
            self.pages.slide(req)
        elif kv.num_computed in kv.checkpoints:
            self.pages.publish(req)
            kv.commit_starts = self.pages.versions.behind(kv.commit_starts, len(kv.lease) * self.page_size)

    def _must_commit_first(self) -> bool:
        """Whether a request's next token depends on the ids of those in flight."""
        return bool(self._num_in_flight) and self.rows.wait_for_ids(self._running_rows())

    def _running_rows(self) -> NDArray[np.int64]:
        """The rows of the running requests, in their order."""
        if self._rows_R is None:
            self._rows_R = np.array([req.hold.row for req in self.running], dtype=np.int64)
        return self._rows_R

    def _grow_running(self) -> bool:
        """Give every running request the page that its next token needs, the oldest first.

        False: there are too few pages, and none may be taken away before the step in flight is committed.
        """
        while True:
            for index in self.rows.short_of_pages(self._running_rows()):
                if not self.pages.grow(self.running[index]):
                    break
            else:
                return True
            if self._num_in_flight:
                return False
            self._reserve.note_retraction()
            self.retract(self.running[-1], RetractCause.POOL)

    def _admissible(self) -> Iterator[Req]:
        """Admit waiting requests one by one, in order, as long as the pool and the batch have room."""
        rows_R = self._running_rows()
        in_prefill = np.flatnonzero(~self.rows.is_decoding(rows_R)).tolist()
        begun = [self.running[index] for index in in_prefill]
        prefilling = {self.pages.next_key(req, req.hold.lease) for req in begun}
        num_to_come = sum(self.rows.num_to_come(rows_R, window) for window in self.pages.windows)
        num_deferred = 0
        if self.adapters.num_slots:
            self.adapters.begin_pass()
        for req in self.waiting.candidates(self.pages.matched, self._is_ready):
            if len(self.running) >= self.config.max_running_requests:
                return
            if self.holds_admission and req not in self.set_back:
                continue
            lease = self.pages.lease(req)
            if self._is_computed(req, lease, prefilling):
                lease.release()
                num_deferred += 1
                if num_deferred == MAX_DEFERRED:
                    return
                continue
            hold = self._take_pages(req, lease, num_to_come)
            if hold is None:
                lease.release()
                return
            self.waiting.begin(req)
            self.set_back.discard(req)
            insort(self.running, req, key=lambda running: running.arrival)
            self._rows_R = None
            req.phase = Phase.RUNNING
            if req.cached_tokens is None:
                req.cached_tokens = hold.num_computed
                req.first_update = self._versions.num_updates
            self.pages.begin(req, hold)
            if req.adapter is not None:
                self.adapters.start(req.adapter)
            prefilling.add(self.pages.next_key(req, hold.lease))
            num_to_come += sum(req.num_to_come_within(window) for window in self.pages.windows)
            yield req

    def _is_ready(self, req: Req) -> bool:
        return req.adapter is None or self.adapters.admits(req.adapter)

    def _is_computed(self, req: Req, lease: PrefixLease, prefilling: set[tuple[object, ...]]) -> bool:
        """Whether another request is computing the page that this one needs next. It waits for that page, so
        the samples of one prompt prefill it once."""
        end = (len(lease) + 1) * self.page_size
        can_share = self.cache.is_enabled and req.parked is None and end <= req.reusable_tokens
        return can_share and self.pages.next_key(req, lease) in prefilling

    def _take_pages(self, req: Req, lease: PrefixLease, num_to_come: int) -> KVHold | None:
        """Take pages for all tokens of a waiting request: cached ones, then free ones. None: no room.

        Args:
            num_to_come: tokens that running requests may still generate, summed over the groups of layers. In
                a group with a sliding window they count until the window is full.
        """
        num_pages = -(-req.num_tokens // self.page_size)
        num_needed = (num_pages - len(lease)) * self.num_groups
        num_free = self.allocator.num_free + self.cache.num_evictable_pages
        if self.running and num_needed + self._reserve.pages(num_to_come) > num_free:
            return None
        pages = self.pages.take(lease, num_pages)
        if pages is None:
            return None
        hold = KVHold(lease, pages, lease.firsts.copy(), self.table.allocate_row(), self.rows)
        num_cached, room = len(lease) * self.page_size, num_pages * self.page_size
        self.rows.open(hold.row, req, num_computed=num_cached, num_pages_tokens=room)
        return hold

    # --------------------------------------------------------------------------------------------- pages

    def retract(self, req: Req, cause: RetractCause) -> None:
        """Drop a request's KV, also in host memory. Admitted again, it prefills prompt and output anew."""
        self.pages.note_lost(req, cause)
        if req.phase is Phase.RUNNING:
            self._leave(req)
        else:
            self.waiting.remove(req)
            self.pages.drop_parked(req)
        req.num_retractions += 1
        if not req.has_input_logprobs:
            req.reset_input_logprobs()
        self._enqueue(req)

    def _leave(self, req: Req) -> None:
        assert req.num_in_flight == 0, "a token in flight would be lost"
        self._release(req, publish=False)
        self.set_back.add(req)
        self.running.remove(req)
        self._rows_R = None

    def _enqueue(self, req: Req) -> None:
        req.phase = Phase.WAITING
        self.waiting.add(req)
