"""The life of a request in the API process: checked, sent, read, and aborted if nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.api.control_client import ControlClient
from ebbtide.srt.managers.api.generate_request import (
    GenerateReqInput,
    GenerationPlan,
    RequestLimits,
    RequestNormalizer,
)
from ebbtide.srt.managers.api.live_generation import LiveGeneration, OutputState, ResponseStyle
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AbortReq,
    AnyControlRequest,
    ControlReply,
    ManagerInput,
    Reply,
    RequestOutput,
    SchedulerInput,
    StateReport,
    TextOutput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.channel import AsyncReceiveEnd, SendEnd
from ebbtide.srt.managers.wire.reply_merging import merge_reports

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig

logger = logging.getLogger(__name__)

# Chooses the replica of each output of a request.
Placement: TypeAlias = Callable[[Sequence[TokenizedGenerateReqInput]], list[TokenizedGenerateReqInput]]


@dataclass(slots=True)
class _Entry:
    """Whose output a rid is. `generation` None: its reader has gone, and only the last output is awaited."""

    generation: LiveGeneration | None
    index: int
    group: str | None


class LiveOutputs:
    """The outputs that the scheduler has not ended yet, by rid.

    A rid stays taken until its last output arrives, read or not: so what is still on its way for a request
    that was abandoned never reaches a new one of the same name.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, plan: GenerationPlan, generation: LiveGeneration) -> None:
        """Take in a request.

        Raises:
            RequestRejected: 400, one of its rids is taken.
        """
        claimed = [output.rid for output in plan.outputs] + list(plan.groups)
        for rid in claimed:
            if rid in self._entries or rid in self._groups:
                raise RequestRejected(f"rid: {rid!r} belongs to a request that is still running")
        if len(set(claimed)) < len(claimed):
            raise RequestRejected("rid: the ids of the outputs are not distinct")
        group_of = {rid: group for group, rids in plan.groups.items() for rid in rids}
        for index, output in enumerate(plan.outputs):
            self._entries[output.rid] = _Entry(generation, index, group_of.get(output.rid))
        for group, rids in plan.groups.items():
            self._groups[group] = set(rids)

    def deliver(self, output: RequestOutput, text: str | None, weight_version: str) -> None:
        """Hand an output to whoever waits for it."""
        entry = self._entries.get(output.rid)
        if entry is None:
            return
        if output.finish is not None:
            self._remove(output.rid, entry)
        if entry.generation is not None:
            entry.generation.outputs[entry.index].apply(output, text, weight_version)
            entry.generation.note(entry.index)

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
        return [generation for generation in generations.values() if generation is not None]

    def _remove(self, rid: str, entry: _Entry) -> None:
        del self._entries[rid]
        if entry.group is not None:
            members = self._groups[entry.group]
            members.discard(rid)
            if not members:
                del self._groups[entry.group]


class TokenizerManager:
    """What HTTP and `Engine` have in common. Lives in one event loop; `start` and `close` it there.

    Args:
        scheduler, inbox: the channel ends, closed by `close`.
        limits: what one request may hold; known once the scheduler has sized its pool.
        tokenizer: None with `skip_tokenizer_init`.
        place: where there are several replicas, chooses among them.

    Attributes:
        reports: what each replica last reported of its state machines, by dp_rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: SendEnd[SchedulerInput],
        inbox: AsyncReceiveEnd[ManagerInput],
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        place: Placement | None = None,
    ) -> None:
        self.reports: dict[int, StateReport] = {}
        self.tokenizer = tokenizer
        self._num_replicas = limits.num_replicas
        self._state: StateReport | None = None
        self._place = place
        self._scheduler = scheduler
        self._inbox = inbox
        self._is_incremental = config.schedule.incremental_streaming_output
        self._normalizer = RequestNormalizer(limits, tokenizer, random.Random(config.runtime.random_seed))
        self._control = ControlClient(scheduler)
        self._live = LiveOutputs()
        self._reader: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._token_texts: dict[int, str] = {}

    def start(self) -> None:
        """Begin to read what the engine sends. Needs a running event loop."""
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """End everything that waits with an `EngineError`, and close the channels. Idempotent."""
        self.fail("the engine has been shut down")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None
        self._scheduler.close()
        self._inbox.close()

    def fail(self, message: str) -> None:
        """The engine is gone: end every request and control call, also those to come, with this message."""
        if self._failure is not None:
            return
        self._failure = message
        self._control.fail(message)
        for generation in self._live.clear():
            generation.fail(EngineError(message))

    # ------------------------------------------------------------------------------------------ generation

    def prepare(self, given: GenerateReqInput | Mapping[str, Any]) -> LiveGeneration:
        """Check a request and start it. Read the returned `LiveGeneration` to its end, or `close()` it.

        Raises:
            RequestRejected: 400; nothing runs.
            EngineError: the engine is gone.
        """
        self._check_alive()
        plan = self._normalizer.plan(given)
        if self._place is not None:
            plan = replace(plan, outputs=self._place(plan.outputs))
        generation = self._generation(plan)
        self._live.add(plan, generation)
        if plan.timeout_s is not None:
            generation.timer = self._abort_after(plan.timeout_s, generation, plan.arrival_s)
        for output in plan.outputs:
            self._scheduler.send(output)
        return generation

    async def generate(self, given: GenerateReqInput | Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield the chunks of a stream, or once the whole answer: a dict, or a list of them.

        Raises:
            RequestRejected, EngineError: as `prepare`, `LiveGeneration.result` and `LiveGeneration.stream`.
        """
        generation = self.prepare(given)
        try:
            if generation.is_stream:
                async for chunk in generation.stream():
                    yield chunk
            else:
                yield await generation.result()
        finally:
            generation.close()

    @property
    def num_live(self) -> int:
        """Outputs that the scheduler has not ended yet."""
        return len(self._live)

    def _generation(self, plan: GenerationPlan) -> LiveGeneration:
        style = ResponseStyle(
            is_incremental=plan.stream and self._is_incremental,
            return_prompt_token_ids=plan.return_prompt_token_ids,
            token_text=self._token_text if plan.return_text_in_logprobs else None,
        )
        return LiveGeneration(
            [OutputState(output, style) for output in plan.outputs],
            is_list=plan.is_list,
            is_stream=plan.stream,
            abandon=self._abandon,
        )

    def _abandon(self, generation: LiveGeneration) -> None:
        self._abort(self._live.abandon(generation), "Aborted: the client disconnected")

    def _abort_after(
        self, timeout_s: float, generation: LiveGeneration, arrival_s: float
    ) -> asyncio.TimerHandle:
        message = f"Aborted: timeout_s of {timeout_s:g} s has passed"
        delay_s = arrival_s + timeout_s - time.monotonic()
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, lambda: self._abort(self._live.rids_of(generation), message))

    def _abort(self, rids: Iterable[str], message: str) -> None:
        if self._failure is None:
            for rid in rids:
                self._scheduler.send(AbortGeneration(rid=rid, message=message))

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            assert self.tokenizer is not None  # or the request would have been refused
            text = self._token_texts[token_id] = self.tokenizer.decode([token_id])
        return text

    # --------------------------------------------------------------------------------- control and messages

    @property
    def state(self) -> StateReport | None:
        """The engine's state machines as last reported; None until every replica has spoken."""
        if self._state is None and len(self.reports) == self._num_replicas:
            self._state = merge_reports([self.reports[rank] for rank in range(self._num_replicas)])
        return self._state

    async def control(self, request: AnyControlRequest, timeout_s: float | None = None) -> Reply:
        """Carry out a control request and return its reply. See `ControlClient.call`."""
        if isinstance(request, AbortReq):
            posted = [request.rid] if isinstance(request.rid, str) else request.rid
            rids = [rid for name in posted for rid in self._live.expand(name)]
            request = msgspec.structs.replace(request, rid=rids)
        return await self._control.call(request, timeout_s)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    async def _read(self) -> None:
        try:
            while True:
                for message in await self._inbox.receive_async():
                    self._handle(message)
                # Messages may come without end: readers must have their turn.
                await asyncio.sleep(0)
        except Exception as error:
            logger.exception("reading the engine's messages failed")
            self.fail(f"reading the engine's messages failed: {error}")

    def _handle(self, message: ManagerInput) -> None:
        match message:
            case TextOutput():
                for output, text in zip(message.outputs, message.texts, strict=True):
                    self._live.deliver(output, text, message.weight_version)
            case TokenOutput():
                for output in message.outputs:
                    self._live.deliver(output, None, message.weight_version)
            case ControlReply():
                self._control.resolve(message)
            case StateReport():
                self.reports[message.dp_rank] = message
                self._state = None  # put together when it is asked for
