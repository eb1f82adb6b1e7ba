"""In which order waiting requests are tried, by the name of the schedule policy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from ebbtide.srt.managers.scheduling.request import Req

# Requests whose prefixes are matched per step: that costs, and nobody waits on the order of the 200th.
MATCHED_WINDOW: Final = 128

# Where a request stands in a tree: at each level how many go on the same way (negative), and the page.
TreePlace: TypeAlias = tuple[tuple[int, int], ...]
Key = TypeVar("Key", float, tuple[int, int], TreePlace)


class WaitingOrder:
    """The order of a schedule policy. Retracted requests come first in all of them, and equals by arrival.

    Args:
        policy: `fcfs`, by arrival; `lpm`, the longest cached prefix first; `dfs-weight`, by the tree of
            cached prefixes; `lof`, the longest output first; `priority`, the highest first; `priority-lof`,
            of equal ones the longest output; `random`.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        # The same on all ranks: they ask for the same numbers in the same turns.
        self._random = random.Random(0)

    def candidates(self, waiting: Sequence[Req], cached_pages: Callable[[Req], list[int]]) -> Iterable[Req]:
        """The requests to be tried, in order. Each may leave `waiting` before the next is asked for.

        Args:
            waiting: retracted ones first, each group by arrival.
            cached_pages: the pages of the prefix cache that a request could begin with.
        """
        match self._policy:
            case "fcfs":
                return _walk(waiting)
            case "lof":
                return _ordered(waiting, lambda req: -req.num_to_come)
            case "priority":
                return _ordered(waiting, lambda req: -req.priority)
            case "priority-lof":
                return _ordered(waiting, lambda req: (-req.priority, -req.num_to_come))
            case "random":
                return _ordered(waiting, lambda req: self._random.random())
        window = waiting[:MATCHED_WINDOW]
        pages = {req.rid: cached_pages(req) for req in window}
        if self._policy == "lpm":
            return _ordered(window, lambda req: -len(pages[req.rid]))
        assert self._policy == "dfs-weight", self._policy
        places = dfs_places(pages)
        return _ordered(window, lambda req: places[req.rid])


def dfs_places(pages: Mapping[str, Sequence[int]]) -> dict[str, TreePlace]:
    """What to sort requests by for a walk through the tree of cached prefixes, depth first.

    Of two branches the one that more requests go through comes first, so that what shares a prefix runs
    together; requests that end at a node come behind those that go on from it.

    Args:
        pages: the cached pages that each request begins with.
    """
    nodes: dict[tuple[int, int], int] = {}
    paths: dict[str, list[tuple[int, int]]] = {}
    num_through: Counter[int] = Counter()
    for rid, own in pages.items():
        node = 0
        path = paths[rid] = []
        for page in own:
            node = nodes.setdefault((node, page), len(nodes) + 1)
            num_through[node] += 1
            path.append((node, page))
    end = (1, 0)  # Behind every branch: those begin with a negative number.
    return {rid: (*((-num_through[node], page) for node, page in path), end) for rid, path in paths.items()}


def _walk(waiting: Sequence[Req]) -> Iterator[Req]:
    """One after the other, without a copy of what may be thousands."""
    index = 0
    while index < len(waiting):
        req = waiting[index]
        yield req
        if index < len(waiting) and waiting[index] is req:
            index += 1


def _ordered(requests: Sequence[Req], key: Callable[[Req], Key]) -> list[Req]:
    return sorted(requests, key=lambda req: (not req.has_begun, key(req)))
