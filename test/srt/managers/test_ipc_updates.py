"""`update_weights_from_ipc` on real weights, from senders over real sockets; the GPU is a stand-in.

A sender does as checkpoint-engine's does: it speaks when it has an answer, and says a last word to a refusal.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zmq
from fixtures.gpu_memory import UUID, Counters, Gpu
from fixtures.real_rank import LIMIT_S, RealRank
from safetensors.torch import load_file

from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.managers.io_struct import (
    Refusal,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqOutput,
)
from ebbtide.srt.managers.scheduling import weight_io as engine_weights

BUFFER_BYTES = 96 << 10


class StandInDevice(CpuDevice):
    """Host memory that is treated as a CUDA device's."""

    name = "cuda:0"
    uuid = UUID


class Sender(threading.Thread):
    """Brings tensors, a full buffer at a time.

    Attributes:
        heard: the answers.
        done_by_the_end: what the device had done when the first word of the end was answered.
    """

    def __init__(self, gpu: Gpu, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.address = f"ipc://{folder}/weights"
        self.heard: list[str] = []
        self.done_by_the_end: list[str] = []
        self._gpu = gpu
        self._tensors = tensors
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.bind(self.address)

    def run(self) -> None:
        try:
            if self._say(self._gpu.share(self._buffer, device=5).__reduce__()):
                return
            for listed in self._buckets():
                if self._say(listed):
                    self._say(RuntimeError("told by the engine"))
                    return
            self._say(None)
            self.done_by_the_end = list(self._gpu.log)
            self._say(None)
        finally:
            self._socket.close(linger=0)

    def _say(self, said: object) -> str:
        self._socket.send(pickle.dumps(said))
        assert self._socket.poll(int(LIMIT_S * 1e3)), "no answer came"
        self.heard.append(self._socket.recv().decode())
        return self.heard[-1]

    def _buckets(self) -> Iterator[list[dict[str, Any]]]:
        listed: list[dict[str, Any]] = []
        offset = 0
        for name, tensor in self._tensors.items():
            piece = tensor.contiguous().reshape(-1).view(torch.uint8)
            if offset + len(piece) > BUFFER_BYTES:
                yield listed
                listed, offset = [], 0
            self._buffer[offset : offset + len(piece)] = piece
            listed.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset})
            offset += len(piece)
        yield listed


@pytest.fixture
def new(checkpoints: tuple[Path, Path]) -> dict[str, torch.Tensor]:
    return load_file(checkpoints[1] / "model.safetensors")


@pytest.fixture
def rank(checkpoints: tuple[Path, Path], gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealRank]:
    monkeypatch.setattr(engine_weights, "TorchCudaIpc", lambda index, uuid: gpu)
    rank = RealRank(checkpoints[0], StandInDevice())
    yield rank
    rank.store.arena.close()


Bring = Callable[..., tuple[Any, Sender]]


@pytest.fixture
def bring(rank: RealRank, gpu: Gpu) -> Bring:
    def bring(tensors: dict[str, torch.Tensor], **fields: Any) -> tuple[Any, Sender]:
        """The reply, and the sender when it has ended."""
        with TemporaryDirectory(prefix="eb-") as folder:  # the path of a Unix socket must be short
            sender = Sender(gpu, Path(folder), tensors)
            handles = {"GPU-other": "ipc:///other", f"GPU-{UUID}": sender.address}
            sender.start()
            reply = rank.apply(UpdateWeightsFromIPCReqInput(zmq_handles=handles, **fields))
            sender.join(LIMIT_S)
            assert not sender.is_alive(), "the sender still waits"
            return reply, sender

    return bring


def assert_serves(rank: RealRank, expected: dict[str, torch.Tensor]) -> None:
    values = rank.values
    for name, tensor in expected.items():
        if name in values:
            assert torch.equal(values[name], tensor.float()), name


def test_the_weights_are_those_of_the_sender(
    rank: RealRank, bring: Bring, gpu: Gpu, counters: Counters, new: dict[str, torch.Tensor]
) -> None:
    reply, sender = bring(new, weight_version="b")
    assert isinstance(reply, UpdateWeightsReqOutput), reply
    assert (reply.weight_version, reply.committed, reply.staged, reply.content) == ("b", True, True, "valid")
    assert len(sender.heard) > 5, "several buckets came"
    assert set(sender.heard) == {""}
    assert_serves(rank, new)
    assert sender.done_by_the_end == ["open 0", "wait 0", "free 0"], "it was dropped before that was answered"
    assert counters.values == [0]


def test_a_tensor_that_does_not_fit_is_answered_with_its_name(
    rank: RealRank, bring: Bring, counters: Counters, new: dict[str, torch.Tensor]
) -> None:
    before = rank.store.checksum()
    reply, sender = bring({**new, "model.norm.weight": torch.zeros(3)}, weight_version="b")
    assert isinstance(reply, Refusal)
    assert reply.status == 400
    assert [error["name"] for error in reply.fields["errors"]] == ["model.norm.weight"]
    assert "model.norm.weight" in sender.heard[-2]
    assert rank.store.checksum() == before
    assert rank.scheduler.control.updates.version == "default"
    assert counters.values == [0]
    assert bring(new, weight_version="b")[0].committed
    assert_serves(rank, new)


def test_an_engine_on_the_cpu_says_what_to_use(checkpoints: tuple[Path, Path]) -> None:
    rank = RealRank(checkpoints[0])
    reply = rank.apply(UpdateWeightsFromIPCReqInput(zmq_handles={f"GPU-{UUID}": "ipc:///sender"}))
    rank.store.arena.close()
    assert isinstance(reply, Refusal)
    assert reply.status == 400
    assert "runs on the CPU: use update_weights_from_tensor" in reply.message
