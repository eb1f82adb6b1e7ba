"""Objects that must not be destroyed while the interpreter ends."""

from __future__ import annotations

import ctypes


def keep_for_ever(subject: object) -> None:
    """Take a reference that nobody gives back, unless `let_go` does."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(subject))


def let_go(subject: object) -> None:
    """Give back the reference that `keep_for_ever` took."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(subject))
