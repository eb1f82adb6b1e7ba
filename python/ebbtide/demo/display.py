"""What the terminal shows while the demo runs."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ebbtide.demo.loop import Stage, StepRecord
from ebbtide.demo.results import heading, row


class Display:
    """Finished lines, and below them, on a terminal, a bar that says what goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=1.0)

    def doing(self, what: str, share_done: float) -> None:
        """Say what goes on, and how much of it is done, from 0 to 1."""
        self._progress.update(self._task, description=what, completed=share_done)

    def doing_stage(self, num_steps: int, step: int, stage: Stage) -> None:
        self.doing(f"step {step + 1} of {num_steps}: {stage}", step / num_steps)

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        if record.step == 0:
            self.line(heading(), "bold")
        self.line(row(record))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
