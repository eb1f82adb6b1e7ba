"""Tensors that are read from a file when they are asked for: what torch's views of the same bytes hold."""

from collections.abc import Callable

import pytest
import torch

from ebbtide.formats.stored_tensor import StoredTensor, copy_into, whole
from ebbtide.srt.errors import RequestRejected


class Bytes:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._data = tensor.numpy().tobytes()

    def read_into(self, room: memoryview, offset: int) -> None:
        found = self._data[offset : offset + len(room)]
        if len(found) < len(room):
            raise RequestRejected("cut short")
        room[:] = found


BASE = torch.arange(60, dtype=torch.float32)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda base: base.view(12, 5),
    "three dimensions": lambda base: base.view(3, 4, 5),
    "rows": lambda base: base.view(12, 5).narrow(0, 3, 7),
    "columns": lambda base: base.view(12, 5).narrow(1, 1, 3),
    "transposed": lambda base: base.view(5, 12).T,
    "scalar": lambda base: base[59],
    "empty": lambda base: base.view(12, 5)[12:],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_holds_what_the_view_holds(name: str, dtype: torch.dtype) -> None:
    view = VIEWS[name](BASE)
    stored = StoredTensor(
        Bytes(BASE), view.storage_offset() * 4, tuple(view.shape), view.stride(), view.dtype
    )
    assert torch.equal(whole(stored), view)
    room = torch.full(view.shape, -1, dtype=dtype)
    copy_into(room, stored)
    assert torch.equal(room, view.to(dtype))
    if view.dim() > 1:
        pieces = [whole(piece) for piece in stored.split(5)]
        assert all(len(piece) <= 5 for piece in pieces)
        assert torch.equal(torch.cat([view[:0], *pieces]), view)
        narrow = stored.narrow(1, 1, 2)
        assert torch.equal(whole(narrow), view.narrow(1, 1, 2))


def test_what_is_not_there_is_a_refusal() -> None:
    stored = StoredTensor.contiguous(Bytes(BASE), 0, (61,), torch.float32)
    with pytest.raises(RequestRejected, match="cut short"):
        stored.read()
    with pytest.raises(RequestRejected, match="cut short"):
        stored.copy_to(torch.empty(61))
