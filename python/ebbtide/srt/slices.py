"""Work that takes long: generators that yield the bytes of each slice that they have just done."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def finish(work: Generator[int, None, T]) -> T:
    """Do all of it at once; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
