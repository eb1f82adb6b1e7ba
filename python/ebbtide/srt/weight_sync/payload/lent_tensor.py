"""What a trainer says of a tensor that lies in memory which it lends. Source: wire_vllm section 2.4."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class LentTensor(Struct, frozen=True, kw_only=True):
    """A tensor behind a handle of its own, or one of several in a buffer.

    Attributes:
        name: of the checkpoint.
        dtype: as torch calls it.
        num_bytes: how far behind it the next one begins in the buffer; None: so many as it has.
    """

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    num_bytes: _Count | None = None
