"""Which experts each token went through: kept per request as passes tell it, and per cached page for others.

Shapes: T tokens, L hidden layers, K experts per token. Source: wire_vllm section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ebbtide.srt.mem_cache.radix_cache import Runs
from ebbtide.srt.model_executor.batch_plan import Routes


class RouteRows:
    """The rows of one request's tokens, from the first on; a token keeps the row of its first pass.

    Attributes:
        end: tokens with a row.
        known_from: rows before this one are not known: their KV was cached without any.
    """

    def __init__(self) -> None:
        self.end = 0
        self.known_from = 0
        self._pieces: list[Routes] = []

    def add(self, start: int, rows_TLK: Routes) -> None:
        """The rows of the tokens from `start` on."""
        if start > self.end:
            self._pieces.append(np.zeros((start - self.end, *rows_TLK.shape[1:]), dtype=rows_TLK.dtype))
            self.known_from = self.end = start
        new = rows_TLK[self.end - start :]
        if len(new):
            self._pieces.append(new)
            self.end += len(new)

    def between(self, start: int, end: int) -> Routes:
        """The rows of tokens [start, end), those that there are."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0][start:end]


class PageRoutes:
    """The rows behind cached pages. A page is known by what it holds: one that was moved, or taken for other
    tokens, has no rows, and whoever wants them computes it again.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._of_page: dict[int, tuple[int, int, Routes]] = {}

    def keep(
        self, tokens: Sequence[int], pages: Sequence[int], runs: Runs, rows: RouteRows, label: int
    ) -> None:
        """Keep the rows of a request's published pages that were computed under `label`."""
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
        """The rows of each page that a request begins with; None where they are not known."""
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
        """Per page a number that stands for its tokens and all before them."""
        bounds = range(0, len(tokens) + 1, self._page_size)
        tags: list[int] = []
        for start, end in pairwise(bounds):
            tags.append(hash((tags[-1] if tags else 0, *tokens[start:end])))
        return tags


def num_usable(found: Sequence[Routes | None], first_page: int) -> int:
    """How many pages a request may begin with that wants the rows from `first_page` on."""
    return next(
        (index for index, rows in enumerate(found) if index >= first_page and rows is None), len(found)
    )


def _labels(runs: Runs) -> list[int]:
    labels: list[int] = []
    for label, end in runs:
        labels += [label] * (end - len(labels))
    return labels
