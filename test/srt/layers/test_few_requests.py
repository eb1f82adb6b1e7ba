"""Which decode steps of few requests are cut into equally many parts, and which by their lengths."""

from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.srt.layers.attention import few_requests
from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape, DecodeBuffers, StepKind
from ebbtide.srt.layers.attention.flashinfer import FlashInferAttention

FULL, WINDOW = AttentionKind(0.1), AttentionKind(0.1, window=1024)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ebbtide.srt.layers.kernels import few_decode

    for module in (few_requests, few_decode):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


class Planned:
    """Stands for the kernels that cut requests by their lengths."""

    def __init__(self) -> None:
        self.lens: list[list[int]] = []

    def plan(self, lens: Any, *, captured: bool, whole: bool = False) -> list[int]:
        assert captured
        assert not whole
        self.lens.append(lens.lens_R.tolist())
        return [len(lens.lens_R)]


def backend_of(*kinds: AttentionKind) -> tuple[FlashInferAttention, Planned]:
    """A backend as far as planning goes, without FlashInfer."""
    backend: Any = FlashInferAttention.__new__(FlashInferAttention)
    planned = Planned()
    backend._shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16, kinds)
    backend._device, backend._layers = CPU, None
    kernels = type("Kernels", (), {"decode": planned, "shared": None})
    backend._kernels = dict.fromkeys(kinds, kernels)
    return backend, planned


@pytest.mark.parametrize(
    ("lens", "size", "kinds", "is_even"),
    [
        ([100] * 31 + [500], 32, (FULL,), True),
        ([640] * 32, 32, (FULL,), True),
        ([20_000] * 17, 24, (FULL,), True),
        ([20_000] * 6, 8, (FULL,), True),
        ([1300] * 23 + [16_384], 24, (FULL,), False),
        ([1900] * 7 + [16_384], 8, (FULL,), False),
        ([600] * 31 + [8192], 32, (FULL,), False),
        ([600] * 31 + [8192], 32, (FULL, WINDOW), False),
        ([600] * 31 + [8192], 32, (WINDOW,), True),
    ],
)
def test_lengths_that_differ_much_are_cut_by_length(
    lens: list[int], size: int, kinds: tuple[AttentionKind, ...], is_even: bool
) -> None:
    backend, _ = backend_of(*kinds)
    assert backend.is_even(np.array(lens, dtype=np.int32), size) is is_even


def test_graphs_of_few_requests_are_of_both_kinds() -> None:
    backend, planned = backend_of(FULL)
    assert [backend.has_even(size) for size in (1, 2, 32)] == [False, True, True]
    indptr, last_page_len = np.array([0, 2, 3], dtype=np.int32), np.array([4, 16], dtype=np.int32)
    numbers = torch.zeros(3, dtype=torch.int32)
    buffers = DecodeBuffers(torch.zeros(2, dtype=torch.int64), numbers[:2], numbers, numbers)

    backend.captured(2, buffers, StepKind.EVEN).plan(indptr, last_page_len)
    backend.captured(1, buffers).plan(indptr[:2], last_page_len[:1])
    assert planned.lens == []

    step = backend.captured(2, buffers)
    step.plan(indptr, last_page_len)
    step.plan(indptr, last_page_len)
    assert planned.lens == [[20, 16]] * 2
