"""Which decode steps of few requests one kernel serves: those whose parts are short."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape, DecodeBuffers, GraphFamily
from ebbtide.srt.layers.attention.flashinfer import FlashInferAttention

FULL, WINDOW = AttentionKind(0.1), AttentionKind(0.1, window=384)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ebbtide.srt.layers.kernels import few_decode

    monkeypatch.setattr(few_decode, "num_multiprocessors", lambda device: 132)


class Planned:
    """Stands for the kernels that cut requests by their lengths."""

    def __init__(self) -> None:
        self.lens: list[list[int]] = []

    def plan(self, lens: Any, *, captured: bool) -> list[int]:
        assert captured
        self.lens.append(lens.lens_R.tolist())
        return [len(lens.lens_R)]


def backend_of(*kinds: AttentionKind) -> tuple[FlashInferAttention, Planned]:
    """A backend as far as planning goes, without FlashInfer."""
    backend: Any = FlashInferAttention.__new__(FlashInferAttention)
    planned = Planned()
    backend._shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16, kinds)
    backend._device, backend._layers = CPU, SimpleNamespace(kv_pages=None)
    kernels = type("Kernels", (), {"decode": planned, "shared": None})
    backend._kernels = dict.fromkeys(kinds, kernels)
    return backend, planned


def families(backend: FlashInferAttention, sizes: list[int]) -> tuple[GraphFamily, GraphFamily]:
    few, any_step = backend.graph_families(sizes)
    assert (few.name, any_step.name) == ("few", "any")
    return few, any_step


@pytest.mark.parametrize(
    ("lens", "size", "kinds", "suits"),
    [
        ([2048], 1, (FULL,), True),
        ([16_384], 1, (FULL,), False),
        ([640] * 8, 8, (FULL,), True),
        ([1900] * 7 + [16_384], 8, (FULL,), False),
        ([640] * 16, 16, (FULL,), True),
        ([16_384] * 16, 16, (FULL,), False),
        ([400] * 32, 32, (FULL,), True),
        ([400] * 31 + [8192], 32, (FULL, WINDOW), False),
        ([400] * 31 + [8192], 32, (WINDOW,), True),
        ([400] * 33, 33, (FULL,), False),
    ],
)
def test_steps_with_a_long_part_are_cut_by_length(
    lens: list[int], size: int, kinds: tuple[AttentionKind, ...], suits: bool
) -> None:
    backend, _ = backend_of(*kinds)
    few, any_step = families(backend, [size])
    lens_R = np.array(lens, dtype=np.int32)
    assert (size in few.sizes and few.suits(lens_R, size)) is suits
    assert size in any_step.sizes
    assert any_step.suits(lens_R, size)


def test_graphs_of_few_requests_are_of_both_kinds() -> None:
    backend, planned = backend_of(FULL)
    few, any_step = families(backend, [1, 2, 32, 33])
    assert (few.sizes, any_step.sizes) == ([1, 2, 32], [1, 2, 32, 33])
    indptr, last_page_len = np.array([0, 2, 3], dtype=np.int32), np.array([4, 16], dtype=np.int32)
    numbers = torch.zeros(3, dtype=torch.int32)
    buffers = DecodeBuffers(torch.zeros(2, dtype=torch.int64), numbers[:2], numbers, numbers)

    few.capture(2, buffers).plan(indptr, last_page_len)
    assert planned.lens == []

    step = any_step.capture(2, buffers)
    step.plan(indptr, last_page_len)
    step.plan(indptr, last_page_len)
    assert planned.lens == [[20, 16]] * 2
