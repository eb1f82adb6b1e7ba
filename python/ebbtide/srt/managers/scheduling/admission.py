"""What a forward pass takes in: the order of requests, the share of each prompt, the pages left free."""

from __future__ import annotations

import heapq
import sys
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.managers.scheduling.request import Req

if TYPE_CHECKING:
    from ebbtide.srt.config import ScheduleConfig

# Requests whose prefixes are matched per step. Matching costs time, and the order of later ones hardly
# counts.
MATCHED_WINDOW: Final = 128
# How many requests of one adapter a step skips because the adapter has no slot yet.
MAX_BARRED: Final = 64

Key = TypeVar("Key", int, tuple[int, int])

# How many shares of prompt tokens a pass computes while streams decode. By default they take about as long
# as 1,024 decoding requests: a pass with both takes twice as long as one without prompts. It is a constant
# and not a measurement, so that all ranks decide alike.
SHARES_WITH_STREAMS: Final = 3
# Smaller passes compute fewer tokens per second, and new requests wait longer for their first one. With more
# new requests per stream than this, passes are not cut.
NEWCOMERS_PER_STREAM: Final = 7


@dataclass(eq=False)
class WaitingRequests:
    """The waiting requests: one line per adapter, and one for the base model.

    The line with the fewest running requests is next; of equal ones, the line that was served longest ago. So
    many requests for one adapter do not starve the others. Within a line the schedule policy decides.
    Retracted requests come before all others, by arrival.

    Args:
        policy: `fcfs`, by arrival; `lpm`, the longest cached prefix first; `lof`, the longest output first;
            `priority`, the highest first; `priority-lof`, of equal ones the longest output. Equals go by
            arrival.
        max_running: how many requests of one adapter may run at a time; None: all.

    Attributes:
        lines: by adapter (None: the base model), in order of arrival, retracted ones first; never empty.
    """

    _policy: str
    _max_running: int | None = None

    def __post_init__(self) -> None:
        self.lines: dict[str | None, list[Req]] = {}
        self._num_running: Counter[str | None] = Counter()
        # When each line was last served, in requests that have begun to run. A new line counts as served now.
        self._served: dict[str | None, int] = {}
        self._num_started = 0

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[Req]:
        """In order of arrival, retracted ones first."""
        lines = list(self.lines.values())
        return iter(lines[0]) if len(lines) == 1 else heapq.merge(*lines, key=_by_turn)

    def first(self, count: int) -> list[Req]:
        return list(islice(self, count))

    def num_of(self, adapter: str | None) -> int:
        """How many wait for one adapter; None: for the base model."""
        return len(self.lines.get(adapter, ()))

    def add(self, req: Req) -> None:
        name = req.adapter_name
        if name not in self.lines:
            self.lines[name], self._served[name] = [], self._num_started
        insort(self.lines[name], req, key=_by_turn)

    def remove(self, req: Req) -> None:
        name = req.adapter_name
        self.lines[name].remove(req)
        if not self.lines[name]:
            del self.lines[name], self._served[name]

    def begin(self, req: Req) -> None:
        """Move a request from its line to the running ones."""
        name = req.adapter_name
        self._num_started += 1
        self._num_running[name] += 1
        self._served[name] = self._num_started
        self.remove(req)

    def stop(self, req: Req) -> None:
        """Note that a request no longer runs."""
        name = req.adapter_name
        self._num_running[name] -= 1
        if not self._num_running[name]:
            del self._num_running[name]

    def candidates(
        self, cached_pages: Callable[[Req], list[int]], is_ready: Callable[[Req], bool]
    ) -> Iterator[Req]:
        """The requests to try, in order. The caller may `begin` one before it asks for the next.

        Args:
            cached_pages: gives the pages of the prefix cache that a request could begin with.
            is_ready: whether a pass can read the request's adapter now; called once for each.
        """
        num_matched = MATCHED_WINDOW // len(self.lines) or 1 if self.lines else 0
        walks = {
            name: iter(self._ordered(line, cached_pages, num_matched)) for name, line in self.lines.items()
        }
        heads = [self._place(req) for walk in walks.values() for req in islice(walk, 1)]
        heapq.heapify(heads)
        num_barred: Counter[str | None] = Counter()
        while heads:
            req = heads[0][-1]
            name = req.adapter_name
            if self._is_full(name) or num_barred[name] == MAX_BARRED:
                heapq.heappop(heads)
                continue
            if is_ready(req):
                yield req
            else:
                num_barred[name] += 1
            following = next(walks[name], None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, self._place(following))

    def _ordered(
        self, line: Sequence[Req], cached_pages: Callable[[Req], list[int]], num_matched: int
    ) -> Iterable[Req]:
        """The requests of a line in the order of the policy; at most `num_matched` prefixes are matched."""
        match self._policy:
            case "fcfs":
                return list(line)
            case "lof":
                return _sorted(line, lambda req: -req.num_to_come)
            case "priority":
                return _sorted(line, lambda req: -req.given.priority)
            case "priority-lof":
                return _sorted(line, lambda req: (-req.given.priority, -req.num_to_come))
        assert self._policy == "lpm", self._policy
        return _sorted(line[:num_matched], lambda req: -len(cached_pages(req)))

    def _is_full(self, name: str | None) -> bool:
        limit = self._max_running
        return limit is not None and name is not None and self._num_running[name] >= limit

    def _place(self, req: Req) -> tuple[bool, int, int, int, int, Req]:
        """The sort key of a line's head. Arrivals differ, so requests are never compared."""
        name = req.adapter_name
        fairness = (0, 0) if req.was_retracted else (self._num_running[name], self._served.get(name, 0))
        return (not req.was_retracted, *fairness, req.arrival - req.head_start, req.arrival, req)


def _by_turn(req: Req) -> tuple[bool, int]:
    """Sort key: retracted requests first, then by arrival less the head start."""
    return not req.was_retracted, req.arrival - req.head_start


def _sorted(requests: Sequence[Req], key: Callable[[Req], Key]) -> list[Req]:
    return sorted(requests, key=lambda req: (not req.was_retracted, key(req)))


class PrefillShare:
    """Shares a pass out to prompts, so that one long prompt does not fill the pass that others wait for.

    Attributes:
        budget: prompt tokens of a pass.
        budget_with_streams: the same while streams decode.
        tokens: the share of one prompt; without chunked prefill, the whole budget.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        chunk = config.chunked_prefill_size
        self.budget = config.max_prefill_tokens if chunk is None else chunk
        self.tokens = self.budget if chunk is None else max(1, int(chunk * config.prefill_share))
        self.budget_with_streams = min(self.budget, SHARES_WITH_STREAMS * self.tokens)
        self._is_chunked = chunk is not None
        self._has_stepped_aside = False

    def of_running(
        self, prefilling: Sequence[Req], upcoming: Sequence[Req], num_streams: int, room: int
    ) -> tuple[dict[Req, int], int]:
        """How many tokens a pass computes of each running prompt. Prompts that end with it come first.

        Args:
            upcoming: requests that wait and may be admitted, retracted ones first: a share is left to them.
            num_streams: requests that decode and are streamed.
            room: tokens that `PassLimit` leaves to prompts.

        Returns:
            The tokens by request, without zeros; and the tokens of the pass that are left.
        """
        budget = min(self._of_pass(prefilling, upcoming, num_streams), room)
        left = self.tokens if upcoming and 2 * self.tokens <= budget else 0
        budget -= left
        chunks: dict[Req, int] = {}
        for req in sorted(prefilling, key=lambda req: req.num_missing > self.tokens):
            if budget > 0:
                chunks[req] = min(req.num_missing, self.tokens, budget)
                budget -= chunks[req]
        return chunks, budget + left

    def _of_pass(self, prefilling: Sequence[Req], upcoming: Sequence[Req], num_streams: int) -> int:
        """Prompt tokens of the next pass.

        Retracted streams count as streams too: they stall until their KV is there again.
        """
        retracted = [req for req in prefilling if req.was_retracted]
        retracted += takewhile(lambda req: req.was_retracted, upcoming)
        num_newcomers = len(prefilling) + len(upcoming) - len(retracted)
        num_streams += sum(req.is_streamed for req in retracted)
        is_whole = num_newcomers > NEWCOMERS_PER_STREAM * num_streams
        return self.budget if is_whole or not num_streams else self.budget_with_streams

    def short_first(self, chunks: dict[Req, int]) -> dict[Req, int]:
        """The chunks of a pass, without those of prompts that do not end with it if short prompts do.

        So the first tokens of short prompts do not wait for long ones. Long prompts are left out at most
        every second pass, and only if the short ones take no more than a share.
        """
        ending = {req: chunk for req, chunk in chunks.items() if chunk == req.num_missing}
        steps_aside = len(ending) < len(chunks) and 0 < sum(ending.values()) <= self.tokens
        self._has_stepped_aside = steps_aside and not self._has_stepped_aside
        return ending if self._has_stepped_aside else chunks

    def of_admitted(self, req: Req, budget: int, room: int) -> int:
        """How many tokens a pass computes of a prompt that was just admitted."""
        return min(req.num_missing, budget, self.tokens) if self._is_chunked else min(req.num_missing, room)


class PassLimit:
    """The most tokens that a pass may have, after a larger one found too little device memory.

    The limit doubles after some passes that fitted. If the larger pass fails again, more passes must fit
    before the next try.

    Attributes:
        num_tokens: the limit; `sys.maxsize`: no pass has failed.
        num_waits: passes in a row that failed with a single token of the same request. None can be smaller.
    """

    LEAST_PATIENCE, MOST_PATIENCE = 8, 512

    def __init__(self) -> None:
        self.num_tokens = sys.maxsize
        self.num_waits = self._num_fitting = self._waiting = 0
        self._patience, self._has_grown = self.LEAST_PATIENCE, False

    def note_failed(self, num_new_R: NDArray[np.int32], first: int) -> None:
        """Note that a pass has failed: halve its prompt tokens, or its decoding requests if it has none.

        Args:
            num_new_R: tokens of each request in the pass.
            first: arrival number of its first request.
        """
        if self._has_grown:
            self._patience = min(2 * self._patience, self.MOST_PATIENCE)
        self._num_fitting, self._has_grown = 0, False
        num_single = int((num_new_R == 1).sum())
        num_others = int(num_new_R.sum()) - num_single
        if num_single + num_others == 1:
            self.num_waits = self.num_waits + 1 if first == self._waiting else 1
            self._waiting = first
        else:
            self.num_tokens = num_single + num_others // 2 if num_others else num_single // 2

    def note_fitting(self) -> None:
        """Note that a pass fitted. If not even one token did before, memory was freed: lift the limit."""
        if self.num_waits:
            self.num_tokens, self.num_waits = sys.maxsize, 0
        self._num_fitting += 1
        if self._num_fitting == self._patience and self.num_tokens < sys.maxsize:
            if self._has_grown:
                self._patience = self.LEAST_PATIENCE
            self.num_tokens = min(2 * self.num_tokens, sys.maxsize)
            self._num_fitting, self._has_grown = 0, True


class GrowthReserve:
    """How many pages stay free for running requests to grow when a new request is admitted.

    Few requests use all of their `max_new_tokens`, so only a share of that is reserved. The share rises after
    a retraction, which costs a second prefill, and falls slowly otherwise.
    """

    SHARE_AT_START, SHARE_MIN, STEP_UP, DECAY = 0.4, 0.1, 0.2, 0.999

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._share = self.SHARE_AT_START

    def pages(self, num_tokens: int) -> int:
        """Pages reserved for `num_tokens` that running requests may still generate."""
        return int(self._share * num_tokens) // self._page_size

    def note_step(self) -> None:
        self._share = max(self.SHARE_MIN, self._share * self.DECAY)

    def note_retraction(self) -> None:
        self._share = min(1.0, self._share + self.STEP_UP)
