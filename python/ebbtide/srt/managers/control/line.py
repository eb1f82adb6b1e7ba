"""What comes one at a time, the oldest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Line:
    """Operations that wait for each other."""

    def __init__(self) -> None:
        self._places: list[object] = []

    @property
    def is_empty(self) -> bool:
        return not self._places

    @contextmanager
    def turn(self) -> Iterator[Callable[[], bool]]:
        """A place in the line; the callable tells whether it has come to the front."""
        place = object()
        self._places.append(place)
        try:
            yield lambda: self._places[0] is place
        finally:
            self._places.remove(place)
