"""Reading weights as they serve."""

from __future__ import annotations

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.ports import HandlerTable
from ebbtide.srt.managers.control.weight_ports import Weights
from ebbtide.srt.managers.io_struct import AnyReply, GetWeightsByNameReqInput, GetWeightsByNameReqOutput
from ebbtide.srt.memory_saver.tags import MemoryTag


class WeightReading:
    """Answers requests for single weights."""

    def __init__(self, weights: Weights, memory: MemoryOccupation) -> None:
        self._weights = weights
        self._memory = memory
        self.handlers: HandlerTable = {GetWeightsByNameReqInput: self.read}

    def read(self, request: GetWeightsByNameReqInput) -> AnyReply:
        """The first rows of a weight that serves."""
        if request.truncate_size < 0:
            raise RequestRejected(f"truncate_size: expected 0 or more rows, got {request.truncate_size}")
        name = self._weights.stored_as(request.name)
        if name in self._weights.names:
            if MemoryTag.WEIGHTS in self._memory.released:
                raise RequestRejected("the weights are released: resume them first", 409)
            if name in self._memory.content.missing:
                raise RequestRejected(
                    f"{name} is stale: it was not written since the weights were resumed", 409
                )
        return GetWeightsByNameReqOutput(values=self._weights.read(name, request.truncate_size))
