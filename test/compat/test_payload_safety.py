"""No payload runs anything, ends the process, or takes memory that was not sent: watched while it is read."""

import base64
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import safetensors.torch
import torch
from fixtures.payloads import open_payload
from hypothesis import HealthCheck, given, settings, strategies as st
from sglang.srt.model_executor.model_runner import LocalSerializedTensor
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.errors import RequestRejected

MIB = 1 << 20
# What Python does when something is run, and nothing that reading a payload may do.
FORBIDDEN = ("exec", "compile", "import", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "shutil.")
# Looking at the sender's shared memory.
ALLOWED = {"os.lstat", "os.open", "os.scandir", "os.remove"}


class Watch:
    """Notes audit events; a hook cannot be taken away again, so it is told when to listen."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(FORBIDDEN) and event not in ALLOWED:
            self.seen.append(f"{event} {arguments!r:.100}")

    @contextmanager
    def on(self) -> Iterator[None]:
        self.seen.clear()
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.arange(6.0).reshape(2, 3)),
        ("b", torch.arange(5, dtype=torch.uint8)),
        ("c", torch.ones(2, dtype=torch.bfloat16)),
    ]


def make(kind: str) -> tuple[bytes, str | None, object]:
    """A payload, its format, and what has to live as long as it."""
    serialize = MultiprocessingSerializer.serialize
    match kind:
        case "named":
            held: Any = tensors()
            return serialize(held), None, held
        case "flattened_bucket":
            bucket = FlattenedTensorBucket(named_tensors=tensors())
            held = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            return serialize(held), kind, held
        case "local":
            held = tensors()
            local = [(name, LocalSerializedTensor([serialize(tensor)])) for name, tensor in held]
            return serialize(local), None, held
        case "direct":
            held = tensors()
            return serialize(held), kind, held
        case "safetensors":
            return safetensors.torch.save(dict(tensors())), kind, None
    raise ValueError(kind)


KINDS = ("named", "flattened_bucket", "local", "direct", "safetensors")
# Fragments that make a pickle call, import, loop or allocate.
NASTY = (
    b"cposix\nsystem\n(S'echo'\ntR",
    b"\x8c\x05posix\x8c\x06system\x93\x8c\x04echo\x85R",
    b"\x8c\x08builtins\x8c\x04eval\x93\x8c\x01x\x85R",
    b"\x8c\x0amultiprocessing\x8c\x04Pool\x93)R",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x3f",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x3f",
    b"\x8a\xff" + b"\x7f" * 255,
    b"(" * 1000,
    b"\x94h\x00" * 500,
    b"J\xff\xff\xff\x7f",
)
edits = st.lists(
    st.tuples(
        st.integers(0, 1 << 20),
        st.one_of(
            st.binary(min_size=1, max_size=8).map(lambda data: ("set", data)),
            st.binary(min_size=1, max_size=8).map(lambda data: ("insert", data)),
            st.sampled_from(NASTY).map(lambda data: ("insert", data)),
            st.integers(1, 40).map(lambda count: ("delete", bytes(count))),
        ),
    ),
    min_size=1,
    max_size=4,
)


def edited(payload: bytes, changes: list[tuple[int, tuple[str, bytes]]]) -> bytes:
    data = bytearray(payload)
    for position, (action, piece) in changes:
        at = 2 + position % max(1, len(data) - 2)
        match action:
            case "set":
                data[at : at + len(piece)] = piece
            case "insert":
                data[at:at] = piece
            case "delete":
                del data[at : at + len(piece)]
    return bytes(data)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read(payload: bytes, load_format: str | None) -> None:
    source = open_payload([base64.b64encode(payload).decode()], load_format)
    try:
        for _ in source.open():
            pass
        for _, tensor in source:
            whole(tensor)
    finally:
        source.close()


def deserialize(payload: bytes, load_format: str | None) -> None:
    MultiprocessingSerializer.deserialize(payload)


@pytest.mark.parametrize(("reader", "kind"), [*((read, kind) for kind in KINDS), (deserialize, "named")])
def test_damaged_payloads(watch: Watch, kind: str, reader: Callable[[bytes, str | None], None]) -> None:
    whole, load_format, held = make(kind)
    reader(whole, load_format)  # imports what is imported at the first use
    peak_before = peak_bytes()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes=edits)
    def try_one(changes: list[tuple[int, tuple[str, bytes]]]) -> None:
        # Each with memory of its own: what is read takes the sender's references.
        payload, _, kept = make(kind)
        broken = edited(payload, changes)
        with watch.on(), suppress(RequestRejected):
            reader(broken, load_format)
        assert watch.seen == []
        del kept

    try_one()
    assert peak_bytes() - peak_before < 256 * MIB
    del held


def test_a_pickle_that_is_named_often_is_read_as_often_as_one_payload_may_be() -> None:
    inner = MultiprocessingSerializer.serialize(torch.ones(4))
    # Its last value is kept again and again: a long way to a small tensor.
    long = inner[:-1] + b"q\xf0" * 500_000 + b"."
    payload = pickle.dumps([("w", LocalSerializedTensor([long]))] * 1000, 4)
    assert len(payload) < 2 * MIB
    with pytest.raises(RequestRejected, match="more than 4000000 pickle opcodes"):
        read(payload, None)
