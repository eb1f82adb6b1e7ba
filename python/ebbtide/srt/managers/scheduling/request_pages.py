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
    """The pages that hold a request's KV, and which of them others may share.

    The schedule policy decides which request gets pages.

    Args:
        windows: sliding window of each group of layers; each group has pages of its own.
        states: slots for recurrent states; None: no layer has one.
        cache_by_version: whether only requests of the same weights share KV.
        records_routes: whether the experts of every token are kept with its page.

    Attributes:
        commit: the weights that serve, which compute all new KV.
        rows: columns of numbers about the running requests.
        recomputed: tokens whose KV is computed a second time, by why it was lost.
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
        """The cached pages that a request could begin with; nothing is pinned."""
        lease = self._match(req, req.reusable_tokens)
        lease.release()
        return lease.pages[0]

    def lease(self, req: Req) -> PrefixLease:
        """Pin the cached pages that a request begins with."""
        return self._with_routes(req, self._match(req, req.reusable_tokens))

    def _match(self, req: Req, max_tokens: int) -> PrefixLease:
        return self.cache.match(self._namespace(req), req.tokens(0, req.num_tokens), max_tokens)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take free pages, evicting unused cached ones as needed. None: there are too few."""
        shortage = num_pages - self.allocator.num_free
        if shortage > 0:
            self.cache.evict(shortage)
        return self.allocator.allocate(num_pages)

    def take(self, lease: PrefixLease, num_pages: int) -> list[list[int]] | None:
        """Pages for a request's first tokens, by group: those of its lease, then free ones.

        None: there are too few.
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
        """Give a request one more page in each group, after freeing those outside its windows.

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
        """Give up the pages of a prefilled request that are outside its sliding windows.

        The request's own pages are free at once; cached ones may be evicted from now on.
        """
        kv = req.hold
        if not self.cache.windowed or not kv.is_prefilled:
            return
        # Keep one page more: the request may end before its launched tokens do, and others go on from there.
        num_tokens = max(0, kv.num_launched - self.page_size)
        self._give_up(kv, [first_needed(num_tokens, window, self.page_size) for window in self.windows])

    def _give_up(self, kv: KVHold, firsts: Sequence[int]) -> None:
        """Give up the pages before these indices, by group, in groups with a window."""
        for group in self.cache.windowed:
            pages, first = kv.pages[group], firsts[group]
            if first > kv.firsts[group]:
                self.allocator.free(pages[max(kv.firsts[group], len(kv.lease)) : first])
                kv.firsts[group] = first
                self._write(kv, group, 0, first)
        kv.lease.slide(kv.firsts)

    def _write(self, kv: KVHold, group: int, start: int, end: int) -> None:
        """Write the page-table entries from `start` to `end`. Entries of pages that were given up name a page
        that is still held: kernels that read whole tiles then find finite numbers there."""
        pages, first = kv.pages[group], kv.firsts[group]
        kept = min(max(first, start), end)
        if start < kept:
            self.table.write(kv.row, start, [pages[first]] * (kept - start), group)
        self.table.write(kv.row, kept, pages[kept:end], group)

    def begin(self, req: Req, hold: KVHold) -> None:
        """Let a request run in these pages. KV that it has in host memory is copied back."""
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
            # KV that is still in the prefix cache is not computed again.
            self.recomputed[cause] += max(0, num_tokens - hold.num_computed)
            req.lost = None

    def _restore(self, req: Req) -> None:
        """Copy KV back from host memory, except for pages that are cached."""
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
        """Give a request the experts of the cached tokens that it begins with."""
        if self.routes is None:
            return
        lease = req.hold.lease
        tokens = req.tokens(0, len(lease) * self.page_size)
        for index, rows in enumerate(self.routes.found(tokens, lease.pages[0], lease.runs)):
            if rows is not None and (index + 1) * self.page_size > req.routes.end:
                req.routes.add(index * self.page_size, rows)

    # -------------------------------------------------------------------------------------------- states

    def _begin_state(self, req: Req, states: Checkpoints) -> None:
        """Have the next pass copy the state of a cached prefix, unless the host has a later state."""
        kv = req.hold
        num_parked = 0 if req.parked is None else req.parked.num_computed
        if kv.lease.checkpoint is not None and len(kv.lease) * self.page_size >= num_parked:
            states.note_used(kv.lease.checkpoint)
            self._copies.append((kv.lease.checkpoint, kv.row))
        if self.cache.is_enabled:
            last = (req.num_tokens - 1) // self.page_size
            kv.ends = tuple(end * self.page_size for end in sorted({kv.lease.num_common, last}))

    def up_to_checkpoint(self, req: Req, num_new: int) -> int:
        """`num_new`, cut so that the pass ends at the next token after which the state is kept."""
        kv, states = req.hold, self.states
        if states is None or not self.cache.is_enabled:
            return num_new
        start, interval = kv.num_launched, states.slots.interval
        ends = (*kv.ends, (start // interval + 1) * interval)
        return min(num_new, min((end for end in ends if end > start), default=num_new + start) - start)

    def state_copies(
        self, requests: Sequence[Req], ends_R: NDArray[np.int64]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The state copies (slot, target slot) before and after a pass that ends at these tokens.

        Copies after it are checkpoints: of requests that end at a page boundary where the state is kept.
        """
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
        """The state slots in use: of the prefix cache, and of these running requests."""
        assert self.states is not None
        holds = [req.hold for req in requests]
        pending = [slot for kv in holds for slot in kv.checkpoints.values()]
        return [*self.states.attached, *(kv.row for kv in holds if kv.num_computed), *pending]

    def drop_checkpoints(self, requests: Sequence[Req]) -> None:
        """Give up all checkpoints, also those that these running requests hold."""
        assert self.states is not None
        self.states.detach_all()
        for kv in [req.hold for req in requests]:
            for slot in kv.checkpoints.values():
                self.states.give_back(slot)
            kv.checkpoints.clear()

    def _attach_checkpoints(self, kv: KVHold, starts: Sequence[tuple[Commit, int]], first_page: int) -> None:
        """Hand checkpoints to the prefix cache. Those that it does not want are given back.

        Args:
            first_page: the first page that the request computed itself.
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
        """A key of the first page that a request computes itself, after the pages of its lease."""
        start = len(lease) * self.page_size
        return (start, req.cache_namespace, *req.tokens(start, min(start + self.page_size, req.num_tokens)))

    def held(self, req: Req, end: int | None = None) -> list[int]:
        """The pages of a running request, group by group; up to page `end` of each if it is given."""
        kv = req.hold
        return [page for pages, first in zip(kv.pages, kv.firsts, strict=True) for page in pages[first:end]]

    def computed(self, req: Req) -> list[int]:
        """The pages that hold computed KV of a running request, group by group, then those of its state."""
        kv = req.hold
        pages = self.held(req, -(-kv.num_computed // self.page_size))
        if self.states is not None and kv.num_computed:
            pages += self.states.slots.pages(kv.row)
        return pages

    def prefill_starts(self, req: Req) -> list[tuple[str, int]]:
        """(version, first token) per span of the prompt's KV."""
        kv = req.hold
        starts = self.versions.prefill_starts(kv.lease.runs, kv.commit_starts, self.page_size)
        return [(version, start) for version, start in starts if start < len(req.spec.prompt_ids)]

    def relocate(self, kv: KVHold, target_of: Mapping[int, int]) -> None:
        """Note that pages of a request have moved. `target_of`: old page → new page."""
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
        """Whether the request shares KV only within one commit. "recompute" implies that: after an update
        the request must not find its old KV in the cache."""
        return self.cache_by_version or req.given.contract.on_update == "recompute"

    # ------------------------------------------------------------------------------------------ giving back

    def release(self, req: Req, *, publish: bool) -> None:
        """A running request gives up its KV.

        Args:
            publish: offer it to the prefix cache.
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
        """Note that a running request's KV was copied to host memory. Its pages are not released yet.

        Args:
            slots: of the page store, one for each page of `computed`.
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
        """Note that a request is about to lose its KV, and why."""
        held = req.kv or req.parked
        if held is not None:
            req.lost = (cause, held.num_computed)

    def tokens_by_version(self, requests: Sequence[Req]) -> dict[str, int]:
        """KV tokens of running requests by weight version. A page of two versions counts as the newer."""
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
        """Drop a request's KV in host memory, if it has any."""
        if req.parked is not None:
            for slots in (*req.parked.slots, req.parked.state):
                self.page_store.drop(slots)
            req.parked = None
