"""CUDA tensors between processes that number their devices differently: devices go by their UUID.

After `monkey_patch_torch_reductions` torch's own pickling of tensors does so. Source: wire_api section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions

_DEVICE_SLOT = 6
# Where every framework that carries this patch keeps torch's own functions.
_ORIGINAL_REDUCE = "_reduce_tensor_original"
_ORIGINAL_REBUILD = "_rebuild_cuda_tensor_original"


def monkey_patch_torch_reductions() -> None:
    """Let torch pickle CUDA tensors with their device's UUID. Idempotent; takes over from another's patch."""
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
    # torch's function finds its counterpart by name, where the patched one now is.
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
    """The index of a device here.

    Args:
        device: the index itself, or a UUID.

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
