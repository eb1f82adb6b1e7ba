"""What a start is at, on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console

READING_CONFIG = "reading the config"


class StageLine:
    """One line that says what a start is at, if the stream is a terminal; nothing is left of it at the end.

    Of several ranks it is the stage of the one that is furthest behind.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._started_s = time.monotonic()
        self._console: Console | None = None
        # By process, each stage that it has come to; the last one is the last that it reported.
        self._stages: dict[str, dict[str, tuple[int, int]]] = {}
        if stream.isatty():
            # Only here: a process without a terminal does without it.
            from rich.console import Console

            self._console = Console(file=stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._erase()

    def show(self, process: str, what: str, number: int = 0, total: int = 0) -> None:
        """Show what a process is at: step `number` of `total`, if it has such.

        Without a name it is this process.
        """
        if self._console is None:
            return
        if process:
            self._stages.pop("", None)
        stages = self._stages.setdefault(process, {})
        stages.pop(what, None)
        stages[what] = number, total
        self._erase()
        text = f"{self.stage} ({time.monotonic() - self._started_s:.0f} s)"
        # The cursor goes back to the beginning: lines that the processes log are written over this one.
        self._console.out(text[: self._console.width - 1], end="\r", highlight=False)

    @property
    def stage(self) -> str:
        behind = min(
            self._stages.values(), key=lambda stages: (len(stages), [*stages.values()][-1][0]), default={}
        )
        for what, (number, total) in reversed(behind.items()):
            return f"{what} {number}/{total}" if total else what
        return ""

    def _erase(self) -> None:
        if self._console is not None:
            from rich.control import Control
            from rich.segment import ControlType

            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
