"""Builds control requests from loose fields, sends them, and gives each call its own reply."""

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
# The most entries of a list, since each costs every rank some time. The largest models have far fewer
# tensors.
MAX_ENTRIES: Final = 1 << 18
# The most characters of a request that an answer quotes, and the most ignored fields that it names.
MAX_CHARACTERS: Final = 200
MAX_IGNORED: Final = 100
# Without these fields, a request is about everything, or gives memory back.
NONE_IS_ALL: Final = ("tags", "request_ids", "level")


def build_request(kind: type[R], fields: Mapping[str, Any]) -> tuple[R, list[str]]:
    """Build a control request from loose fields: a JSON body, or keyword arguments.

    Null means "not given". Unknown fields are ignored; up to `MAX_IGNORED` of their names are returned,
    sorted. In Python, a torch.dtype may be given for its name.

    Raises RequestRejected: 400, with the field's path and what was expected.
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
    """Refuse a request that lacks an important field, and has an unknown one with almost the same name.

    Raises RequestRejected: 400; the unknown name is within two letters of the missing one.
    """
    fields = msgspec.structs.fields(kind)
    if all(known.name in given for known in fields if known.required or known.name in NONE_IS_ALL):
        return
    for name in unknown:
        meant = next((known.name for known in fields if _is_near(name, known.name, 2)), None)
        if meant is not None and meant not in given:
            raise RequestRejected(f"{name}: unknown; did you mean {meant}?", param=f"body.{name}")


def _is_near(one: str, other: str, num_letters: int) -> bool:
    """Whether the edit distance of two words is at most `num_letters`."""
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
    # By name, since importing torch takes seconds.
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("torch", "dtype")


def _check_sizes(kind: type[Struct], path: str, value: Any) -> None:
    """Refuse integers beyond 64 bits, numbers that are not finite, and very long lists.

    Field types do not bound integers, and neither do JSON and Python.
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


# Called when the engine can commit: returns why it must not, or None.
Vote: TypeAlias = Callable[[], Awaitable[str | None]]


class _Part(NamedTuple):
    """Events of a request that other engines commit too: it is prepared, and it has waited too long."""

    prepared: asyncio.Future[None]
    overdue: asyncio.Future[None]


class ControlClient:
    """Sends control requests, and gives each caller the reply with its id. It lives in one event loop.

    Args:
        live: the live outputs. Requests that abort also end outputs that were not sent to a scheduler yet.
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

        If the caller is cancelled or runs out of time, the request is still carried out, and the reply is
        dropped. Time limits that are fields of a request are handled by the scheduler.

        Args:
            timeout_s: how long to wait for the reply; None: for ever.
            vote: says whether to commit, if other engines commit the request too. Not called if nothing is
                committed.
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
        """Abort outputs; those that are not sent yet, as soon as they were."""
        if self._failure is None:
            for rid in self._live.abort(rids, message):
                self._scheduler.send(AbortGeneration(rid=rid, message=message))

    def _distribute(self, request: AnyControlRequest) -> tuple[AnyControlRequest, list[str], str]:
        """The request as schedulers take it, the unsent outputs that it aborts, and the message for these."""
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
        """Wait until the engine is prepared or has replied; if it is prepared, send it the verdict."""
        loop = asyncio.get_running_loop()
        part = self._parts[call_id] = _Part(loop.create_future(), loop.create_future())
        # The verdict if the caller is cancelled here: nothing is committed.
        refusal: str | None = "whoever was to say whether to commit has gone away"
        try:
            waiting: list[asyncio.Future[Any]] = [reply, part.prepared]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                voting = asyncio.ensure_future(vote())
                try:
                    waiting = [reply, voting, part.overdue]
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    # If the vote is not there, the request has ended by itself, or has waited too long.
                    is_late = "it was ready, and was not told in time that all were"
                    refusal = voting.result() if voting.done() else is_late
                finally:
                    voting.cancel()
        finally:
            del self._parts[call_id]
            if not reply.done():
                self._scheduler.send(Verdict(id=call_id, refusal=refusal))

    def resolve(self, message: ControlReply) -> None:
        """Give a reply to its caller, if it still waits."""
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
        """Let all calls, also later ones, raise `EngineDown`."""
        self._failure = message
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDown(message))


def _accepted(reply: AnyReply) -> Reply:
    if not isinstance(reply, Refusal):
        return reply
    fields = reply.fields
    if "errors" in fields:
        # Errors that are the same on all ranks of a replica are listed once, as those of the first rank.
        fields = {**fields, "errors": [{"rank": 0, **error} for error in fields["errors"]]}
    if reply.status < 500:
        raise RequestRejected(reply.message, reply.status, **fields)
    raise EngineError(reply.message, **fields)


def _with_more_aborted(reply: Reply, num_more: int) -> Reply:
    match reply:
        case AbortReqOutput():
            # The sum over all replicas, which count their own.
            num_aborted = reply.num_aborted + num_more
            return AbortReqOutput(
                changed=num_aborted > 0, num_aborted=num_aborted, message=f"Aborted {num_aborted} requests."
            )
        case PauseGenerationReqOutput():
            return msgspec.structs.replace(reply, num_aborted=reply.num_aborted + num_more)
        case _:
            return reply
