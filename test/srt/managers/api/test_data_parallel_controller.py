"""Several replicas behind one manager: who gets what, and the one reply to what all are asked."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from fixtures.scripted_engine import as_tests

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.control_client import ControlClient
from ebbtide.srt.managers.api.data_parallel_controller import DataParallelController, OrderedInbox
from ebbtide.srt.managers.api.live_generation import LiveOutputs
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AbortReq,
    AbortReqOutput,
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    AnyReply,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlCall,
    ControlReply,
    DestroyWeightsUpdateGroupReqInput,
    FinishReason,
    InitWeightsUpdateGroupReqInput,
    ManagerInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    PingReqInput,
    PingReqOutput,
    Preserve,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    RequestOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenOutput,
    UpdateWeightsFromTensorReqInput,
    WeightsContent,
    WeightSessionReqOutput,
    WeightsUpdateGroupReqOutput,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.sampling_params import SamplingParams


class Replica:
    """Notes what it is sent, as it would arrive."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def send(self, message: SchedulerInput | msgspec.Raw) -> None:
        encoded = msgspec.msgpack.encode(message)
        self.received.append(msgspec.msgpack.decode(encoded, type=SchedulerInput))

    def close(self) -> None:
        pass

    @property
    def calls(self) -> list[ControlCall]:
        return [message for message in self.received if isinstance(message, ControlCall)]


class Setup:
    """A controller over replicas that are played by the test, and a control client over it."""

    def __init__(self, num_replicas: int, method: str, tp_size: int) -> None:
        self.replicas = [Replica() for _ in range(num_replicas)]
        self.arrived: asyncio.Queue[list[ManagerInput]] = asyncio.Queue()
        inbox = Mock(receive_async=self.arrived.get)
        self.controller = DataParallelController(self.replicas, inbox, tp_size, method)
        self.client = ControlClient(self.controller, LiveOutputs())

    async def read(self) -> None:
        """What the manager does with what comes."""
        while True:
            for message in await self.controller.receive_async():
                if isinstance(message, ControlReply):
                    self.client.resolve(message)

    def generate(self, *outputs: TokenizedGenerateReqInput) -> list[int | None]:
        placed = self.controller.place(outputs)
        for output in placed:
            self.controller.send(output)
        return [output.dp_rank for output in placed]

    async def arrive(self, message: ManagerInput) -> None:
        await self.arrived.put([message])
        for _ in range(5):
            await asyncio.sleep(0)

    async def call(self, request: AnyControlRequest) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.client.call(request))
        await asyncio.sleep(0)
        return task

    async def answer(self, dp_rank: int, reply: AnyReply, number: int = -1) -> None:
        """A replica's reply to the last control call that it got, or another one."""
        call = self.replicas[dp_rank].calls[number]
        await self.arrive(ControlReply(id=call.id, reply=reply, dp_rank=dp_rank))


def run(
    script: Callable[[Setup], Coroutine[Any, Any, None]],
    num_replicas: int = 2,
    method: str = "round_robin",
    tp_size: int = 1,
) -> None:
    async def play() -> None:
        setup = Setup(num_replicas, method, tp_size)
        reader = asyncio.create_task(setup.read())
        try:
            await script(setup)
        finally:
            reader.cancel()
        assert not reader.done() or reader.cancelled(), reader.exception()

    asyncio.run(play())


scripted = as_tests(run)


def output(
    rid: str, prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 5, dp_rank: int | None = None
) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=prompt if isinstance(prompt, list) else list(prompt),
        sampling_params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        seed=0,
        dp_rank=dp_rank,
    )


def ended(rid: str) -> RequestOutput:
    return RequestOutput(rid=rid, token_ids=[], finish=FinishReason("stop", 2))


def paused(mode: PauseMode = PauseMode.WAIT, *, changed: bool = True) -> PauseGenerationReqOutput:
    return PauseGenerationReqOutput(
        changed=changed, mode=mode, num_running=1, num_retracted=2, num_aborted=0, num_queued=3
    )


def resumed(**mapped_bytes: int) -> ResumeMemoryOccupationReqOutput:
    return ResumeMemoryOccupationReqOutput(
        changed=True,
        tags=[MemoryTag(tag) for tag in mapped_bytes],
        mapped_bytes={MemoryTag(tag): num_bytes for tag, num_bytes in mapped_bytes.items()},
        weights=WeightsContent(content="valid", num_missing=0, missing=[]),
        device_free_bytes_before=1,
        device_free_bytes_after=1,
        duration_ms=1.0,
    )


# ------------------------------------------------------------------------------------------- generations


@scripted()
async def test_the_prompts_of_a_batch_go_round_and_the_samples_of_one_stay_together(setup: Setup) -> None:
    first, second = [1, 2], [1, 2]
    batch = [output("a0", first), output("a1", first), output("b0", second), output("b1", second)]
    assert setup.generate(*batch) == [0, 0, 1, 1]
    assert setup.generate(output("c", first)) == [0]


@scripted(num_replicas=3)
async def test_a_pinned_request_goes_where_it_is_pinned_to(setup: Setup) -> None:
    assert [setup.generate(output(str(number), dp_rank=2))[0] for number in range(3)] == [2, 2, 2]


@scripted(num_replicas=2, method="shortest_queue")
async def test_the_shortest_queue_is_counted_in_tokens_of_prompts_and_outputs_to_come(setup: Setup) -> None:
    assert setup.generate(output("long", [1] * 10, max_new_tokens=90)) == [0]
    # 100 tokens on replica 0: nine short requests of 11 tokens on replica 1 are fewer, ten are not.
    short = [setup.generate(output(f"s{number}", [1], max_new_tokens=10))[0] for number in range(11)]
    assert short == [1] * 10 + [0]
    await setup.arrive(TokenOutput(weight_version="1", outputs=[ended("long")]))
    # To be placed alone counts for nothing.
    assert setup.controller.place([output("refused", [1] * 1000)])[0].dp_rank == 0
    assert setup.generate(output("next")) == [0]


@scripted(num_replicas=2, method="shortest_queue")
async def test_a_batch_spreads_by_its_own_weight(setup: Setup) -> None:
    lengths = (50, 10, 10, 10, 10, 10, 10)
    batch = [output(str(number), [1] * length) for number, length in enumerate(lengths)]
    assert setup.generate(*batch) == [0, 1, 1, 1, 1, 0, 1]


@scripted()
async def test_an_abort_goes_to_the_replica_that_has_the_request(setup: Setup) -> None:
    setup.generate(output("a"), output("b"))
    setup.controller.send(AbortGeneration(rid="b", message="gone"))
    assert [type(message) for message in setup.replicas[1].received[1:]] == [AbortGeneration]
    assert len(setup.replicas[0].received) == 1
    await setup.arrive(TokenOutput(weight_version="1", outputs=[ended("a"), ended("b")]))
    setup.controller.send(AbortGeneration(rid="b", message="too late"))
    setup.controller.send(AbortGeneration(rid="unknown", message="never was"))
    assert [len(replica.received) for replica in setup.replicas] == [1, 2]


# -------------------------------------------------------------------------------------- control requests


@scripted(tp_size=2)
async def test_each_replica_gets_the_entries_of_its_own_ranks_or_those_of_one_replica(
    setup: Setup,
) -> None:
    for entries, shares in (
        ([b"0", b"1", b"2", b"3"], [[b"0", b"1", b"", b""], [b"", b"", b"2", b"3"]]),
        ([b"0", b"1"], [[b"0", b"1"], [b"0", b"1"]]),
    ):
        task = await setup.call(UpdateWeightsFromTensorReqInput(serialized_named_tensors=entries))
        sent: list[Any] = [replica.calls[-1].request for replica in setup.replicas]
        assert [request.serialized_named_tensors for request in sent] == shares
        task.cancel()


@scripted()
async def test_replies_to_calls_that_cross_find_their_callers(setup: Setup) -> None:
    aborting = await setup.call(AbortReq(rid="a"))
    pinging = await setup.call(PingReqInput())
    await setup.answer(0, PingReqOutput(), 1)
    await setup.answer(1, AbortReqOutput(changed=True, num_aborted=1), 0)
    await setup.answer(1, PingReqOutput(), 1)
    assert isinstance(await pinging, PingReqOutput)
    assert not aborting.done()
    await setup.answer(0, AbortReqOutput(changed=False, num_aborted=0), 0)
    assert (await aborting).num_aborted == 1


@pytest.mark.parametrize(
    ("request_", "reply", "undoing"),
    [
        (PauseGenerationReqInput(mode=PauseMode.WAIT), paused(), ContinueGenerationReqInput()),
        (
            BeginWeightUpdateReqInput(),
            WeightSessionReqOutput(changed=True),
            AbortWeightUpdateReqInput(),
        ),
        (
            ResumeMemoryOccupationReqInput(),
            resumed(weights=0, kv_cache=5000),  # the weights were resident before
            # What was parked in host memory goes back there.
            ReleaseMemoryOccupationReqInput(tags=(MemoryTag.KV_CACHE,), preserve=Preserve.LIVE),
        ),
        (
            ResumeMemoryOccupationReqInput(),
            resumed(weights=2000),  # and they are whole: they came out of a backup
            ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,), preserve=Preserve.LIVE, backup=True),
        ),
        (
            InitWeightsUpdateGroupReqInput(
                master_address="h", master_port=1, rank_offset=1, world_size=4, group_name="g"
            ),
            WeightsUpdateGroupReqOutput(changed=True),
            DestroyWeightsUpdateGroupReqInput(group_name="g"),
        ),
    ],
)
@scripted(num_replicas=3)
async def test_what_only_some_replicas_did_is_taken_back_before_the_refusal(
    setup: Setup, request_: AnyControlRequest, reply: AnyReply, undoing: AnyControlRequest
) -> None:
    task = await setup.call(request_)
    await setup.answer(0, reply)
    await setup.answer(1, Refusal(status=409, message="3 are running", fields={"num_running": 3}))
    await setup.answer(2, reply)
    assert [replica.calls[-1].request == undoing for replica in setup.replicas] == [True, False, True]
    assert not task.done()
    await setup.answer(2, ContinueGenerationReqOutput(changed=True))
    await setup.answer(0, ContinueGenerationReqOutput(changed=True))
    with pytest.raises(RequestRejected, match=r"^replica 1: 3 are running$") as caught:
        await task
    assert caught.value.status == 409
    assert caught.value.fields == {"num_running": 3}
    again = await setup.call(PingReqInput())
    for dp_rank in range(3):
        await setup.answer(dp_rank, PingReqOutput())
    await again


@scripted()
async def test_what_was_asked_for_later_is_not_taken_back(setup: Setup) -> None:
    waiting = await setup.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
    retracting = await setup.call(PauseGenerationReqInput(mode=PauseMode.RETRACT))
    await setup.answer(0, paused(), 0)
    await setup.answer(1, Refusal(status=409, message="superseded"), 0)
    with pytest.raises(RequestRejected, match="superseded"):
        await waiting
    for dp_rank in range(2):
        await setup.answer(dp_rank, paused(PauseMode.RETRACT), 1)
    await retracting
    assert [len(replica.calls) for replica in setup.replicas] == [2, 2]


@scripted()
async def test_a_replica_that_was_paused_before_stays_so(setup: Setup) -> None:
    task = await setup.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
    await setup.answer(0, paused(changed=False))
    await setup.answer(1, Refusal(status=409, message="3 are running"))
    with pytest.raises(RequestRejected, match="replica 1: 3 are running"):
        await task
    assert len(setup.replicas[0].calls) == 1


def given(*batches: list[ManagerInput], num_calls: int) -> list[list[ManagerInput]]:
    async def read() -> list[list[ManagerInput]]:
        inbox = OrderedInbox(Mock(receive_async=AsyncMock(side_effect=batches)))
        return [list(await inbox.receive_async()) for _ in range(num_calls)]

    return asyncio.run(read())


def reply(aborts_before: int, dp_rank: int = 0) -> ControlReply:
    return ControlReply(id="7", reply=PingReqOutput(), dp_rank=dp_rank, aborts_before=aborts_before)


def aborted(number: int | None, dp_rank: int = 0) -> TokenOutput:
    outputs = [RequestOutput("a", [])]
    return TokenOutput(weight_version="1", outputs=outputs, texts=[""], dp_rank=dp_rank, abort_number=number)


def test_a_reply_waits_for_all_that_was_aborted_before_it_and_comes_alone() -> None:
    early, first, second = reply(2), aborted(1), aborted(2)
    assert given([early], [first], [second], num_calls=4) == [[], [first], [second], [early]]
    assert given([first, second, early], num_calls=2) == [[first, second], [early]]


def test_nothing_else_is_held_up() -> None:
    batches: list[list[ManagerInput]] = [[aborted(1)], [reply(0), aborted(None)], [reply(1)]]
    assert given(*batches, num_calls=3) == batches


def test_each_replica_counts_its_own() -> None:
    early = reply(1, dp_rank=1)
    others: list[list[ManagerInput]] = [[aborted(1, dp_rank=0)], [aborted(1, dp_rank=1)]]
    assert given([early], *others, num_calls=4) == [[], *others, [early]]
