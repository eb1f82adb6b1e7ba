"""Which block sizes each shape takes. `bench/gpu_small_batch.py` finds them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A product. `num_rows` are outputs; a gated weight holds twice as many rows."""

    num_rows: int
    num_columns: int
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, bfloat16."""
        return self.num_rows * self.num_columns * (4 if self.gated else 2)


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

# What the sweep found on an H200 for (upper bound of tokens, shape).
TUNED: Mapping[tuple[int, Shape], Config] = {
    (1, Shape(6144, 4096, False)): MatvecConfig(block_rows=8, block_columns=1024, num_warps=4),
    (1, Shape(4096, 4096, False)): MatvecConfig(block_rows=2, block_columns=1024, num_warps=4),
    (1, Shape(14336, 4096, True)): MatvecConfig(block_rows=4, block_columns=512, num_warps=2),
    (1, Shape(4096, 14336, False)): MatvecConfig(block_rows=2, block_columns=1024, num_warps=4),
    (1, Shape(128256, 4096, False)): MatvecConfig(block_rows=4, block_columns=2048, num_warps=4),
    (1, Shape(4096, 1024, False)): MatvecConfig(block_rows=4, block_columns=1024, num_warps=1),
    (1, Shape(1024, 2048, False)): MatvecConfig(block_rows=2, block_columns=2048, num_warps=4),
    (1, Shape(3072, 1024, True)): MatvecConfig(block_rows=2, block_columns=1024, num_warps=1),
    (1, Shape(1024, 3072, False)): MatvecConfig(block_rows=2, block_columns=1024, num_warps=4),
    (1, Shape(151936, 1024, False)): MatvecConfig(block_rows=4, block_columns=1024, num_warps=4),
    (8, Shape(6144, 4096, False)): ProductConfig(
        block_rows=32, block_columns=128, num_splits=2, num_warps=4, num_stages=7, fold_norm=False
    ),
    (8, Shape(4096, 4096, False)): ProductConfig(
        block_rows=32, block_columns=256, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (8, Shape(14336, 4096, True)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=1, num_warps=4, num_stages=4, fold_norm=False
    ),
    (8, Shape(4096, 14336, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (8, Shape(128256, 4096, False)): ProductConfig(
        block_rows=32, block_columns=128, num_splits=1, num_warps=4, num_stages=7, fold_norm=False
    ),
    (8, Shape(4096, 1024, False)): ProductConfig(
        block_rows=32, block_columns=256, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (8, Shape(1024, 2048, False)): ProductConfig(
        block_rows=32, block_columns=128, num_splits=4, num_warps=4, num_stages=7, fold_norm=False
    ),
    (8, Shape(3072, 1024, True)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=4, fold_norm=False
    ),
    (8, Shape(1024, 3072, False)): ProductConfig(
        block_rows=32, block_columns=128, num_splits=4, num_warps=4, num_stages=7, fold_norm=False
    ),
    (8, Shape(151936, 1024, False)): ProductConfig(
        block_rows=32, block_columns=128, num_splits=1, num_warps=4, num_stages=7, fold_norm=False
    ),
    (32, Shape(6144, 4096, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=1, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(4096, 4096, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(14336, 4096, True)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=1, num_warps=4, num_stages=4, fold_norm=False
    ),
    (32, Shape(4096, 14336, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(128256, 4096, False)): ProductConfig(
        block_rows=128, block_columns=128, num_splits=1, num_warps=8, num_stages=4, fold_norm=False
    ),
    (32, Shape(4096, 1024, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(1024, 2048, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=4, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(3072, 1024, True)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(1024, 3072, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=4, num_warps=4, num_stages=5, fold_norm=False
    ),
    (32, Shape(151936, 1024, False)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=1, num_warps=4, num_stages=8, fold_norm=False
    ),
    (64, Shape(6144, 4096, False)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=1, num_warps=4, num_stages=8, fold_norm=False
    ),
    (64, Shape(4096, 4096, False)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=2, num_warps=4, num_stages=8, fold_norm=False
    ),
    (64, Shape(14336, 4096, True)): ProductConfig(
        block_rows=128, block_columns=64, num_splits=1, num_warps=8, num_stages=4, fold_norm=False
    ),
    (64, Shape(4096, 14336, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (64, Shape(128256, 4096, False)): ProductConfig(
        block_rows=128, block_columns=128, num_splits=1, num_warps=8, num_stages=4, fold_norm=False
    ),
    (64, Shape(4096, 1024, False)): ProductConfig(
        block_rows=64, block_columns=128, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (64, Shape(1024, 2048, False)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=4, num_warps=4, num_stages=8, fold_norm=False
    ),
    (64, Shape(3072, 1024, True)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=2, num_warps=4, num_stages=5, fold_norm=False
    ),
    (64, Shape(1024, 3072, False)): ProductConfig(
        block_rows=64, block_columns=64, num_splits=4, num_warps=4, num_stages=8, fold_norm=False
    ),
    (64, Shape(151936, 1024, False)): ProductConfig(
        block_rows=128, block_columns=128, num_splits=1, num_warps=8, num_stages=4, fold_norm=False
    ),
}

TOKEN_BUCKETS = (1, 8, 32, 64)


def token_bucket(num_tokens: int) -> int:
    """The smallest bucket that holds as many tokens."""
    return next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket)


def choose(num_tokens: int, shape: Shape) -> Config:
    """The block sizes for a shape: measured ones where there are any."""
    bucket = token_bucket(num_tokens)
    tuned = TUNED.get((bucket, shape))
    return tuned if tuned is not None else default_config(bucket, shape)


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
