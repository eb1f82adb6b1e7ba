"""Tensors that were serialized by each rank, and a loader for models of the client's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.common import MultiprocessingSerializer

if TYPE_CHECKING:
    import torch


@dataclass
class LocalSerializedTensor:
    """A tensor of each rank. `values[tp_rank]` is made by `MultiprocessingSerializer.serialize`."""

    values: list[bytes]

    def get(self, rank: int) -> Any:
        """Deserialize a rank's tensor."""
        return MultiprocessingSerializer.deserialize(self.values[rank])


def _model_load_weights_direct(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write tensors to a model's parameters of the same names and shapes.

    Raises:
        ValueError: there is no such parameter, or its shape differs. Tensors before it have been written.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in named_tensors:
        if name not in parameters:
            raise ValueError(f"{name}: the model has no such parameter")
        if parameters[name].shape != tensor.shape:
            raise ValueError(
                f"{name}: expected shape {list(parameters[name].shape)}, got {list(tensor.shape)}"
            )
        parameters[name].detach().copy_(tensor)
