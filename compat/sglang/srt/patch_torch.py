"""The older path of `sglang.srt.utils.patch_torch`."""

from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified as _rebuild_cuda_tensor_modified
from sglang.srt.utils.patch_torch import _reduce_tensor_modified as _reduce_tensor_modified
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions as monkey_patch_torch_reductions
