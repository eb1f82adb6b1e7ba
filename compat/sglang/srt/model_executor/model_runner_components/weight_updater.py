"""One tensor per rank, serialized by each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.utils.common import MultiprocessingSerializer


@dataclass
class LocalSerializedTensor:
    """`values[tp_rank]` is that rank's tensor, as `MultiprocessingSerializer.serialize` makes it."""

    values: list[bytes]

    def get(self, rank: int) -> Any:
        """Open one rank's tensor."""
        return MultiprocessingSerializer.deserialize(self.values[rank])
