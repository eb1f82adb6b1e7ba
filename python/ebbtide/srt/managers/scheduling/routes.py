"""Which experts each token took: recorded per request, and per cached page for requests that reuse it.

Shapes: T tokens, L hidden layers, K experts per token. Source: wire_vllm section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ebbtide.srt.mem_cache.radix_cache import Runs
from ebbtide.srt.model_executor.batch_plan import Routes


class RouteRows:
    """The experts of one request's tokens, one row per token. A token keeps the row of its first pass.

    Attributes:
        end: number of rows.
        known_from: rows before this one are zeros: their KV came from the cache without experts.
    """

    def __init__(self) -> None:
        self.end = 0
        self.known_from = 0
        self._pieces: list[Routes] = []

    def add(self, start: int, rows_TLK: Routes) -> None:
        """Add the rows of the tokens from `start` on; rows that exist already stay."""
        if start > self.end:
            self._pieces.append(np.zeros((start - self.end, *rows_TLK.shape[1:]), dtype=rows_TLK.dtype))
            self.known_from = self.end = start
        new = rows_TLK[self.end - start :]
        if len(new):
            self._pieces.append(new)
            self.end += len(new)

    def between(self, start: int, end: int) -> Routes:
        """The rows of tokens [start, end), as far as they exist."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0][start:end]


class PageRoutes:
    """The rows of cached pages, each kept with a hash of the page's tokens and its label.

    If a page was moved, or reused for other tokens, its rows are not found: a request that wants them
    computes the page again.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._of_page: dict[int, tuple[int, int, Routes]] = {}

    def keep(
        self, tokens: Sequence[int], pages: Sequence[int], runs: Runs, rows: RouteRows, label: int
    ) -> None:
        """Keep the rows of a request's published pages with this label."""
        labels = _labels(runs)
        for index, tag in enumerate(self._tags(tokens[: len(labels) * self._page_size])):
            start = index * self._page_size
            is_own = (
                labels[index] == label and rows.known_from <= start and start + self._page_size <= rows.end
            )
            if is_own and not self._holds(pages[index], tag, label):
                own = rows.between(start, start + self._page_size).copy()
                self._of_page[pages[index]] = (tag, label, own)

    def found(self, tokens: Sequence[int], pages: Sequence[int], runs: Runs) -> list[Routes | None]:
        """The rows of each page that a request begins with; None for pages without."""
        labels = _labels(runs)
        tags = self._tags(tokens[: len(pages) * self._page_size])
        return [
            self._of_page[page][2] if self._holds(page, tag, label) else None
            for page, tag, label in zip(pages, tags, labels, strict=True)
        ]

    def _holds(self, page: int, tag: int, label: int) -> bool:
        kept = self._of_page.get(page)
        return kept is not None and kept[:2] == (tag, label)

    def _tags(self, tokens: Sequence[int]) -> list[int]:
        """One hash per page, of its tokens and all tokens before them."""
        bounds = range(0, len(tokens) + 1, self._page_size)
        tags: list[int] = []
        for start, end in pairwise(bounds):
            tags.append(hash((tags[-1] if tags else 0, *tokens[start:end])))
        return tags


def num_usable(found: Sequence[Routes | None], first_page: int) -> int:
    """How many cached pages a request can use if it wants the rows from `first_page` on."""
    return next(
        (index for index, rows in enumerate(found) if index >= first_page and rows is None), len(found)
    )


def _labels(runs: Runs) -> list[int]:
    labels: list[int] = []
    for label, end in runs:
        labels += [label] * (end - len(labels))
    return labels
