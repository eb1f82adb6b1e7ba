"""Payloads from a trainer in another process, in every format; and what is refused before it is read."""

import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fixtures.gpu_memory import UUID, Counters, Gpu
from fixtures.payloads import open_payload
from fixtures.trainer_process import TrainerProcess, sample_tensors

from ebbtide.formats import IpcTensor
from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.config import Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import PayloadReader

LeftBehind = Callable[[], set[Path]]
OTHER = "00000000-1111-4222-8333-444444444444"
# At an odd offset in a buffer.
TENSORS = {"odd": torch.arange(3, dtype=torch.uint8), "b": torch.arange(6.0).reshape(2, 3)}
BUFFER = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in [*TENSORS.values(), torch.ones(5)]])


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    with TrainerProcess() as process:
        yield process


@pytest.fixture
def left_behind(trainer: TrainerProcess) -> LeftBehind:
    """What the trainer has in shared memory now and had not when the test began."""
    before = trainer.shared_objects()
    return lambda: trainer.shared_objects() - before


def assert_holds(source: WeightSource, expected: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Headers, names, dtypes, shapes and bits are those expected; the source is closed afterwards."""
    headers = [(entry.name, entry.shape, entry.dtype) for entry in source.entries]
    assert headers == [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in expected]
    received = {name: whole(tensor).clone() for name, tensor in source}
    source.close()
    assert list(received) == [name for name, _ in expected]
    for name, tensor in expected:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor.detach()), name


@pytest.mark.parametrize(
    ("kind", "load_format", "as_bytes"),
    [
        ("named", None, False),
        ("named", "direct", True),
        ("bucket", "flattened_bucket", False),
        ("bucket_of_dicts", "flattened_bucket", True),
    ],
)
def test_what_a_trainer_sends_arrives(
    trainer: TrainerProcess, kind: str, load_format: str | None, as_bytes: bool
) -> None:
    entry: bytes | str = trainer.send(kind)
    if as_bytes:
        entry = base64.b64decode(entry)
    source = open_payload([entry], load_format)
    assert source.direct is (load_format == "direct")
    assert source.near_bytes is None, "it lies in host memory"
    assert_holds(source, sample_tensors())


def test_each_rank_opens_its_own_of_locally_serialized_tensors(
    trainer: TrainerProcess, left_behind: LeftBehind
) -> None:
    entry = trainer.send("two_ranks")
    for rank in (0, 1):
        source = open_payload([entry, entry], None, place=Place(tp_rank=rank, tp_size=2))
        assert_holds(source, [(name, tensor.detach() + rank) for name, tensor in sample_tensors()])
    trainer.drop()
    assert left_behind() == set()


@pytest.mark.parametrize("load_format", [None, "safetensors"])
def test_no_entries_write_nothing(load_format: str | None) -> None:
    assert_holds(open_payload([], load_format), [])


@pytest.mark.parametrize("sender_drops_it_first", [False, True])
def test_shared_memory_is_gone_once_both_sides_have_dropped_it(
    trainer: TrainerProcess, left_behind: LeftBehind, sender_drops_it_first: bool
) -> None:
    entry = trainer.send("named")
    assert left_behind() != set()
    source = open_payload([entry], None)
    if sender_drops_it_first:
        trainer.drop()
    assert_holds(source, sample_tensors())
    trainer.drop()
    assert left_behind() == set()


def test_replicas_share_an_entry_and_drop_it_once(trainer: TrainerProcess, left_behind: LeftBehind) -> None:
    entry = trainer.send("named")
    # The replica that drops the reference closes first: the others must still find the memory.
    for dp_rank in range(3):
        place = Place(dp_rank=dp_rank, dp_size=3)
        assert_holds(open_payload([entry], None, place=place), sample_tensors())
    trainer.drop()
    assert left_behind() == set()


def test_a_payload_whose_tensors_are_gone_is_refused(trainer: TrainerProcess) -> None:
    entry = trainer.send("named")
    open_payload([entry], None).close()
    trainer.drop()
    with pytest.raises(RequestRejected, match="until the update is answered"):
        open_payload([entry], None)


@pytest.mark.parametrize("cut_bytes", [0, 40])
def test_a_payload_that_is_refused_unread_leaves_nothing_behind(
    trainer: TrainerProcess, left_behind: LeftBehind, cut_bytes: int
) -> None:
    payload = base64.b64decode(trainer.send("bucket"))
    with pytest.raises(RequestRejected):
        open_payload([payload[: len(payload) - cut_bytes]], None)
    assert left_behind() != set()
    trainer.drop()
    assert left_behind() == set()


def safetensors_image() -> tuple[bytes, list[tuple[str, torch.Tensor]]]:
    # A safetensors file has neither views nor shared storages.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in sample_tensors()}
    image = safetensors.torch.save(tensors)
    return image, sorted(tensors.items())


@pytest.mark.parametrize("as_bytes", [False, True])
def test_one_safetensors_image_serves_all_ranks(as_bytes: bool) -> None:
    image, expected = safetensors_image()
    entry = image if as_bytes else base64.b64encode(image).decode()
    for tp_rank in (0, 1):
        place = Place(tp_rank=tp_rank, tp_size=2, dp_rank=1, dp_size=3)
        source = open_payload([entry], "safetensors", place=place)
        assert_holds(source, expected)
    assert {name for name, _ in expected} == {name for name, _ in sample_tensors()}


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "dtype"])
def test_a_damaged_safetensors_image_is_refused(damage: str) -> None:
    image, _ = safetensors_image()
    damaged = {
        "cut": image[:-1],
        "header": b"\xff" * 8 + image[8:],
        "empty": b"",
        "dtype": image.replace(b'"F64"', b'"Q64"'),
    }[damage]
    with pytest.raises(RequestRejected, match="not a safetensors image"):
        open_payload([damaged], "safetensors")


def test_ranks_find_their_entry_by_index() -> None:
    entries = [
        base64.b64encode(safetensors.torch.save({"x": torch.tensor([float(index)])})).decode()
        for index in range(6)
    ]
    for dp_rank in range(2):
        for tp_rank in range(3):
            place = Place(tp_rank=tp_rank, tp_size=3, dp_rank=dp_rank, dp_size=2)
            [(_, own)] = open_payload(entries, "safetensors", place=place)
            [(_, replicated)] = open_payload(entries[:3], "safetensors", place=place)
            assert whole(own).item() == dp_rank * 3 + tp_rank
            assert whole(replicated).item() == tp_rank


@pytest.mark.parametrize(
    ("num_entries", "load_format"),
    [(1, None), (3, None), (5, "safetensors")],
)
def test_another_number_of_entries_is_refused(num_entries: int, load_format: str | None) -> None:
    with pytest.raises(RequestRejected, match=rf"expected 4 .* or 2 .* entries, got {num_entries}"):
        open_payload(["AAAA"] * num_entries, load_format, place=Place(tp_size=2, dp_size=2))


@pytest.mark.parametrize(
    ("load_format", "message"),
    [
        ("pickle", "null, flattened_bucket, direct, safetensors"),
        ("os.system", r"os\.system.*custom-weight-loader"),
    ],
)
def test_other_load_formats_are_refused_with_the_valid_ones(load_format: str, message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as refusal:
        open_payload([], load_format)
    assert refusal.value.status == 400


def test_decoding_that_is_left_between_two_slices_leaves_nothing_behind(
    trainer: TrainerProcess, left_behind: LeftBehind
) -> None:
    entry = trainer.send("named")
    opening = PayloadReader().open([entry], None)
    next(opening)
    opening.close()
    assert left_behind() != set()
    opening = PayloadReader().open([entry], None)
    next(opening)
    assert_holds(finish(opening), sample_tensors())
    trainer.drop()
    assert left_behind() == set()


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
    place = Place(tp_size=num_ranks, tp_rank=num_ranks - 1)
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
