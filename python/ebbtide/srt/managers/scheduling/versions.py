"""Versions of the weights: which ones computed the KV, and which ones a request asks for.

Source: control_semantics section 2, "What a request may ask for".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ebbtide.srt.managers.wire.generation import FinishReason, VersionContract


@dataclass(frozen=True, slots=True)
class Commit:
    """Weights that serve or have served. Several commits may have the same version.

    Attributes:
        number: unique.
        version: the name that clients gave the weights.
    """

    number: int
    version: str


class KVVersions:
    """Turns sets of commits into the integer labels of cached pages, and back.

    Most pages were computed by one commit. A page that was partly filled when weights changed under a running
    request has two or more.
    """

    def __init__(self) -> None:
        self._label_of: dict[tuple[Commit, ...], int] = {}
        self._commits_of: list[tuple[Commit, ...]] = []

    def versions(self, labels: Iterable[int]) -> Iterator[str]:
        """The distinct versions behind these labels, oldest first."""
        return iter(dict.fromkeys(commit.version for label in labels for commit in self._commits_of[label]))

    def spans(
        self, cached: Sequence[tuple[int, int]], computed: Sequence[tuple[Commit, int]], page_size: int
    ) -> list[tuple[Commit, int]]:
        """(commit, first token) per span of all of a request's KV. Commits of one page begin together.

        Args:
            cached: (label, end page) per run of cached pages.
            computed: (commit, first token) per span that the request computed itself.
        """
        starts: list[tuple[Commit, int]] = []
        own_start = computed[0][1] if computed else None
        page = 0
        for label, end in cached:
            if own_start is None or page * page_size < own_start:
                starts += [(commit, page * page_size) for commit in self._commits_of[label]]
            page = end
        return [*starts, *computed]

    @staticmethod
    def behind(starts: Sequence[tuple[Commit, int]], first_token: int) -> list[tuple[Commit, int]]:
        """The spans of the KV from `first_token` on."""
        reached = max((start for _, start in starts if start <= first_token), default=first_token)
        return [(commit, max(start, first_token)) for commit, start in starts if start >= reached]

    def prefill_starts(
        self, cached: Sequence[tuple[int, int]], computed: Sequence[tuple[Commit, int]], page_size: int
    ) -> list[tuple[str, int]]:
        """(version, first token) per span of a prompt's KV; arguments as in `spans`.

        A page of two commits counts as the older one.
        """
        starts: list[tuple[str, int]] = []
        last_start = -1
        for commit, start in self.spans(cached, computed, page_size):
            if start > last_start and (not starts or commit.version != starts[-1][0]):
                starts.append((commit.version, start))
            last_start = start
        return starts

    def runs(
        self, starts: Sequence[tuple[Commit, int]], first_page: int, end_page: int, page_size: int
    ) -> Iterator[tuple[int, int]]:
        """Cut pages [first_page, end_page) into runs of one label each; yields (label, end page of the run).

        Args:
            starts: (commit, first token) per span of the KV, ascending; a span reaches to the next one. If
                spans begin at the same token, each of their commits may have computed any part.
        """
        page = first_page
        while page < end_page:
            label, page = self._run(starts, page, end_page, page_size)
            yield label, page

    def _run(
        self, starts: Sequence[tuple[Commit, int]], page: int, end_page: int, page_size: int
    ) -> tuple[int, int]:
        """The label of `page`, and the end of the run of pages that have the same."""
        inside: list[Commit] = []
        inside_from = -1
        for commit, start in starts:
            if start <= page * page_size:
                inside = [*inside, commit] if start == inside_from else [commit]
                inside_from = start
            elif start < (page + 1) * page_size:
                inside.append(commit)
            else:
                break
        label = self._label_of.setdefault(tuple(inside), len(self._commits_of))
        if label == len(self._commits_of):
            self._commits_of.append(tuple(inside))
        if len(inside) > 1:
            return label, page + 1
        next_start = min((start for _, start in starts if start > page * page_size), default=None)
        end = end_page if next_start is None else min(end_page, next_start // page_size)
        return label, max(end, page + 1)


class Standing(Enum):
    """Whether the serving weights are what a contract asks for."""

    HOLDS = auto()
    NOT_YET = auto()
    PASSED = auto()


class ServedVersions:
    """The versions that have served so far, and their order.

    Whole numbers are ordered by value. Any other version comes before those that served after it.

    Attributes:
        current: the version that serves.
        num_updates: updates committed so far.
    """

    def __init__(self, version: str) -> None:
        self.current = version
        self.num_updates = 0
        self._served = {version}

    def note(self, version: str, *, is_update: bool) -> None:
        """Note that this version serves from now on. `is_update`: it is of other weights."""
        self.current = version
        self.num_updates += is_update
        self._served.add(version)

    def why_ended(
        self, contract: VersionContract, first_update: int | None, *, loses_kv: bool
    ) -> FinishReason | None:
        """Why a request ends because of the weights that serve now; None: it goes on.

        Args:
            first_update: `num_updates` when the request began to run; None: it has not.
            loses_kv: whether it has KV of the weights before this update.
        """
        has_passed = self.standing(contract) is Standing.PASSED
        if first_update is None:
            reason = FinishReason("abort", message=self.why_passed(contract), status_code=409)
            return reason if has_passed else None
        if has_passed:
            return FinishReason("stale", message=self.why_passed(contract))
        if contract.max_lag is not None and self.num_updates - first_update > contract.max_lag:
            message = f"more than {contract.max_lag} updates were committed while it ran (max_version_lag)"
            return FinishReason("stale", message=message)
        if loses_kv and contract.on_update == "abort":
            return FinishReason("abort", message="Aborted by a weight update (on_update)")
        return None

    def why_passed(self, contract: VersionContract) -> str:
        """The message for a request whose exact version no longer serves."""
        return f"exact_weight_version: {contract.exact_version!r} has passed, {self.current!r} serves"

    def standing(self, contract: VersionContract) -> Standing:
        """Whether a request with this contract may begin now, later, or never."""
        exact, minimum = contract.exact_version, contract.min_version
        if exact is not None and exact != self.current:
            is_past = exact in self._served or self._is_before(exact, self.current)
            return Standing.PASSED if is_past else Standing.NOT_YET
        if minimum is None or minimum in self._served or self._is_before(minimum, self.current):
            return Standing.HOLDS
        return Standing.NOT_YET

    @staticmethod
    def _is_before(version: str, other: str) -> bool:
        return version.isdecimal() and other.isdecimal() and int(version) < int(other)
