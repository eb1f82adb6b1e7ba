"""What a trainer says of its broadcasts. Source: wire_api section 3.3."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Announcement:
    """What the trainer says that it will broadcast: one entry per tensor in each list.

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
