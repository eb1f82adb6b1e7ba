"""What a trainer and an engine both speak. Here, without torch: requests, and what they say of tensors."""

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
        dtypes: as torch spells them, with or without "torch.".
        load_format: None for one broadcast per tensor; "flattened_bucket" for one of all their bytes;
            "packed" for several of those, cut by `packed_buffer_bytes`; "sparse" for two per tensor, the
            positions of `num_updates` elements and their values.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    load_format: str | None = None
    packed_buffer_bytes: int = 1 << 30
    num_updates: Sequence[int] = ()


def packed_slices(sizes: Sequence[int], buffer_bytes: int) -> list[slice]:
    """Which tensors each packed broadcast holds: up to the one with which they exceed the buffer."""
    slices, first, num_bytes = [], 0, 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes > buffer_bytes or index == len(sizes) - 1:
            slices.append(slice(first, index + 1))
            first, num_bytes = index + 1, 0
    return slices


class ChangedTensor(Struct, frozen=True, kw_only=True):
    """A tensor of which a delta changes some elements. Source: wire_vllm section 5.5.

    Attributes:
        shape: of the whole tensor.
        num_codes: how many of the payload's codes say where, see `encode_positions`. Those of all tensors lie
            one behind the other, in the order of the header; so do the values.
        num_changed: how many of the payload's values are the new ones.
        checksum: the `state_sum` of the whole tensor as it is to be, 16 hexadecimal digits; None: not
            compared.
    """

    name: str
    shape: tuple[_Count, ...]
    num_codes: _Count
    num_changed: _Count
    checksum: str | None = None


class IpcTensor(Struct, frozen=True, kw_only=True):
    """A tensor behind a handle of its own, or one of several in a buffer. Source: wire_vllm section 2.4.

    Attributes:
        num_bytes: from its beginning to that of the next one in the buffer; None: as many as it has.
    """

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    num_bytes: _Count | None = None


def request_body(fields: Mapping[str, Any]) -> bytes:
    """The JSON of a request's fields; bytes, as payloads are, become base64."""
    return json.encode(fields, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no word for: sampling parameters, arrays of ids, dtypes."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
