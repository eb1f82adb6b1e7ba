"""The names of vLLM that RL trainers use with a server or an engine. Source: wire_vllm."""

from __future__ import annotations

import os
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from sys import meta_path
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.outputs import CompletionOutput as CompletionOutput, RequestOutput as RequestOutput
from vllm.sampling_params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from vllm.async_engine import AsyncEngineArgs as AsyncEngineArgs, AsyncLLMEngine as AsyncLLMEngine

# Trainers choose vLLM's interfaces by the version. TRL supports versions up to this one.
__version__ = os.environ.get("EBBTIDE_VLLM_VERSION", "0.31.0")


class LLM:
    """A name that trainers import. Making an instance raises: this package has no such engine."""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            "vllm.LLM is not in Ebbtide's package of vLLM's names: start `ebbtide serve MODEL` and have the "
            'trainer talk to it (TRL: vllm_mode="server"), or use ebbtide.Engine'
        )


class _Rest(MetaPathFinder):
    """The last import finder: raises for all other modules of vLLM."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("vllm."):
            return None
        raise ModuleNotFoundError(
            f"{fullname} is not provided: this vllm is Ebbtide's package of the names that trainers use",
            name=fullname,
        )


def _refuse_real_vllm() -> None:
    """Raise ImportError if a real vLLM is installed: which one runs would depend on the order of folders."""
    for found in distributions(name="vllm"):
        raise ImportError(
            f"vllm {found.version} is installed, and Ebbtide's package of that name would hide it: "
            "uninstall it, take this folder off PYTHONPATH, or use another environment"
        )


def __getattr__(name: str) -> Any:
    # Imported on first access: clients of a server need no engine.
    if name in ("AsyncEngineArgs", "AsyncLLMEngine"):
        from vllm import async_engine

        return getattr(async_engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_refuse_real_vllm()
meta_path.append(_Rest())
