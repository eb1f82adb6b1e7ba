"""What each layer of a model stores of a request, and how layers are grouped to share page ids.

A model declares a spec for each of its layers. Layers with equal specs form *groups* of one size, so that
pages of all groups have the same size and come from one pool: a page holds the keys and values of some tokens
in all layers of one group. A request has a list of pages for each group. If a spec has a sliding window, a
request needs only the pages of its last tokens, and gives up the others as it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ebbtide.srt.distributed import Division, part_of


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of tokens.

    Attributes:
        num_heads, head_dim: of keys and of values.
        window: how many tokens a token attends to, itself included; None: all up to itself.
    """

    num_heads: int
    head_dim: int
    window: int | None = None

    @property
    def num_planes(self) -> int:
        """How many tensors a layer has in the pool: its keys and its values."""
        return 2

    @property
    def token_shape(self) -> tuple[int, int]:
        """The shape of a token in a plane: (heads, numbers per head)."""
        return self.num_heads, self.head_dim

    def of_rank(self, rank: int, size: int) -> Paged:
        """The spec with the heads of this rank out of `size`.

        Raises ConfigurationError: they cannot be divided.
        """
        _, count = part_of(rank, size, self.num_heads, Division.SHARED, "num_key_value_heads")
        return replace(self, num_heads=count)


@dataclass(frozen=True, slots=True)
class Latent:
    """What multi-head latent attention stores of a token: one row that all heads share.

    It begins with the rotated part of the key. The latent follows, which is both the rest of the key and the
    value: heads project their queries and outputs instead. Source: DeepSeek-V2,
    https://arxiv.org/abs/2405.04434.

    Attributes:
        rank: numbers of the latent.
        rope: numbers that are rotated.
    """

    rank: int
    rope: int

    @property
    def window(self) -> None:
        return None

    @property
    def num_planes(self) -> int:
        return 1

    @property
    def token_shape(self) -> tuple[int, int]:
        return 1, self.rope + self.rank

    def of_rank(self, rank: int, size: int) -> Latent:
        """The same on every rank, since every head reads the whole row."""
        return self


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state: tensors of fixed size per request, instead of something per token.

    Attributes:
        parts: the shape of each tensor and the name of its dtype; ranks divide the first dimension.
    """

    parts: tuple[tuple[tuple[int, ...], str], ...]


# What a layer stores per token; and anything that a layer may store.
TokenSpec = Paged | Latent
CacheSpec = TokenSpec | State

# The window of each group. A group of None keeps all pages.
Windows = tuple[int | None, ...]
WHOLE: Windows = (None,)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The layers of a model in groups.

    Attributes:
        layers_per_group: the last group of each spec may have fewer.
        windows: of each group; groups without a window come first.
        places: (group, number in the group) of each layer.
    """

    layers_per_group: int
    windows: Windows
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, specs: Sequence[TokenSpec]) -> CacheGroups:
        """Groups as large as the rarest spec: larger ones would leave its pages partly empty.

        Raises:
            ValueError: heads differ between layers; all pages must have one size.
        """
        if len({(spec.num_planes, spec.token_shape) for spec in specs}) > 1:
            raise ValueError("expected layers with the same number and size of KV heads")
        windows = sorted(
            {spec.window for spec in specs}, key=lambda window: (window is not None, window or 0)
        )
        size = min(sum(spec.window == window for spec in specs) for window in windows)
        group_windows: list[int | None] = []
        places = [(0, 0)] * len(specs)
        for window in windows:
            layers = [layer for layer, spec in enumerate(specs) if spec.window == window]
            for number, layer in enumerate(layers):
                places[layer] = (len(group_windows) + number // size, number % size)
            group_windows += [window] * -(-len(layers) // size)
        return cls(size, tuple(group_windows), tuple(places))


def first_needed(num_tokens: int, window: int | None, page_size: int) -> int:
    """The first page that the token after the first `num_tokens` attends to."""
    return 0 if window is None else max(0, num_tokens + 1 - window) // page_size
