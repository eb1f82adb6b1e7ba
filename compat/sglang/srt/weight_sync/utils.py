"""Sends weights of a sharded trainer to an engine with as many ranks. Source: wire_api section 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions


async def update_weights(
    engine: Any,
    params_batch: Sequence[tuple[str, torch.Tensor]],
    device_mesh_key: str,
    device_mesh: DeviceMesh,
    load_format: str | None = None,
    flush_cache: bool = True,
) -> Any:
    """Send every rank's tensors to the engine as one update. All ranks of the mesh call it.

    Args:
        engine: has a coroutine `update_weights_from_tensor` that takes an `UpdateWeightsFromTensorReqInput`;
            called on the first rank only.
        params_batch: (name, tensor) pairs with the same names in the same order on every rank. Those of rank
            i are read by the engine's rank i.
        device_mesh_key: the dimension of `device_mesh` whose ranks match the engine's.
        flush_cache: whether to empty the prefix cache, for example only with the last of several batches.

    Returns:
        The engine's answer on the first rank, None on the others.
    """
    mesh = device_mesh[device_mesh_key]
    ranks = mesh.mesh.flatten().tolist()
    monkey_patch_torch_reductions()
    # Keeps the tensors alive until the engine has answered.
    tensors = [
        (name, _preprocess_tensor_for_update_weights(tensor.detach())) for name, tensor in params_batch
    ]
    own = [(name, MultiprocessingSerializer.serialize(tensor)) for name, tensor in tensors]
    is_first = dist.get_rank() == ranks[0]
    gathered: list[Any] | None = [None] * len(ranks) if is_first else None
    dist.gather_object(own, gathered, dst=ranks[0], group=mesh.get_group())
    if gathered is None:
        return None
    named = [
        (of_ranks[0][0], LocalSerializedTensor([value for _, value in of_ranks]))
        for of_ranks in zip(*gathered, strict=True)
    ]
    entry = MultiprocessingSerializer.serialize(named)
    return await engine.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[entry] * len(ranks), load_format=load_format, flush_cache=flush_cache
        )
    )


def _preprocess_tensor_for_update_weights(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
