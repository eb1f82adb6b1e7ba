"""Checksums of parameters depend on every bit and on nothing else; copies are compared bit for bit."""

import hashlib
import re
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.device import CpuDevice
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.scheduling import weight_io
from ebbtide.srt.managers.scheduling.weight_io import ParameterChecker

T = TypeVar("T")


class Store:
    """Stands in for a weight store: these parameters and no model."""

    def __init__(self, **parameters: Tensor) -> None:
        self.tensors = parameters
        self.generation = 0

    def note_write(self) -> None:
        self.generation += 1

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def covered(self, name: str, direct: bool = False) -> frozenset[str]:
        assert direct
        return frozenset({f"checkpoint.{name}"})


def checker(store: Any) -> ParameterChecker:
    return ParameterChecker(store, CpuDevice(), ParallelConfig(tp_size=2, dp_size=2, tp_rank=1, dp_rank=1))


def finish(work: Generator[int, None, T]) -> tuple[T, int]:
    """What the work returns, and the bytes that it has read."""
    num_bytes = 0
    while True:
        try:
            num_bytes += next(work)
        except StopIteration as end:
            return end.value, num_bytes


def sum_of(tensor: Tensor) -> str:
    result, num_bytes = finish(checker(Store(w=tensor)).checksums(()))
    assert num_bytes == tensor.nbytes
    return result.checksums["w"]


def sample(dtype: torch.dtype = torch.bfloat16, size: int = 1001) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    sums = {sum_of(tensor)}
    for byte in (0, 7, 8, 500, tensor.nbytes - 1):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            sums.add(sum_of(other))
    assert len(sums) == 41


@pytest.mark.parametrize("size", [4, 8, 16])
def test_places_count(size: int) -> None:
    """Two values that differ in their sign only, wherever they are swapped."""
    tensor = torch.zeros(64, dtype=torch.bfloat16)
    sums = set()
    for place in range(0, 64, size):
        other = tensor.clone()
        other[place + size - 1] = -0.0
        sums.add(sum_of(other))
    assert len(sums) == 64 // size


def test_pieces_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum_of(sample())
    monkeypatch.setattr(weight_io, "PIECE_BYTES", 64)
    assert sum_of(sample()) == whole
    assert sum_of(torch.zeros(0)) == "0" * 16


def test_sha256_is_that_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_io, "PIECE_BYTES", 64)
    tensor = sample()
    result, num_bytes = finish(checker(Store(w=tensor)).checksums((), "sha256"))
    data = tensor.view(torch.uint8).numpy().tobytes()
    assert (result.checksums, num_bytes) == ({"w": hashlib.sha256(data).hexdigest()}, len(data))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")  # noqa: TID251
def test_the_device_does_not_count() -> None:
    assert sum_of(sample(size=100_001).to("cuda")) == sum_of(sample(size=100_001))


def test_names_are_part_of_the_checksum_of_a_rank() -> None:
    def total(**parameters: Tensor) -> str:
        return finish(checker(Store(**parameters)).checksums(()))[0].per_gpu_checksum

    a, b = torch.zeros(3), torch.ones(3)
    assert len({total(x=a, y=b), total(x=b, y=a), total(x=a), total(y=a)}) == 4
    assert total(x=a, y=b) == total(y=b, x=a)


def test_a_rank_says_which_it_is_and_leaves_out_what_is_skipped() -> None:
    store = Store(a=torch.zeros(3), ab=torch.zeros(3), c=torch.zeros(3))
    result, _ = finish(checker(store).checksums(["a"]))
    assert set(result.checksums) == {"c"}
    [place] = result.parallelism_info
    assert (place.tp_rank, place.tp_size, place.dp_rank, place.dp_size) == (1, 2, 1, 2)
    assert (place.rank, place.size) == (3, 4)
    assert checker(store).sources(["b"]) == {"checkpoint.a", "checkpoint.c"}


def test_a_copy_stays_what_it_was() -> None:
    store = Store(a=sample(), b=torch.full((7, 3), float("nan")))
    snapshot, num_bytes = finish(checker(store).snapshot())
    assert num_bytes == 2002 + 84
    assert finish(snapshot(()))[0] == []
    store.tensors["a"][5] += 1
    [error] = finish(snapshot(()))[0]
    assert error["name"] == "a"
    assert re.fullmatch(r"\d of 2002 bytes are not .* the snapshot: max_abs_err=[\d.e+-]+", error["reason"])
    store.tensors["a"][5] = float("nan")
    [error] = finish(snapshot(()))[0]
    assert error["reason"].endswith("max_abs_err=nan")
    assert finish(snapshot(["a"]))[0] == []


def test_parameters_are_filled_in_place() -> None:
    store = Store(a=torch.zeros(1000), b=torch.zeros(1000))
    address = store.tensors["a"].data_ptr()
    checker(store).fill(["b"])
    assert store.generation == 1
    assert store.tensors["a"].data_ptr() == address
    assert store.tensors["a"].view(torch.uint8).unique().numel() > 200
    assert not store.tensors["b"].any()


def test_a_copy_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 100})
    monkeypatch.setattr(weight_io.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(RequestRejected, match="takes 2002 bytes of host memory, 100 are free") as caught:
        finish(checker(Store(a=sample())).snapshot())
    assert (caught.value.status, caught.value.fields["needed_bytes"]) == (409, 2002)


def test_a_copy_that_the_system_gives_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # More than there are addresses: the system refuses it, whatever it promises otherwise.
    huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 60)
    monkeypatch.setattr(weight_io, "PIECE_BYTES", 1 << 60)
    memory = type("Memory", (), {"available": 1 << 61})
    monkeypatch.setattr(weight_io.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(RequestRejected, match="of host memory, 2002 are free") as caught:
        finish(checker(Store(a=sample(), b=huge)).snapshot())
    assert caught.value.status == 409


def test_parameters_are_read_in_pieces() -> None:
    tensors = {"first": sample(), "second": sample(torch.float32, 10).view(2, 5)}
    reader = checker(Store(**tensors))
    pieces = [reader.pieces(1, first_byte, 16)[0] for first_byte in (0, 16, 32)]
    assert (pieces[0].name, pieces[0].shape, pieces[0].dtype) == ("second", (2, 5), "float32")
    assert [len(piece.data) for piece in pieces] == [16, 16, 8]
    in_one = [[piece.name for piece in reader.pieces(0, 0, size)] for size in (2000, 2041, 2042)]
    assert in_one == [["first"], ["first"], ["first", "second"]]
    assert [piece.name for piece in reader.pieces(0, 2000, 100)] == ["first"]
    data = bytearray().join(piece.data for piece in pieces)
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).view(2, 5), tensors["second"])
    with pytest.raises(RequestRejected, match="0 to 1, got 2"):
        reader.pieces(2, 0, 16)
