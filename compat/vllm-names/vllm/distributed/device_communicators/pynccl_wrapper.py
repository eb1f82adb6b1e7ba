"""The name by which vLLM's groups pickle the id of a communicator."""

from __future__ import annotations

import ctypes

from ebbtide.formats.nccl import UNIQUE_ID_BYTES


class ncclUniqueId(ctypes.Structure):
    """Where and by which key the ranks of an NCCL communicator meet."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)
