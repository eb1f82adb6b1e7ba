"""A conversation as checkpoint-engine's sender leads it: a buffer that is filled again and again.

The sender speaks over a real socket, from a thread; the GPU is a stand-in.
"""

import pickle
import re
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zmq
from fixtures.deadlines import HANG_S, wait_until
from fixtures.gpu_memory import UUID, Call, Counters, Gpu

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.conversations import ANSWERING, IpcConversation, open_conversation
from ebbtide.srt.weight_sync.source import WeightSource

BUFFER_BYTES = 256
TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "odd": torch.arange(5, dtype=torch.uint8),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}


class Sender:
    """The other end, as checkpoint-engine has it: it binds, and says something only when it has an answer."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self.address = f"ipc://{folder}/weights"
        self.buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
        self._gpu = gpu
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.SNDTIMEO, int(HANG_S * 1e3))
        self._socket.bind(self.address)

    def offer(self, **changes: Any) -> tuple[object, tuple[Any, ...]]:
        """What `reduce_tensor` makes of the buffer: not called, and with the sender's own device."""
        rebuild, arguments = self._gpu.share(self.buffer, device=5, **changes).__reduce__()
        return rebuild, arguments

    def fill(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        listed, offset = [], 0
        for name, tensor in tensors.items():
            piece = tensor.reshape(-1).view(torch.uint8)
            self.buffer[offset : offset + len(piece)] = piece
            listed.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset})
            offset += len(piece)
        return listed

    def say(self, said: object) -> None:
        self._socket.send(said if isinstance(said, bytes) else pickle.dumps(said))

    def hear(self) -> str:
        assert self._socket.poll(30_000), "no answer came"
        return self._socket.recv().decode()

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def sender(gpu: Gpu) -> Iterator[Sender]:
    with TemporaryDirectory(prefix="eb-") as folder:  # the path of a Unix socket must be short
        sender = Sender(gpu, Path(folder))
        yield sender
        sender.close()


def planned(source: WeightSource) -> Generator[int, None, WeightSource]:
    """What is brought, as it is."""
    yield 0
    return source


@pytest.fixture
def conversation(gpu: Gpu, sender: Sender) -> Iterator[IpcConversation[WeightSource]]:
    conversation = open_conversation(
        planned, {"GPU-0": "ipc:///other", f"GPU-{UUID.upper()}": sender.address}, gpu
    )
    yield conversation
    conversation.close()


def answered(conversation: IpcConversation[WeightSource], sender: Sender, said: object) -> str:
    """What the engine answers to what it needs nobody for."""
    sender.say(said)
    heard: list[str] = []
    hearing = threading.Thread(target=lambda: heard.append(sender.hear()))
    hearing.start()
    while hearing.is_alive():
        assert conversation.poll() is False
        hearing.join(1e-3)
    return heard[0]


def refusal(conversation: IpcConversation[WeightSource]) -> str:
    """How the update ends."""
    with pytest.raises(RequestRejected) as refused:
        wait_until(conversation.poll)
    assert refused.value.status == 400
    return refused.value.message


def test_a_buffer_that_is_filled_again_and_again(
    conversation: IpcConversation[WeightSource], sender: Sender, gpu: Gpu, counters: Counters
) -> None:
    assert conversation.poll() is False
    # Protocol 3 writes names as text, which those of a framework's patch can take the place of.
    offer = pickle.dumps(sender.offer(), protocol=3)
    torchs = b"torch.multiprocessing.reductions\nrebuild_cuda_tensor\n"
    patched = offer.replace(torchs, b"sglang.srt.utils.patch_torch\n_rebuild_cuda_tensor_modified\n")
    assert answered(conversation, sender, patched) == ""
    assert gpu.log == ["open 0", "wait 0"]
    for step in range(3):
        tensors = {name: tensor + step for name, tensor in TENSORS.items()}
        sender.say(sender.fill(tensors))
        wait_until(conversation.poll)
        source = conversation.bucket
        assert source is not None
        assert [(entry.name, entry.shape) for entry in source.entries] == [
            (name, tuple(tensor.shape)) for name, tensor in tensors.items()
        ]
        assert list(source.open()) == []
        for name, tensor in source:
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name]), name
        del tensor
        assert list(source.detach()) == []
        source.close()
        del source
        conversation.answer()
        assert sender.hear() == ""
    assert answered(conversation, sender, None) == ""
    assert gpu.log[2:] == ["free 0"]
    assert counters.values == [0]
    sender.say(None)
    wait_until(conversation.poll)
    assert conversation.bucket is None
    conversation.answer()  # the commit has been
    assert sender.hear() == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 250}, r"a: bytes 250 to 274 are not within"),
        ({"dtype": "float32"}, r"a: dtype: expected a torch\.dtype"),
        ({"more": 1}, "expected exactly the fields name, shape, dtype, offset"),
    ],
)
def test_a_bucket_that_cannot_be_is_refused_and_so_is_the_update(
    conversation: IpcConversation[WeightSource], sender: Sender, changes: dict[str, Any], message: str
) -> None:
    answered(conversation, sender, sender.offer())
    [bucket] = sender.fill({"a": TENSORS["a"]})
    problem = answered(conversation, sender, [{**bucket, **changes}])
    assert re.search(message, problem), problem
    sender.say([bucket])  # the sender may go on, and is told at the end
    wait_until(conversation.poll)
    conversation.answer()
    assert sender.hear() == ""
    assert answered(conversation, sender, None) == ""
    sender.say(None)
    assert problem in refusal(conversation)
    assert sender.hear() == problem


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        (lambda sender: [], "expected rebuild_cuda_tensor and its arguments, got list"),
        (lambda sender: b"no pickle", "broken pickle|no opcode"),
        (lambda sender: Call(len, "run"), r"builtins\.len"),
        (lambda sender: sender.offer(dtype=torch.float32, size=torch.Size([8])), "expected bytes"),
        (lambda sender: sender.offer(num_bytes=16), "reaches beyond its storage"),
    ],
)
def test_a_buffer_that_cannot_be_is_refused_and_the_sender_has_a_last_word(
    conversation: IpcConversation[WeightSource],
    sender: Sender,
    gpu: Gpu,
    capfd: pytest.CaptureFixture[str],
    offer: Callable[[Sender], object],
    message: str,
) -> None:
    problem = answered(conversation, sender, offer(sender))
    assert re.search(message, problem), problem
    sender.say(RuntimeError("I see"))
    assert problem in refusal(conversation)
    assert sender.hear() == problem
    conversation.close()
    assert gpu.log == []
    assert "run" not in capfd.readouterr().out


@pytest.mark.parametrize("said", [RuntimeError("out of memory"), {"a": 1}])
def test_a_sender_that_gives_up_ends_the_update(
    conversation: IpcConversation[WeightSource], sender: Sender, counters: Counters, said: object
) -> None:
    answered(conversation, sender, sender.offer())
    sender.say(said)
    is_reason = isinstance(said, RuntimeError)
    expected = "the sender gave up: out of memory" if is_reason else "which was not expected"
    assert expected in refusal(conversation)
    conversation.close()
    assert counters.values == [0]


def test_a_sender_that_ends_without_a_word_ends_the_update(
    conversation: IpcConversation[WeightSource], sender: Sender, counters: Counters
) -> None:
    answered(conversation, sender, sender.offer())
    sender.say(sender.fill(TENSORS))
    wait_until(conversation.poll)
    sender.close()
    # What it had said is heard, and it may be answered.
    assert conversation.poll() is True
    conversation.answer()
    assert refusal(conversation) == "nothing of the update is served: the sender has ended"
    conversation.close()
    assert counters.values == [0]


def test_an_update_that_is_given_up_leaves_nobody_waiting(
    conversation: IpcConversation[WeightSource], sender: Sender, counters: Counters
) -> None:
    answered(conversation, sender, sender.offer())
    sender.say(sender.fill(TENSORS))
    wait_until(conversation.poll)
    conversation.close()
    conversation.close()
    assert counters.values == [0]
    for said in (sender.fill(TENSORS), None, None):
        assert sender.hear() == "the update was given up"
        sender.say(said)
    assert sender.hear() == "the update was given up"
    sender.close()
    wait_until(lambda: all(thread.name != ANSWERING for thread in threading.enumerate()))


@pytest.mark.parametrize(
    ("handles", "message"),
    [
        ({"GPU-1": "ipc:///a"}, "no address for GPU-.*given: GPU-1"),
        ({f"GPU-{UUID}": "tcp://127.0.0.1:80"}, "expected addresses as ipc://PATH"),
        ({f"GPU-{UUID}": "ipc://" + "a" * 300}, "cannot be connected to"),
    ],
)
def test_addresses_that_cannot_be(gpu: Gpu, handles: dict[str, str], message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as refused:
        open_conversation(planned, handles, gpu)
    assert refused.value.status == 400


def test_an_engine_on_the_cpu_says_what_to_use() -> None:
    with pytest.raises(RequestRejected, match="runs on the CPU: use update_weights_from_tensor"):
        open_conversation(planned, {f"GPU-{UUID}": "ipc:///a"}, None)
