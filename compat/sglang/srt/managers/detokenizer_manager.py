"""A function that launchers pass on, and that only raises."""

from __future__ import annotations

from typing import Any, NoReturn


def run_detokenizer_process(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: Ebbtide starts its processes itself."""
    raise NotImplementedError("run_detokenizer_process: an engine is started by Engine._launch_subprocesses")
