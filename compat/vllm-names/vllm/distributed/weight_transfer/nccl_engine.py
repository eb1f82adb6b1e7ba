"""The trainer's end of weight transfer as vLLM had it before 0.28, which SkyRL calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    DEFAULT_PACKED_NUM_BUFFERS,
    packed_nccl_broadcast_producer,
)


def _tensor_of(item: tuple[str, Tensor]) -> Tensor:
    return item[1]


@dataclass
class NCCLTrainerSendWeightsArgs:
    """How weights are sent: `packed`, or a broadcast for each tensor."""

    group: PyNcclCommunicator
    src: int = 0
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor] = _tensor_of
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS


class NCCLWeightTransferEngine:
    """Its two functions for trainers."""

    trainer_init = staticmethod(trainer_init)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, Tensor]], trainer_args: Mapping[str, Any] | NCCLTrainerSendWeightsArgs
    ) -> None:
        """Broadcast the announced tensors, in the announced order."""
        if not isinstance(trainer_args, NCCLTrainerSendWeightsArgs):
            trainer_args = NCCLTrainerSendWeightsArgs(**trainer_args)
        args = trainer_args
        if args.packed:
            packed_nccl_broadcast_producer(
                iterator,
                args.group,
                args.src,
                args.post_iter_func,
                args.packed_buffer_size_bytes,
                args.packed_num_buffers,
            )
            return
        for item in iterator:
            args.group.broadcast(args.post_iter_func(item).contiguous(), args.src, args.stream)
