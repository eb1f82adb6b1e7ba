"""Control calls: each caller gets its own reply, whatever happens to the others."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fixtures.scripted_engine import as_tests

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.api.control_client import ControlClient
from ebbtide.srt.managers.api.live_generation import LiveOutputs
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortReqOutput,
    AnyControlRequest,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlCall,
    ControlReply,
    PingReqInput,
    PingReqOutput,
    Prepared,
    Refusal,
    Verdict,
)
from ebbtide.srt.managers.wire.merging import merge_replicas


class Scheduler:
    """Keeps the calls that it gets; tests answer them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.live = LiveOutputs()
        self.client = ControlClient(self, self.live)

    def send(self, message: ControlCall | Verdict) -> None:
        self.calls.append(message)

    async def begin(self, request: AnyControlRequest, **more: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.client.call(request, **more))
        await asyncio.sleep(0)
        return task

    def answer(self, number: int, reply: Any) -> None:
        self.client.resolve(ControlReply(id=self.calls[number].id, reply=reply))


def run(script: Callable[[Scheduler], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(script(Scheduler()))


scripted = as_tests(run)


@scripted()
async def test_replies_find_their_callers_in_any_order(scheduler: Scheduler) -> None:
    tasks = [await scheduler.begin(ContinueGenerationReqInput()) for _ in range(5)]
    for number in (3, 0, 4, 1, 2):
        scheduler.answer(number, ContinueGenerationReqOutput(changed=True, message=str(number)))
    assert [(await task).message for task in tasks] == list("01234")


@scripted()
async def test_aborted_requests_are_counted_over_all_replicas(scheduler: Scheduler) -> None:
    task = await scheduler.begin(AbortReq(abort_all=True))
    replicas = [AbortReqOutput(changed=True, num_aborted=2, message="Aborted 2 requests.")] * 2
    scheduler.answer(0, merge_replicas(replicas))
    assert (await task).message == "Aborted 4 requests."


@scripted()
async def test_a_caller_that_goes_away_neither_cancels_its_request_nor_takes_another_s_reply(
    scheduler: Scheduler,
) -> None:
    gone = await scheduler.begin(ContinueGenerationReqInput())
    waiting = await scheduler.begin(PingReqInput())
    gone.cancel()
    await asyncio.sleep(0)
    assert len(scheduler.calls) == 2
    scheduler.answer(0, ContinueGenerationReqOutput(changed=True))
    scheduler.answer(1, PingReqOutput())
    assert isinstance(await waiting, PingReqOutput)


@scripted()
async def test_an_abort_whose_caller_goes_away_ends_what_is_about_to_be_sent_too(
    scheduler: Scheduler,
) -> None:
    scheduler.live.claim(["unsent"], {})
    (await scheduler.begin(AbortReq(abort_all=True))).cancel()
    await asyncio.sleep(0)
    assert scheduler.live.note_sent("unsent") == "Aborted by /abort_request"


@scripted()
async def test_a_refusal_raises_with_its_fields_and_a_failure_of_the_engine_as_such(
    scheduler: Scheduler,
) -> None:
    for status, kind in ((400, RequestRejected), (409, RequestRejected), (500, EngineError)):
        task = await scheduler.begin(PingReqInput())
        scheduler.answer(-1, Refusal(status=status, message="rank 0: no", fields={"needed_bytes": 7}))
        with pytest.raises(kind, match="rank 0: no") as caught:
            await task
        if isinstance(caught.value, RequestRejected):
            assert (caught.value.status, caught.value.body["needed_bytes"]) == (status, 7)


@scripted()
async def test_no_reply_in_time_is_an_engine_error_and_a_late_reply_harms_nobody(
    scheduler: Scheduler,
) -> None:
    with pytest.raises(EngineError, match=r"PingReqInput.*0\.01 s"):
        await scheduler.client.call(PingReqInput(), timeout_s=0.01)
    scheduler.answer(0, PingReqOutput())
    task = await scheduler.begin(PingReqInput(), timeout_s=20)
    scheduler.answer(1, PingReqOutput(message="second"))
    assert (await task).message == "second"


@pytest.mark.parametrize("is_overdue", [False, True])
@scripted()
async def test_what_engines_commit_together_waits_for_the_verdict(
    scheduler: Scheduler, is_overdue: bool
) -> None:
    verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def vote() -> str | None:
        return await verdict

    task = await scheduler.begin(PingReqInput(), vote=vote)
    scheduler.answer(0, Prepared())
    await asyncio.sleep(0)
    assert len(scheduler.calls) == 1
    if is_overdue:
        scheduler.answer(0, Prepared(is_overdue=True))
    else:
        verdict.set_result("another has refused")
    while len(scheduler.calls) == 1:
        await asyncio.sleep(0)
    why = "it was ready, and was not told in time that all were" if is_overdue else "another has refused"
    assert scheduler.calls[1] == Verdict(id=scheduler.calls[0].id, refusal=why)
    scheduler.answer(0, PingReqOutput())
    assert isinstance(await task, PingReqOutput)


@scripted()
async def test_nobody_commits_for_a_voter_that_has_gone(scheduler: Scheduler) -> None:
    async def vote() -> str | None:
        raise ConnectionError

    task = await scheduler.begin(PingReqInput(), vote=vote)
    scheduler.answer(0, Prepared())
    with pytest.raises(ConnectionError):
        await task
    assert "gone away" in scheduler.calls[1].refusal


@scripted()
async def test_nobody_votes_or_commits_for_a_caller_that_has_gone(scheduler: Scheduler) -> None:
    verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def vote() -> str | None:
        return await verdict

    task = await scheduler.begin(PingReqInput(), vote=vote)
    scheduler.answer(0, Prepared())
    for _ in range(3):  # until it votes
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert verdict.cancelled()
    assert "gone away" in scheduler.calls[1].refusal


@scripted()
async def test_a_dead_engine_ends_calls_that_wait_and_calls_to_come(scheduler: Scheduler) -> None:
    task = await scheduler.begin(PingReqInput())
    scheduler.client.fail("the scheduler died: SIGKILL")
    for call in (task, scheduler.client.call(PingReqInput())):
        with pytest.raises(EngineError, match="SIGKILL"):
            await call
