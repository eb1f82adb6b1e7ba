"""What the header of a delta says of each tensor. Source: wire_vllm section 5.5."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class ChangedTensor(Struct, frozen=True, kw_only=True):
    """A tensor of which a delta changes some elements.

    Attributes:
        name: of the checkpoint.
        shape: of the whole tensor.
        num_codes: how many of the payload's codes say where, see `gap_coding`. Those of all tensors lie one
            behind the other, in the order of the header; so do the values.
        num_changed: how many of the payload's values are the new ones.
        checksum: of the whole tensor as it is to be, see `state_sum`: 16 hexadecimal digits; None: nobody
            compares it.
    """

    name: str
    shape: tuple[_Count, ...]
    num_codes: _Count
    num_changed: _Count
    checksum: str | None = None
