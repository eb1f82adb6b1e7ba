"""A process and its terminal: log lines, a line with the stage of the start, and the signals that end it."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from ebbtide.srt.server_args import ServerArgs

READING_CONFIG = "reading the config"
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)


class StageLine:
    """A line with the stage of the start, if the stream is a terminal. It is erased at the end.

    With several processes, it shows the stages of the first that reports one.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._started_s = time.monotonic()
        self._console: Console | None = None
        self._process = ""
        if stream.isatty():
            # Imported only if needed, which saves time in processes without a terminal.
            from rich.console import Console

            self._console = Console(file=stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._erase()

    def show(self, process: str, what: str, number: int = 0, total: int = 0) -> None:
        """Show the stage `what` of a process.

        `process`: its name; empty: this process. `number`, `total`: the step within the stage; 0: no steps.
        """
        self._process = self._process or process
        if self._console is None or process != self._process:
            return
        self._erase()
        stage = f"{what} {number}/{total}" if total else what
        text = f"{stage} ({time.monotonic() - self._started_s:.0f} s)"
        # Move the cursor back to the start, so that log lines overwrite this one.
        self._console.out(text[: self._console.width - 1], end="\r", highlight=False)

    def _erase(self) -> None:
        if self._console is not None:
            from rich.control import Control
            from rich.segment import ControlType

            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


class Stopped(BaseException):
    """SIGINT or SIGTERM has come."""


# When to raise `Stopped` again if it was lost in a callback, which should be over by then.
_AGAIN_S: Final = 0.05


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle_stops(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in _STOPS:
        signal.signal(number, handler)


def ignore_stops() -> None:
    """Ignore further signals for the rest of `raising_signals`, so that cleanup is not interrupted."""
    if is_main_thread():
        _handle_stops(signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # it raises a lost `Stopped` again


@contextmanager
def raising_signals(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make the first SIGINT or SIGTERM raise `Stopped`. Later ones are ignored, to let cleanup finish.

    Python drops exceptions in some callbacks, such as those of imports. `Stopped` is then raised again soon,
    or at the end of the block. Does nothing outside the main thread.

    `note`: is called before `Stopped` is raised.
    """
    if not is_main_thread():
        yield
        return
    is_asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # raised again by a signal: the timer is not needed
        is_asked = True
        _handle_stops(signal.SIG_IGN)
        note()
        raise Stopped

    report = sys.unraisablehook

    def report_others(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, Stopped):
            # Raise it again at the next signal, or by the timer.
            _handle_stops(stop)
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            report(lost)

    previous = {number: signal.getsignal(number) for number in (*_STOPS, signal.SIGALRM)}
    sys.unraisablehook = report_others
    _handle_stops(stop)
    try:
        yield
    finally:
        if is_asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = report
        for number, handler in previous.items():
            signal.signal(number, handler)
    if is_asked:
        raise Stopped


TEXT: Final = "%(asctime)s %(levelname)s [{process}] %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `time` (UTC), `level`, `process`, `logger`, `message`, and `exception` if any."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(args: ServerArgs, process_name: str) -> None:
    """Log to stderr, from the level of the arguments on. Each line has the name of the process."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process_name)
        if args.log_format == "json"
        else logging.Formatter(TEXT.format(process=process_name))
    )
    level = logging.getLevelNamesMapping().get(args.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, handlers=[handler], force=True)
