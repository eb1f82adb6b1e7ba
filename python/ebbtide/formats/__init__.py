"""Formats that trainers and engines share. This module, without torch: bodies of requests about tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, json

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Announcement:
    """The tensors of a broadcast: one entry per tensor in each list.

    Source: wire_api section 3.3, wire_vllm section 2.3.

    Attributes:
        dtypes: torch's names, with or without "torch.".
        load_format: None: one broadcast per tensor; "flattened_bucket": one of the bytes of all tensors;
            "packed": several such, see `packed_slices`; "sparse": two per tensor, positions and values.
        packed_buffer_bytes: limit of a packed broadcast.
        num_updates: with "sparse", the number of changed elements of each tensor.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    load_format: str | None = None
    packed_buffer_bytes: int = 1 << 30
    num_updates: Sequence[int] = ()


def packed_slices(sizes: Sequence[int], buffer_bytes: int) -> list[slice]:
    """The tensors of each packed broadcast: up to and including the one that exceeds the buffer.

    Args:
        sizes: bytes of each tensor.
    """
    slices, first, num_bytes = [], 0, 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes > buffer_bytes or index == len(sizes) - 1:
            slices.append(slice(first, index + 1))
            first, num_bytes = index + 1, 0
    return slices


class ChangedTensor(Struct, frozen=True, kw_only=True):
    """A tensor with elements that a delta changes. Source: wire_vllm section 5.5.

    A payload has the codes of all tensors in one tensor, concatenated in the order of the header; so are the
    values.

    Attributes:
        shape: of the whole tensor.
        num_codes: number of codes of its changed positions, see `encode_positions`.
        num_changed: number of changed elements.
        checksum: `state_sum` of the whole new tensor, 16 hexadecimal digits; None: not compared.
    """

    name: str
    shape: tuple[_Count, ...]
    num_codes: _Count
    num_changed: _Count
    checksum: str | None = None


class IpcTensor(Struct, frozen=True, kw_only=True):
    """A tensor that has its own IPC handle, or is in a buffer with others. Source: wire_vllm section 2.4.

    Attributes:
        num_bytes: bytes from its start to the next tensor's in the buffer; None: the bytes of its elements.
    """

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    num_bytes: _Count | None = None


def request_body(fields: Mapping[str, Any]) -> bytes:
    """Encode a request's fields as JSON. Bytes become base64."""
    return json.encode(fields, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert values that JSON does not have: sampling parameters, arrays of ids, dtypes."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
