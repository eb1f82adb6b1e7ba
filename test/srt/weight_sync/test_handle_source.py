"""Handles of a trainer's memory as vLLM's trainers send them, for every device to every rank.

The GPU is a stand-in; the counts are kept in a real file, as a sender keeps them.
"""

import pickle
from typing import Any

import pytest
import torch
from fixtures.gpu_memory import UUID, Counters, Gpu

from ebbtide.formats.announcement import IpcTensor
from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import PayloadReader

OTHER = "00000000-1111-4222-8333-444444444444"
# At an odd offset in a buffer.
TENSORS = {"odd": torch.arange(3, dtype=torch.uint8), "b": torch.arange(6.0).reshape(2, 3)}
BUFFER = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in [*TENSORS.values(), torch.ones(5)]])


def arguments(gpu: Gpu, tensor: torch.Tensor) -> tuple[Any, ...]:
    _, shared = gpu.share(tensor).__reduce__()
    return tuple(shared)


def lent(**num_bytes: int) -> list[IpcTensor]:
    return [
        IpcTensor(name=name, dtype=str(one.dtype)[6:], shape=tuple(one.shape), num_bytes=num_bytes.get(name))
        for name, one in TENSORS.items()
    ]


def opened(
    gpu: Gpu | None, handles: object, told: list[IpcTensor] | None = None, num_ranks: int = 1
) -> WeightSource:
    place = ParallelConfig(tp_size=num_ranks, tp_rank=num_ranks - 1)
    entries = [pickle.dumps(handles)] * num_ranks
    return finish(PayloadReader(place, gpu).open_handles(entries, lent() if told is None else told))


def assert_brings_all(source: WeightSource) -> None:
    assert len(list(source.open())) > 0
    for name, tensor in source:
        assert torch.equal(whole(tensor), TENSORS[name])
    list(source.detach())
    source.close()


def test_each_rank_opens_and_gives_back_what_is_of_its_device(gpu: Gpu, counters: Counters) -> None:
    elsewhere = Gpu(counters)
    handles = [
        {OTHER: arguments(elsewhere, tensor), UUID: arguments(gpu, tensor)} for tensor in TENSORS.values()
    ]
    assert_brings_all(opened(gpu, handles, num_ranks=2))
    assert counters.values == [1, 0, 1, 0]
    with pytest.raises(RequestRejected, match="given back before"):
        list(opened(gpu, handles).open())


@pytest.mark.parametrize("is_with_function", [False, True], ids=["vllm", "skyrl"])
def test_a_buffer_comes_again_and_again(gpu: Gpu, counters: Counters, is_with_function: bool) -> None:
    function, shared = gpu.share(BUFFER).__reduce__()
    handle: Any = (function, shared) if is_with_function else shared
    for _ in range(3):
        assert_brings_all(opened(gpu, {UUID: handle}, lent(odd=3, b=24)))
    assert counters.values == [0]
    assert_brings_all(opened(gpu, {f"GPU-{UUID.upper()}": handle}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda gpu: {OTHER: arguments(gpu, BUFFER)}, f"no handle for device {UUID}; given: {OTHER}"),
        (lambda gpu: {UUID: arguments(gpu, BUFFER[:20].clone())}, "27 bytes are not within the buffer of 20"),
        (lambda gpu: {UUID: arguments(gpu, torch.zeros(6, 6))}, "expected one dimension"),
        (lambda gpu: {UUID: 3}, "expected rebuild_cuda_tensor and its arguments, got int"),
        (lambda gpu: [{UUID: arguments(gpu, BUFFER)}], "the handles of each of 2 tensors, got 1"),
        (lambda gpu: [{UUID: arguments(gpu, BUFFER)} for _ in TENSORS], "its handle is of torch.uint8"),
        (lambda gpu: [3, 4], "expected handles by the UUID of a device, got int"),
        (lambda gpu: "text", "got str"),
    ],
)
def test_what_is_wrong_is_refused_and_given_back(
    gpu: Gpu, counters: Counters, wrong: Any, message: str
) -> None:
    handles = wrong(gpu)
    with pytest.raises(RequestRejected, match=message):
        opened(gpu, handles)
    assert gpu.log == []
    is_read = OTHER not in str(handles) and "2 tensors" not in message
    assert set(counters.values) <= {0 if is_read else 1}


def test_what_is_not_told_of_is_refused(gpu: Gpu) -> None:
    with pytest.raises(RequestRejected, match="lent"):
        finish(PayloadReader(cuda=gpu).open_handles([b""], None))
    with pytest.raises(RequestRejected, match="expected 24 bytes, got 20"):
        opened(gpu, {UUID: arguments(gpu, BUFFER)}, lent(odd=3, b=20))
    with pytest.raises(RequestRejected, match="runs on the CPU"):
        opened(None, {})
