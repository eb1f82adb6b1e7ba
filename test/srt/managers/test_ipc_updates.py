"""`update_weights_from_ipc` on real weights, from senders over real sockets; the GPU is a stand-in.

A sender does as checkpoint-engine's does: it speaks when it has an answer, and says a last word to a refusal.
"""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zmq
from fixtures.checkpoints import checksum_of
from fixtures.deadlines import HANG_S
from fixtures.gpu_memory import UUID, Counters, Gpu
from fixtures.real_rank import RealRank
from safetensors.torch import load_file

from ebbtide.srt.device import CpuDevice
from ebbtide.srt.managers.io_struct import (
    UpdateWeightsFromIPCReqInput,
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
        assert self._socket.poll(int(HANG_S * 1e3)), "no answer came"
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
def rank(checkpoints: tuple[Path, Path], gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealRank]:
    monkeypatch.setattr(engine_weights, "CudaIpc", lambda index, uuid: gpu)
    rank = RealRank(checkpoints[0], StandInDevice())
    yield rank
    rank.store.arena.close()


def bring(rank: RealRank, gpu: Gpu, tensors: dict[str, torch.Tensor]) -> tuple[Any, Sender]:
    """The reply, and the sender when it has ended."""
    with TemporaryDirectory(prefix="eb-") as folder:  # the path of a Unix socket must be short
        sender = Sender(gpu, Path(folder), tensors)
        handles = {"GPU-other": "ipc:///other", f"GPU-{UUID}": sender.address}
        sender.start()
        reply = rank.apply(UpdateWeightsFromIPCReqInput(zmq_handles=handles, weight_version="b"))
        sender.join(HANG_S)
        assert not sender.is_alive(), "the sender still waits"
        return reply, sender


def test_the_weights_are_those_of_the_sender_and_a_tensor_that_does_not_fit_is_answered(
    rank: RealRank, gpu: Gpu, counters: Counters, checkpoints: tuple[Path, Path]
) -> None:
    new, before = load_file(checkpoints[1] / "model.safetensors"), checksum_of(rank.store)
    refusal, sender = bring(rank, gpu, {**new, "model.norm.weight": torch.zeros(3)})
    assert refusal.status == 400
    assert [error["name"] for error in refusal.fields["errors"]] == ["model.norm.weight"]
    assert "model.norm.weight" in sender.heard[-2]
    assert checksum_of(rank.store) == before
    assert rank.scheduler.control.updates.version == "default"
    assert counters.values == [0]
    gpu.log.clear()

    reply, sender = bring(rank, gpu, new)

    assert (reply.weight_version, reply.committed, reply.staged, reply.content) == ("b", True, True, "valid")
    assert len(sender.heard) > 5, "several buckets came"
    assert set(sender.heard) == {""}
    values = rank.values
    assert all(torch.equal(values[name], new[name].float()) for name in new.keys() & values.keys())
    assert [entry.split()[0] for entry in sender.done_by_the_end] == ["open", "wait", "free"], (
        "dropped before"
    )
    assert counters.values == [0, 0]
