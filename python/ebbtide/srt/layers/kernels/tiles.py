"""How kernels cut their work: (card, operation, shape, number of tokens) → a tile, as data.

`tiles.json` keeps what was measured: card → operation and shape → up to how many tokens → tile.
bench/gpu_small_batch.py and bench/gpu_moe.py measure it. Cards of one compute capability are taken to be
alike. What is not in it takes the rules here. Which kernel serves is said by `layers.step.Kernels`.
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
    """Upper bounds of tokens, ascending, and fields of tiles: of this card, or else of one like it."""
    cards = (card(device), *cards_like(device))
    rows = next((rows for each in cards if (rows := _file().get(each, {}).get(key))), {})
    return tuple(sorted((int(tokens), fields) for tokens, fields in rows.items()))


def keep(key: str, tiles: dict[int, Any], device: torch.device) -> None:
    """Write tiles by number of tokens, measured on this device, into the file."""
    rows = _file().setdefault(card(device), {}).setdefault(key, {})
    rows.update({str(tokens): asdict(tile) for tokens, tile in tiles.items()})
    _FILE.write_text(json.dumps(_file(), indent=1, sort_keys=True) + "\n")
    _measured.cache_clear()


# Products of 16 bits: `small_batch`.


@dataclass(frozen=True)
class Shape:
    """A product. `num_rows` are outputs; a gated weight holds twice as many rows."""

    num_rows: int
    num_columns: int
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, bfloat16."""
        return self.num_rows * self.num_columns * (2 if self.gated else 1) * 2

    @property
    def key(self) -> str:
        return f"rows={self.num_rows},columns={self.num_columns}{',gated' if self.gated else ''}"


@dataclass(frozen=True)
class MatvecConfig:
    """How one token is multiplied: the weight tile of a program, and the warps that share it."""

    block_rows: int
    block_columns: int
    num_warps: int


@dataclass(frozen=True)
class ProductConfig:
    """How several tokens are multiplied.

    Attributes:
        block_rows, block_columns: the weight tile of one iteration (of gates, and again of ups).
        num_splits: parts into which the columns are divided; more than one need a second kernel.
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
# By default: rows of a program, and the most parts that columns are divided into.
_BLOCK_ROWS, _MOST_SPLITS = 64, 8


def token_bucket(num_tokens: int) -> int:
    """The smallest bucket that holds as many tokens."""
    return next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket)


def choose_product(num_tokens: int, shape: Shape, device: torch.device) -> Config:
    """The block sizes for a shape: measured ones where there are any, for this many tokens or some more."""
    bucket = token_bucket(num_tokens)
    for most_tokens, fields in _measured(shape.key, device):
        if bucket == 1 == most_tokens:
            return MatvecConfig(**fields)
        if 1 < bucket <= most_tokens:
            return ProductConfig(**fields)
    return default_product(bucket, shape, num_multiprocessors(device))


def default_product(bucket: int, shape: Shape, num_multiprocessors: int) -> Config:
    """Block sizes for any shape: as many parts of the columns as give each multiprocessor one program."""
    if bucket == 1:
        # 128 threads read 16 bytes each of a row of 1,024; two such tiles are in flight per program.
        block_columns = next((each for each in (1024, 512, 256) if shape.num_columns % each == 0), 1024)
        return MatvecConfig(4, block_columns, 4)
    if shape.gated:
        block_columns, num_stages = 128, 4
    else:
        block_columns, num_stages = (256, 3) if bucket <= 16 else (128, 5)
    num_blocks = -(-shape.num_rows // _BLOCK_ROWS)
    # Shorter parts take longer to be added up than they save.
    most_splits = shape.num_columns // (512 if bucket <= 16 else 1024)
    num_splits = max(1, min(num_multiprocessors // num_blocks, most_splits, _MOST_SPLITS))
    return ProductConfig(_BLOCK_ROWS, block_columns, num_splits, 4, num_stages)


# Products of 8 bits by blocks of 128 × 128: `small_batch.fp8_products`. The best of those tried on an H200.


@dataclass(frozen=True)
class StationaryConfig:
    """How one token is multiplied whose columns fit into the registers of a program's threads.

    Attributes:
        block_rows: that are read at once, by all threads of a program.
        num_steps: how often; all of these rows lie in one row of blocks.
        num_warps: of a program.
    """

    block_rows: int
    num_steps: int
    num_warps: int


@dataclass(frozen=True)
class PassingConfig:
    """How one token of more columns is multiplied: rows of a program, and words of each read at once."""

    block_rows: int
    block_words: int
    num_warps: int


@dataclass(frozen=True)
class QuantizedConfig:
    """How tokens of 8 bits are multiplied.

    Attributes:
        block_tokens, block_rows: of a program.
        num_splits: parts into which the columns are divided; more than one need a second kernel.
        num_warps, num_stages: warps of a program, tiles in shared memory.
    """

    block_tokens: int
    block_rows: int
    num_splits: int
    num_warps: int
    num_stages: int


_MAX_STATIONARY = 8192
_FEW_PROGRAMS = 100
# Groups of a part of the columns from which on it is worth being halved.
_LONG = 14


def choose_one(num_columns: int, *, gated: bool) -> StationaryConfig | PassingConfig:
    """For one token, which keeps its precision."""
    if num_columns > _MAX_STATIONARY:
        return PassingConfig(2, 512, 4) if gated else PassingConfig(4, 512, 8)
    return StationaryConfig(2, 2, 4) if gated else StationaryConfig(4, 2, 4)


def choose_quantized(num_tokens: int, num_rows: int, num_columns: int) -> QuantizedConfig:
    """For several tokens: programs for every multiprocessor, of four groups at least."""
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
    """Whether a gated product of this shape can be quantised by the kernel that computes it."""
    return choose_quantized(1, num_rows, num_columns).num_splits == 1


# Experts: `fused_moe`, `few_token_moe`, `fp8.moe`.


@dataclass(frozen=True)
class Tile:
    """How one product is cut.

    Attributes:
        rows: weight rows of a program (for gate and up: of each).
        step: columns taken at once along the summed dimension.
    """

    rows: int
    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """How a batch is cut.

    Attributes:
        block_tokens: tokens of one expert that a program multiplies, a power of two ≥ 16; 1: each token
            reads the weights of its experts by itself.
    """

    block_tokens: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class Layer:
    """What plans depend on, besides the number of tokens."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def key(self) -> str:
        return f"experts={self.num_experts},top={self.top_k},hidden={self.hidden},inner={self.inner}"


# Up to this many tokens each reads the weights of its experts by itself: few have an expert in common.
FEW_TOKENS = 4
ONE_BY_ONE = Plan(1, Tile(2, 2048, 4, 1), Tile(4, 1024, 8, 1))
# Plans by the number of tokens in a block. If these are few, all the time goes into reading weights, so there
# are many small programs.
DEFAULTS = {
    16: Plan(16, Tile(64, 128, 4, 4), Tile(128, 64, 8, 5)),
    32: Plan(32, Tile(32, 128, 4, 4), Tile(128, 64, 8, 5)),
    64: Plan(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: Plan(128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
}
# What was measured for a number of tokens serves from a fourth of it on.
_REACH = 4
# float32 has no tensor cores and takes twice the room: it has to work, not to be quick.
WIDE = Plan(32, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))


def choose_plan(num_tokens: int, layer: Layer, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for a batch: what was measured where there is any."""
    if dtype == torch.float32:
        return ONE_BY_ONE if num_tokens <= FEW_TOKENS else WIDE
    for most_tokens, fields in _measured(layer.key, device):
        if most_tokens // _REACH < num_tokens <= most_tokens:
            return Plan(fields["block_tokens"], Tile(**fields["gate_up"]), Tile(**fields["down"]))
    if num_tokens <= FEW_TOKENS:
        return ONE_BY_ONE
    # Room for half as much again as an expert's share.
    room = 3 * num_tokens * layer.top_k // (2 * layer.num_experts)
    return DEFAULTS[next((size for size in DEFAULTS if room <= size), 128)]


@dataclass(frozen=True)
class FewPlan:
    """How few tokens are cut for experts of 8 bits.

    Attributes:
        rows: of the first weight, gates and ups, that are read at once.
        steps: how often by one program; `rows` · `steps` divides 128.
        down_rows: of the second weight that a program has.
    """

    rows: int = 2
    steps: int = 2
    down_rows: int = 4
    num_warps: int = 4


def choose_fp8_plan(num_tokens: int, num_experts: int, top_k: int) -> FewPlan | int:
    """Few tokens one by one; of others how many a block has, with half as much again as an expert's share."""
    if num_tokens <= FEW_TOKENS:
        return FewPlan()
    room = 3 * num_tokens * top_k // (2 * num_experts)
    return 16 if room <= 24 else 32 if room <= 48 else 64
