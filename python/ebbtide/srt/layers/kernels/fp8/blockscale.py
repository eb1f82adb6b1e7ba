"""Products of up to 256 tokens with 8-bit weights, by the kernel of FlashInfer's `fp8_blockscale_gemm_sm90`.

The kernel is DeepGEMM's (https://github.com/deepseek-ai/DeepGEMM), as in TensorRT-LLM. FlashInfer's host code
must be compiled with CUTLASS, and calls nvcc for each size of a weight. Here NVRTC compiles only the kernel,
with the tiles that the host code would choose.

Shapes: T tokens, K columns, O outputs, G = K / 128 groups.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ebbtide.srt.layers.kernels import nvrtc
from ebbtide.srt.layers.kernels.launch import compute_capability, num_multiprocessors

logger = logging.getLogger(__name__)

# On an H200, our kernels are faster for fewer tokens, and cuBLAS for more.
MIN_TOKENS, MAX_TOKENS = 33, 256
# One number of tokens for each different tile: up to 64, up to 128, and up to 256 tokens.
_BLOCKS_OF_TOKENS = (64, 128, 256)
_GROUP = 128
_OPTIONS = (
    "-default-device",
    "--ptxas-options=--register-usage-level=10",
    "--diag-suppress=161,174,177,940",
    "-D__FORCE_INCLUDE_CUDA_FP16_HPP_FROM_FP16_H__=1",
    "-D__FORCE_INCLUDE_CUDA_BF16_HPP_FROM_BF16_H__=1",
)
_TEXT = """// FlashInfer {flashinfer}
#define NVRTC_JIT_COMPILATION
#include <deep_gemm/nvrtc_std.cuh>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <deep_gemm/nvrtc_cutlass.cuh>
#include <deep_gemm/fp8_gemm_impl.cuh>
using namespace deep_gemm;
using Order = typename SchedulerSelector<
    GemmType::Normal, {rows}, {columns}, {block_tokens}, {block_rows}, 128, 1, 1>::type;
__global__ void unused() {{
  void* kernel = (void*)&fp8_gemm_kernel<
      {rows}, {columns}, {block_tokens}, {block_rows}, 128, 1, {num_stages}, 128, 128, 1, Order,
      NormalSchedulerInput>;
}}
"""


@dataclass(frozen=True)
class BlockTile:
    """The tile of a program.

    Attributes:
        block_tokens, block_rows: its size.
        num_stages: tiles in shared memory.
    """

    block_tokens: int
    block_rows: int
    num_stages: int

    def shared_bytes(self, num_columns: int) -> int:
        stage = self.block_tokens * (_GROUP + 4) + self.block_rows * _GROUP + 16
        # Tiles that do not divide a block of 128 rows may reach into two blocks, which have two scales.
        scales = num_columns // _GROUP * 4 * (1 if _GROUP % self.block_rows == 0 else 2)
        return self.block_tokens * self.block_rows * 2 + self.num_stages * stage + -(-scales // 8) * 8


def choose_tile(num_tokens: int, num_rows: int, num_columns: int, num_programs: int) -> BlockTile | None:
    """The tile with the most programs that all run at once; None: there is none.

    If programs had to compute several tiles one after the other, cuBLAS would be faster.
    """
    block_tokens = 64 if num_tokens <= 64 else 128
    token_blocks = -(-num_tokens // block_tokens)
    for block_rows in range(16, 129, 16):
        if token_blocks * -(-num_rows // block_rows) <= num_programs:
            for num_stages in (8, 7, 6, 5, 4) if _GROUP % block_rows == 0 else (6, 5, 4):
                tile = BlockTile(block_tokens, block_rows, num_stages)
                if tile.shared_bytes(num_columns) <= nvrtc.MAX_SHARED_BYTES:
                    return tile
    return None


def is_available(device: torch.device) -> bool:
    """Whether this kernel is available on a device."""
    return compute_capability(device) == (9, 0) and _includes() is not None


def blockscale_product(
    values_TK: Tensor, x_scales_TG: Tensor, weight_OK: Tensor, scales: Tensor, num_tokens: int
) -> Tensor | None:
    """x Wᵀ, [T, O] in bfloat16; None if other kernels are faster, or this one is not available.

    Args:
        values_TK, x_scales_TG: from `quantize_tokens`; they have padding rows.
        weight_OK, scales: an 8-bit weight with a scale for each block of 128 × 128; K is a multiple of 128.
    """
    device = weight_OK.device
    num_rows, num_columns = weight_OK.shape
    if num_rows % 16 or not is_available(device) or (includes := _includes()) is None:
        return None
    options = (*_OPTIONS, *includes)
    num_programs = num_multiprocessors(device)
    kernels: dict[BlockTile, nvrtc.Kernel] = {}
    if nvrtc.is_ahead():
        for each in _tiles(num_rows, num_columns, num_programs):
            nvrtc.compile_ahead(_text(each, num_rows, num_columns), options)
    else:
        kernels = _kernels(num_rows, num_columns, options, device)
    tile = choose_tile(num_tokens, num_rows, num_columns, num_programs)
    if tile is None or not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
        return None
    if nvrtc.is_ahead():
        return torch.empty((num_tokens, num_rows), dtype=torch.bfloat16, device=device)
    kernel = kernels.get(tile)
    if kernel is None:
        return None
    out_TO = torch.empty((num_tokens, num_rows), dtype=torch.bfloat16, device=device)
    padded_tokens = len(values_TK)
    box = min(tile.block_tokens, num_tokens), tile.block_rows
    scales_GT, groups = x_scales_TG.t(), num_columns // _GROUP
    map_of = nvrtc.TensorMap
    kernel.launch(
        num_programs,
        device,
        ctypes.c_uint64(out_TO.data_ptr()),
        ctypes.c_uint64(scales.data_ptr()),
        _Input(num_tokens, None),
        map_of(values_TK, (padded_tokens, num_columns), (tile.block_tokens, _GROUP), is_swizzled=True),
        map_of(weight_OK, (num_rows, num_columns), (tile.block_rows, _GROUP), is_swizzled=True),
        map_of(scales_GT, (groups, padded_tokens), (1, tile.block_tokens), is_swizzled=False),
        map_of(out_TO, (num_tokens, num_rows), box, is_swizzled=False),
    )
    return out_TO


class _Input(ctypes.Structure):
    """The kernel's argument of type NormalSchedulerInput."""

    _fields_ = (("num_tokens", ctypes.c_uint32), ("unused", ctypes.c_void_p))


def _text(tile: BlockTile, num_rows: int, num_columns: int) -> str:
    return _TEXT.format(flashinfer=_version(), rows=num_rows, columns=num_columns, **vars(tile))


@cache
def _version() -> str:
    """FlashInfer's version, part of the text because the headers of another one make another kernel."""
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "of unknown version"


def _tiles(num_rows: int, num_columns: int, num_programs: int) -> list[BlockTile]:
    """The tiles for all numbers of tokens, since prompts of any length may come later."""
    tiles = (choose_tile(most, num_rows, num_columns, num_programs) for most in _BLOCKS_OF_TOKENS)
    return [tile for tile in dict.fromkeys(tiles) if tile is not None]


@cache
def _kernels(
    num_rows: int, num_columns: int, options: tuple[str, ...], device: torch.device
) -> dict[BlockTile, nvrtc.Kernel]:
    """A weight's kernels, those that can be compiled. All at once, so that no later pass waits for them."""
    kernels = {}
    for tile in _tiles(num_rows, num_columns, num_multiprocessors(device)):
        threads = 128 * (1 + tile.block_tokens // 64)
        try:
            cubin = nvrtc.compiled(_text(tile, num_rows, num_columns), options)
            shared_bytes = tile.shared_bytes(num_columns)
            kernels[tile] = nvrtc.Kernel(cubin, "fp8_gemm_kernel", threads, shared_bytes)
        except (ImportError, OSError, RuntimeError) as error:
            _tell(f"it cannot be compiled or loaded: {error}")
    return kernels


@cache
def _includes() -> tuple[str, ...] | None:
    """Compiler options to find FlashInfer's headers, and CUDA's, which come with Triton; None: not found."""
    folders = []
    for package, below, header in (
        ("flashinfer", "data/csrc/nv_internal/tensorrt_llm", "deep_gemm/fp8_gemm_impl.cuh"),
        ("triton", "backends/nvidia/include", "cuda_bf16.h"),
    ):
        spec = find_spec(package)
        folder = Path(spec.origin).parent / below if spec is not None and spec.origin is not None else None
        if folder is None or not (folder / header).is_file():
            _tell(f"{package} has no {header}")
            return None
        folders.append(f"-I{folder}")
    return tuple(folders)


@cache
def _tell(why: str) -> None:
    """Log once why the kernel is not used, not once for each size of a weight."""
    logger.warning("FlashInfer's kernel for products of 8 bits is not used, others are: %s", why)
