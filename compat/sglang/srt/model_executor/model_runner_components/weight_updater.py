"""Tensors as an engine takes them: one per rank, serialized by each of them, or by parameter names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.utils.common import MultiprocessingSerializer

if TYPE_CHECKING:
    import torch


@dataclass
class LocalSerializedTensor:
    """`values[tp_rank]` is that rank's tensor, as `MultiprocessingSerializer.serialize` makes it."""

    values: list[bytes]

    def get(self, rank: int) -> Any:
        """Open one rank's tensor."""
        return MultiprocessingSerializer.deserialize(self.values[rank])


def _model_load_weights_direct(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write tensors to a model's parameters of the same names and shapes; for loaders of the client's own.

    Raises:
        ValueError: a name that is no parameter, or another shape. What came before it has been written.
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
