"""Long work, cut into slices: generators that yield the bytes of each slice when it is done."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

# Work that returns a T. It yields the bytes of each slice that it has just done, and 0 if it can do no more
# before the loop has turned. `managers.control.pace.Pace` makes turns of the loop of it.
Slices: TypeAlias = Generator[int, None, T]


def finish(work: Slices[T]) -> T:
    """Do all of it at once; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
