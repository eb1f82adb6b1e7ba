"""How kernels divide their work: (card, operation, shape, number of tokens) → a tile, as data.

`tiles.json` has measured tiles: card → operation and shape → largest number of tokens → tile, written by
bench/gpu_small_batch.py and bench/gpu_moe.py. Cards with the same compute capability share them. For anything
else the rules here apply. `layers.step.Kernels` decides which kernel serves.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ebbtide.srt.layers.kernels.launch import card, cards_like, num_multiprocessors

_FILE = Path(__file__).with_name("tiles.json")


@cache
def _file() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    tiles: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(_FILE.read_text())
    return tiles


@cache
def _measured(key: str, device: torch.device) -> tuple[tuple[int, dict[str, Any]], ...]:
    """Largest numbers of tokens, ascending, with fields of tiles, measured on this card or on one like it."""
    cards = (card(device), *cards_like(device))
    rows = next((rows for each in cards if (rows := _file().get(each, {}).get(key))), {})
    return tuple(sorted((int(tokens), fields) for tokens, fields in rows.items()))


def keep(key: str, tiles: dict[int, Any], device: torch.device) -> None:
    """Write tiles that were measured on this device, by number of tokens, into the file."""
    rows = _file().setdefault(card(device), {}).setdefault(key, {})
    rows.update({str(tokens): asdict(tile) for tokens, tile in tiles.items()})
    _FILE.write_text(json.dumps(_file(), indent=1, sort_keys=True) + "\n")
    _measured.cache_clear()


# Products with 16-bit weights: `small_batch`.


@dataclass(frozen=True)
class Shape:
    """A product. `num_rows` are its outputs; a gated weight has twice as many rows."""

    num_rows: int
    num_columns: int
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in bfloat16."""
        return self.num_rows * self.num_columns * (2 if self.gated else 1) * 2

    @property
    def key(self) -> str:
        return f"rows={self.num_rows},columns={self.num_columns}{',gated' if self.gated else ''}"


@dataclass(frozen=True)
class MatvecConfig:
    """The tile for one token: the rows and columns of the weight per program and step, and its warps."""

    block_rows: int
    block_columns: int
    num_warps: int


@dataclass(frozen=True)
class ProductConfig:
    """The tile for several tokens.

    Attributes:
        block_rows, block_columns: the tile of the weight per iteration (of gates, and another one of ups).
        num_splits: into how many the columns are split; the last program of each block adds splits up.
        num_warps: warps of a program.
        num_stages: tiles in shared memory.
    """

    block_rows: int
    block_columns: int
    num_splits: int
    num_warps: int
    num_stages: int


Config = MatvecConfig | ProductConfig

TOKEN_BUCKETS = (1, 8, 16, 32, 64)
# Defaults: rows of a program, and the most splits.
_BLOCK_ROWS, _MOST_SPLITS = 64, 8


def token_bucket(num_tokens: int) -> int:
    """The smallest bucket for this many tokens."""
    return next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket)


def choose_product(num_tokens: int, shape: Shape, device: torch.device) -> Config:
    """The tile for a shape, measured for this many tokens or somewhat more; otherwise the default."""
    bucket = token_bucket(num_tokens)
    for most_tokens, fields in _measured(shape.key, device):
        if bucket == 1 == most_tokens:
            return MatvecConfig(**fields)
        if 1 < bucket <= most_tokens:
            return ProductConfig(**fields)
    return default_product(bucket, shape, num_multiprocessors(device))


def default_product(bucket: int, shape: Shape, num_multiprocessors: int) -> Config:
    """A tile for any shape, with enough splits to give each multiprocessor one program."""
    if bucket == 1:
        # 128 threads read 16 bytes each of 1,024 columns; a program has two such tiles in flight.
        block_columns = next((each for each in (1024, 512, 256) if shape.num_columns % each == 0), 1024)
        return MatvecConfig(4, block_columns, 4)
    if shape.gated:
        block_columns, num_stages = 128, 4
    else:
        block_columns, num_stages = (256, 3) if bucket <= 16 else (128, 5)
    num_blocks = -(-shape.num_rows // _BLOCK_ROWS)
    # With shorter splits, adding them up takes longer than splitting saves.
    most_splits = shape.num_columns // (512 if bucket <= 16 else 1024)
    num_splits = max(1, min(num_multiprocessors // num_blocks, most_splits, _MOST_SPLITS))
    return ProductConfig(_BLOCK_ROWS, block_columns, num_splits, 4, num_stages)


# Products with 8-bit weights, a scale for each block of 128 × 128: `small_batch.fp8_products`. These were the
# best of those tried on an H200.


@dataclass(frozen=True)
class StationaryConfig:
    """The tile for one token whose columns fit into the registers of a program.

    Attributes:
        block_rows: rows that all threads of a program read per step.
        num_steps: steps; all these rows must be in one row of blocks.
        num_warps: of a program.
    """

    block_rows: int
    num_steps: int
    num_warps: int


@dataclass(frozen=True)
class PassingConfig:
    """The tile for one token with more columns: a program's rows, and words per row and step."""

    block_rows: int
    block_words: int
    num_warps: int


@dataclass(frozen=True)
class QuantizedConfig:
    """The tile for tokens in 8 bits.

    Attributes:
        block_tokens, block_rows: of a program.
        num_splits: into how many the columns are split; with more than 1 a second kernel adds them up.
        num_warps, num_stages: warps of a program, tiles in shared memory.
    """

    block_tokens: int
    block_rows: int
    num_splits: int
    num_warps: int
    num_stages: int


_MAX_STATIONARY = 8192
_FEW_PROGRAMS = 100
# A split with at least this many groups of 128 columns is halved once more.
_LONG = 14


def choose_one(num_columns: int, *, gated: bool) -> StationaryConfig | PassingConfig:
    """The tile for one token, which is not quantised."""
    if num_columns > _MAX_STATIONARY:
        return PassingConfig(2, 512, 4) if gated else PassingConfig(4, 512, 8)
    return StationaryConfig(2, 2, 4) if gated else StationaryConfig(4, 2, 4)


def choose_quantized(num_tokens: int, num_rows: int, num_columns: int) -> QuantizedConfig:
    """The tile for several tokens: splits fill the device, but keep at least four groups of 128 columns."""
    tokens = max(16, 1 << (num_tokens - 1).bit_length())
    programs, groups, splits = num_rows // 128, num_columns // 128, 1
    while programs * splits < _FEW_PROGRAMS and groups % (2 * splits) == 0 and groups >= 8 * splits:
        splits *= 2
    if splits == 1:
        return QuantizedConfig(tokens, 128, 1, 8, 4)
    if groups % (2 * splits) == 0 and groups >= 2 * _LONG * splits:
        return QuantizedConfig(tokens, 128, 2 * splits, 8 if tokens == 32 else 4, 3)
    return (
        QuantizedConfig(tokens, 64, splits, 4, 5)
        if tokens == 64
        else QuantizedConfig(tokens, 128, splits, 8, 4)
    )


def gates_at_once(num_rows: int, num_columns: int) -> bool:
    """Whether the kernel that computes a gated product of this shape can quantise it too."""
    return choose_quantized(1, num_rows, num_columns).num_splits == 1


# Experts: `fused_moe`, `few_token_moe`, `fp8.moe`.


@dataclass(frozen=True)
class Tile:
    """The tile of one grouped product.

    Attributes:
        rows: rows of the weight per program (in the first product: of gates, and as many of ups).
        step: columns per iteration, along the summed dimension.
    """

    rows: int
    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """How the tokens of a batch are divided among programs.

    Attributes:
        block_tokens: tokens of one expert that a program multiplies, a power of two ≥ 16; 1: each token reads
            its experts' weights by itself.
    """

    block_tokens: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class Layer:
    """What plans depend on, besides the number of tokens and the dtype."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def key(self) -> str:
        return f"experts={self.num_experts},top={self.top_k},hidden={self.hidden},inner={self.inner}"


# Up to this many tokens, each reads its experts' weights by itself, since few share an expert.
FEW_TOKENS = 4
ONE_BY_ONE = Plan(1, Tile(2, 2048, 4, 1), Tile(4, 1024, 8, 1))
# Plans by `block_tokens`. With few tokens nearly all time goes into reading weights, so programs are small
# and many.
DEFAULTS = {
    16: Plan(16, Tile(64, 128, 4, 4), Tile(128, 64, 8, 5)),
    32: Plan(32, Tile(32, 128, 4, 4), Tile(128, 64, 8, 5)),
    64: Plan(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: Plan(128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
}
# A plan measured for n tokens is used for more than n / 4 and up to n tokens.
_REACH = 4
# float32 does not use tensor cores and takes twice the memory. This plan has to work, not to be fast.
WIDE = Plan(32, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))


def choose_plan(num_tokens: int, layer: Layer, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for a batch: a measured one if there is any, otherwise a default."""
    if dtype == torch.float32:
        return ONE_BY_ONE if num_tokens <= FEW_TOKENS else WIDE
    for most_tokens, fields in _measured(layer.key, device):
        if most_tokens // _REACH < num_tokens <= most_tokens:
            return Plan(fields["block_tokens"], Tile(**fields["gate_up"]), Tile(**fields["down"]))
    if num_tokens <= FEW_TOKENS:
        return ONE_BY_ONE
    # Blocks have room for one and a half times an expert's average share.
    room = 3 * num_tokens * layer.top_k // (2 * layer.num_experts)
    return DEFAULTS[next((size for size in DEFAULTS if room <= size), 128)]


@dataclass(frozen=True)
class FewPlan:
    """The tile for few tokens and 8-bit experts.

    Attributes:
        rows: rows of the first weight, of gates and as many of ups, that are read per step.
        steps: steps of a program; `rows` · `steps` divides 128.
        down_rows: rows of the second weight per program.
    """

    rows: int = 2
    steps: int = 2
    down_rows: int = 4
    num_warps: int = 4


def choose_fp8_plan(num_tokens: int, num_experts: int, top_k: int) -> FewPlan | int:
    """The tile for few tokens; for more, tokens per block, which is about 1.5 times an expert's share."""
    if num_tokens <= FEW_TOKENS:
        return FewPlan()
    room = 3 * num_tokens * top_k // (2 * num_experts)
    return 16 if room <= 24 else 32 if room <= 48 else 64
