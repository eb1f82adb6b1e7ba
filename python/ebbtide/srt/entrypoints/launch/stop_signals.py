"""SIGINT and SIGTERM as an exception, so that what has been started is ended on the way out."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal has asked for the end."""


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def raising_signals(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make the first SIGINT or SIGTERM raise `Stopped`; those behind it do not interrupt the way out.

    It is raised at the end if it was lost: in a callback of the interpreter, as imports have them, it is.
    Does nothing in other threads than the main one. `note` is called first.
    """
    if not is_main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    is_asked = False

    def handle_all(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in numbers:
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        handle_all(signal.SIG_IGN)
        note()
        raise Stopped

    report = sys.unraisablehook

    def report_others(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, Stopped):
            # The next signal may be luckier.
            handle_all(stop)
        else:
            report(lost)

    previous = {number: signal.getsignal(number) for number in numbers}
    sys.unraisablehook = report_others
    handle_all(stop)
    try:
        yield
    finally:
        sys.unraisablehook = report
        for number, handler in previous.items():
            signal.signal(number, handler)
    if is_asked:
        raise Stopped
