"""The class by whose name vLLM pickles the id of a communicator."""

from __future__ import annotations

import ctypes

from ebbtide.formats.nccl import UNIQUE_ID_BYTES


class ncclUniqueId(ctypes.Structure):
    """The id of an NCCL communicator, by which its ranks meet."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)
