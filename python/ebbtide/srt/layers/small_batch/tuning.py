"""Which block sizes each shape takes: what was measured, kept as data, or a rule.

`tiles.json`: card → shape → up to how many tokens → block sizes; bench/gpu_small_batch.py finds them.
Cards of one compute capability are taken to be alike.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ebbtide.srt.layers.kernels.launch import card, card_like

TILES_FILE = Path(__file__).with_name("tiles.json")


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
        """What the file of measured tiles calls it."""
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
        fold_norm: whether the norm is part of the product; otherwise it is a kernel before it.
    """

    block_rows: int
    block_columns: int
    num_splits: int
    num_warps: int
    num_stages: int
    fold_norm: bool


Config = MatvecConfig | ProductConfig

TOKEN_BUCKETS = (1, 8, 16, 32, 64)


def token_bucket(num_tokens: int) -> int:
    """The smallest bucket that holds as many tokens."""
    return next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket)


def choose(num_tokens: int, shape: Shape, device: torch.device) -> Config:
    """The block sizes for a shape: measured ones where there are any, for so many tokens or some more."""
    bucket = token_bucket(num_tokens)
    buckets = [larger for larger in TOKEN_BUCKETS if larger >= bucket] if bucket > 1 else [bucket]
    for name in (card(device), card_like(device)):
        for measured_bucket in buckets:
            tuned = measured(name).get((measured_bucket, shape.key))
            if tuned is not None:
                return tuned
    return default_config(bucket, shape)


@cache
def measured(card: str) -> Mapping[tuple[int, str], Config]:
    """(Bucket of tokens, shape's key) → what was the quickest on this card."""
    shapes = json.loads(TILES_FILE.read_text()).get(card, {})
    return {
        (int(bucket), key): MatvecConfig(**fields) if int(bucket) == 1 else ProductConfig(**fields)
        for key, buckets in shapes.items()
        for bucket, fields in buckets.items()
    }


def default_config(bucket: int, shape: Shape) -> Config:
    """Block sizes for any shape: enough programs for every multiprocessor, all of them resident at once."""
    if bucket == 1:
        # 128 threads read 16 bytes each of a row of 1,024; two such tiles are in flight per program.
        return MatvecConfig(4, min(1024, _block_columns(shape.num_columns, 1024)), 4)
    block_rows = 32 if bucket <= 8 and not shape.gated else 64
    num_programs = -(-shape.num_rows // block_rows)
    num_splits = 1
    # Two programs per multiprocessor keep the memory busy; below that columns are shared out.
    while num_splits < 8 and num_programs * num_splits < 192 and shape.num_columns // num_splits >= 1024:
        num_splits *= 2
    block_columns = _block_columns(shape.num_columns, 128)
    # Each program would scale its tokens again if the norm were folded: a kernel before is cheaper.
    num_stages = 4 if shape.gated else 5
    return ProductConfig(block_rows, block_columns, num_splits, 4, num_stages, fold_norm=False)


def _block_columns(num_columns: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides the columns, but a tile of 64 at least."""
    block = largest
    while block > 64 and num_columns % block:
        block //= 2
    return block
