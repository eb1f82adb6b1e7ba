"""The pages of requests: taken from the pool, shared through the prefix cache, parked, and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ebbtide.srt.managers.control.ports import PageStore
from ebbtide.srt.managers.io_struct import RetractCause
from ebbtide.srt.managers.scheduling.request import KVHold, ParkedKV, Req
from ebbtide.srt.managers.scheduling.routes import PageRoutes, num_usable
from ebbtide.srt.managers.scheduling.running_rows import RunningRows
from ebbtide.srt.managers.scheduling.versions import Commit, KVVersions
from ebbtide.srt.mem_cache.page_allocator import PageAllocator
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.mem_cache.prefix_cache import Namespace, NoPrefixCache, PrefixCache, PrefixLease


class RequestPages:
    """What a request's KV lies in, and what of it others may use. Which request gets pages is the policy's.

    Args:
        cache_by_version: whether KV is shared by requests of the same weights only.
        records_routes: whether the experts of every token are kept with its page.

    Attributes:
        commit: the weights that serve; what is computed now is theirs.
        rows: the running requests' columns of numbers.
        shares_prefixes: whether there is a prefix cache.
        recomputed: tokens whose KV is computed once more, by why it was given up.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        cache: PrefixCache,
        table: PageTable,
        page_size: int,
        page_store: PageStore,
        *,
        cache_by_version: bool,
        records_routes: bool,
    ) -> None:
        self.allocator = allocator
        self.cache = cache
        self.table = table
        self.page_size = page_size
        self.page_store = page_store
        self.versions = KVVersions()
        self.commit = Commit(0, "")
        self.rows = RunningRows(len(table.array))
        self.routes = PageRoutes(page_size) if records_routes else None
        self.recomputed: Counter[RetractCause] = Counter()
        self.shares_prefixes = not isinstance(cache, NoPrefixCache)
        self._is_shared_by_version = cache_by_version

    # ---------------------------------------------------------------------------------------------- taking

    def matched(self, req: Req) -> list[int]:
        """The cached pages that it could begin with."""
        tokens = req.tokens(0, req.num_tokens)
        lease = self.cache.match(self._namespace(req), tokens, req.reusable_tokens)
        lease.release()
        return lease.pages

    def lease(self, req: Req, tokens: list[int]) -> PrefixLease:
        """Cached pages for a request to begin with."""
        lease = self.cache.match(self._namespace(req), tokens, req.reusable_tokens)
        return self._with_routes(req, tokens, lease)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Free pages; cached ones that nobody uses are evicted for them. None: there are not so many."""
        shortage = num_pages - self.allocator.num_free
        if shortage > 0:
            self.cache.evict(shortage)
        return self.allocator.allocate(num_pages)

    def begin(self, req: Req, hold: KVHold) -> None:
        """A request runs in these pages. What it has in host memory comes back to them."""
        req.kv = hold
        self.table.write(hold.row, 0, hold.pages)
        for version in self.versions.versions(hold.lease.labels):
            req.note_kv_used(version)
        self._restore(req)
        self._take_routes(req)
        if req.lost is not None:
            cause, num_tokens = req.lost
            # What the prefix cache has kept of it is not computed again.
            self.recomputed[cause] += max(0, num_tokens - hold.num_computed)
            req.lost = None

    def _restore(self, req: Req) -> None:
        """Bring KV back from host memory, but for pages that are cached."""
        kv, parked = req.kv, req.parked
        assert kv is not None
        if parked is None:
            return
        num_cached = len(kv.lease.pages)
        if num_cached < len(parked.slots):
            self.page_store.restore(parked.slots[num_cached:], kv.pages[num_cached : len(parked.slots)])
            self.rows.computed[kv.row] = self.rows.launched[kv.row] = parked.num_computed
        kv.is_prefilled = parked.is_prefilled
        kv.commit_starts = self.versions.behind(parked.commit_starts, num_cached * self.page_size)
        self.drop_parked(req)
        self.publish(req)
        kv.commit_starts = self.versions.behind(kv.commit_starts, len(kv.lease.pages) * self.page_size)

    def _with_routes(self, req: Req, tokens: list[int], lease: PrefixLease) -> PrefixLease:
        """A lease of no page whose experts a request wants and nobody knows."""
        if self.routes is None or req.routes_from is None:
            return lease
        first_page = max(req.routes_from, req.routes.end) // self.page_size
        num_pages = num_usable(self.routes.found(tokens, lease.pages, lease.runs), first_page)
        if num_pages == len(lease.pages):
            return lease
        lease.release()
        return self.cache.match(self._namespace(req), tokens, num_pages * self.page_size)

    def _take_routes(self, req: Req) -> None:
        """The experts of the cached tokens that a request begins with."""
        assert req.kv is not None
        if self.routes is None:
            return
        lease = req.kv.lease
        tokens = req.tokens(0, len(lease.pages) * self.page_size)
        for index, rows in enumerate(self.routes.found(tokens, lease.pages, lease.runs)):
            if rows is not None and (index + 1) * self.page_size > req.routes.end:
                req.routes.add(index * self.page_size, rows)

    # ------------------------------------------------------------------------------------------ in between

    def next_key(self, req: Req) -> tuple[object, ...]:
        """What identifies the first page that a prefilling request computes itself."""
        assert req.kv is not None
        start = len(req.kv.lease.pages) * self.page_size
        return (start, req.namespace, *req.tokens(start, min(start + self.page_size, req.num_tokens)))

    def held(self, req: Req) -> list[int]:
        """All pages of a running request."""
        assert req.kv is not None
        return req.kv.pages

    def computed(self, req: Req) -> list[int]:
        """The pages that hold KV of a running request."""
        assert req.kv is not None
        return req.kv.pages[: -(-req.kv.num_computed // self.page_size)]

    def prefill_starts(self, req: Req) -> list[tuple[str, int]]:
        """Each version behind the KV of its prompt, with the token from which on it is that."""
        assert req.kv is not None
        starts = self.versions.prefill_starts(req.kv.lease.runs, req.kv.commit_starts, self.page_size)
        return [(version, start) for version, start in starts if start < len(req.spec.prompt_ids)]

    def publish(self, req: Req) -> None:
        """Hand the request's whole pages to the prefix cache, one run of commits at a time."""
        kv = req.kv
        assert kv is not None
        end_page = kv.num_computed // self.page_size
        starts = kv.commit_starts
        if self._is_by_version(req) and starts:
            # A page of this namespace holds KV of one commit only: stop where the next commit begins.
            later = [start for commit, start in starts if str(commit.number) != kv.lease.namespace[-1]]
            end_page = min([end_page, *(start // self.page_size for start in later)])
        first_page = len(kv.lease.pages)
        tokens = req.tokens(0, kv.num_computed)
        for label, end in self.versions.runs(starts, first_page, end_page, self.page_size):
            kv.lease = self.cache.publish(kv.lease, tokens[: end * self.page_size], kv.pages, label)
            kv.pages[: len(kv.lease.pages)] = kv.lease.pages
            if self.routes is not None:
                self.routes.keep(tokens, kv.lease.pages, kv.lease.runs, req.routes, label)
        self.table.write(kv.row, first_page, kv.pages[first_page:end_page])

    def _namespace(self, req: Req) -> Namespace:
        return (*req.namespace, str(self.commit.number)) if self._is_by_version(req) else req.namespace

    def _is_by_version(self, req: Req) -> bool:
        """Whether it shares KV of the same weights only. One that wants new KV must not find the old."""
        return self._is_shared_by_version or req.contract.on_update == "recompute"

    # ------------------------------------------------------------------------------------------ giving back

    def release(self, req: Req, *, publish: bool) -> None:
        """A running request gives up its KV.

        Args:
            publish: leave it to the prefix cache, as far as that wants it.
        """
        kv = req.kv
        assert kv is not None
        if publish:
            self.publish(req)
        self.allocator.free(kv.pages[len(kv.lease.pages) :])
        kv.lease.release()
        self.table.free_row(kv.row)
        self.rows.logprobs.empty(req)
        self.rows.close(kv.row)
        req.kv = None

    def park(self, req: Req, slots: list[int]) -> None:
        """A running request's KV has been copied to these slots; its pages are still to be released."""
        kv = req.kv
        assert kv is not None
        starts = self.versions.spans(kv.lease.runs, kv.commit_starts, self.page_size)
        req.parked = ParkedKV(slots, kv.num_computed, kv.is_prefilled, starts)

    def note_lost(self, req: Req, cause: RetractCause) -> None:
        """A request is about to give up what was computed for it."""
        held = req.kv or req.parked
        if held is not None:
            req.lost = (cause, held.num_computed)

    def tokens_by_version(self, requests: Sequence[Req]) -> dict[str, int]:
        """KV tokens of running requests by the version that computed them; of a page of two, the newer."""
        tokens: Counter[str] = Counter()
        holds = [req.kv for req in requests if req.kv is not None]
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
            self.page_store.drop(req.parked.slots)
            req.parked = None
