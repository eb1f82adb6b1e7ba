"""Meeting vLLM's trainers: their store and their pickled id, and a stand-in for the library of NCCL."""

import base64
import ctypes
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures.servers import free_port

from ebbtide.formats import nccl
from ebbtide.formats.rendezvous import ID_KEY, GroupAddress, connect, decode_id, read_id
from ebbtide.formats.weight_group import WeightGroup
from ebbtide.srt.errors import RequestRejected

CPU = torch.device("cpu")
ID = bytes(range(128))
SUCCESS, IN_PROGRESS, SYSTEM_ERROR = 0, 7, 2


@pytest.fixture
def pickled_id(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """As the trainer's class makes it, whose module is gone again when it is read."""
    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    fields = {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": name}
    kind: Any = type("ncclUniqueId", (ctypes.Structure,), fields)
    with monkeypatch.context() as here:
        packages = name.split(".")
        for depth in range(1, len(packages) + 1):
            here.setitem(sys.modules, ".".join(packages[:depth]), ModuleType("package"))
        here.setattr(sys.modules[name], "ncclUniqueId", kind, raising=False)
        return pickle.dumps(kind.from_buffer_copy(ID))


@dataclass
class Library:
    """Says what NCCL says. What rank 0 broadcasts are bytes that count up.

    Attributes:
        joins, moves: whether the others come, and whether broadcasts end.
    """

    joins: bool = True
    moves: bool = True
    fails: str = ""
    called: list[str] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            self.args[name] = arguments
            if name == self.fails:
                return SYSTEM_ERROR
            if name == "ncclCommInitRankConfig":
                arguments[0]._obj.value = 1234
                return IN_PROGRESS
            if name == "ncclCommGetAsyncError":
                is_joining = "ncclAllReduce" not in self.called
                is_done = self.joins if is_joining else self.moves
                arguments[1]._obj.value = SUCCESS if is_done else IN_PROGRESS
            if name == "ncclBroadcast":
                ctypes.memmove(arguments[1].value, bytes(range(12)), 12)
            return SUCCESS

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    library.__dict__["ncclGetErrorString"] = lambda status: b"unhandled system error"
    monkeypatch.setattr(nccl, "load_library", lambda: library)
    return library


def address(port: int, unique_id: bytes | None = None) -> GroupAddress:
    return GroupAddress("vllm", "127.0.0.1", port, 1, 2, "raw_nccl", unique_id)


def test_the_id_is_read_and_nothing_is_imported(pickled_id: bytes) -> None:
    assert read_id(pickled_id) == ID
    assert decode_id(base64.b64encode(ID).decode()) == ID


@pytest.mark.parametrize(
    "pickled", [pickle.dumps(print), pickle.dumps({"id": 1}), b"", b"cvllm.other\nncclUniqueId\n."]
)
def test_what_is_no_id_is_refused(pickled: bytes) -> None:
    with pytest.raises(RequestRejected):
        read_id(pickled)


@pytest.mark.parametrize("text", ["", "AA==", "_-" * 86, base64.b64encode(ID + b"x").decode()])
def test_what_is_no_id_in_base64_is_refused(text: str) -> None:
    with pytest.raises(RequestRejected, match="128 bytes"):
        decode_id(text)


def test_a_group_is_met_as_vllms_trainers_meet_it(library: Library, pickled_id: bytes) -> None:
    port = free_port()
    stores: list[Any] = []

    def trainer() -> None:
        # It returns when as many clients have come as there are ranks.
        stores.append(dist.TCPStore("127.0.0.1", port, 2, is_master=True, use_libuv=False))
        stores[0].set(ID_KEY, pickled_id)

    thread = threading.Thread(target=trainer)
    thread.start()
    member = connect(address(port), 60, CPU)
    thread.join()
    _, world_size, ident, rank, config = library.args["ncclCommInitRankConfig"]
    assert (world_size, bytes(ident), rank) == (2, ID, 1)
    assert config._obj.blocking == 0
    assert library.called.index("ncclAllReduce") > 0, "the warm-up that the trainer waits for"

    group = WeightGroup("vllm", member, CPU)
    received = group.receive([((3,), torch.int32)], 60)
    while not received.is_done:
        threading.Event().wait(1e-3)
    assert received.result()[0].view(torch.uint8).tolist() == list(range(12))
    _, _, count, kind, root, comm, _ = library.args["ncclBroadcast"]
    assert (count.value, kind, root, comm.value) == (3, 2, 0, 1234)
    while not group.close("it is done").is_done:
        threading.Event().wait(1e-3)
    assert library.called[-1] == "ncclCommAbort"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"joins": False}, "did not come in time"),
        ({"fails": "ncclCommInitRankConfig"}, "unhandled system error"),
        ({"fails": "ncclAllReduce"}, "ncclAllReduce"),
    ],
)
def test_a_communicator_that_does_not_come_about_is_given_up(
    library: Library, wrong: dict[str, Any], message: str
) -> None:
    library.__dict__.update(wrong)
    with pytest.raises(nccl.NcclFailed, match=message):
        connect(address(1, ID), 0.05, CPU)
    if wrong != {"fails": "ncclCommInitRankConfig"}:
        assert library.called[-1] in ("ncclCommAbort", "ncclGetErrorString")
        assert "ncclCommAbort" in library.called


def test_a_broadcast_that_does_not_end_is_refused_at_its_deadline(library: Library) -> None:
    group = WeightGroup("vllm", connect(address(1, ID), 60, CPU), CPU)
    library.moves = False
    received = group.receive([((3,), torch.int32)], 0.05)
    while not received.is_done:
        threading.Event().wait(1e-3)
    with pytest.raises(RequestRejected, match=r"the group 'vllm' was left.*init_weights_update_group"):
        received.result()
    assert group.is_closed
    assert "ncclCommAbort" in library.called
