"""A dumper that dumps nothing: frameworks call it all over their own code."""

from __future__ import annotations

from typing import Any


class DumperConfig:
    """Takes any settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Dumper:
    """Takes any call of any method."""

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for methods by such names, and take their absence for an answer.
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


dumper = _Dumper()


def _get_rank() -> int:
    """The rank in torch's default group; 0 without one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
