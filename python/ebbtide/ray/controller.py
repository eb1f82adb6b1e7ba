"""Control requests of a fleet: its live replicas are the members of a committee, which may die and join."""

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

# A request may hear of a death sooner than whoever watches for it.
DEATH_NEWS_S: Final = 5.0
# What is prepared is committed at a boundary between two forward passes: that much later it hangs.
COMMIT_S: Final = 60.0
TOO_LATE: Final = "it was to commit, and did not within {seconds:g} s, as others did"


def replica_name(slot: int) -> str:
    return f"replica {slot}"


class Replica:
    """An engine of a fleet, until it dies; its successor is another one.

    Attributes:
        slot: its place in the fleet, which its successor takes.
        life: how many there were in that place before.
        num_live: requests that it is working on.
        lacks: adapters that others have and it has not, by `name` or `name@version`.
        has_died: set once it has been found dead, with `reason`.
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
        """Note that it is dead. Idempotent: the first reason counts."""
        if not self.has_died.is_set():
            self.reason = reason
            self.has_died.set()

    async def watch(self) -> None:
        """Return when it is dead, whoever notes it."""
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
        """Whether this error came of its death, rather than being its answer."""
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
        """While it works on one more request."""
        self.num_live += 1
        try:
            yield
        finally:
            self.num_live -= 1

    def number_for(self, kind: type[ControlRequest]) -> int | None:
        """The place of its next call, where calls of this kind are carried out in their order."""
        return next(self._numbers) if kind.row.per_rank is None else None

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.engine.ask(method, *args, **kwargs)


@dataclass
class _Call:
    """A control request that is being carried out: its fields, and the bodies of the answers by slot."""

    kind: type[ControlRequest]
    fields: Mapping[str, Any]
    closed: asyncio.Future[Closed]
    bodies: dict[int, Any] = field(default_factory=dict)


class FleetController:
    """Carries control requests out on all replicas that live, as a `DataParallelController` does.

    `replicas`: by slot; a successor takes its place by `admit`. `has_committed`: whether the weights are
    others than at the start.
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
        self._committee.leave(replica.slot)

    def admit(self, replica: Replica) -> None:
        """Have a new one take part in every request from now on."""
        self.replicas[replica.slot] = replica
        self._committee.join(replica.slot)

    @asynccontextmanager
    async def without(self, subject: str) -> AsyncGenerator[None, None]:
        """While nothing about a subject changes: requests about it that come meanwhile wait."""
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
        """Carry a request out on all live replicas; returns the first one's body, with all in `replicas`."""
        if issubclass(kind, LoadRequest) and fields.get("lora_version") is None:
            # Their own numbers differ: a new replica has seen fewer loads.
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
        """Ask all live replicas at once; answers as `control` does."""
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

    # ------------------------------------------------------------------------------------- of the committee

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
        """A replica's own part of the fields."""
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
            # Whoever did not do what the others did must not serve; another one takes its place.
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
    """What an error says as a reply; None: it came of the replica's death."""
    if isinstance(error, EngineError):
        return None if await replica.is_cause(error) else Refusal(status=500, message=str(error))
    status = error.status if isinstance(error, RequestRejected) else 400
    return Refusal(status=status, message=str(error), fields=getattr(error, "fields", {}))


def by_speaker(messages: Mapping[str, str]) -> str:
    """Who says what, each message once. By name."""
    speakers: dict[str, list[str]] = {}
    for name, message in messages.items():
        speakers.setdefault(message, []).append(name)
    return "; ".join(f"{', '.join(names)}: {message}" for message, names in speakers.items())
