"""Control calls: each caller gets its own reply, whatever happens to the others."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.api.control_client import ControlClient
from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlCall,
    ControlReply,
    PingReqInput,
    PingReqOutput,
    Refusal,
    Reply,
)


class Scheduler:
    """Keeps the calls that it gets; tests answer them."""

    def __init__(self) -> None:
        self.calls: list[ControlCall] = []

    def send(self, message: ControlCall) -> None:
        self.calls.append(message)


async def begin(client: ControlClient, request: AnyControlRequest, **more: Any) -> asyncio.Task[Reply]:
    task = asyncio.create_task(client.call(request, **more))
    await asyncio.sleep(0)
    return task


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def answer(client: ControlClient, call: ControlCall, reply: Any) -> None:
    client.resolve(ControlReply(id=call.id, reply=reply))


def test_replies_find_their_callers_in_any_order() -> None:
    async def test() -> None:
        client = ControlClient(scheduler := Scheduler())
        tasks = [await begin(client, ContinueGenerationReqInput()) for _ in range(5)]
        for number in (3, 0, 4, 1, 2):
            answer(
                client,
                scheduler.calls[number],
                ContinueGenerationReqOutput(changed=True, message=str(number)),
            )
        assert [(await task).message for task in tasks] == list("01234")

    run(test())


def test_a_caller_that_goes_away_neither_cancels_its_request_nor_takes_another_s_reply() -> None:
    async def test() -> None:
        client = ControlClient(scheduler := Scheduler())
        gone = await begin(client, ContinueGenerationReqInput())
        waiting = await begin(client, PingReqInput())
        gone.cancel()
        await asyncio.sleep(0)
        assert len(scheduler.calls) == 2
        answer(client, scheduler.calls[0], ContinueGenerationReqOutput(changed=True))
        answer(client, scheduler.calls[1], PingReqOutput())
        assert isinstance(await waiting, PingReqOutput)

    run(test())


@pytest.mark.parametrize("status", [400, 409])
def test_a_refusal_raises_with_its_fields(status: int) -> None:
    async def test() -> None:
        client = ControlClient(scheduler := Scheduler())
        task = await begin(client, PingReqInput())
        answer(client, scheduler.calls[0], Refusal(status=status, message="no", fields={"needed_bytes": 7}))
        with pytest.raises(RequestRejected, match="no") as caught:
            await task
        assert caught.value.status == status
        assert caught.value.body["needed_bytes"] == 7

    run(test())


def test_a_failure_of_the_engine_is_not_the_caller_s_fault() -> None:
    async def test() -> None:
        client = ControlClient(scheduler := Scheduler())
        task = await begin(client, PingReqInput())
        answer(client, scheduler.calls[0], Refusal(status=500, message="rank 0: boom"))
        with pytest.raises(EngineError, match="rank 0: boom"):
            await task

    run(test())


def test_no_reply_in_time_is_an_engine_error_and_a_late_reply_harms_nobody() -> None:
    async def test() -> None:
        client = ControlClient(scheduler := Scheduler())
        with pytest.raises(EngineError, match=r"PingReqInput.*0\.01 s"):
            await client.call(PingReqInput(), timeout_s=0.01)
        answer(client, scheduler.calls[0], PingReqOutput())
        task = await begin(client, PingReqInput(), timeout_s=20)
        answer(client, scheduler.calls[1], PingReqOutput(message="second"))
        assert (await task).message == "second"

    run(test())


def test_a_dead_engine_ends_calls_that_wait_and_calls_to_come() -> None:
    async def test() -> None:
        client = ControlClient(Scheduler())
        task = await begin(client, PingReqInput())
        client.fail("the scheduler died: SIGKILL")
        for call in (task, client.call(PingReqInput())):
            with pytest.raises(EngineError, match="SIGKILL"):
                await call

    run(test())
