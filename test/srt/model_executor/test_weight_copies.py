"""Copies into the weights, and the search for NaN and Inf in them: gathered in a kernel, and one by one."""

import math
import os
from itertools import product

import pytest
import torch

from ebbtide.srt.layers.fp8 import FP8, dequantize, quantize_into
from ebbtide.srt.model_executor import weight_copies
from ebbtide.srt.model_executor.weight_copies import (
    EXPONENTS,
    LOOKED_AT_ONCE,
    Destination,
    NonFinite,
    Run,
    WeightCopies,
)

HAS_GPU = torch.cuda.is_available()  # noqa: TID251
BFLOAT16, HALF, FLOAT, BYTES = torch.bfloat16, torch.float16, torch.float32, torch.uint8


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs: in Triton's interpreter where there is no GPU."""
    if (request.param == "cuda") != HAS_GPU:
        pytest.skip("the kernel is interpreted where there is no GPU")
    if not HAS_GPU:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    language = pytest.importorskip("triton.language")
    if not HAS_GPU and type(language.sum).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported before TRITON_INTERPRET was set")
    return torch.device(request.param, 0) if HAS_GPU else torch.device("cpu")


def test_planned_copies_bring_every_byte_and_name_what_is_not_finite(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide.srt.layers.kernels import copy_spans

    monkeypatch.setattr(weight_copies, "LAUNCH_BYTES", 1_000_000)
    monkeypatch.setattr(copy_spans, "PIECES", 2)
    monkeypatch.setattr(copy_spans, "ROW_BYTES", 2 * copy_spans.PIECE_BYTES)
    tensors = {
        "pieces": torch.randn(400_000).to(BFLOAT16),
        "short": torch.tensor([6e4, -6e4, 0, 0, 0, 0, 0, math.inf], dtype=HALF),
        "last of many": torch.cat([torch.full((99_999,), 3e38), torch.tensor([math.nan])]),
        "bytes": torch.full((320,), 255, dtype=BYTES),
        "upper half": torch.tensor([1.0, -math.inf, *[2.0] * 14], dtype=BFLOAT16),
    }
    part = torch.arange(64, dtype=FLOAT).to(device)
    sources = {name: tensor.to(device) for name, tensor in tensors.items()}
    arena = torch.zeros(4 << 20, dtype=BYTES, device=device)
    copies, end, bounds = WeightCopies(device), 0, []
    # Where two have one name, the later one counts.
    assert copies.plan("short", part, Run(1 << 20, 16, 0, FLOAT), arena.data_ptr())
    for name, tensor in sources.items():
        assert copies.plan(name, tensor, Run(end, tensor.nbytes, 0, tensor.dtype), arena.data_ptr())
        bounds.append((end, end + tensor.nbytes))
        end += tensor.nbytes
    # A rank's part of a tensor: its rows from 32 on.
    assert copies.plan("part", part, Run(end, 64, 128, FLOAT), arena.data_ptr())
    # And its columns from 8 on, of several programs' rows.
    wide = torch.randn(20_000, 40).to(BFLOAT16)
    wide[19_000, 8], wide[5, 7], wide[6, 24] = torch.nan, torch.nan, torch.inf
    columns = wide[:, 8:24].contiguous()
    sources["wide"] = wide.to(device)
    lines = Run(2 << 20, columns.nbytes, 16, BFLOAT16, 32, 80)
    assert copies.plan("wide", sources["wide"], lines, arena.data_ptr())

    assert copies.prepare(arena.data_ptr()) is not None
    kernels = list(copies.launch())
    assert (sum(kernels), len(kernels)) == (end + 64 + columns.nbytes, 3)

    torch.zeros(1, device=device).item()  # everything that was launched has run
    assert sorted(copies.nonfinite()) == ["last of many", "short", "upper half", "wide"]
    for tensor, (start, stop) in zip(tensors.values(), bounds, strict=True):
        assert torch.equal(arena[start:stop].cpu(), tensor.view(BYTES))
    assert torch.equal(arena[end : end + 64].cpu(), part[32:48].view(BYTES).cpu())
    assert torch.equal(arena[2 << 20 :][: columns.nbytes].cpu(), columns.flatten().view(BYTES))
    assert not arena[end + 64 : 2 << 20].any()


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """Of each pattern of bits one; of 32 bits those with few ones, or few zeros, at either end."""
    if dtype == FLOAT:
        few = [sign << 31 | (1 << n) - 1 << m for sign in (0, 1) for n in range(32) for m in range(32 - n)]
        return torch.tensor(few).to(torch.int32).view(dtype)
    num_bits = 8 * dtype.itemsize
    return torch.arange(1 << num_bits).to({8: BYTES, 16: torch.int16}[num_bits]).view(dtype)


@pytest.mark.parametrize("dtype", list(EXPONENTS), ids=str)
def test_a_planned_copy_tells_each_number_that_is_not_finite_from_all_that_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    from ebbtide.srt.layers.kernels import copy_spans

    # One program for each of them: most would have nothing to do.
    monkeypatch.setattr(copy_spans, "PIECES", 1)
    monkeypatch.setattr(copy_spans, "ROW_BYTES", copy_spans.PIECE_BYTES)
    numbers = every_number(dtype)
    is_finite = numbers.to(FLOAT).isfinite()
    good, bad = numbers.view(BYTES).view(-1, dtype.itemsize)[is_finite], numbers[~is_finite]
    padding = torch.zeros(-good.numel() % 16, dtype=BYTES)
    places, sources = range(4 // dtype.itemsize), {}
    # Each number at each place in a word of 32 bits; and of the others some, beside numbers nearly like them.
    for place in places:
        sources[f"good at {place}"] = torch.cat([good.roll(place, 0).flatten(), padding]).view(dtype)
    for number, place in product({0, len(bad) // 2, len(bad) - 1}, places):
        beside = good[-1].repeat(16 // dtype.itemsize).view(dtype)
        beside[place] = bad[number]
        sources[f"bad {number} at {place}"] = beside
    sources = {name: tensor.to(device) for name, tensor in sources.items()}
    arena, copies, end = torch.zeros(1 << 20, dtype=BYTES, device=device), WeightCopies(device), 0
    for name, tensor in sources.items():
        assert copies.plan(name, tensor, Run(end, tensor.nbytes, 0, dtype), arena.data_ptr())
        end += tensor.nbytes
    assert copies.prepare(arena.data_ptr()) is not None
    assert sum(copies.launch()) == end

    torch.zeros(1, device=device).item()  # everything that was launched has run
    assert copies.nonfinite() == [name for name in sources if name.startswith("bad")]
    copied = torch.cat([tensor.view(BYTES) for tensor in sources.values()])
    assert torch.equal(arena[:end], copied)


def test_what_was_planned_of_one_run_of_memory_is_good_for_another(device: torch.device) -> None:
    runs = [torch.randn(2 * 65_536).to(BFLOAT16).to(device) for _ in range(2)]
    runs[1][-1] = torch.nan
    arenas = [torch.zeros(1 << 20, dtype=BYTES, device=device) for _ in range(3)]

    def plan(run: torch.Tensor, arena: torch.Tensor) -> tuple[WeightCopies, weight_copies.PlannedSpans]:
        copies, plain = WeightCopies(device), run[65_536:]
        values, scales = arena[:65_536].view(FP8), arena[65_536 : 65_536 + 16].view(FLOAT)
        assert copies.plan("plain", plain, Run(1 << 19, plain.nbytes, 0, BFLOAT16), arena.data_ptr())
        weight = run[:65_536].view(256, 256)
        assert copies.plan_quantized("weight", weight, values.view(256, 256), scales.view(2, 2))
        planned = copies.prepare(arena.data_ptr(), run.data_ptr())
        assert planned is not None
        return copies, planned

    _, planned = plan(runs[0], arenas[0])
    assert planned.is_for(runs[1].data_ptr())
    assert not planned.is_for(runs[1].data_ptr() + 2)
    made, _ = plan(runs[1], arenas[2])
    sizes = list(made.launch())
    for _ in range(2):  # elsewhere, and then there again
        moved = WeightCopies(device)
        moved.take(planned, arenas[1].zero_().data_ptr(), runs[1].data_ptr())
        assert not any(ready.found_S.any() for ready in planned.ready)
        assert list(moved.launch()) == sizes

        torch.zeros(1, device=device).item()  # everything that was launched has run
        assert moved.nonfinite() == made.nonfinite() == ["plain"]
        assert torch.equal(arenas[1], arenas[2])
        assert arenas[1].any()
        assert not arenas[0].any()


def test_planned_weights_of_8_bits_are_those_of_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_copies, "LAUNCH_BYTES", 500_000)
    whole = torch.randn(384, 1536).mul(torch.logspace(-6, 1, 1536)).to(BFLOAT16)
    whole[128:256] *= 2.0**-100
    whole[:128, 256:384] = 0
    whole[:128, 300], whole[5, 700] = -0.0, -0.0
    whole[300, 700] = math.inf
    sent = whole.to(device)
    # Parts of rows and of columns: what ranks hold.
    parts = {"all": sent, "rows": sent[128:256], "columns": sent[:256, 640:1408]}
    arena = torch.zeros(2 << 20, dtype=BYTES, device=device)

    def places(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        start = list(parts).index(name) * (640 << 10)
        rows, columns = parts[name].shape
        values = arena[start : start + rows * columns].view(FP8).view(rows, columns)
        start += rows * columns
        scales = arena[start : start + rows * columns // 4096].view(FLOAT).view(rows // 128, columns // 128)
        return values, scales

    copies = WeightCopies(device)
    assert copies.plan("bytes", torch.ones(16, device=device), Run(2 << 20, 64, 0, FLOAT), 0)
    for name, part in parts.items():
        assert copies.plan_quantized(name, part, *places(name))
    assert copies.plan_quantized("bytes", *(parts["rows"], *places("rows")))
    assert copies.prepare(arena.data_ptr()) is not None
    assert len(list(copies.launch())) > 1

    torch.zeros(1, device=device).item()  # everything that was launched has run
    assert copies.nonfinite() == ["all"]
    for name, part in parts.items():
        values, scales = (tensor.cpu() for tensor in places(name))
        expected, expected_scales = torch.empty_like(values), torch.empty_like(scales)
        quantize_into(expected, expected_scales, part.cpu())
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
        good = scales.isfinite().repeat_interleave(128, 0).repeat_interleave(128, 1)
        if HAS_GPU:
            assert torch.equal(values.view(BYTES)[good], expected.view(BYTES)[good])
        else:
            # The interpreter's numbers of 8 bits just below a power of two are half of it.
            found, wanted = dequantize(values, scales)[good], dequantize(expected, scales)[good]
            assert (found - wanted).abs().gt(wanted.abs() * 0.15).float().mean() < 0.05


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(128, 128), torch.zeros(128, 64, dtype=BFLOAT16), torch.zeros(128, 128, dtype=BFLOAT16).t()],
    ids=["converts", "no block", "transposed"],
)
def test_what_is_quantised_in_some_other_way_is_not_planned(tensor: torch.Tensor) -> None:
    copies = WeightCopies(torch.device("cpu"))
    assert not copies.plan_quantized("w", tensor, torch.zeros(128, 128, dtype=FP8), torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("tensor", "dtype", "offset"),
    [
        (torch.zeros(8, dtype=HALF), FLOAT, 0),
        (torch.zeros(8, 8, dtype=FLOAT).t(), FLOAT, 0),
        (torch.zeros(3, dtype=FLOAT), FLOAT, 0),
        (torch.zeros(9, dtype=FLOAT)[1:], FLOAT, 0),
        (torch.zeros(8, dtype=FLOAT), FLOAT, 4),
        (torch.zeros(8, dtype=torch.float64), torch.float64, 0),
    ],
    ids=["converts", "strided", "odd length", "odd source", "odd destination", "no masks"],
)
def test_what_is_not_alike_is_not_planned(tensor: torch.Tensor, dtype: torch.dtype, offset: int) -> None:
    copies = WeightCopies(torch.device("cpu"))
    assert not copies.plan("w", tensor, Run(offset, tensor.nbytes, 0, dtype), 4096)


def test_nan_and_inf_are_found_and_what_is_merely_large_is_not() -> None:
    regions = {f"good.{index}": torch.ones(3) for index in range(2 * LOOKED_AT_ONCE)} | {
        "nan": torch.tensor([1.0, math.nan]),
        "inf": torch.tensor([[1.0], [-math.inf]], dtype=torch.bfloat16),
        "large": torch.full((100,), 3e38),
        "large half": torch.full((100,), 6e4, dtype=torch.float16),
        "empty": torch.empty(0),
        "integers": torch.ones(2, dtype=torch.int8),
        "eight bits": every_number(FP8)[:0x7F],
        "eight bits below zero": every_number(FP8)[0x80:0xFF],
        "eight bits, nan": every_number(FP8)[:0x80],
        "eight bits, nan below zero": torch.arange(0xF0, 0x100).to(BYTES).view(FP8).view(4, 4)[:, 3:],
        "no eight bits": torch.empty(0, dtype=FP8),
    }
    nonfinite = NonFinite()
    for name, region in regions.items():
        nonfinite.add(name, region)
    nonfinite.finish()
    assert nonfinite.names() == ["nan", "inf", "eight bits, nan", "eight bits, nan below zero"]
    only = NonFinite()
    only.add("nan", regions["eight bits, nan"])
    only.finish()
    assert only.names() == ["nan"]


def test_scales_tell_of_what_was_quantised_and_values_of_what_came_in_8_bits() -> None:
    region, scales = torch.zeros(128, 128, dtype=FP8), torch.ones(1, 1)
    assert Destination(region, None, scales=scales).nonfinite_region(BFLOAT16) is scales
    assert Destination(region, None, scales=scales).nonfinite_region(FP8) is region
    assert Destination(scales, None).nonfinite_region(BFLOAT16) is scales
