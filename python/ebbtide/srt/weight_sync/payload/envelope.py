"""The envelope of a weight payload: base64 and pickle around named tensors, buckets and their records.

Source: wire_api section 4.1.
"""

import base64
import binascii
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.payload.allowed_globals import (
    AnyStorageRef,
    kind_of,
    natural,
    recording,
    tensor_dtype,
    tensor_shape,
    text,
)
from ebbtide.srt.weight_sync.payload.bucket import FlattenedTensorMetadata
from ebbtide.srt.weight_sync.payload.pickle_reader import Budget, Record, read_by_slices, read_pickle
from ebbtide.srt.weight_sync.payload.tensor_list import MAGIC, decode_tensors

_STARTS: Final = (b"\x80", MAGIC)
_METADATA_FIELDS: Final = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")


@dataclass(frozen=True)
class LocalSerializedTensor:
    """One tensor for each tensor-parallel rank: `values[tp_rank]` is the raw pickle of that rank's."""

    values: list[bytes]


def raw_payload(entry: bytes | str) -> bytes:
    """Returns the pickle inside an entry: base64 text, or (bytes that begin 0x80) the pickle itself.

    Or a tensor list, which begins with `tensor_list.MAGIC`.
    """
    if isinstance(entry, bytes) and entry.startswith(_STARTS):
        return entry
    try:
        data = raw_base64(entry)
    except RequestRejected as error:
        if isinstance(entry, str):
            raise
        raise RequestRejected(
            "the payload is neither a pickle of protocol 2 or later (its first byte is not 0x80) nor base64"
        ) from error
    if not data.startswith(_STARTS):
        raise RequestRejected(
            "the payload is not a pickle of protocol 2 or later: its first byte is not 0x80"
        )
    return data


def raw_base64(entry: bytes | str) -> bytes:
    """Returns what base64 text stands for; raises `RequestRejected` when it is not base64."""
    try:
        return base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(f"the payload is not base64: {error}") from error


def decode_payload(data: bytes, note: Callable[[AnyStorageRef], None]) -> object:
    """Returns what a payload's pickle describes: plain values, `TensorRef`s, and records by class name.

    `note` is told of every reference to the sender's memory as it is read, so that those of a payload that
    is refused half-way can be given back. `LocalSerializedTensor` and `FlattenedTensorMetadata` arrive as
    `Record`s and are checked by `as_metadata` and `as_local_serialized`. Raises `RequestRejected`, which
    names the global, for anything outside wire_api section 4.4.
    """
    return decode_tensors(data, note) if data.startswith(MAGIC) else read_pickle(data, recording(note))


def decode_by_slices(
    data: bytes, note: Callable[[AnyStorageRef], None], budget: Budget
) -> Generator[int, None, object]:
    """As `decode_payload`, yielding the bytes of each slice: hundreds of tensors take long."""
    if data.startswith(MAGIC):
        return decode_tensors(data, note)
    return (yield from read_by_slices(data, recording(note), budget))


def as_metadata(value: object) -> FlattenedTensorMetadata:
    """Checks one element of a bucket's metadata: a record or a plain dict with exactly its six fields."""
    fields = record_fields(value, "FlattenedTensorMetadata", _METADATA_FIELDS)
    where = "FlattenedTensorMetadata"
    return FlattenedTensorMetadata(
        name=text(fields["name"], f"{where}.name"),
        shape=torch.Size(tensor_shape(fields["shape"], f"{where}.shape")),
        dtype=tensor_dtype(fields["dtype"], f"{where}.dtype"),
        start_idx=natural(fields["start_idx"], f"{where}.start_idx"),
        end_idx=natural(fields["end_idx"], f"{where}.end_idx"),
        numel=natural(fields["numel"], f"{where}.numel"),
    )


def as_local_serialized(value: Record) -> LocalSerializedTensor:
    """Checks a `LocalSerializedTensor` record: one field, a list of pickles as bytes."""
    fields = record_fields(value, "LocalSerializedTensor", ("values",))
    values = fields["values"]
    if not isinstance(values, list | tuple) or not all(isinstance(item, bytes) for item in values):
        raise RequestRejected("LocalSerializedTensor.values: expected a list of bytes, one per rank")
    return LocalSerializedTensor(values=list(values))


def record_fields(value: object, kind: str, expected: Sequence[str]) -> dict[str, Any]:
    """The fields of a record of this class or of a plain dictionary, which has to have exactly these."""
    if isinstance(value, Record) and value.name.rpartition(".")[2] == kind:
        fields = value.fields or {}
    elif isinstance(value, dict):
        fields = value
    else:
        raise RequestRejected(f"expected a {kind}, got {kind_of(value)}")
    if set(fields) != set(expected):
        raise RequestRejected(f"{kind}: expected exactly the fields {', '.join(expected)}")
    return fields
