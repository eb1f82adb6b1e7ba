"""Whether the contents of the weights are whole. Source: control_semantics section 1.2."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.srt.managers.io_struct import WeightsContent

MAX_NAMES = 10


@dataclass(frozen=True)
class Valid:
    """Every parameter holds a committed value."""


@dataclass(frozen=True)
class Stale:
    """These parameters hold nothing: not written since their memory came back, or half-written."""

    missing: frozenset[str]


class WeightContent:
    """Whether the live weights may be computed with: `Valid | Stale(missing)`."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._report: WeightsContent | None = None
        self.state: Valid | Stale = Valid()

    def lose(self, names: frozenset[str] | None = None) -> None:
        """The contents of these parameters (all by default) are gone."""
        missing = self._names if names is None else names & self._names
        if isinstance(self.state, Stale):
            missing |= self.state.missing
        if missing:
            self._change(Stale(missing))

    def note_written(self, names: frozenset[str]) -> None:
        """A committed update has written these parameters."""
        if isinstance(self.state, Stale):
            missing = self.state.missing - names
            self._change(Stale(missing) if missing else Valid())

    @property
    def missing(self) -> frozenset[str]:
        return self.state.missing if isinstance(self.state, Stale) else frozenset()

    def report(self) -> WeightsContent:
        """The state as clients see it. It is asked for in every turn, and sorted when it has changed."""
        if self._report is None:
            missing = self.missing
            self._report = WeightsContent(
                content="stale" if missing else "valid",
                num_missing=len(missing),
                missing=sorted(missing)[:MAX_NAMES],
            )
        return self._report

    def _change(self, state: Valid | Stale) -> None:
        self.state = state
        self._report = None
