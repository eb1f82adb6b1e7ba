"""`/generate` requests while they run: whose each output is, and the answers that their readers get."""

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

# In logprobs: what takes over ten milliseconds to put together has a thread. An output costs as much as some.
COST_AT_ONCE: Final = 1 << 14
OUTPUT_COST: Final = 1 << 6


@dataclass(eq=False)
class LiveGeneration:
    """A request that runs, with one output or several. Read its `result()`, or chunk by chunk, and close it.

    Belongs to the loop of the engine, except that a stream is read where its reader is: a chunk is made when
    it is read, and not before.

    Args:
        abandon: called when the reader goes away while outputs are still to come.
        waker: wakes the reader of a stream; outputs are delivered under its lock.
    """

    outputs: Sequence[OutputState]
    _: KW_ONLY
    is_list: bool
    is_stream: bool
    abandon: Callable[[LiveGeneration], None]
    waker: StreamWaker
    # Ends the request when its time is up, unless it ends before.
    timer: asyncio.TimerHandle | None = None
    _error: Exception | None = None
    # What the reader waits for, while it waits.
    _waiter: Waiter | None = None
    # Indices of outputs with something new, in order of arrival. However slow the reader, that is all that
    # waits for it: chunks that pile up become one.
    _news: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_unfinished = len(self.outputs)

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended. False for ever after a failure of the engine."""
        return self._num_unfinished == 0

    async def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer. Cancelling this aborts the request.

        Raises RequestRejected: the engine would not take it after all (503, the queue is full); EngineError:
        the engine failed.
        """
        answers: dict[int, dict[str, Any]] = {}
        try:
            while self._error is None:
                # The engine still computes the others: for what is made now the caller does not wait.
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
                    # An event would keep a queue of readers, of whom there is one.
                    waiter = self._waiter = asyncio.get_running_loop().create_future()
                    await waiter
            raise self._error
        finally:
            self.close()

    async def has_next(self) -> bool:
        """Wait for the next chunk of a stream, or an error; False: there will be none. In any event loop."""
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
        """What `has_next` has waited for, with an `index` if there are several outputs.

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
        """The reader needs no more: outputs that are still to come are aborted. Idempotent."""
        self._cancel_timer()
        if not self.is_finished:
            self.abandon(self)

    def note_token(self, index: int) -> None:
        """Output `index` of a stream has one more token, and goes on."""
        self._news[index] = None
        self._wake()

    def note(self, index: int) -> None:
        """Output `index` has something new."""
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
        """Outputs that are still to come never will: end with this error."""
        with self.waker.lock:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        """There is something for the reader."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if self.is_stream:
            self.waker.wake_later(waiter)
        else:
            # An answer goes ahead of replies that are read behind its end.
            waiter.set_result(None)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


def _answers_of(outputs: Mapping[int, OutputState]) -> dict[int, dict[str, Any]]:
    return {index: output.response() for index, output in outputs.items()}


# What an event loop may run of them before it looks at anything else: a millisecond.
STREAMS_PER_TURN: Final = 32

# What a reader waits for: in its event loop, or in a thread without one.
Waiter: TypeAlias = asyncio.Future[None] | concurrent.futures.Future[None]


class StreamWaker:
    """Queues of readers to be woken, one for each event loop that has any.

    Whatever arrives for all readers of another loop before it has its turn wakes that loop once. `lock`: held
    by whoever delivers to streams, or takes from them.
    """

    def __init__(self) -> None:
        # Finalizers that the collector runs may ask for it again.
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
        # The readers of loops that have been closed have gone.
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
        group: the rid that was posted for it and others.
        client: who asked for it.
        output: what has arrived of it; None before it is about to be sent.
        generation: whose it is; None before that too, and once its reader has gone, when only its last output
            is awaited.
        is_sent: whether the scheduler knows it.
        abort_message: set of an output that is to be aborted as soon as it has been sent.
    """

    index: int
    group: str | None
    client: Caller
    output: OutputState | None = None
    generation: LiveGeneration | None = None
    is_sent: bool = False
    abort_message: str | None = None


class LiveOutputs:
    """The outputs that have not ended yet, from when their request comes in.

    A rid stays taken until its last output arrives, read or not: so what is still on its way for a request
    that was abandoned never reaches a new one of the same name.

    Attributes:
        none_left: set while there are none.
        ended: those that have, for a while.
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
        """Take the rids of a request that has come in.

        `groups`: a rid that was posted for several outputs → theirs. Raises RequestRejected: 400, one of them
        is taken.
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
        """Give back what was claimed for outputs that will not be sent."""
        for rid in rids:
            if (entry := self._entries.get(rid)) is not None:
                self._remove(rid, entry)

    def attach(self, generation: LiveGeneration) -> None:
        """Have this request wait for its outputs, which are about to be sent."""
        for output in generation.outputs:
            entry = self._entries[output.request.rid]
            entry.output, entry.generation = output, generation

    def note_sent(self, rid: str) -> str | None:
        """The scheduler knows an output from now on. Returns why it is to be aborted, if it is."""
        entry = self._entries[rid]
        entry.is_sent = True
        return entry.abort_message

    @property
    def unsent(self) -> list[str]:
        """The rids of outputs that the scheduler does not know yet."""
        return [rid for rid, entry in self._entries.items() if not entry.is_sent]

    def abort(self, rids: Iterable[str], message: str) -> list[str]:
        """End these outputs. Returns those of them that the scheduler has to be asked for now."""
        sent: list[str] = []
        for rid in rids:
            entry = self._entries.get(rid)
            if entry is not None and not entry.is_sent:
                entry.abort_message = message
            elif entry is not None:
                sent.append(rid)
        return sent

    def deliver(self, output: RequestOutput, text: str | None, weight_version: str) -> OutputState | None:
        """Hand an output to whoever waits for it. Returns it if it has ended."""
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
        """Hand one more token of each stream to whoever reads it."""
        rows = None if streamed.logprobs is None else LogprobRows(streamed.logprobs)
        # This runs for each token of each stream.
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
        """Outputs of a request that are still to come."""
        rids = (output.request.rid for output in generation.outputs)
        return [rid for rid in rids if (entry := self._entries.get(rid)) and entry.generation is generation]

    def abandon(self, generation: LiveGeneration) -> list[str]:
        """Nobody reads this request any more. Returns what is still to come of it."""
        rids = self.rids_of(generation)
        for rid in rids:
            self._entries[rid].generation = None
        return rids

    def expand(self, rid: str) -> list[str]:
        """The outputs that a posted rid stands for: the one of that id, or every one of its batch."""
        return sorted(self._groups.get(rid, (rid,)))

    def clear(self) -> list[LiveGeneration]:
        """Forget everything. Returns the requests that were still read."""
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
