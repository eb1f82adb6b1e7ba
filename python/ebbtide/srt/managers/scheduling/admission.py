"""What a pass takes in: which requests are tried first, how much of each prompt, what stays free."""

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

# Requests whose prefixes are matched per step: that costs, and nobody waits on the order of the 200th.
MATCHED_WINDOW: Final = 128
# How many requests of an adapter a step looks at whose version has no slot yet.
MAX_BARRED: Final = 64

Key = TypeVar("Key", int, tuple[int, int])

# Shares of prompt tokens in a pass that streams wait for. By default they take about as long as 1,024
# requests that decode, so that with those a pass takes twice as long as one without prompts. Nothing
# here is measured, so all ranks decide alike.
SHARES_WITH_STREAMS: Final = 3
# Smaller passes serve fewer tokens per second, which whoever has no token yet waits for: with more of them to
# each stream than this, passes are whole.
NEWCOMERS_PER_STREAM: Final = 7


@dataclass(eq=False)
class WaitingRequests:
    """The requests that wait: those of each adapter, and those of none, in a line of their own.

    Who has the fewest requests running is next, of equals who was served longest ago: many requests for one
    adapter keep out neither the others nor the base. Within a line the schedule policy decides. Requests
    whose KV was taken away come first of all, by arrival.

    Args:
        policy: `fcfs`, by arrival; `lpm`, the longest cached prefix first; `lof`, the longest output first;
            `priority`, the highest first; `priority-lof`, of equal ones the longest output. Equals go by
            arrival.
        max_running: requests of one adapter that may run at a time; None: all.

    Attributes:
        lines: by adapter, in order of arrival, retracted ones first; none of them is empty.
    """

    _policy: str
    _max_running: int | None = None

    def __post_init__(self) -> None:
        self.lines: dict[str | None, list[Req]] = {}
        self._num_running: Counter[str | None] = Counter()
        # When each line was last served, by the count of requests that began to run; a new one: now.
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
        """Those that wait for one adapter; None: for the base."""
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
        """It leaves its line, and runs."""
        name = req.adapter_name
        self._num_started += 1
        self._num_running[name] += 1
        self._served[name] = self._num_started
        self.remove(req)

    def stop(self, req: Req) -> None:
        """It runs no more."""
        name = req.adapter_name
        self._num_running[name] -= 1
        if not self._num_running[name]:
            del self._num_running[name]

    def candidates(
        self, cached_pages: Callable[[Req], list[int]], is_ready: Callable[[Req], bool]
    ) -> Iterator[Req]:
        """The requests to be tried, in order. Each may begin to run before the next is asked for.

        Args:
            cached_pages: the pages of the prefix cache that a request could begin with.
            is_ready: whether its adapter is where a pass can read it; asked once of each.
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
        """The requests of a line to be tried, in order; `num_matched` may be asked about."""
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
        """What the heads of the lines are sorted by; no two of them arrived at once."""
        name = req.adapter_name
        fairness = (0, 0) if req.was_retracted else (self._num_running[name], self._served.get(name, 0))
        return (not req.was_retracted, *fairness, req.arrival - req.head_start, req.arrival, req)


def _by_turn(req: Req) -> tuple[bool, int]:
    """Requests that had KV first; each group in order of arrival, but for head starts."""
    return not req.was_retracted, req.arrival - req.head_start


def _sorted(requests: Sequence[Req], key: Callable[[Req], Key]) -> list[Req]:
    return sorted(requests, key=lambda req: (not req.was_retracted, key(req)))


class PrefillShare:
    """What one prompt gets of a pass at most, whoever else is there: who comes next waits for that pass.

    Attributes:
        budget: prompt tokens of a pass.
        budget_with_streams: the same, where streams wait for it.
        tokens: of one prompt; without chunks there are no shares.
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
        """How many tokens a pass computes of each prompt that is being prefilled, where it computes any.

        Those that end with it come first. Returns what is left of the pass too.

        Args:
            upcoming: those that wait and may be admitted: a share is left to them. Retracted ones come
                first.
            num_streams: requests that decode and are streamed.
            room: tokens that `PassLimit` leaves to prompts.
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

        Streams that have lost their KV stand still until it is there again: they wait for it too.
        """
        retracted = [req for req in prefilling if req.was_retracted]
        retracted += takewhile(lambda req: req.was_retracted, upcoming)
        num_newcomers = len(prefilling) + len(upcoming) - len(retracted)
        num_streams += sum(req.is_streamed for req in retracted)
        is_whole = num_newcomers > NEWCOMERS_PER_STREAM * num_streams
        return self.budget if is_whole or not num_streams else self.budget_with_streams

    def short_first(self, chunks: dict[Req, int]) -> dict[Req, int]:
        """The chunks of a pass. Where short prompts end with it, those that go on wait for the next one, so
        that first tokens do not wait for them; but never twice in a row, nor for more than a share.
        """
        ending = {req: chunk for req, chunk in chunks.items() if chunk == req.num_missing}
        steps_aside = len(ending) < len(chunks) and 0 < sum(ending.values()) <= self.tokens
        self._has_stepped_aside = steps_aside and not self._has_stepped_aside
        return ending if self._has_stepped_aside else chunks

    def of_admitted(self, req: Req, budget: int, room: int) -> int:
        """How many tokens a pass computes of a prompt that it begins with."""
        return min(req.num_missing, budget, self.tokens) if self._is_chunked else min(req.num_missing, room)


class PassLimit:
    """How many tokens a pass has at most, because one of more has found too little memory on the device.

    Twice as many are tried after some passes that fitted, and later each time that this was in vain.

    Attributes:
        num_tokens: at most; `sys.maxsize`: none has failed.
        num_waits: passes of one token of the same request that have failed since one has not. None can be
            smaller.
    """

    LEAST_PATIENCE, MOST_PATIENCE = 8, 512

    def __init__(self) -> None:
        self.num_tokens = sys.maxsize
        self.num_waits = self._num_fitting = self._waiting = 0
        self._patience, self._has_grown = self.LEAST_PATIENCE, False

    def note_failed(self, num_new_R: NDArray[np.int32], first: int) -> None:
        """A pass of so many tokens of each request has failed, the first of which came as number `first`.

        Less of the prompts may fit, and in the end half of what comes token by token.
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
        """A pass was launched. Where even one token had no room, somebody has given memory back."""
        if self.num_waits:
            self.num_tokens, self.num_waits = sys.maxsize, 0
        self._num_fitting += 1
        if self._num_fitting == self._patience and self.num_tokens < sys.maxsize:
            if self._has_grown:
                self._patience = self.LEAST_PATIENCE
            self.num_tokens = min(2 * self.num_tokens, sys.maxsize)
            self._num_fitting, self._has_grown = 0, True


class GrowthReserve:
    """How many pages to leave free for running requests, when a new one asks to be admitted.

    Few requests use all of their `max_new_tokens`, so a share of it is set aside: more after a retraction,
    which costs a second prefill, and slowly less while all goes well.
    """

    SHARE_AT_START, SHARE_MIN, STEP_UP, DECAY = 0.4, 0.1, 0.2, 0.999

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._share = self.SHARE_AT_START

    def pages(self, num_tokens: int) -> int:
        """How many are kept for `num_tokens` that running requests may still generate."""
        return int(self._share * num_tokens) // self._page_size

    def note_step(self) -> None:
        self._share = max(self.SHARE_MIN, self._share * self.DECAY)

    def note_retraction(self) -> None:
        self._share = min(1.0, self._share + self.STEP_UP)
