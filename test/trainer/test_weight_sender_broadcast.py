"""A `WeightSender` that broadcasts to all ranks of real engines and servers: all of it serves, or nothing."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import weight_sending
from fixtures.deadlines import HANG_S
from fixtures.line_faults import raised_at_line
from fixtures.servers import Server, free_port, running_server, url_of, wait_until
from fixtures.weight_sending import BUCKET_BYTES, Weights, serves

from ebbtide.formats import weight_group
from ebbtide.formats.rendezvous import GroupAddress, Member, abort
from ebbtide.trainer import WeightSender, WeightSendError, broadcaster
from ebbtide.trainer.targets import EngineTarget


@pytest.fixture
def engine(divided_engine: Any) -> Iterator[Any]:
    """An engine of two ranks, which has left every group in the end."""
    yield divided_engine
    assert groups_of(divided_engine) == []


@pytest.fixture
def mortal_server(checkpoint: Path) -> Iterator[Server]:
    with running_server(checkpoint, "--device", "cpu", "--skip-tokenizer-init") as server:
        yield server


def sender_to(target: Any, **options: Any) -> WeightSender:
    return weight_sending.sender_to(target, transport="broadcast", **{"retries": 1, **options})


def groups_of(engine: Any) -> list[str]:
    groups: list[str] = engine.server_info()["weight_update"]["groups"]
    return groups


@pytest.fixture
def no_broadcast_is_left() -> Callable[[], bool]:
    """Whether the threads of this test's groups have ended. Peers of other modules may hang for a while."""
    before = set(threading.enumerate())

    def is_so() -> bool:
        names = [thread.name for thread in threading.enumerate() if thread not in before]
        return not any(name.startswith(("broadcast-", "join-")) for name in names)

    return is_so


@pytest.mark.parametrize("bucket_bytes", [BUCKET_BYTES, 1])
def test_an_engine_takes_all_weights_in_one_group_that_is_kept(
    engine: Any, old: Weights, new: Weights, bucket_bytes: int
) -> None:
    odd: Weights = {name: torch.nn.Parameter(tensor) for name, tensor in new.items()}
    odd["lm_head.weight"] = new["lm_head.weight"].t().contiguous().t()
    odd["model.norm.weight"] = torch.arange(128, dtype=torch.float64)[::2]
    groups = []
    with sender_to(engine, bucket_bytes=bucket_bytes) as sender:
        for weights, version in ((old, "again"), (odd, "odd")):
            sent = sender.send(weights.items(), version=version)
            assert (sent.num_tensors, sent.staged) == (len(new), True)
            groups.append(groups_of(engine))
    assert serves(engine, {name: tensor.detach().float() for name, tensor in odd.items()}, "odd")
    assert groups[0] == groups[1]
    assert len(groups[0]) == 1


def test_a_closed_sender_has_left_and_makes_another_group_at_its_own_port(
    engine: Any, new: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left = []

    def leave_slowly(members: list[Member]) -> None:
        time.sleep(0.2)
        abort(members)
        has_left.append(True)

    monkeypatch.setattr(weight_group, "abort", leave_slowly)
    sender = sender_to(engine, master_address="127.0.0.1", master_port=free_port(), backend="gloo")
    for count, version in enumerate(("1", "2"), start=1):
        sender.send(new.items(), version=version)
        sender.close()
        # The program may end now: one that ends while a thread is in torch is aborted.
        assert len(has_left) == count
        assert groups_of(engine) == []
    assert serves(engine, new, "2")


def test_a_tensor_that_does_not_fit_leaves_the_old_weights_and_nobody_waiting(
    engine: Any, old: Weights, new: Weights, no_broadcast_is_left: Callable[[], bool]
) -> None:
    bad = {**new, list(new)[9]: torch.zeros(3)}
    reading = iter(bad.items())
    with sender_to(engine, retries=3) as sender:
        with pytest.raises(WeightSendError, match=rf"{list(new)[9]}: .* no engine serves any of it"):
            sender.send(reading, version="bad")
        # Other ranks of a trainer would wait in a gather.
        assert next(reading, None) is None
        assert serves(engine, old, "old")
        wait_until(no_broadcast_is_left, "the broadcast that nobody took has ended")
        sender.send(new.items(), version="new")
    assert serves(engine, new, "new")


def test_a_group_that_breaks_is_made_again_and_the_bucket_sent_again(engine: Any, new: Weights) -> None:
    groups: list[str] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(new.items()):
            if index == 15:
                groups.extend(groups_of(engine))
                engine.destroy_weights_update_group(groups[0])
            yield item

    with sender_to(engine) as sender:
        sender.send(gather(), version="new")
        assert len(groups_of(engine)) == len(groups) == 1
        assert groups_of(engine) != groups
    assert serves(engine, new, "new")


def test_an_engine_that_does_not_join_keeps_nobody_waiting(
    engine: Any, new: Weights, monkeypatch: pytest.MonkeyPatch, no_broadcast_is_left: Callable[[], bool]
) -> None:
    join = EngineTarget.join_group

    def join_with_nccl(target: EngineTarget, address: GroupAddress, timeout_s: float) -> None:
        join(target, replace(address, backend="nccl"), timeout_s)

    monkeypatch.setattr(EngineTarget, "join_group", join_with_nccl)
    with (
        sender_to(engine) as sender,
        pytest.raises(WeightSendError, match=r"bucket 0 .* runs on the CPU.* no engine serves any of it"),
    ):
        sender.send(new.items(), version="new")
    wait_until(no_broadcast_is_left, "this end has stopped waiting for the others")


class RecordedGroup:
    """A group that takes whatever is sent."""

    def __init__(self, name: str, member: object, device: torch.device) -> None:
        self.name = name
        self.is_closed = False
        self.num_sent = self.num_taken = 0
        self.future: Future[None] = Future()
        self.future.set_result(None)

    def send(self, tensors: object, timeout_s: float) -> "RecordedGroup":
        self.num_sent += 1
        return self

    def close(self, why: str) -> weight_group.Leaving:
        self.is_closed = True
        return weight_group.Leaving(self.name, lambda: None)


def test_a_group_is_left_wherever_a_broadcast_in_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent and not asked for would be taken for the next bucket."""
    made: list[RecordedGroup] = []

    def make(*arguments: Any) -> RecordedGroup:
        made.append(RecordedGroup(*arguments))
        return made[-1]

    def take(*_: object) -> dict[str, Any]:
        made[-1].num_taken += 1
        return {}

    monkeypatch.setattr(broadcaster, "WeightGroup", make)
    monkeypatch.setattr(broadcaster, "connect", lambda *_: None)
    asked = SimpleNamespace(
        name="engine",
        location=None,
        size=lambda: (1, 1),
        join_group=lambda *_: None,
        take_broadcast=take,
        leave_group=lambda _: None,
    )
    sending, named = broadcaster.Broadcaster([asked], "gloo", None, None), [("a", torch.zeros(1))]  # type: ignore[list-item]
    for number in itertools.count():
        assert sending.connect(torch.device("cpu"), HANG_S) == {}
        fault = RuntimeError("can't start new thread")
        with raised_at_line(number, fault, "trainer/broadcaster.py") as lines, suppress(RuntimeError):
            sending.send(named, HANG_S)
        if next(lines) <= number:
            break
        assert made[-1].is_closed or made[-1].num_sent == made[-1].num_taken, f"at line {number}"
    assert not made[-1].is_closed
    assert len(made) > 10


@pytest.mark.parametrize("is_used_again", [False, True])
def test_no_engine_stays_in_a_group_whose_making_use_or_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, is_used_again: bool
) -> None:
    monkeypatch.setattr(broadcaster, "WeightGroup", RecordedGroup)
    monkeypatch.setattr(broadcaster, "connect", lambda *_: None)
    monkeypatch.setattr(broadcaster, "host_store", lambda _: SimpleNamespace(port=1))
    joined: set[str] = set()
    asked = SimpleNamespace(
        name="engine",
        location=None,
        size=lambda: (1, 1),
        join_group=lambda address, _: joined.add(address.name),
        take_broadcast=lambda *_: {},
        leave_group=joined.discard,
    )
    for number in itertools.count():
        making = broadcaster.Broadcaster([asked], "gloo", None, None)  # type: ignore[list-item]
        with (
            raised_at_line(number, KeyboardInterrupt(), "trainer/broadcaster.py") as lines,
            suppress(KeyboardInterrupt),
        ):
            making.connect(torch.device("cpu"), HANG_S)
            making.send([("a", torch.zeros(1))], HANG_S)
            making.close()
        if is_used_again:
            assert making.connect(torch.device("cpu"), HANG_S) == {}
            assert len(joined) == 1, f"at line {number}"
        making.close()
        assert not joined, f"at line {number}"
        if next(lines) <= number:
            break


def test_several_targets_until_one_dies_in_the_middle(
    engine: Any, mortal_server: Server, old: Weights, new: Weights, no_broadcast_is_left: Callable[[], bool]
) -> None:
    server = mortal_server

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(new.items()):
            if index == 10:
                server.process.kill()
            yield item

    with sender_to([url_of(server), engine]) as sender:
        sender.send(old.items(), version="both")
        assert serves(engine, old, "both")
        assert serves(server, old, "both")
        with pytest.raises(WeightSendError, match=r"bucket \d+ .* no answer") as caught:
            sender.send(gather(), version="dead")
        assert url_of(server) in caught.value.failures
        assert caught.value.committed == ()
        assert serves(engine, old, "both")
    wait_until(no_broadcast_is_left, "the broadcast has ended with its receiver")
    with sender_to(engine) as sender:
        sender.send(new.items(), version="alone")
    assert serves(engine, new, "alone")
