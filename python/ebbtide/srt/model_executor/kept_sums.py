"""Sums of what tensors hold, kept so that a delta is summed up alone, and not all that it is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class KeptSums:
    """A rank's shares of tensors' sums (`state_sum`) in one copy of the weights, by checkpoint name.

    They hold for one generation of the live weights: where anybody else has written, nothing is known. A
    tensor of which nothing is known is summed up whole, by the next delta of it.
    """

    def __init__(self, generation: int = 0, sums: Mapping[str, int] | None = None) -> None:
        self._generation = generation
        self._sums = dict(sums or {})

    def at(self, generation: int) -> Mapping[str, int]:
        """What is known while the live weights are of this generation."""
        return self._sums if generation == self._generation else {}

    def forget(self, names: Iterable[str]) -> None:
        """They have been written, or will be."""
        for name in names:
            self._sums.pop(name, None)

    def note(self, sums: Mapping[str, int]) -> None:
        """These tensors hold something of these sums now."""
        self._sums.update(sums)
