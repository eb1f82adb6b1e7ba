"""Replies behind what was aborted before them, whichever way is the shorter."""

import asyncio
from collections.abc import Sequence

from ebbtide.srt.managers.api.data_parallel_controller import OrderedInbox
from ebbtide.srt.managers.io_struct import (
    ControlReply,
    ManagerInput,
    PingReqOutput,
    RequestOutput,
    TextOutput,
    TokenOutput,
)


class Batches:
    """What arrives, batch by batch."""

    def __init__(self, batches: Sequence[Sequence[ManagerInput]]) -> None:
        self._batches = list(batches)

    async def receive_async(self) -> Sequence[ManagerInput]:
        return self._batches.pop(0)

    def close(self) -> None:
        pass


def given(*batches: Sequence[ManagerInput], num_calls: int) -> list[list[ManagerInput]]:
    async def read() -> list[list[ManagerInput]]:
        inbox = OrderedInbox(Batches(batches))
        return [list(await inbox.receive_async()) for _ in range(num_calls)]

    return asyncio.run(read())


def reply(aborts_before: int, dp_rank: int = 0) -> ControlReply:
    return ControlReply(id="7", reply=PingReqOutput(), dp_rank=dp_rank, aborts_before=aborts_before)


def aborted(number: int | None, dp_rank: int = 0) -> TextOutput:
    outputs = [RequestOutput("a", [])]
    return TextOutput(weight_version="1", outputs=outputs, texts=[""], dp_rank=dp_rank, abort_number=number)


def test_a_reply_waits_for_all_that_was_aborted_before_it_and_comes_alone() -> None:
    early, first, second = reply(2), aborted(1), aborted(2)
    assert given([early], [first], [second], num_calls=4) == [[], [first], [second], [early]]
    assert given([first, second, early], num_calls=2) == [[first, second], [early]]
    ids = TokenOutput(weight_version="1", outputs=[], abort_number=2)
    assert given([early], [ids], num_calls=3) == [[], [ids], [early]]


def test_nothing_else_is_held_up() -> None:
    other, plain, late = reply(0), aborted(None), reply(1)
    assert given([aborted(1)], [other, plain], [late], num_calls=3) == [[aborted(1)], [other, plain], [late]]


def test_each_replica_counts_its_own() -> None:
    early = reply(1, dp_rank=1)
    batches = [early], [aborted(1, dp_rank=0)], [aborted(1, dp_rank=1)]
    assert given(*batches, num_calls=4) == [[], *map(list, batches[1:]), [early]]
