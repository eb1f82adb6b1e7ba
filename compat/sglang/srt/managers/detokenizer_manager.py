"""A name that launchers pass on."""

from __future__ import annotations

from typing import Any, NoReturn


def run_detokenizer_process(*args: Any, **kwargs: Any) -> NoReturn:
    """Ebbtide starts what it needs by itself."""
    raise NotImplementedError("run_detokenizer_process: an engine is started by Engine._launch_subprocesses")
