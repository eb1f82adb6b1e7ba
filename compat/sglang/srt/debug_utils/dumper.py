"""SGLang's debug dumper, which does nothing here. Frameworks call it throughout their code."""

from __future__ import annotations

from typing import Any


class DumperConfig:
    """Accepts any settings, and ignores them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Dumper:
    """Accepts calls of any method, which do nothing."""

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for optional methods with such names.
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
