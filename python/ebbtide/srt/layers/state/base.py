"""What layers that keep a state of each request are handed with a pass.

Shapes: R requests, P prompts, or pieces of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup

# Tokens that a layer with a state takes at once.
PIECE_TOKENS = 64
# Added to the sum of squares of a key or a query before it is made a unit vector.
KEY_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateStep:
    """The requests of a pass, as layers that keep a state see them.

    A request's state is that behind all tokens before its first new one; before position 0 it is zero,
    whatever its slot holds. Layers leave there the state behind the last new token.

    Attributes:
        layers: of each such layer its tensors, [slots, *shape]: see `StatePool`.
        slots_R: int64, the slot of each request.
        num_decoding: requests with one new token, which come first, as many tokens.
        indptr_P1: int32, first new token of each of the other requests, and the end.
        lens_P: how many those are.
        pieces_P3: int32, those tokens in pieces of at most `PIECE_TOKENS` of one request: first token, count,
            number of the request.
    """

    layers: Sequence[tuple[Tensor, ...]]
    slots_R: Tensor
    num_decoding: int
    indptr_P1: Tensor | None = None
    lens_P: Sequence[int] = ()
    pieces_P3: Tensor | None = None


class StateLayer(nn.Module):
    """A layer that keeps a state of each request.

    Args:
        number: of the layer, among those with states.

    Attributes:
        group: the ranks that divide the heads among them.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.group = ParallelGroup()
