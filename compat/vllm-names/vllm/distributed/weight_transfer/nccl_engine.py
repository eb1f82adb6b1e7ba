"""The trainer's end of weight transfer as in vLLM before 0.28, for SkyRL."""

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
    """Options for sending weights. `packed`: several tensors per broadcast, otherwise one."""

    group: PyNcclCommunicator
    src: int = 0
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor] = _tensor_of
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS


class NCCLWeightTransferEngine:
    """The two functions for trainers."""

    trainer_init = staticmethod(trainer_init)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, Tensor]], trainer_args: Mapping[str, Any] | NCCLTrainerSendWeightsArgs
    ) -> None:
        """Broadcast the (name, tensor) pairs, in the order that was announced to the engine."""
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
