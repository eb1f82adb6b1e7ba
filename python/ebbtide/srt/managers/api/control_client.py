"""Control requests from the API process: built of loose fields, and sent.

Each call gets its own reply, whoever else calls or goes away.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ebbtide.srt.errors import EngineDown, EngineError, RequestRejected
from ebbtide.srt.lossless import read
from ebbtide.srt.managers.api.live_generation import LiveOutputs
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AbortReq,
    AbortReqOutput,
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlReply,
    ControlRequest,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    Prepared,
    Refusal,
    Reply,
    Verdict,
)
from ebbtide.srt.managers.wire.channel import SendEnd

R = TypeVar("R", bound=ControlRequest)

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
# Every entry of a list costs each rank some time. This is several times the tensors of the largest models.
MAX_ENTRIES: Final = 1 << 18
# An answer quotes no more characters of a request, and names no more of its ignored fields, than this.
MAX_CHARACTERS: Final = 200
MAX_IGNORED: Final = 100
# Fields without which a request is about everything, or gives memory back.
NONE_IS_ALL: Final = ("tags", "request_ids", "level")


def build_request(kind: type[R], fields: Mapping[str, Any]) -> tuple[R, list[str]]:
    """Build a control request from loose fields: a JSON body, or keyword arguments.

    Null means "not given". Unknown fields are ignored; up to a hundred are returned, sorted, for
    `ignored_fields`. In Python, a torch.dtype may stand for its name. Raises RequestRejected: 400, with the
    field's path and what was expected.
    """
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    try:
        for name, value in known.items():
            _check_sizes(kind, f"$.{name}", value)
    except RecursionError:
        raise RequestRejected(f"{kind.__name__}: a field is nested too deeply") from None
    given = {name: _plain(value) for name, value in known.items() if value is not None}
    ignored = [name[:MAX_CHARACTERS] for name in sorted(set(fields) - set(known))[:MAX_IGNORED]]
    refuse_misspelt(kind, given, ignored)
    try:
        return read(kind, {"type": kind.__name__, **given}), ignored
    except RequestRejected as error:
        raise RequestRejected(f"{kind.__name__}: {error.message}") from None


def refuse_misspelt(kind: type[Struct], given: Collection[str], unknown: Iterable[str]) -> None:
    """Refuse a request that does not say what it is about, and has a field that may be meant to say it.

    Raises RequestRejected: 400; an unknown field is within two letters of a known one.
    """
    fields = msgspec.structs.fields(kind)
    if all(known.name in given for known in fields if known.required or known.name in NONE_IS_ALL):
        return
    for name in unknown:
        meant = next((known.name for known in fields if _is_near(name, known.name, 2)), None)
        if meant is not None and meant not in given:
            raise RequestRejected(f"{name}: unknown; did you mean {meant}?", param=f"body.{name}")


def _is_near(one: str, other: str, num_letters: int) -> bool:
    """Whether `num_letters` letters inserted, left out or replaced make one of the other."""
    if abs(len(one) - len(other)) > num_letters:
        return False
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    if not one or not other:
        return True
    return num_letters > 0 and (
        _is_near(one[1:], other[1:], num_letters - 1)
        or _is_near(one[1:], other, num_letters - 1)
        or _is_near(one, other[1:], num_letters - 1)
    )


def _plain(value: Any) -> Any:
    """The value, with a torch.dtype, or a list of them, by name."""
    if isinstance(value, list | tuple):
        return [str(member) if _is_dtype(member) else member for member in value]
    return str(value) if _is_dtype(value) else value


def _is_dtype(value: Any) -> bool:
    # It is known by name: torch takes seconds to import, and nothing else here needs it.
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("torch", "dtype")


def _check_sizes(kind: type[Struct], path: str, value: Any) -> None:
    """Refuse numbers that the messages between processes, or JSON, have no room for, and endless lists.

    Neither the types of the fields nor JSON and Python bound an integer.
    """
    match value:
        case bool():
            return
        case int() if not INT64_MIN <= value <= INT64_MAX:
            raise RequestRejected(f"{kind.__name__}: Expected an integer of at most 64 bits - at `{path}`")
        case float() if not math.isfinite(value):
            raise RequestRejected(f"{kind.__name__}: Expected a finite number, got {value} - at `{path}`")
        case Mapping():
            for name, member in value.items():
                _check_sizes(kind, f"{path}.{name}", member)
        case list() | tuple() if len(value) > MAX_ENTRIES:
            raise RequestRejected(
                f"{kind.__name__}: Expected at most {MAX_ENTRIES} entries, got {len(value)} - at `{path}`"
            )
        case list() | tuple():
            for index, member in enumerate(value):
                _check_sizes(kind, f"{path}[{index}]", member)


# Asked once the engine can commit: returns why it is not to, or None.
Vote: TypeAlias = Callable[[], Awaitable[str | None]]


class _Part(NamedTuple):
    """What is heard of a request that other engines commit too: it can be committed, and has waited long."""

    prepared: asyncio.Future[None]
    overdue: asyncio.Future[None]


class ControlClient:
    """Sends control requests and hands each caller the reply with its id. Lives in one event loop.

    `live`: the outputs on their way. What aborts requests ends those too that schedulers do not know yet.
    """

    def __init__(
        self, scheduler: SendEnd[ControlCall | Verdict | AbortGeneration], live: LiveOutputs
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._ids = itertools.count()
        self._waiting: dict[str, asyncio.Future[AnyReply]] = {}
        self._parts: dict[str, _Part] = {}
        self._failure: str | None = None

    async def call(
        self, request: AnyControlRequest, timeout_s: float | None = None, vote: Vote | None = None
    ) -> Reply:
        """Send a request and wait for its reply.

        A caller that is cancelled or runs out of time does not take its request back: that is carried out,
        and the reply is dropped. Time limits that are part of a request are the scheduler's affair.

        Args:
            timeout_s: how long to wait for the reply; None for ever.
            vote: says whether to commit what other engines commit too; not asked about what commits nothing.
        """
        request, unsent, message = self._distribute(request)
        try:
            reply = await self._reply_to(request, timeout_s, vote)
        except asyncio.CancelledError:
            self.abort(unsent, message)
            raise
        self.abort(unsent, message)
        return _with_more_aborted(reply, len(unsent))

    def abort(self, rids: Iterable[str], message: str) -> None:
        """End outputs; those that are about to be sent, as soon as they have been."""
        if self._failure is None:
            for rid in self._live.abort(rids, message):
                self._scheduler.send(AbortGeneration(rid=rid, message=message))

    def _distribute(self, request: AnyControlRequest) -> tuple[AnyControlRequest, list[str], str]:
        """The request as the schedulers understand it; the outputs that they do not know, and their end."""
        match request:
            case AbortReq():
                posted = [request.rid] if isinstance(request.rid, str) else request.rid
                rids = [rid for name in posted for rid in self._live.expand(name)]
                unsent = [rid for rid in self._live.unsent if request.abort_all or rid in rids]
                return msgspec.structs.replace(request, rid=rids), unsent, "Aborted by /abort_request"
            case PauseGenerationReqInput(mode=PauseMode.ABORT):
                return request, self._live.unsent, "Aborted by pause_generation"
            case _:
                return request, [], ""

    async def _reply_to(
        self, request: AnyControlRequest, timeout_s: float | None, vote: Vote | None
    ) -> Reply:
        if self._failure is not None:
            raise EngineDown(self._failure)
        call_id = str(next(self._ids))
        future: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._scheduler.send(ControlCall(id=call_id, request=request, is_joint=vote is not None))
            async with asyncio.timeout(timeout_s):
                if vote is not None:
                    await self._take_part(call_id, future, vote)
                reply = await future
        except TimeoutError:
            name = type(request).__name__
            raise EngineError(f"{name}: the engine gave no reply within {timeout_s:g} s") from None
        finally:
            del self._waiting[call_id]
        return _accepted(reply)

    async def _take_part(self, call_id: str, reply: asyncio.Future[AnyReply], vote: Vote) -> None:
        """Wait until the engine can commit, or has replied without that, and send it the verdict."""
        loop = asyncio.get_running_loop()
        part = self._parts[call_id] = _Part(loop.create_future(), loop.create_future())
        # A caller that goes away here commits nothing: nobody would hear of it.
        refusal: str | None = "whoever was to say whether to commit has gone away"
        try:
            waiting: list[asyncio.Future[Any]] = [reply, part.prepared]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                voting = asyncio.ensure_future(vote())
                try:
                    waiting = [reply, voting, part.overdue]
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    # Otherwise it has ended the request by itself, or its time is up.
                    is_late = "it was ready, and was not told in time that all were"
                    refusal = voting.result() if voting.done() else is_late
                finally:
                    voting.cancel()
        finally:
            del self._parts[call_id]
            if not reply.done():
                self._scheduler.send(Verdict(id=call_id, refusal=refusal))

    def resolve(self, message: ControlReply) -> None:
        """Hand a reply to its caller, if that still waits."""
        if isinstance(message.reply, Prepared):
            part = self._parts.get(message.id)
            if part is not None and not part.prepared.done():
                part.prepared.set_result(None)
            if part is not None and message.reply.is_overdue and not part.overdue.done():
                part.overdue.set_result(None)
            return
        future = self._waiting.get(message.id)
        if future is not None and not future.done():
            future.set_result(message.reply)

    def fail(self, message: str) -> None:
        """End every call that waits, and those to come, with `EngineDown`."""
        self._failure = message
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDown(message))


def _accepted(reply: AnyReply) -> Reply:
    if not isinstance(reply, Refusal):
        return reply
    fields = reply.fields
    if "errors" in fields:
        # What all ranks of a replica found alike is listed once, as the first one's.
        fields = {**fields, "errors": [{"rank": 0, **error} for error in fields["errors"]]}
    if reply.status < 500:
        raise RequestRejected(reply.message, reply.status, **fields)
    raise EngineError(reply.message, **fields)


def _with_more_aborted(reply: Reply, num_more: int) -> Reply:
    match reply:
        case AbortReqOutput():
            # Of all replicas; each of them counts its own.
            num_aborted = reply.num_aborted + num_more
            return AbortReqOutput(
                changed=num_aborted > 0, num_aborted=num_aborted, message=f"Aborted {num_aborted} requests."
            )
        case PauseGenerationReqOutput():
            return msgspec.structs.replace(reply, num_aborted=reply.num_aborted + num_more)
        case _:
            return reply
