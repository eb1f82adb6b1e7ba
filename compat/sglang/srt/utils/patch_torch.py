"""Pickles CUDA tensors with their device's UUID, since processes may number devices differently.

`monkey_patch_torch_reductions` makes torch's own pickling do so. Source: wire_api section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions

_DEVICE_SLOT = 6
# All frameworks with this patch keep torch's own functions under these names.
_ORIGINAL_REDUCE = "_reduce_tensor_original"
_ORIGINAL_REBUILD = "_rebuild_cuda_tensor_original"


def monkey_patch_torch_reductions() -> None:
    """Let torch pickle CUDA tensors with their device's UUID. Idempotent; replaces other packages' patch."""
    if reductions.reduce_tensor is _reduce_tensor_modified:
        return
    for kept, name in ((_ORIGINAL_REDUCE, "reduce_tensor"), (_ORIGINAL_REBUILD, "rebuild_cuda_tensor")):
        if not hasattr(reductions, kept):
            setattr(reductions, kept, getattr(reductions, name))
    reductions.reduce_tensor = _reduce_tensor_modified
    reductions.rebuild_cuda_tensor = _rebuild_cuda_tensor_modified
    reductions.init_reductions()  # type: ignore[no-untyped-call]


def _reduce_tensor_modified(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
    rebuild, arguments = getattr(reductions, _ORIGINAL_REDUCE)(*args, **kwargs)
    # For CUDA tensors, torch's function returns the patched `rebuild_cuda_tensor`, found by its name.
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, arguments
    device = _uuid(arguments[_DEVICE_SLOT])
    return _rebuild_cuda_tensor_modified, (*arguments[:_DEVICE_SLOT], device, *arguments[_DEVICE_SLOT + 1 :])


def _rebuild_cuda_tensor_modified(*arguments: Any) -> torch.Tensor:
    device = device_index(arguments[_DEVICE_SLOT])
    rebuild: Any = getattr(reductions, _ORIGINAL_REBUILD, reductions.rebuild_cuda_tensor)
    tensor: torch.Tensor = rebuild(*arguments[:_DEVICE_SLOT], device, *arguments[_DEVICE_SLOT + 1 :])
    return tensor


def device_index(device: int | str) -> int:
    """The index of a device in this process.

    Args:
        device: index or UUID.

    Raises:
        RuntimeError: no visible device has that UUID.
    """
    if isinstance(device, int):
        return device
    visible = [_uuid(index) for index in range(torch.accelerator.device_count())]
    if device not in visible:
        raise RuntimeError(
            f"no visible device has the UUID {device}; there are {', '.join(visible) or 'none'}"
        )
    return visible.index(device)


def _uuid(index: int) -> str:
    return str(torch.get_device_module("cuda").get_device_properties(index).uuid)
