"""Routed experts in the forms that clients read. Source: wire_vllm section 6.1."""

from __future__ import annotations

import base64
import io
from typing import Any, Literal, TypeAlias

import numpy as np

from ebbtide.srt.managers.io_struct import RoutedExperts

# "int32": base64 of the numbers alone. "npy": base64 of a file of numpy's. "packed": an object with `data`
# first, base64 of the smallest of uint8, int16 and int32 that holds them.
RoutedForm: TypeAlias = Literal["int32", "npy", "packed"]


def encoded(routed: RoutedExperts, form: RoutedForm) -> Any:
    """What an answer says of them."""
    rows = np.frombuffer(routed.data, dtype=routed.dtype).reshape(routed.shape)
    match form:
        case "int32":
            return _base64(rows.astype(np.int32).tobytes())
        case "npy":
            file = io.BytesIO()
            np.save(file, rows, allow_pickle=False)
            return _base64(file.getvalue())
        case "packed":
            largest = int(rows.max(initial=0))
            kind = "uint8" if largest < 256 else "int16" if largest < 1 << 15 else "int32"
            # Readers cut `data` out by its place: it comes first.
            return {"data": _base64(rows.astype(kind).tobytes()), "shape": list(routed.shape), "dtype": kind}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
