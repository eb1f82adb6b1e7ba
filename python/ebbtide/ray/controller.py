"""Carries out control requests on all live replicas of a fleet, which are the members of a committee."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ebbtide.ray.engine import RayEngine
from ebbtide.ray.errors import ActorDied
from ebbtide.ray.joint_engine import TENSORS, Answered, FleetCall
from ebbtide.srt.errors import EbbtideError, EngineError, RequestRejected
from ebbtide.srt.managers.api.control_client import build_request
from ebbtide.srt.managers.committee import Closed, Committee
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    ControlCall,
    ControlRequest,
    GivenUp,
    InitWeightsUpdateGroupReqInput,
    LoadRequest,
    Prepared,
    Refusal,
    Verdict,
)
from ebbtide.srt.managers.wire.merging import merge_replica_refusals

# How long a failed request waits for news that its replica has died, which may come later than the failure.
DEATH_NEWS_S: Final = 5.0
# A prepared request is committed between two forward passes. A replica that takes longer than this hangs.
COMMIT_S: Final = 60.0
TOO_LATE: Final = "it was to commit, and did not within {seconds:g} s, as others did"


def replica_name(slot: int) -> str:
    return f"replica {slot}"


class Replica:
    """An engine of a fleet, until it dies. A new `Replica` then takes its place.

    Attributes:
        slot: its place in the fleet.
        life: number of earlier replicas in this place.
        num_live: number of requests that it is working on.
        lacks: adapters that it does not have though others do, as `name` or `name@version`.
        has_died: set when it is found dead.
        reason: why it died; empty while it lives.
    """

    def __init__(self, slot: int, life: int, engine: RayEngine) -> None:
        self.slot = slot
        self.life = life
        self.engine = engine
        self.num_live = 0
        self.lacks: set[str] = set()
        self.has_died = asyncio.Event()
        self.reason = ""
        self._numbers = itertools.count()

    @property
    def name(self) -> str:
        return replica_name(self.slot)

    def die(self, reason: str) -> None:
        """Note that it has died. Idempotent: the first reason counts."""
        if not self.has_died.is_set():
            self.reason = reason
            self.has_died.set()

    async def watch(self) -> None:
        """Wait until it has died, by its own news or by a call of `die`."""
        ended = asyncio.create_task(self.engine.async_ended())
        died: asyncio.Task[Any] = asyncio.create_task(self.has_died.wait())
        try:
            await asyncio.wait([ended, died], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.die(ended.result())
        finally:
            ended.cancel()
            died.cancel()

    async def is_cause(self, error: EngineError) -> bool:
        """Whether its death caused an error. Waits up to `DEATH_NEWS_S` for the news."""
        if isinstance(error, ActorDied):
            self.die(str(error))
        try:
            async with asyncio.timeout(DEATH_NEWS_S):
                await self.has_died.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one more request in `num_live` while in this context."""
        self.num_live += 1
        try:
            yield
        finally:
            self.num_live -= 1

    def number_for(self, kind: type[ControlRequest]) -> int | None:
        """The number of its next call, by which calls are carried out in order; None: the order is free."""
        return next(self._numbers) if kind.row.per_rank is None else None

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.engine.ask(method, *args, **kwargs)


@dataclass
class _Call:
    """A control request that is being carried out.

    Attributes:
        closed: the committee's outcome.
        bodies: of the replicas' answers, by slot.
    """

    kind: type[ControlRequest]
    fields: Mapping[str, Any]
    closed: asyncio.Future[Closed]
    bodies: dict[int, Any] = field(default_factory=dict)


class FleetController:
    """Carries out control requests on all live replicas, like `DataParallelController`.

    Attributes:
        replicas: by slot. `admit` replaces one.
        has_committed: whether the weights have changed since the start.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.has_committed = False
        self._committee = Committee(set(range(len(replicas))), self._broadcast, self._send, self._answer)
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._load_numbers = itertools.count(1)

    # ------------------------------------------------------------------------------------------- membership

    @property
    def living(self) -> list[Replica]:
        return [one for one in self.replicas if not one.has_died.is_set()]

    def bury(self, replica: Replica) -> None:
        """Leave a dead replica out of the requests under way and of later ones."""
        self._committee.leave(replica.slot)

    def admit(self, replica: Replica) -> None:
        """Let a new replica take its slot, and part in every request from now on."""
        self.replicas[replica.slot] = replica
        self._committee.join(replica.slot)

    @asynccontextmanager
    async def without(self, subject: str) -> AsyncGenerator[None, None]:
        """A context in which no request about a subject is carried out; those that come meanwhile wait."""
        name, is_held = uuid.uuid4().hex, asyncio.Event()
        self._committee.hold(name, subject, is_held.set)
        await is_held.wait()
        try:
            yield
        finally:
            self._committee.release(name)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._calls.values():
            if not call.closed.done():
                call.closed.set_exception(EngineError("the fleet has been shut down"))

    # --------------------------------------------------------------------------------------------- requests

    async def control(self, kind: type[Any], fields: Mapping[str, Any]) -> Any:
        """Carry out a request on all live replicas; returns the first one's body, with all in `replicas`.

        Raises:
            RequestRejected: refused, or some replica refused it; `replicas` says which.
            EngineError: it failed, or no replica is left.
        """
        if issubclass(kind, LoadRequest) and fields.get("lora_version") is None:
            # Not the replicas' own numbers, which differ: a new replica has seen fewer loads.
            fields = {**fields, "lora_version": f"fleet-{next(self._load_numbers)}"}
        is_stored = not all(isinstance(one, bytes | str) for one in fields.get(TENSORS) or ())
        request, _ = build_request(kind, {**fields, TENSORS: []} if is_stored else fields)
        call = _Call(kind, fields, asyncio.get_running_loop().create_future())
        call_id = uuid.uuid4().hex
        self._calls[call_id] = call
        self._committee.call(ControlCall(id=call_id, request=request))
        closed = await call.closed
        note = "Nothing was committed" if kind.row.is_joint and not closed.is_committed else ""
        return self._merged(call.bodies, closed, note)

    async def ask_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of all live replicas at once; returns and raises as `control` does."""
        asked = self.living
        results = await asyncio.gather(
            *(one.ask(method, *args, **kwargs) for one in asked), return_exceptions=True
        )
        bodies: dict[int, Any] = {}
        replies: dict[int, AnyReply] = {}
        for one, result in zip(asked, results, strict=True):
            if isinstance(result, EbbtideError):
                refusal = await _refusal_of(one, result)
                if refusal is not None:
                    replies[one.slot] = refusal
            elif isinstance(result, BaseException):
                raise result
            else:
                bodies[one.slot] = result
        return self._merged(bodies, Closed(replies, None, is_committed=False))

    def _merged(self, bodies: Mapping[int, Any], closed: Closed, note: str = "") -> Any:
        refused = {slot: reply for slot, reply in closed.replies.items() if isinstance(reply, Refusal)}
        refusal = closed.refusal
        if refusal is None and refused:
            refusal = merge_replica_refusals(refused, len(bodies.keys() | refused.keys()))
        if refusal is not None:
            own = {slot for slot, reply in refused.items() if not isinstance(reply, GivenUp)}
            outcomes = [
                {"replica": replica_name(slot), "success": slot not in own}
                for slot in sorted(bodies.keys() | refused.keys())
            ]
            message = f"{refusal.message}. {note}" if note else refusal.message
            fields = {**refusal.fields, "replicas": outcomes}
            if refusal.status < 500:
                raise RequestRejected(message, refusal.status, **fields)
            raise EngineError(message, **fields)
        if not bodies:
            reasons = "; ".join(f"{one.name}: {one.reason}" for one in self.replicas)
            raise EngineError(f"no replica is left to do this ({reasons})")
        by_name = {replica_name(slot): body for slot, body in sorted(bodies.items())}
        first = next(iter(by_name.values()))
        return {**first, "replicas": by_name} if isinstance(first, dict) else first

    # -------------------------------------------------------------------------- called by the committee

    def _broadcast(self, call: ControlCall) -> None:
        given = self._calls[call.id]
        first_rank = 0
        for slot in sorted(self._committee.members):
            replica = self.replicas[slot]
            fields = self._share(given, replica, first_rank)
            first_rank += replica.engine.num_ranks
            number = replica.number_for(given.kind)
            self._start(self._propose(replica, FleetCall(call.id, given.kind, fields, call.is_joint, number)))

    def _share(self, call: _Call, replica: Replica, first_rank: int) -> Mapping[str, Any]:
        """The fields for one replica: its rank offset in a group, or its own part of the entries."""
        if call.kind is InitWeightsUpdateGroupReqInput:
            return {**call.fields, "rank_offset": call.fields["rank_offset"] + first_rank}
        entries = call.fields.get(TENSORS)
        num_ranks = replica.engine.num_ranks
        if isinstance(entries, list) and len(entries) == len(self.replicas) * num_ranks > num_ranks:
            own = entries[replica.slot * num_ranks : (replica.slot + 1) * num_ranks]
            return {**call.fields, TENSORS: own}
        return call.fields

    def _send(self, slot: int, message: ControlCall | Verdict) -> None:
        replica = self.replicas[slot]
        if isinstance(message, ControlCall):
            kind, fields = type(message.request), msgspec.structs.asdict(message.request)
            call = FleetCall(message.id, kind, fields, is_joint=False, number=replica.number_for(kind))
            self._start(self._propose(replica, call))
            return
        self._start(self._decide(replica, message))
        if message.refusal is None:
            late = Refusal(status=500, message=TOO_LATE.format(seconds=COMMIT_S))
            loop = asyncio.get_running_loop()
            loop.call_later(COMMIT_S, self._committee.take, slot, message.id, late)

    async def _propose(self, replica: Replica, call: FleetCall) -> None:
        try:
            async for word in replica.engine.propose(call):
                if isinstance(word, Answered):
                    self._note_answer(replica, call.id, word)
                else:
                    self._committee.take(replica.slot, call.id, word)
        except EbbtideError as error:
            await self._note_failure(replica, call.id, error)

    def _note_answer(self, replica: Replica, call_id: str, answer: Answered) -> None:
        call = self._calls.get(call_id)
        if call is not None and not isinstance(answer.reply, Refusal):
            call.bodies[replica.slot] = answer.body
        if replica.slot in self._committee.members:
            self._committee.has_session[replica.slot] = answer.has_session
        self._committee.take(replica.slot, call_id, answer.reply)

    async def _decide(self, replica: Replica, verdict: Verdict) -> None:
        try:
            await replica.ask("decide", verdict.id, verdict.refusal)
        except EbbtideError as error:
            await self._note_failure(replica, verdict.id, error)

    async def _note_failure(self, replica: Replica, call_id: str, error: EbbtideError) -> None:
        refusal = await _refusal_of(replica, error)
        if refusal is not None:
            self._committee.take(replica.slot, call_id, refusal)

    def _answer(self, call_id: str, answer: Prepared | Closed) -> None:
        assert isinstance(answer, Closed), "the fleet itself decides"
        call = self._calls.pop(call_id)
        if issubclass(call.kind, LoadRequest) and answer.is_committed:
            for replica in self.living:
                replica.lacks -= {call.fields["lora_name"]}
        done = {slot: reply for slot, reply in answer.replies.items() if not isinstance(reply, Refusal)}
        self.has_committed = self.has_committed or any(one.has_changed_weights for one in done.values())
        if answer.is_committed and done:
            # A replica that did not commit although others did must not serve: it is replaced.
            for slot in answer.replies.keys() - done.keys():
                self.replicas[slot].die(answer.replies[slot].message)
            answer = Closed(done, answer.refusal, is_committed=True)
        call.bodies = {slot: body for slot, body in call.bodies.items() if slot in answer.replies}
        if not call.closed.done():
            call.closed.set_result(answer)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _refusal_of(replica: Replica, error: EbbtideError) -> Refusal | None:
    """An error as a reply; None: the replica's death caused it."""
    if isinstance(error, EngineError):
        return None if await replica.is_cause(error) else Refusal(status=500, message=str(error))
    status = error.status if isinstance(error, RequestRejected) else 400
    return Refusal(status=status, message=str(error), fields=getattr(error, "fields", {}))


def by_speaker(messages: Mapping[str, str]) -> str:
    """Join messages by name into one text, with equal messages only once."""
    speakers: dict[str, list[str]] = {}
    for name, message in messages.items():
        speakers.setdefault(message, []).append(name)
    return "; ".join(f"{', '.join(names)}: {message}" for message, names in speakers.items())
