"""What an attacker or a broken sender may put into a payload is refused, by name and without effect."""

import builtins
import os
import pickle
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.payloads import open_payload
from fixtures.trainer_process import LocalSerializedTensor
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.multiprocessing import reductions
from torch.storage import TypedStorage, UntypedStorage

from ebbtide.formats.bucket import FlattenedTensorMetadata
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.config import Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.source import PlanCache
from ebbtide.trainer.payload_encoding import serialize


class Call:
    """Pickles as a call of a function: the way into every unpickler that does not look."""

    def __init__(self, function: Callable[..., Any], *arguments: object, state: object = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def pickle_global(module: str, name: str) -> bytes:
    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return text(module) + text(name) + b"\x93"


def refusal(payload: bytes, load_format: str | None = None) -> str:
    """The message with which a replica that leaves the sender's references alone refuses a payload."""
    with pytest.raises(RequestRejected) as refused:
        open_payload([payload], load_format, place=SECOND_REPLICA)
    assert refused.value.status == 400
    return refused.value.message


SECOND_REPLICA = Place(dp_rank=1, dp_size=2)
MARKER = Path(tempfile.gettempdir()) / f"ebbtide-payload-was-run-{os.getpid()}"

GADGETS: dict[str, tuple[object, str]] = {
    "system": (Call(os.system, f"touch {MARKER}"), "posix.system"),
    "getattr": (Call(getattr, Call(builtins.__import__, "os"), "system"), "builtins.getattr"),
    "meta tensor": (torch.empty(2**40, device="meta"), "rebuild_meta_tensor"),
    "from_file": (Call(UntypedStorage.from_file, "/etc/passwd", False, 8), "builtins.getattr"),
    "module attribute of torch": (Call(torch.set_default_device, "meta"), "torch.set_default_device"),
}


@pytest.mark.parametrize("name", GADGETS)
def test_gadgets_are_refused_by_name_and_not_run(name: str) -> None:
    gadget, named = GADGETS[name]
    MARKER.unlink(missing_ok=True)
    # Meta tensors pickle through torch's own reductions only.
    payload = serialize([("w", gadget)]) if name == "meta tensor" else pickle.dumps([("w", gadget)])
    assert named in refusal(payload)
    assert not MARKER.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.storage", "UntypedStorage.from_file"),
        ("torch.multiprocessing.reductions", "rebuild_tensor.__globals__"),
        ("torch.multiprocessing.reductions", "os.system"),
        ("antigravity", "LocalSerializedTensors"),
        ("elsewhere.patch_torch", "_rebuild_cuda_tensor_modified"),
    ],
)
def test_names_are_compared_exactly(module: str, name: str) -> None:
    assert repr(f"{module}.{name}") in refusal(b"\x80\x04" + pickle_global(module, name) + b".")


def test_nothing_named_is_imported() -> None:
    # `antigravity` opens a browser when it is imported.
    assert "antigravity.fly" in refusal(b"\x80\x04" + pickle_global("antigravity", "fly") + b".")
    record = pickle_global("antigravity", "FlattenedTensorMetadata") + b")\x81}b"
    assert "antigravity.FlattenedTensorMetadata" in refusal(b"\x80\x04" + record + b".")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Call(torch.Tensor, 5), "'torch.Tensor', which may only be an argument"),
        (Call(torch.nn.Parameter, None), "'torch.nn.parameter.Parameter', which may only"),
        (Call(UntypedStorage, 2**50), "'torch.storage.UntypedStorage', which may only"),
        (Call(torch.Size, [2], state={"x": 1}), "sets the state of a tuple"),
        (Call(OrderedDict, state={"x": 1}), "sets the state of a dict"),
        (Call(OrderedDict, [("a", 1)]), "expected 0 arguments, got 1"),
        (Call(torch.Size, [2], [3]), "expected 1 arguments, got 2"),
        (Call(torch.Size, [1] * 65), "at most 64"),
        (Call(reductions.rebuild_tensor, torch.Tensor, None, ()), "expected a typed storage"),
    ],
)
def test_accepted_globals_do_what_the_contract_says_and_no_more(value: object, message: str) -> None:
    assert message in refusal(pickle.dumps(value))


# What a sender may get wrong about its own tensors. The memory below is real: 48 bytes, 12 float32.


@dataclass
class Block:
    storage: UntypedStorage
    manager: bytes
    handle: bytes
    num_bytes: int


NOBODY = b"/tmp/torch-shm-dir-000000/manager.sock"


@pytest.fixture(scope="module")
def block() -> Block:
    storage = torch.arange(12, dtype=torch.float32).untyped_storage()
    return Block(storage, *storage._share_filename_cpu_())


def tensor_call(block: Block, **changes: Any) -> Call:
    """A tensor of 3 × 4 in the shared block, with some of its arguments changed."""
    slots: dict[str, Any] = {
        "cls": torch.Tensor,
        "storage_cls": UntypedStorage,
        "manager": block.manager,
        "handle": block.handle,
        "num_bytes": block.num_bytes,
        "dtype": torch.float32,
        "offset": 0,
        "shape": (3, 4),
        "stride": (4, 1),
        "requires_grad": False,
        **changes,
    }
    untyped = Call(
        reductions.rebuild_storage_filename,
        *(slots[name] for name in ("storage_cls", "manager", "handle", "num_bytes")),
    )
    untyped = slots.get("untyped", untyped)
    typed = slots.get("typed", Call(reductions.rebuild_typed_storage, untyped, slots["dtype"]))
    metadata = tuple(slots[name] for name in ("offset", "shape", "stride", "requires_grad"))
    return Call(reductions.rebuild_tensor, slots["cls"], typed, slots.get("metadata", metadata))


def reference(block: Block, **changes: Any) -> bytes:
    """The payload of that tensor."""
    return pickle.dumps([("w", tensor_call(block, **changes))], 4)


def peek(payload: bytes) -> torch.Tensor:
    """Reads the tensor as a replica that leaves the sender's references alone."""
    source = open_payload([payload], None, place=SECOND_REPLICA)
    [(_, tensor)] = source
    read = whole(tensor)
    source.close()
    return read


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ({"cls": torch.nn.Parameter, "requires_grad": True}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ({"shape": (2,), "stride": (5,), "offset": 6}, [6, 11]),
        ({"shape": (), "stride": (), "offset": 11}, 11),
        ({"shape": (0, 7), "stride": (2**40, 2**40)}, []),
        ({"shape": Call(torch.Size, [1, 1]), "stride": (99, 99), "offset": 3}, [[3]]),
    ],
)
def test_references_within_the_block_are_opened(
    block: Block, changes: dict[str, Any], expected: object
) -> None:
    tensor = peek(reference(block, **changes))
    assert tensor.tolist() == expected
    assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1}, "beyond its storage of 48 bytes"),
        ({"offset": -1}, "offset: expected an integer from 0"),
        ({"shape": (2**63,), "stride": (0,)}, "shape: expected an integer from 0 to 2^63-1"),
        ({"shape": (2**62, 2**62, 0), "stride": (1, 1, 1)}, "multiply to more"),
        ({"shape": (2**40,), "stride": (0,)}, "repeats elements"),
        ({"shape": (3, 4, 1)}, "3 sizes but 2 strides"),
        ({"stride": (4, -1)}, "stride: expected an integer"),
        ({"requires_grad": 1}, "requires_grad: expected a bool"),
        ({"dtype": torch.Tensor}, "expected a torch.dtype, got torch.Tensor"),
        ({"cls": UntypedStorage}, "class: expected torch.Tensor or torch.nn.parameter.Parameter"),
        ({"storage_cls": TypedStorage}, "class: expected torch.storage.UntypedStorage"),
        ({"num_bytes": 49}, "holds 48 bytes, the payload says 49"),
        ({"handle": b"/etc/passwd"}, "handle: expected the form"),
        ({"handle": b"/torch_1_2_3/../../etc/passwd"}, "handle: expected the form"),
        ({"handle": b"/torch_1_2_3"}, "No such file"),
        ({"manager": b"/tmp/elsewhere/manager.sock"}, "manager: expected"),
        ({"manager": b"/tmp/torch-shm-dir-a/../b/manager.sock"}, "manager: expected"),
        ({"untyped": 5}, "expected an untyped storage, got int"),
        ({"typed": Call(torch.Size, [3])}, "expected a typed storage, got tuple"),
        ({"metadata": [0, (3, 4), (4, 1), False]}, "expected a tuple of metadata, got list"),
        ({"metadata": (0, (3, 4), (4, 1))}, "expected 4 arguments, got 3"),
    ],
)
def test_references_beyond_the_block_are_refused(block: Block, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(reference(block, **changes))
    assert peek(reference(block)).numel() == 12


def test_a_block_cannot_be_given_two_sizes(block: Block) -> None:
    tensors = [tensor_call(block, num_bytes=size, shape=(4,), stride=(1,)) for size in (48, 16)]
    assert "two sizes: 48 and 16" in refusal(pickle.dumps([("a", tensors[0]), ("b", tensors[1])]))


@pytest.mark.parametrize("size", [0, 64, 111])
def test_a_block_that_is_cut_short_after_it_was_looked_at_is_refused(size: int) -> None:
    """Where it is mapped, the process ends here: nothing catches SIGBUS."""
    file = Path(f"/dev/shm/torch_{os.getpid()}_{2**31}_{2**31}")
    file.write_bytes(bytes(64 + 48))
    try:
        hand_made = Block(UntypedStorage(0), NOBODY, b"/" + file.name.encode(), 48)
        source = open_payload([reference(hand_made)], None)
        os.truncate(file, size)
        [(_, tensor)] = source
        with pytest.raises(RequestRejected, match=rf"{file.name} was cut short"):
            whole(tensor)
        source.close()
    finally:
        file.unlink()


def test_the_manager_is_left_alone(block: Block) -> None:
    # A connection to it would keep it, and all that its sender has left in it, for as long as this process.
    assert torch.equal(peek(reference(block, manager=NOBODY)), peek(reference(block)))


CUDA_ARGUMENTS: tuple[Any, ...] = (
    torch.Tensor,
    Call(torch.Size, [2]),
    (1,),
    0,
    TypedStorage,
    torch.float32,
    0,
    b"h" * 64,
    8,
    0,
    False,
    b"/torch_1_2_3",
    0,
    b"e" * 64,
    True,
)
CUDA_UUID = "3c1f9e0a-0000-4000-8000-0123456789ab"


def cuda_payload(arguments: tuple[Any, ...]) -> bytes:
    return pickle.dumps([("w", Call(reductions.rebuild_cuda_tensor, *arguments))])


@pytest.mark.parametrize("device", [0, 7, CUDA_UUID])
def test_cuda_tensors_are_refused_because_this_engine_runs_on_the_cpu(device: object) -> None:
    arguments = (*CUDA_ARGUMENTS[:6], device, *CUDA_ARGUMENTS[7:])
    assert "this engine runs on the CPU" in refusal(cuda_payload(arguments))


@pytest.mark.parametrize(
    "module",
    [
        "sglang.srt.utils.patch_torch",
        "sglang.srt.patch_torch",
        "nemo_rl.models.generation.sglang.utils.train_utils",
        "nemo_rl.models.policy.torch_reductions_utils",
        "roll.utils.send_recv_utils",
    ],
)
def test_patched_senders_of_cuda_tensors_are_recognised(module: str) -> None:
    arguments = pickle.dumps(CUDA_ARGUMENTS, 3)[2:-1]
    tensor = pickle_global(module, "_rebuild_cuda_tensor_modified") + arguments + b"R"
    payload = b"\x80\x03]\x8c\x01w" + tensor + b"\x86a."  # [("w", tensor)]
    assert "this engine runs on the CPU" in refusal(payload)


CUDA_SLOTS = ["tensor class", "shape", "stride", "offset", "storage class", "dtype", "device"]
CUDA_SLOTS += ["memory handle", "storage size", "storage offset", "requires_grad", "reference counter file"]
CUDA_SLOTS += ["reference counter index", "event handle", "event sync flag"]


@pytest.mark.parametrize(("slot", "name"), list(enumerate(CUDA_SLOTS)))
def test_broken_cuda_references_are_refused_by_slot(slot: int, name: str) -> None:
    arguments = (*CUDA_ARGUMENTS[:slot], 1.5, *CUDA_ARGUMENTS[slot + 1 :])
    assert f"rebuild_cuda_tensor: {name}: " in refusal(cuda_payload(arguments))


def test_file_descriptors_are_refused_with_advice() -> None:
    message = refusal(b"\x80\x04" + pickle_global(resource_sharer.__name__, "DupFd") + b".")
    assert "multiprocessing.resource_sharer.DupFd" in message
    assert 'set_sharing_strategy("file_system")' in message


# Shapes of the decoded object.


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "expected a list of (name, tensor), got NoneType"),
        ([1], "pairs of (name, tensor), got int"),
        ([("a", 1)], "a: expected a tensor, got int"),
        ([("a", torch.Tensor)], "a: expected a tensor, got torch.Tensor"),
        (
            [("a", FlattenedTensorMetadata("a", torch.Size([1]), torch.int8, 0, 1, 1))],
            "expected a LocalSerializedTensor",
        ),
        ([("a", LocalSerializedTensor(b"x"))], "expected a list of bytes"),  # type: ignore[arg-type]
        ([("a", LocalSerializedTensor([]))], "0 ranks' tensors were sent"),
        ([("a", LocalSerializedTensor([b"\x80\x04N."]))], "a: expected a tensor, got NoneType"),
        ([("a", LocalSerializedTensor([b"N."]))], "base64"),
    ],
)
def test_named_payloads_of_another_shape_are_refused(value: object, message: str) -> None:
    assert message in refusal(pickle.dumps(value))


METADATA = {
    "name": "w",
    "shape": torch.Size([2]),
    "dtype": torch.float32,
    "start_idx": 0,
    "end_idx": 8,
    "numel": 8,
}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (5, "metadata: expected a list, got int"),
        ([5], "expected a FlattenedTensorMetadata, got int"),
        ([{}], "exactly the fields name, shape, dtype"),
        ([{**METADATA, "name": b"w"}], "name: expected a string, got bytes"),
        ([{**METADATA, "shape": [2**63 - 1] * 3 + [0]}], "multiply to more"),
        ([{**METADATA, "dtype": "float32"}], "dtype: expected a torch.dtype"),
        ([{**METADATA, "start_idx": -8}], "start_idx: expected an integer"),
    ],
)
def test_broken_metadata_is_refused(block: Block, metadata: object, message: str) -> None:
    flat = tensor_call(block, dtype=torch.uint8, shape=(8,), stride=(1,))
    payload = pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
    assert message in refusal(payload, "flattened_bucket")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], 'a dictionary of "flattened_tensor" and "metadata"'),
        ({"flattened_tensor": 5, "metadata": []}, "flattened_tensor: expected a tensor, got int"),
    ],
)
def test_buckets_of_another_shape_are_refused(value: object, message: str) -> None:
    assert message in refusal(pickle.dumps(value), "flattened_bucket")


def test_a_bucket_is_held_against_its_bytes_however_often_its_list_has_come(block: Block) -> None:
    cache = PlanCache()

    def open_bucket(
        size: int, flat_dtype: torch.dtype = torch.uint8, **changes: object
    ) -> list[TensorHeader]:
        flat = tensor_call(block, dtype=flat_dtype, shape=(size,), stride=(1,))
        listed = [METADATA, {**METADATA, "name": "v", "start_idx": 8, "end_idx": 16, **changes}]
        payload = pickle.dumps({"flattened_tensor": flat, "metadata": listed})
        opened = open_payload([payload], "flattened_bucket", place=SECOND_REPLICA, cache=cache)
        opened.close()
        return list(opened.entries)

    first = open_bucket(16)
    assert [(one.name, one.shape, one.dtype) for one in first] == [
        ("w", (2,), torch.float32),
        ("v", (2,), torch.float32),
    ]
    for _ in range(2):
        assert open_bucket(24) == first
        with pytest.raises(RequestRejected, match="bytes 8 to 16 are not within the 12 bytes sent"):
            open_bucket(12)
        with pytest.raises(RequestRejected, match="expected contiguous bytes"):
            open_bucket(3, torch.float32)
        with pytest.raises(RequestRejected, match=r"of shape .3,. takes 12 bytes, 8 were sent"):
            open_bucket(16, shape=torch.Size([3]))
        with pytest.raises(RequestRejected, match=r"of shape .2,. takes 4 bytes, 8 were sent"):
            open_bucket(16, dtype=torch.bfloat16)
    assert open_bucket(16, name="u")[1].name == "u"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("", "first byte is not 0x80"),
        ("gASV", "broken pickle"),
        ("not base64!", "not base64"),
        (b"\xff\xfe", "neither a pickle .* nor base64"),
    ],
)
def test_envelopes_that_hold_no_pickle_are_refused(entry: bytes | str, message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        open_payload([entry], None)


# Mutations of what is valid: refused, or decoded into tensors that can be read; nothing else ever happens.


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 20)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(
        [torch.Tensor, UntypedStorage, TypedStorage, torch.float32, torch.bfloat16, torch.bits8, torch.Size]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
SLOTS = ["cls", "storage_cls", "manager", "handle", "num_bytes", "dtype", "untyped", "typed"]
SLOTS += ["offset", "shape", "stride", "requires_grad", "metadata"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(SLOTS), junk, min_size=1, max_size=2))
def test_any_value_in_any_slot_is_refused_or_readable(block: Block, changes: dict[str, Any]) -> None:
    try:
        tensor = peek(reference(block, **changes))
    except RequestRejected:
        return
    assert tensor.numel() * tensor.element_size() <= 48
