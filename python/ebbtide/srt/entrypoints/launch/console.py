"""How a process speaks to its terminal: lines of the log, what a start is at, and the signals that end it."""

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
    """One line that says what a start is at, if the stream is a terminal; nothing is left of it at the end.

    Of several processes it is the stage of the first that reports one.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._started_s = time.monotonic()
        self._console: Console | None = None
        self._process = ""
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
        self._process = self._process or process
        if self._console is None or process != self._process:
            return
        self._erase()
        stage = f"{what} {number}/{total}" if total else what
        text = f"{stage} ({time.monotonic() - self._started_s:.0f} s)"
        # The cursor goes back to the beginning: lines that the processes log are written over this one.
        self._console.out(text[: self._console.width - 1], end="\r", highlight=False)

    def _erase(self) -> None:
        if self._console is not None:
            from rich.control import Control
            from rich.segment import ControlType

            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


class Stopped(BaseException):
    """A signal has asked for the end."""


# After that long a callback is over in which a stop was lost.
_AGAIN_S: Final = 0.05


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle_stops(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in _STOPS:
        signal.signal(number, handler)


def ignore_stops() -> None:
    """Have none interrupt the way out, for the rest of `raising_signals`."""
    if is_main_thread():
        _handle_stops(signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # by which one that was lost comes again


@contextmanager
def raising_signals(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make the first SIGINT or SIGTERM raise `Stopped`; those behind it do not interrupt the way out.

    It is raised again soon, or at the end, if it was lost: in a callback of the interpreter, as imports have
    them, it is. Does nothing in other threads than the main one. `note` is called first.
    """
    if not is_main_thread():
        yield
        return
    is_asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # one was lost, and need not come again
        is_asked = True
        _handle_stops(signal.SIG_IGN)
        note()
        raise Stopped

    report = sys.unraisablehook

    def report_others(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, Stopped):
            # The next signal may be luckier, and one comes by itself.
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
    """Log to stderr from the level of the arguments on, each line with the name of the process."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process_name)
        if args.log_format == "json"
        else logging.Formatter(TEXT.format(process=process_name))
    )
    level = logging.getLevelNamesMapping().get(args.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, handlers=[handler], force=True)
