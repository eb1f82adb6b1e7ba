"""What each layer of a model keeps of a request, and which layers keep alike and so share page ids.

A model declares a spec for each of its layers. Layers with equal specs form *groups* of one size, so that the
pages of all groups are alike and come from one pool: a page holds the keys and values of some tokens in all
layers of one group. A request has a list of pages for each group. Where a spec has a window, a request needs
the pages of its last tokens alone, and gives the others up as it goes on.
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
        window: how many tokens a token attends to, itself among them; None: all up to itself.
    """

    num_heads: int
    head_dim: int
    window: int | None = None

    @property
    def num_planes(self) -> int:
        """Tensors of a layer in the pool: its keys and its values."""
        return 2

    @property
    def token_shape(self) -> tuple[int, int]:
        """What a token takes in a plane: heads, and numbers of a head."""
        return self.num_heads, self.head_dim

    def of_rank(self, rank: int, size: int) -> Paged:
        """With the heads that this one of `size` ranks holds.

        Raises ConfigurationError where they cannot be divided.
        """
        _, count = part_of(rank, size, self.num_heads, Division.SHARED, "num_key_value_heads")
        return replace(self, num_heads=count)


@dataclass(frozen=True, slots=True)
class Latent:
    """What multi-head latent attention keeps of a token: one row that all heads share.

    It begins with the rotated part of the key. The latent behind it is the rest of the key, and the value,
    where heads project queries and outputs instead. Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434.

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
        """Every rank has all of it, since every head reads all of it."""
        return self


@dataclass(frozen=True, slots=True)
class State:
    """Numbers of fixed size for each request, in place of something for each of its tokens.

    Attributes:
        parts: the shape of each tensor and the name of its dtype; ranks divide the first dimension.
    """

    parts: tuple[tuple[tuple[int, ...], str], ...]


# What a layer keeps of each token, and what it keeps at all.
TokenSpec = Paged | Latent
CacheSpec = TokenSpec | State

# The window of each group. A group of None keeps all pages.
Windows = tuple[int | None, ...]
WHOLE: Windows = (None,)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The layers of a model in groups.

    Attributes:
        layers_per_group: the last group with a spec may have fewer.
        windows: of each group; those that keep all pages come first.
        places: for each layer its group, and its number in that.
    """

    layers_per_group: int
    windows: Windows
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, specs: Sequence[TokenSpec]) -> CacheGroups:
        """Groups as large as the rarest spec fills: a page of a smaller one would be empty in part.

        Raises:
            ValueError: heads differ between layers: pages are of one size.
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
    """The first page that the token behind the first `num_tokens` attends to, where it is not its own."""
    return 0 if window is None else max(0, num_tokens + 1 - window) // page_size
