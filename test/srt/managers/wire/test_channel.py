"""Channels: order, waiting, type checks, large messages, and a peer that is gone."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from fixtures.scripted_engine import channel_pair

from ebbtide.srt.managers.io_struct import (
    ControlCall,
    Expire,
    FlushCacheReqInput,
    PingReqInput,
    SchedulerInput,
    TokenizedGenerateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from ebbtide.srt.managers.wire.channel import MAX_AT_ONCE, Receiver, Sender
from ebbtide.srt.sampling_params import SamplingParams

LARGE = bytes(range(256)) * (1 << 17)  # 32 MiB


@pytest.fixture
def channel(tmp_path: Path) -> Any:
    receiver: Receiver[Any] = Receiver(f"ipc://{tmp_path}/channel", SchedulerInput)
    sender: Sender[Any] = Sender(f"ipc://{tmp_path}/channel")
    yield sender, receiver
    sender.close()
    receiver.close()


def take(receiver: Receiver[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        got = receiver.receive()
        assert got, f"only {len(messages)} of {count} messages arrived"
        assert len(got) <= MAX_AT_ONCE
        messages += got
    return messages


def test_messages_arrive_whole_and_in_order(channel: Any) -> None:
    sender, receiver = channel
    sent = [
        TokenizedGenerateReqInput(
            rid="a",
            input_ids=[1, 2],
            sampling_params=SamplingParams(stop="x", logit_bias={3: 0.5}),
            max_new_tokens=5,
            seed=-(2**63),
            cache_namespace=("salt",),
        ),
        ControlCall(id="1", request=FlushCacheReqInput()),
        *(Expire(id=str(number)) for number in range(2000)),
        ControlCall(id="2", request=UpdateWeightsFromTensorReqInput(serialized_named_tensors=[LARGE])),
    ]
    for message in sent:
        sender.send(message)
    assert take(receiver, len(sent)) == sent


def test_a_ping_overtakes_what_waits_and_nothing_else_changes_places() -> None:
    sender, receiver = channel_pair(SchedulerInput)
    ping, flush = (ControlCall(id="1", request=kind()) for kind in (PingReqInput, FlushCacheReqInput))
    waiting = [Expire(id=str(number)) for number in range(3 * MAX_AT_ONCE)]
    for message in (*waiting, flush, ping, *waiting):
        sender.send(message)
    assert take(receiver, 2 * len(waiting) + 2) == [ping, *waiting, flush, *waiting]
    sender.close()
    receiver.close()


def test_a_poll_returns_at_once_and_a_wait_ends(channel: Any) -> None:
    _, receiver = channel
    assert receiver.receive(0) == []
    assert receiver.receive(0.01) == []


def test_a_wait_ends_with_the_first_message(channel: Any) -> None:
    sender, receiver = channel
    timer = threading.Timer(0.05, lambda: sender.send(Expire(id="1")))
    timer.start()
    assert receiver.receive(None) == [Expire(id="1")]
    timer.join()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_waiting_in_an_event_loop(channel: Any, loop_factory: Any) -> None:
    sender, receiver = channel

    async def exchange() -> None:
        sender.send(Expire(id="0"))
        assert await receiver.receive_async() == [Expire(id="0")]
        cancelled = asyncio.create_task(receiver.receive_async())
        await asyncio.sleep(0)
        cancelled.cancel()
        for number in range(1, 300):
            waiting = asyncio.create_task(receiver.receive_async())
            await asyncio.sleep(0)
            sender.send(Expire(id=str(number)))
            assert await waiting == [Expire(id=str(number))]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(exchange())


class Stranger(msgspec.Struct, tag=True):
    rid: int = 0


@pytest.mark.parametrize(
    ("message", "where"),
    [(Stranger(), "Stranger"), ({"type": "AbortGeneration", "rid": 3, "message": ""}, r"\$\.rid")],
)
def test_what_does_not_fit_the_union_raises_and_names_the_place(
    channel: Any, message: Any, where: str
) -> None:
    sender, receiver = channel
    sender.send(message)
    with pytest.raises(msgspec.ValidationError, match=where):
        receiver.receive()


def test_sending_to_nobody_neither_blocks_nor_holds_up_closing(tmp_path: Path) -> None:
    sender: Sender[Any] = Sender(f"ipc://{tmp_path}/nobody")
    for number in range(5000):
        sender.send(Expire(id=str(number)))
    sender.close()
