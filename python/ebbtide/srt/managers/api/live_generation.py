"""Running `/generate` requests: which request each output belongs to, and what their readers get."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeAlias

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.api.ended_outputs import NOBODY, Caller, EndedOutputs
from ebbtide.srt.managers.api.output_state import OutputState
from ebbtide.srt.managers.io_struct import RequestOutput, StreamedTokens
from ebbtide.srt.managers.wire.generation import LogprobRows

# Answers with more logprobs than this, which take over ten milliseconds, are made in a thread. Each output
# counts as `OUTPUT_COST` logprobs more.
COST_AT_ONCE: Final = 1 << 14
OUTPUT_COST: Final = 1 << 6


@dataclass(eq=False)
class LiveGeneration:
    """A running request with one or more outputs. Read its `result()`, or its chunks, and close it.

    It belongs to the engine's event loop. A stream may be read in any loop or thread: a chunk is made when it
    is read.

    Args:
        abandon: called if the reader leaves while outputs are still to come.
        waker: wakes the reader of a stream; outputs are delivered under its lock.
    """

    outputs: Sequence[OutputState]
    _: KW_ONLY
    is_list: bool
    is_stream: bool
    abandon: Callable[[LiveGeneration], None]
    waker: StreamWaker
    # Ends the request at its time limit.
    timer: asyncio.TimerHandle | None = None
    _error: Exception | None = None
    # The future that the reader waits for; None: it does not wait.
    _waiter: Waiter | None = None
    # Indices of outputs with something new, in order of arrival. This is all that piles up for a slow reader:
    # its next chunk has everything new.
    _news: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_unfinished = len(self.outputs)

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended. It stays False if the engine fails."""
        return self._num_unfinished == 0

    async def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Wait for the whole answer. Cancelling this aborts the request.

        Raises:
            RequestRejected: the scheduler refused it, such as 503 because the queue is full.
            EngineError: the engine failed.
        """
        answers: dict[int, dict[str, Any]] = {}
        try:
            while self._error is None:
                # Make the answers of outputs that have ended while the engine still computes the others.
                news, self._news = self._news, {}
                ended = {
                    index: self.outputs[index] for index in news if self.outputs[index].finish is not None
                }
                if sum(OUTPUT_COST + output.num_logprobs for output in ended.values()) > COST_AT_ONCE:
                    answers |= await asyncio.to_thread(_answers_of, ended)
                else:
                    answers |= _answers_of(ended)
                if len(answers) == len(self.outputs):
                    return [answers[index] for index in sorted(answers)] if self.is_list else answers[0]
                if not self._news and self._error is None:
                    # A future is cheaper than an event, since there is only one reader.
                    waiter = self._waiter = asyncio.get_running_loop().create_future()
                    await waiter
            raise self._error
        finally:
            self.close()

    async def has_next(self) -> bool:
        """Wait, in any event loop, for the next chunk of a stream or an error. False: there are no more."""
        loop = asyncio.get_running_loop()
        while (is_there := self._has_next(waiter := loop.create_future())) is None:
            await waiter
        return is_there

    def wait_next(self) -> bool:
        """As `has_next`, for a thread without an event loop."""
        waiter: concurrent.futures.Future[None]
        while (is_there := self._has_next(waiter := concurrent.futures.Future())) is None:
            waiter.result()
        return is_there

    def _has_next(self, waiter: Waiter) -> bool | None:
        """Whether there is a next chunk, or an error; None: the waiter will be woken."""
        with self.waker.lock:
            if self._news or self._error is not None:
                return True
            if self._num_unfinished == 0:
                return False
            self._waiter = waiter
            return None

    def next_chunk(self) -> dict[str, Any]:
        """The chunk that `has_next` has waited for, with an `index` if there are several outputs.

        Raises RequestRejected, EngineError: as `result`.
        """
        if self._error is not None:
            raise self._error
        with self.waker.lock:
            index = next(iter(self._news))
            del self._news[index]
            chunk = self.outputs[index].response()
        if self.is_list:
            chunk["index"] = index
        return chunk

    def close(self) -> None:
        """Stop reading: outputs that are still to come are aborted. Idempotent."""
        self._cancel_timer()
        if not self.is_finished:
            self.abandon(self)

    def note_token(self, index: int) -> None:
        """Note that output `index` of a stream has one more token, and goes on."""
        self._news[index] = None
        self._wake()

    def note(self, index: int) -> None:
        """Note that output `index` has something new."""
        self._news[index] = None
        finish = self.outputs[index].finish
        if finish is not None:
            self._num_unfinished -= 1
            if self.is_finished:
                self._cancel_timer()
            if finish.status_code is not None:
                message, status = finish.message, finish.status_code
                self._error = EngineError(message) if status == 500 else RequestRejected(message, status)
        if self.is_stream or finish is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """End with this error: no more outputs will come."""
        with self.waker.lock:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        """Wake the reader, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if self.is_stream:
            self.waker.wake_later(waiter)
        else:
            # At once, so that the answer comes before control replies that were sent after it.
            waiter.set_result(None)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


def _answers_of(outputs: Mapping[int, OutputState]) -> dict[int, dict[str, Any]]:
    return {index: output.response() for index, output in outputs.items()}


# Streams that are woken in one turn of an event loop: they take it about a millisecond.
STREAMS_PER_TURN: Final = 32

# The future of a reader: in an event loop, or in a thread without one.
Waiter: TypeAlias = asyncio.Future[None] | concurrent.futures.Future[None]


class StreamWaker:
    """Wakes the readers of streams, with one queue per event loop.

    Many outputs that arrive together wake another event loop only once.

    Attributes:
        lock: held while outputs are delivered to streams, or read from them.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run a stream's finalizer while it is held.
        self.lock = threading.RLock()
        self._waiting: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}

    def wake_later(self, waiter: Waiter) -> None:
        """Wake a reader in one of the next turns of its event loop. Needs the lock."""
        if isinstance(waiter, concurrent.futures.Future):
            waiter.set_result(None)
            return
        loop = waiter.get_loop()
        if (waiting := self._waiting.get(loop)) is not None:
            waiting.append(waiter)
            return
        # Drop the queues of closed event loops: their readers are gone.
        self._waiting = {one: queue for one, queue in self._waiting.items() if not one.is_closed()}
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._turn, loop)
            self._waiting[loop] = [waiter]

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        with self.lock:
            waiting = self._waiting[loop]
            woken = waiting[:STREAMS_PER_TURN]
            del waiting[:STREAMS_PER_TURN]
            if waiting:
                loop.call_soon(self._turn, loop)
            else:
                del self._waiting[loop]
        for waiter in woken:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(slots=True)
class _Entry:
    """One output.

    Attributes:
        index: its number in its request.
        group: the rid that the client gave for several outputs; None: it gave none.
        client: who asked for it.
        output: what has arrived; None: it is not about to be sent yet.
        generation: its request; None: not attached yet, or the reader has left and only its end is awaited.
        is_sent: whether it was sent to the scheduler.
        abort_message: why to abort it as soon as it was sent; None: do not.
    """

    index: int
    group: str | None
    client: Caller
    output: OutputState | None = None
    generation: LiveGeneration | None = None
    is_sent: bool = False
    abort_message: str | None = None


class LiveOutputs:
    """The outputs that have not ended, from the arrival of their request on.

    A rid stays taken until its last output arrives, even without a reader. So late outputs of an abandoned
    request never reach a new one with the same rid.

    Attributes:
        none_left: set while there are no live outputs.
        ended: outputs that have ended, kept for a while to be continued.
    """

    def __init__(self) -> None:
        self.ended = EndedOutputs(lambda rid: rid in self._entries or rid in self._groups)
        self.none_left = asyncio.Event()
        self.none_left.set()
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def claim(
        self, rids: Sequence[str], groups: Mapping[str, Iterable[str]], client: Caller = NOBODY
    ) -> None:
        """Take the rids of a new request.

        Args:
            groups: rid that the client gave for several outputs → the rids of these.

        Raises RequestRejected: 400, one of them is taken.
        """
        claimed = [*rids, *groups]
        for rid in claimed:
            if rid in self._entries or rid in self._groups:
                raise RequestRejected(f"rid: {rid!r} belongs to a request that is still running")
        if len(set(claimed)) < len(claimed):
            raise RequestRejected("rid: the ids of the outputs are not distinct")
        group_of = {rid: group for group, members in groups.items() for rid in members}
        for index, rid in enumerate(rids):
            self._entries[rid] = _Entry(index, group_of.get(rid), client)
        for group, members in groups.items():
            self._groups[group] = set(members)
        self.none_left.clear()

    def release(self, rids: Iterable[str]) -> None:
        """Free the rids of outputs that will not be sent."""
        for rid in rids:
            if (entry := self._entries.get(rid)) is not None:
                self._remove(rid, entry)

    def attach(self, generation: LiveGeneration) -> None:
        """Attach a request to its outputs, which are about to be sent."""
        for output in generation.outputs:
            entry = self._entries[output.request.rid]
            entry.output, entry.generation = output, generation

    def note_sent(self, rid: str) -> str | None:
        """Note that an output was sent. Returns why it must be aborted now; None: it need not."""
        entry = self._entries[rid]
        entry.is_sent = True
        return entry.abort_message

    @property
    def unsent(self) -> list[str]:
        """The rids of outputs that were not sent to the scheduler yet."""
        return [rid for rid, entry in self._entries.items() if not entry.is_sent]

    def abort(self, rids: Iterable[str], message: str) -> list[str]:
        """Abort these outputs. Returns the rids for which the scheduler must be told now."""
        sent: list[str] = []
        for rid in rids:
            entry = self._entries.get(rid)
            if entry is not None and not entry.is_sent:
                entry.abort_message = message
            elif entry is not None:
                sent.append(rid)
        return sent

    def deliver(self, output: RequestOutput, text: str | None, weight_version: str) -> OutputState | None:
        """Deliver an output to its request. Returns its state if it has ended and is still read."""
        entry = self._entries.get(output.rid)
        if entry is None:
            return None
        if output.finish is not None:
            self._remove(output.rid, entry)
        state = entry.output
        if state is None:
            return None
        state.apply(output, text, weight_version)
        if output.finish is not None and output.finish.status_code is None:
            self.ended.keep(state.request, state.all_ids, entry.client, state.adapter)
        if entry.generation is None:
            return None
        entry.generation.note(entry.index)
        return state if output.finish is not None else None

    def deliver_tokens(
        self, streamed: StreamedTokens, texts: Sequence[str] | None, weight_version: str
    ) -> None:
        """Deliver one more token to each of these streams."""
        rows = None if streamed.logprobs is None else LogprobRows(streamed.logprobs)
        # Hot path: it runs for every token of every stream.
        entries, token_ids = self._entries, streamed.token_ids
        for place, rid in enumerate(streamed.rids):
            entry = entries.get(rid)
            if entry is None or (state := entry.output) is None:
                continue
            text = None if texts is None else texts[place]
            state.apply_token(token_ids[place], rows, place, text, weight_version)
            if entry.generation is not None:
                entry.generation.note_token(entry.index)

    def rids_of(self, generation: LiveGeneration) -> list[str]:
        """The rids of a request's outputs that are still to come."""
        rids = (output.request.rid for output in generation.outputs)
        return [rid for rid in rids if (entry := self._entries.get(rid)) and entry.generation is generation]

    def abandon(self, generation: LiveGeneration) -> list[str]:
        """Note that nobody reads this request any more. Returns the rids of outputs still to come."""
        rids = self.rids_of(generation)
        for rid in rids:
            self._entries[rid].generation = None
        return rids

    def expand(self, rid: str) -> list[str]:
        """The outputs that a client's rid stands for: the output of that id, or all of its batch."""
        return sorted(self._groups.get(rid, (rid,)))

    def clear(self) -> list[LiveGeneration]:
        """Drop all outputs. Returns the requests that were still read."""
        generations = {id(entry.generation): entry.generation for entry in self._entries.values()}
        self._entries.clear()
        self._groups.clear()
        self.none_left.set()
        return [generation for generation in generations.values() if generation is not None]

    def _remove(self, rid: str, entry: _Entry) -> None:
        del self._entries[rid]
        if entry.group is not None:
            members = self._groups[entry.group]
            members.discard(rid)
            if not members:
                del self._groups[entry.group]
        if not self._entries:
            self.none_left.set()
