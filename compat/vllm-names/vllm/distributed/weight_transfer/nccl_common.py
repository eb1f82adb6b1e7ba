"""The rendezvous of a trainer with the ranks of an engine. Source: wire_vllm section 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup


def trainer_init(init_info: Mapping[str, Any]) -> PyNcclCommunicator:
    """Join as rank 0, on the current GPU, or on the CPU if there is none.

    Args:
        init_info: `master_address`, `master_port` and `world_size`, as in `/init_weight_transfer_engine`.
    """
    group = StatelessProcessGroup.create(
        init_info["master_address"], int(init_info["master_port"]), 0, init_info["world_size"]
    )
    has_gpu = torch.accelerator.is_available()
    device = torch.device("cuda", torch.accelerator.current_device_index()) if has_gpu else "cpu"
    return PyNcclCommunicator(group, device)
