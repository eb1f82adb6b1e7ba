"""The pages of requests: taken from the pool, shared through the prefix cache, parked, and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.managers.control import PageStore
from ebbtide.srt.managers.io_struct import RetractCause
from ebbtide.srt.managers.scheduling.request import KVHold, ParkedKV, Req
from ebbtide.srt.managers.scheduling.routes import PageRoutes, num_usable
from ebbtide.srt.managers.scheduling.running_rows import RunningRows
from ebbtide.srt.managers.scheduling.versions import Commit, KVVersions
from ebbtide.srt.mem_cache import Windows, first_needed
from ebbtide.srt.mem_cache.page_allocator import PageAllocator, PageTable
from ebbtide.srt.mem_cache.radix_cache import Namespace, PrefixLease, RadixCache
from ebbtide.srt.mem_cache.state_slots import Checkpoints


@dataclass(eq=False)
class RequestPages:
    """What a request's KV lies in, and what of it others may use. Which request gets pages is the policy's.

    Args:
        windows: of the groups of layers, each of which has pages of its own.
        states: the slots of states that layers keep of requests; None: they keep none.
        cache_by_version: whether KV is shared by requests of the same weights only.
        records_routes: whether the experts of every token are kept with its page.

    Attributes:
        commit: the weights that serve; what is computed now is theirs.
        rows: the running requests' columns of numbers.
        recomputed: tokens whose KV is computed once more, by why it was given up.
    """

    allocator: PageAllocator
    cache: RadixCache
    table: PageTable
    page_size: int
    page_store: PageStore
    windows: Windows
    states: Checkpoints | None
    _: KW_ONLY
    cache_by_version: bool
    records_routes: bool

    def __post_init__(self) -> None:
        self.versions = KVVersions()
        self.commit = Commit(0, "")
        self.rows = RunningRows(len(self.table.array))
        self.routes = PageRoutes(self.page_size) if self.records_routes else None
        self.recomputed: Counter[RetractCause] = Counter()
        self._copies: list[tuple[int, int]] = []

    # ---------------------------------------------------------------------------------------------- taking

    def matched(self, req: Req) -> list[int]:
        """The cached pages that it could begin with."""
        lease = self._match(req, req.reusable_tokens)
        lease.release()
        return lease.pages[0]

    def lease(self, req: Req) -> PrefixLease:
        """Cached pages for a request to begin with."""
        return self._with_routes(req, self._match(req, req.reusable_tokens))

    def _match(self, req: Req, max_tokens: int) -> PrefixLease:
        return self.cache.match(self._namespace(req), req.tokens(0, req.num_tokens), max_tokens)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Free pages; cached ones that nobody uses are evicted for them. None: too few are left."""
        shortage = num_pages - self.allocator.num_free
        if shortage > 0:
            self.cache.evict(shortage)
        return self.allocator.allocate(num_pages)

    def take(self, lease: PrefixLease, num_pages: int) -> list[list[int]] | None:
        """Pages for a request's first tokens in each group: those of its lease, and free ones behind them.

        None: too few are left.
        """
        num_new = num_pages - len(lease)
        pages = self.allocate(num_new * len(self.windows))
        if pages is None:
            return None
        return [
            leased + pages[group * num_new : (group + 1) * num_new]
            for group, leased in enumerate(lease.pages)
        ]

    def grow(self, req: Req) -> bool:
        """Give a request a page more in each group, once it has given up what it needs no more.

        False: there are too few.
        """
        kv = req.hold
        if self.cache.windowed:
            self.slide(req)
        new = self.allocate(len(self.windows))
        if new is None:
            return False
        for group, page in enumerate(new):
            self.table.write(kv.row, len(kv.pages[group]), [page], group)
            kv.pages[group].append(page)
        self.rows.capacity[kv.row] += self.page_size
        return True

    def slide(self, req: Req) -> None:
        """Give up the pages of a prefilled request that its next token does not attend to.

        What the prefix cache has of them may be evicted from now on; the request's own are free at once.
        """
        kv = req.hold
        if not self.cache.windowed or not kv.is_prefilled:
            return
        # A page more: of what is launched, less may come to be its output, and be of use to who goes on.
        num_tokens = max(0, kv.num_launched - self.page_size)
        self._give_up(kv, [first_needed(num_tokens, window, self.page_size) for window in self.windows])

    def _give_up(self, kv: KVHold, firsts: Sequence[int]) -> None:
        """Give up the pages of windows before these."""
        for group in self.cache.windowed:
            pages, first = kv.pages[group], firsts[group]
            if first > kv.firsts[group]:
                self.allocator.free(pages[max(kv.firsts[group], len(kv.lease)) : first])
                kv.firsts[group] = first
                self._write(kv, group, 0, first)
        kv.lease.slide(kv.firsts)

    def _write(self, kv: KVHold, group: int, start: int, end: int) -> None:
        """The page table's entries from `start` to `end`. In place of a page that was given up, kernels that
        read a whole tile find one of the request: numbers that are finite."""
        pages, first = kv.pages[group], kv.firsts[group]
        kept = min(max(first, start), end)
        if start < kept:
            self.table.write(kv.row, start, [pages[first]] * (kept - start), group)
        self.table.write(kv.row, kept, pages[kept:end], group)

    def begin(self, req: Req, hold: KVHold) -> None:
        """A request runs in these pages. What it has in host memory comes back to them."""
        req.kv = hold
        for group, pages in enumerate(hold.pages):
            self._write(hold, group, 0, len(pages))
        for version in self.versions.versions(hold.lease.labels):
            req.note_kv_used(version)
        if self.states is not None:
            self._begin_state(req, self.states)
        self._restore(req)
        self._take_routes(req)
        if req.lost is not None:
            cause, num_tokens = req.lost
            # What the prefix cache has kept of it is not computed again.
            self.recomputed[cause] += max(0, num_tokens - hold.num_computed)
            req.lost = None

    def _restore(self, req: Req) -> None:
        """Bring KV back from host memory, but for pages that are cached."""
        kv, parked = req.hold, req.parked
        if parked is None:
            return
        num_cached = len(kv.lease)
        if num_cached * self.page_size < parked.num_computed:
            for pages, slots, first in zip(kv.pages, parked.slots, parked.firsts, strict=True):
                start = max(num_cached, first)
                self.page_store.restore(slots[start - first :], pages[start : first + len(slots)])
            self._give_up(kv, parked.firsts)
            if self.states is not None:
                self.page_store.restore(parked.state, self.states.slots.pages(kv.row))
            self.rows.computed[kv.row] = self.rows.launched[kv.row] = parked.num_computed
        kv.is_prefilled, kv.is_mixed = parked.is_prefilled, parked.is_mixed
        kv.commit_starts = self.versions.behind(parked.commit_starts, num_cached * self.page_size)
        self.drop_parked(req)
        self.publish(req)
        kv.commit_starts = self.versions.behind(kv.commit_starts, len(kv.lease) * self.page_size)

    def _with_routes(self, req: Req, lease: PrefixLease) -> PrefixLease:
        """The lease, cut before the first page whose experts the request wants and nobody knows."""
        first = req.given.routed_experts_start
        if self.routes is None or first is None:
            return lease
        first_page = max(first, req.routes.end) // self.page_size
        tokens = req.tokens(0, len(lease) * self.page_size)
        num_pages = num_usable(self.routes.found(tokens, lease.pages[0], lease.runs), first_page)
        if num_pages == len(lease):
            return lease
        lease.release()
        return self._match(req, num_pages * self.page_size)

    def _take_routes(self, req: Req) -> None:
        """The experts of the cached tokens that a request begins with."""
        if self.routes is None:
            return
        lease = req.hold.lease
        tokens = req.tokens(0, len(lease) * self.page_size)
        for index, rows in enumerate(self.routes.found(tokens, lease.pages[0], lease.runs)):
            if rows is not None and (index + 1) * self.page_size > req.routes.end:
                req.routes.add(index * self.page_size, rows)

    # -------------------------------------------------------------------------------------------- states

    def _begin_state(self, req: Req, states: Checkpoints) -> None:
        """A request begins behind the state of its prefix, or of what it has in host memory."""
        kv = req.hold
        num_parked = 0 if req.parked is None else req.parked.num_computed
        if kv.lease.checkpoint is not None and len(kv.lease) * self.page_size >= num_parked:
            states.note_used(kv.lease.checkpoint)
            self._copies.append((kv.lease.checkpoint, kv.row))
        if self.cache.is_enabled:
            last = (req.num_tokens - 1) // self.page_size
            kv.ends = tuple(end * self.page_size for end in sorted({kv.lease.num_common, last}))

    def up_to_checkpoint(self, req: Req, num_new: int) -> int:
        """How many of `num_new` tokens a pass may compute, so that it ends where a state is to be kept."""
        kv, states = req.hold, self.states
        if states is None or not self.cache.is_enabled:
            return num_new
        start, interval = kv.num_launched, states.slots.interval
        ends = (*kv.ends, (start // interval + 1) * interval)
        return min(num_new, min((end for end in ends if end > start), default=num_new + start) - start)

    def state_copies(
        self, requests: Sequence[Req], ends_R: NDArray[np.int64]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Copies of states, (slot, target), before a pass that ends at these tokens, and after it."""
        states = self.states
        assert states is not None
        before, self._copies, after = self._copies, [], []
        for index in np.flatnonzero(ends_R % self.page_size == 0).tolist() if self.cache.is_enabled else ():
            kv, end = requests[index].hold, int(ends_R[index])
            if kv.is_mixed or (end % states.slots.interval and end not in kv.ends):
                continue
            if kv.is_prefilled and kv.checkpoints:
                self.publish(requests[index])  # the one before
            slot = states.take()
            if slot is not None:
                kv.checkpoints[end] = slot
                after.append((kv.row, slot))
        return before, after

    def state_slots(self, requests: Sequence[Req]) -> list[int]:
        """The slots that hold something, with those of these running requests."""
        assert self.states is not None
        holds = [req.hold for req in requests]
        pending = [slot for kv in holds for slot in kv.checkpoints.values()]
        return [*self.states.attached, *(kv.row for kv in holds if kv.num_computed), *pending]

    def drop_checkpoints(self, requests: Sequence[Req]) -> None:
        """The contents of all checkpoints will be lost, of those too that these running requests hold."""
        assert self.states is not None
        self.states.detach_all()
        for kv in [req.hold for req in requests]:
            for slot in kv.checkpoints.values():
                self.states.give_back(slot)
            kv.checkpoints.clear()

    def _attach_checkpoints(self, kv: KVHold, starts: Sequence[tuple[Commit, int]], first_page: int) -> None:
        """Hand checkpoints to the prefix cache with the pages before them.

        Those from `first_page` on the request computed itself. What the cache does not want nobody needs.
        """
        assert self.states is not None
        for end, slot in [item for item in kv.checkpoints.items() if item[0] <= kv.num_computed]:
            del kv.checkpoints[end]
            page = end // self.page_size
            is_kept = False
            if first_page < page <= len(kv.lease):
                [(label, _)] = self.versions.runs(starts, page - 1, page, self.page_size)
                is_kept = self.cache.attach(kv.lease, page, slot, label)
            if not is_kept:
                self.states.give_back(slot)

    # ------------------------------------------------------------------------------------------ in between

    def next_key(self, req: Req, lease: PrefixLease) -> tuple[object, ...]:
        """What identifies the first page that a request computes itself, behind those of its lease."""
        start = len(lease) * self.page_size
        return (start, req.cache_namespace, *req.tokens(start, min(start + self.page_size, req.num_tokens)))

    def held(self, req: Req, end: int | None = None) -> list[int]:
        """All pages of a running request, one group after the other; or those of each before `end`."""
        kv = req.hold
        return [page for pages, first in zip(kv.pages, kv.firsts, strict=True) for page in pages[first:end]]

    def computed(self, req: Req) -> list[int]:
        """The pages that hold KV of a running request, one group after the other, then those of its state."""
        kv = req.hold
        pages = self.held(req, -(-kv.num_computed // self.page_size))
        if self.states is not None and kv.num_computed:
            pages += self.states.slots.pages(kv.row)
        return pages

    def prefill_starts(self, req: Req) -> list[tuple[str, int]]:
        """Each version behind the KV of its prompt, with the token from which on it is that."""
        kv = req.hold
        starts = self.versions.prefill_starts(kv.lease.runs, kv.commit_starts, self.page_size)
        return [(version, start) for version, start in starts if start < len(req.spec.prompt_ids)]

    def relocate(self, kv: KVHold, target_of: Mapping[int, int]) -> None:
        """Some of a request's pages have moved to others."""
        kv.pages = [[target_of.get(page, page) for page in pages] for pages in kv.pages]
        kv.lease.relocate(target_of)
        for group, pages in enumerate(kv.pages):
            self._write(kv, group, 0, len(pages))

    def publish(self, req: Req) -> None:
        """Hand the request's whole pages to the prefix cache, one run of commits at a time."""
        kv = req.hold
        if kv.is_mixed:
            return
        end_page = kv.num_computed // self.page_size
        starts = kv.commit_starts
        if self._is_by_version(req) and starts:
            # A page of this namespace holds KV of one commit only: stop where the next commit begins.
            later = [start for commit, start in starts if str(commit.number) != kv.lease.namespace[-1]]
            end_page = min([end_page, *(start // self.page_size for start in later)])
        first_page = len(kv.lease)
        tokens = req.tokens(0, kv.num_computed)
        for label, end in self.versions.runs(starts, first_page, end_page, self.page_size):
            kv.lease = self.cache.publish(
                kv.lease, tokens[: end * self.page_size], kv.pages, kv.firsts, label
            )
            for pages, leased in zip(kv.pages, kv.lease.pages, strict=True):
                pages[: len(leased)] = leased
            if len(kv.lease) < end:
                break
            if self.routes is not None:
                self.routes.keep(tokens, kv.lease.pages[0], kv.lease.runs, req.routes, label)
        for group in range(len(kv.pages)):
            self._write(kv, group, first_page, max(first_page, end_page))
        if kv.checkpoints:
            self._attach_checkpoints(kv, starts, first_page)

    def _namespace(self, req: Req) -> Namespace:
        namespace = req.cache_namespace
        return (*namespace, str(self.commit.number)) if self._is_by_version(req) else namespace

    def _is_by_version(self, req: Req) -> bool:
        """Whether it shares KV of the same weights only. One that wants new KV must not find the old."""
        return self.cache_by_version or req.given.contract.on_update == "recompute"

    # ------------------------------------------------------------------------------------------ giving back

    def release(self, req: Req, *, publish: bool) -> None:
        """A running request gives up its KV.

        Args:
            publish: leave it to the prefix cache, as far as that wants it.
        """
        kv = req.hold
        if publish:
            self.publish(req)
        for slot in kv.checkpoints.values():
            assert self.states is not None
            self.states.give_back(slot)
        for pages, first in zip(kv.pages, kv.firsts, strict=True):
            self.allocator.free(pages[max(first, len(kv.lease)) :])
        kv.lease.release()
        self.table.free_row(kv.row)
        self.rows.logprobs.empty(req)
        self.rows.close(kv.row)
        req.kv = None

    def park(self, req: Req, slots: list[int]) -> None:
        """A running request's KV has been copied to these slots; its pages are still to be released.

        Args:
            slots: of the pages that are `computed`.
        """
        kv = req.hold
        starts = self.versions.spans(kv.lease.runs, kv.commit_starts, self.page_size)
        end = -(-kv.num_computed // self.page_size)
        of_group, start = [], 0
        for first in kv.firsts:
            of_group.append(slots[start : start + max(0, end - first)])
            start += len(of_group[-1])
        req.parked = ParkedKV(
            of_group,
            slots[start:],
            kv.firsts,
            kv.num_computed,
            is_prefilled=kv.is_prefilled,
            is_mixed=kv.is_mixed,
            commit_starts=starts,
        )

    def note_lost(self, req: Req, cause: RetractCause) -> None:
        """A request is about to give up what was computed for it."""
        held = req.kv or req.parked
        if held is not None:
            req.lost = (cause, held.num_computed)

    def tokens_by_version(self, requests: Sequence[Req]) -> dict[str, int]:
        """KV tokens of running requests by the version that computed them; of a page of two, the newer."""
        tokens: Counter[str] = Counter()
        holds = [req.hold for req in requests]
        ends = self.rows.computed[[kv.row for kv in holds]].tolist()
        for kv, end in zip(holds, ends, strict=True):
            spans = self.versions.spans(kv.lease.runs, kv.commit_starts, self.page_size)
            for commit, start in reversed(spans):
                if start < end:
                    tokens[commit.version] += end - start
                    end = start
        return dict(tokens)

    def drop_parked(self, req: Req) -> None:
        """What a request has in host memory, if anything, is of no use any more."""
        if req.parked is not None:
            for slots in (*req.parked.slots, req.parked.state):
                self.page_store.drop(slots)
            req.parked = None
