"""Which weight versions computed which cached pages: the labels that the prefix cache keeps for us."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class KVVersions:
    """Turns sets of weight versions into the integer labels of cached pages, and back.

    Most pages are computed by one version. A page that was being filled when weights were swapped under a
    running request has two, or more.
    """

    def __init__(self) -> None:
        self._label_of: dict[tuple[str, ...], int] = {}
        self._versions_of: list[tuple[str, ...]] = []

    def versions(self, labels: Iterable[int]) -> Iterator[str]:
        """The distinct versions behind these labels, oldest first."""
        return iter(dict.fromkeys(version for label in labels for version in self._versions_of[label]))

    def runs(
        self, starts: Sequence[tuple[str, int]], first_page: int, end_page: int, page_size: int
    ) -> Iterator[tuple[int, int]]:
        """Pages [first_page, end_page) as runs of one label each: yields (label, end of the run).

        Args:
            starts: (version, first token) per span of the KV, ascending; a span reaches to the next one.
        """
        page = first_page
        while page < end_page:
            label, page = self._run(starts, page, end_page, page_size)
            yield label, page

    def _run(
        self, starts: Sequence[tuple[str, int]], page: int, end_page: int, page_size: int
    ) -> tuple[int, int]:
        """The label of `page`, and where the run of pages that share it ends."""
        inside: list[str] = []
        for version, start in starts:
            if start <= page * page_size:
                inside = [version]
            elif start < (page + 1) * page_size:
                inside.append(version)
            else:
                break
        label = self._label_of.setdefault(tuple(inside), len(self._versions_of))
        if label == len(self._versions_of):
            self._versions_of.append(tuple(inside))
        if len(inside) > 1:
            return label, page + 1
        next_start = min((start for _, start in starts if start > page * page_size), default=None)
        end = end_page if next_start is None else min(end_page, next_start // page_size)
        return label, max(end, page + 1)
