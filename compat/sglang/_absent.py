"""Parts of SGLang that this package lacks: some modules have names only, others raise a clear error."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from types import ModuleType
from typing import Any, NoReturn

OURS = "+ebbtide"

# Frameworks import these at startup, for features that Ebbtide does not have. Calling one raises.
NAMES_ONLY: Mapping[str, Sequence[str]] = {
    "sglang.srt.configs": (),
    "sglang.srt.configs.device_config": ("DeviceConfig",),
    "sglang.srt.configs.load_config": ("LoadConfig",),
    "sglang.srt.configs.model_config": ("ModelConfig",),
    "sglang.srt.distributed": (),
    "sglang.srt.distributed.parallel_state": ("ParallelismContext", "RankParallelismConfig"),
    "sglang.srt.entrypoints.openai.encoding_dsv4": (),
    "sglang.srt.environ": ("envs",),
    "sglang.srt.layers.dp_attention": ("compute_dp_attention_world_info",),
    "sglang.srt.layers.quantization": (),
    "sglang.srt.layers.quantization.fp4_utils": ("initialize_fp4_gemm_config",),
    "sglang.srt.layers.quantization.fp8_utils": ("initialize_fp8_gemm_config",),
    "sglang.srt.model_loader": ("get_model",),
    "sglang.srt.model_loader.parameter_mapper": ("ParameterMapper",),
    "sglang.srt.ray": ("get_scheduler_actor_name",),
}


class NamesOnly(MetaPathFinder, Loader):
    """The last import finder: makes the modules of `NAMES_ONLY`, and refuses all others of sglang."""

    @classmethod
    def install(cls) -> None:
        """Append the finder to `sys.meta_path`. Idempotent."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("sglang."):
            return None
        if fullname in NAMES_ONLY:
            return ModuleSpec(fullname, self, origin=__file__, is_package=True)
        raise ModuleNotFoundError(
            f"{fullname} is not provided: this sglang is Ebbtide's compatibility package", name=fullname
        )

    def exec_module(self, module: ModuleType) -> None:
        for name in NAMES_ONLY[module.__name__]:
            setattr(module, name, _absent(module.__name__, name))


def _absent(module: str, name: str) -> type[Any]:
    """Make a class that can be imported and subclassed, but not instantiated."""

    def refuse(cls: type[Any], *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{module}.{name} is not in Ebbtide")

    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": "A name only."})


def refuse_real_sglang() -> None:
    """Refuse to be imported beside a real SGLang: which one runs would depend on the order of folders.

    Raises:
        ImportError: a real SGLang is installed.
    """
    for found in distributions(name="sglang"):
        if not found.version.endswith(OURS):
            raise ImportError(
                f"sglang {found.version} is installed, and Ebbtide's package of that name would hide it: "
                "uninstall it, take this folder off PYTHONPATH, or use another environment"
            )
