"""State dicts that prime-rl's trainer broadcasts, one after the other, each behind a word on what is in it.

First comes how many there are. Of each: the length of a pickle, the pickle, which lists names, shapes and
sizes by dtype, and for each dtype one broadcast of all its elements. Source: wire_vllm section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ebbtide.formats.allowed_globals import kind_of, resolve_global, text
from ebbtide.formats.pickle_reader import read_pickle
from ebbtide.formats.tensor_refs import TensorHeader, dtype_named, natural, tensor_shape
from ebbtide.formats.weight_group import Broadcasts, TensorKinds, WeightGroup
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.source import WeightSource

MAX_STATE_DICTS: Final = 1 << 16
MAX_PICKLE_BYTES: Final = 64 << 20
_NUMBER: Final[TensorKinds] = [((1,), torch.int64)]

# What is received next; sent in: what has come. Yields a source where a state dict is whole.
_Receiving: TypeAlias = Generator[TensorKinds | WeightSource, list[Tensor], None]


class StateDictConversation:
    """One rank's end of an update, to be used as `IpcConversation`: the sender itself hears no answers.

    After a problem the rest is received all the same: a sender that waits in the middle of a broadcast would
    do so for ever.

    Args:
        timeout_s: how long each broadcast may take.
    """

    def __init__(self, group: WeightGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._receiving = _state_dicts(group.device.type != "cpu")
        self._broadcasts: Broadcasts | None = None
        self._bucket: WeightSource | None = None
        self._owes_answer = False
        self._is_over = False
        self._refused = ""

    @property
    def bucket(self) -> WeightSource | None:
        """The state dict that has come; None once all have."""
        return self._bucket

    def poll(self) -> bool:
        """Whether a state dict has come, or all have.

        Raises:
            RequestRejected: 400, the broadcasts failed, or say what they should not; the group has been left.
        """
        while not self._owes_answer:
            if self._is_over:
                raise RequestRejected(f"nothing of the update is served: {self._refused}")
            arrived = None
            if self._broadcasts is not None:
                if not self._broadcasts.is_done:
                    return False
                arrived = self._broadcasts.result()
            self._broadcasts = None
            self._go_on(arrived)
        return True

    def answer(self, problem: str = "") -> None:
        """What has come was taken, or not: the update will be refused then."""
        self._refused = self._refused or problem
        self._owes_answer = False
        self._bucket = None

    def close(self) -> None:
        """Leave a group whose trainer is in the middle of something. Idempotent."""
        self._bucket = None
        if not self._is_over:
            self._is_over = True
            self._refused = self._refused or "the update was given up"
            self._group.close("an update ended before all of its broadcasts had arrived")

    def _go_on(self, arrived: list[Tensor] | None) -> None:
        try:
            asked = next(self._receiving) if arrived is None else self._receiving.send(arrived)
        except StopIteration:
            self._is_over = True
            self._owes_answer = not self._refused
            return
        except RequestRejected:
            # What comes next is not known.
            self.close()
            raise
        if isinstance(asked, WeightSource):
            self._bucket, self._owes_answer = asked, True
        else:
            self._broadcasts = self._group.receive(asked, self._timeout_s)


def _state_dicts(is_on_device: bool) -> _Receiving:
    for _ in range(_number((yield _NUMBER), "state dicts", MAX_STATE_DICTS)):
        num_bytes = _number((yield _NUMBER), "bytes of a list", MAX_PICKLE_BYTES)
        [pickled] = yield [((num_bytes,), torch.uint8)]
        listed = _listed(bytes(pickled.cpu().numpy()))
        flat = yield [((sum(_numel(one) for one in headers),), dtype) for dtype, headers in listed.items()]
        tensors = {
            header.name: part.view(header.shape)
            for headers, whole in zip(listed.values(), flat, strict=True)
            for header, part in zip(headers, torch.split(whole, [*map(_numel, headers)]), strict=True)
        }
        entries = [header for headers in listed.values() for header in headers]
        rows = [(entry.name, tensors[entry.name]) for entry in entries]
        yield WeightSource(entries, rows.copy, is_on_device=is_on_device)


def _number(arrived: list[Tensor], what: str, most: int) -> int:
    found = int(arrived[0])
    if not 0 <= found <= most:
        raise RequestRejected(f"the trainer announced {found} {what}: expected 0 to {most}")
    return found


def _listed(pickled: bytes) -> dict[torch.dtype, list[TensorHeader]]:
    """What comes, by dtype, in the order of the broadcasts."""
    said = read_pickle(pickled, _resolve)
    if not isinstance(said, dict):
        raise RequestRejected(f"a state dict: expected lists of tensors by dtype, got {kind_of(said)}")
    listed = {}
    for key, rows in said.items():
        dtype = dtype_named(text(key, "a state dict: dtype"), "a state dict")
        if not isinstance(rows, list):
            raise RequestRejected(f"a state dict: {dtype}: expected a list of tensors, got {kind_of(rows)}")
        listed[dtype] = [_header(row, dtype) for row in rows]
    names = [header.name for headers in listed.values() for header in headers]
    if len(set(names)) != len(names):
        raise RequestRejected("a state dict: a tensor is named twice")
    return listed


def _resolve(module: str, name: str) -> object:
    """As `resolve_global`; dtypes, which are keys here, by their names."""
    found = resolve_global(module, name)
    return name if isinstance(found, torch.dtype) else found


def _header(row: object, dtype: torch.dtype) -> TensorHeader:
    if not isinstance(row, tuple | list) or len(row) != 3:
        raise RequestRejected(f"a state dict: expected (name, shape, number of elements), got {kind_of(row)}")
    name = text(row[0], "name")
    header = TensorHeader(name, tensor_shape(row[1], f"{name[:200]}: shape"), dtype)
    if natural(row[2], f"{name[:200]}: number of elements") != _numel(header):
        raise RequestRejected(f"{name[:200]}: {row[2]} elements do not make {list(header.shape)}")
    return header


def _numel(header: TensorHeader) -> int:
    return math.prod(header.shape)
