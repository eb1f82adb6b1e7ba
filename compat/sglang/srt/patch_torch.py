"""The older path of `sglang.srt.utils.patch_torch`."""

from sglang.srt.utils.patch_torch import (
    _rebuild_cuda_tensor_modified as _rebuild_cuda_tensor_modified,
    _reduce_tensor_modified as _reduce_tensor_modified,
    monkey_patch_torch_reductions as monkey_patch_torch_reductions,
)
