"""FlashInfer's kernel for products of 8 bits: when it is taken and compiled; on a GPU, what comes of it."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fixtures.kernels import needs_gpu
from torch import Tensor

from ebbtide.srt.layers.fp8 import FP8, dequantize, quantize_into

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import nvrtc
from ebbtide.srt.layers.kernels.fp8 import blockscale
from ebbtide.srt.layers.kernels.fp8.blockscale import blockscale_product, choose_tile

Operands = tuple[Tensor, Tensor, Tensor, Tensor, int]


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU says that it is one, and the compiler's headers are found."""
    monkeypatch.setattr(blockscale, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(blockscale, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(blockscale, "_includes", lambda: ("-Iheaders",))
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (blockscale._kernels, blockscale._tell, blockscale._version):
        cached.cache_clear()


def operands(num_tokens: int, num_rows: int = 512, num_columns: int = 256) -> Operands:
    return (
        torch.zeros((256, num_columns), dtype=FP8),
        torch.zeros((num_columns // 128, 256)).t(),
        torch.zeros((num_rows, num_columns), dtype=FP8),
        torch.zeros((num_rows // 128, num_columns // 128)),
        num_tokens,
    )


@pytest.mark.parametrize("num_rows", [1024, 4096, 6144, 8448])
@pytest.mark.parametrize("num_columns", [2048, 14336, 53248])
@pytest.mark.parametrize("num_tokens", [2, 64, 65, 200, 256])
def test_a_tile_leaves_no_program_waiting_and_fits(num_rows: int, num_columns: int, num_tokens: int) -> None:
    tile = choose_tile(num_tokens, num_rows, num_columns, 132)

    assert tile is not None
    programs = -(-num_tokens // tile.block_tokens) * -(-num_rows // tile.block_rows)
    assert programs <= 132
    assert tile.shared_bytes(num_columns) <= nvrtc.MAX_SHARED_BYTES
    smaller = tile.block_rows - 16
    assert smaller == 0 or -(-num_tokens // tile.block_tokens) * -(-num_rows // smaller) > 132


def test_what_would_have_programs_wait_is_left_to_others() -> None:
    assert choose_tile(64, 28672, 4096, 132) is None
    assert choose_tile(256, 10240, 4096, 132) is None


def test_it_is_compiled_ahead_for_all_numbers_of_tokens_and_not_launched(
    an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text says whose headers it is compiled with: those of another version make another kernel."""
    texts: list[str] = []
    monkeypatch.setattr(nvrtc, "compiled", lambda text, options: texts.append(text))
    monkeypatch.setattr(blockscale, "version", {"flashinfer-python": "0.6.99"}.__getitem__)

    with ThreadPoolExecutor(2) as threads, nvrtc.compiling_ahead(threads):
        few, some, many = (blockscale_product(*operands(num_tokens)) for num_tokens in (32, 40, 8192))

    assert few is None
    assert many is None
    assert some is not None
    assert some.shape == (40, 512)
    # Of up to 64 tokens, and of more: of so few rows tiles are the same for 128 tokens and for 256.
    assert len(texts) == len(set(texts)) == 2
    assert all("FlashInfer 0.6.99" in text for text in texts)


def test_after_a_pass_of_any_size_no_other_waits_for_the_compiler(
    an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    launches: list[str] = []
    monkeypatch.setattr(
        nvrtc, "compiled", lambda text, options: texts.append(text) or b".text._Z15fp8_gemm_kernelv"
    )
    monkeypatch.setattr(nvrtc, "call", lambda name, *given: launches.append(name))
    monkeypatch.setattr(nvrtc, "current_stream", lambda device: 0)

    assert blockscale_product(*operands(8192)) is None
    assert len(texts) == 2
    for num_tokens in (40, 100, 200):
        assert blockscale_product(*operands(num_tokens)) is not None

    assert len(texts) == 2
    assert launches.count("cuLaunchKernel") == 3


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (b"", "no kernel fp8_gemm_kernel"),
        (b".text._Z15fp8_gemm_kernelv", "no binary for this GPU"),
        (RuntimeError("no cuda_bf16.h"), "no cuda_bf16.h"),
        (ImportError("no cuda.bindings"), "no cuda.bindings"),
        (PermissionError("the folder of kernels"), "the folder of kernels"),
    ],
    ids=str,
)
def test_where_it_cannot_be_had_others_multiply_and_one_line_says_so(
    an_h200: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: bytes | Exception,
    said: str,
) -> None:
    def compile_it(text: str, options: tuple[str, ...]) -> bytes:
        if isinstance(compiled, Exception):
            raise compiled
        return compiled

    def refuse(name: str, *arguments: object) -> None:
        raise RuntimeError(f"{name}: no binary for this GPU")

    monkeypatch.setattr(nvrtc, "compiled", compile_it)
    monkeypatch.setattr(nvrtc, "call", refuse)

    with caplog.at_level(logging.WARNING):
        with ThreadPoolExecutor(1) as threads, nvrtc.compiling_ahead(threads):
            blockscale_product(*operands(64))
        assert [blockscale_product(*operands(num_tokens)) for num_tokens in (64, 50, 200)] == [None] * 3

    assert [said in record.message for record in caplog.records] == [True]


def test_without_headers_others_multiply_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blockscale, "find_spec", lambda name: None)
    blockscale._includes.cache_clear()
    forget()

    with caplog.at_level(logging.WARNING):
        assert [blockscale._includes() for _ in range(2)] == [None, None]

    assert ["flashinfer" in record.message for record in caplog.records] == [True]
    blockscale._includes.cache_clear()


@needs_gpu
@pytest.mark.parametrize("num_tokens", [33, 64, 65, 130, 256])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(4096, 4096), (6144, 4096), (1040, 14336)])
def test_products(num_tokens: int, num_rows: int, num_columns: int) -> None:
    """The same bits again, too."""
    from ebbtide.srt.layers.kernels.fp8.product import quantize_tokens

    torch.manual_seed(5)
    weight = torch.randn(num_rows, num_columns, device="cuda") / num_columns**0.5
    values = torch.empty(weight.shape, dtype=FP8, device="cuda")
    scales = torch.empty((-(-num_rows // 128), num_columns // 128), device="cuda")
    padded = torch.zeros((-(-num_rows // 128) * 128, num_columns), device="cuda")
    padded[:num_rows] = weight
    whole = torch.empty(padded.shape, dtype=FP8, device="cuda")
    quantize_into(whole, scales, padded)
    values.copy_(whole[:num_rows])
    x_values, x_scales = quantize_tokens(torch.randn(num_tokens, num_columns, device="cuda").bfloat16())
    wide = x_values[:num_tokens].float().view(num_tokens, -1, 128) * x_scales[:num_tokens, :, None]
    expected = wide.flatten(1) @ dequantize(values, scales).T

    first, again = (blockscale_product(x_values, x_scales, values, scales, num_tokens) for _ in range(2))

    assert first is not None
    assert again is not None
    assert (first.float() - expected).norm() / expected.norm() < 8e-3
    assert torch.equal(first, again)
