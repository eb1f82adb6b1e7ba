"""A platform for verl that runs its trainers on a CPU.

verl imports it by VERL_USE_EXTERNAL_MODULES=cpu_platform, and chooses it by VERL_PLATFORM=cpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

CPU = torch.device("cpu")
# torch.cpu, with functions of torch.cuda that verl calls and torch.cpu lacks.
DEVICE = ModuleType("torch.cpu")
DEVICE.__dict__.update(vars(torch.cpu))
for _name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
    setattr(DEVICE, _name, lambda *_: 0)
for _name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "manual_seed", "manual_seed_all"):
    setattr(DEVICE, _name, lambda *_: None)
DEVICE.mem_get_info = lambda *_: (0, 1 << 30)
DEVICE.set_device = lambda *_: None
DEVICE.get_device_name = lambda *_: "CPU"
DEVICE.current_device = lambda: CPU
DEVICE.get_rng_state = torch.get_rng_state
DEVICE.set_rng_state = torch.set_rng_state


_join = torch.distributed.init_process_group


def _join_once(backend: str | None = None, **options: Any) -> None:
    """Join by gloo once: verl names a backend for the CPU and one for its device, here the same."""
    _join("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


torch.distributed.init_process_group = _join_once


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A CPU, with gloo for collectives."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CPU  # Not an index, which torch would take for an accelerator.

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
