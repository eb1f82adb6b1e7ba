"""Long work in slices: generators that yield the number of bytes of each slice when it is done."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

# Work that returns a T. After each slice it yields the slice's bytes, and 0 if it can only go on after the
# scheduler's loop has run. `managers.control.pace.Pace` does the slices between the steps of that loop.
Slices: TypeAlias = Generator[int, None, T]


def finish(work: Slices[T]) -> T:
    """Do all of the work at once. Returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
