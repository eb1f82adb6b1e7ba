"""`POST /transition`: several control requests in one call, which can safely be repeated.

A controller that lost the answer does not know what was done. It repeats the call with the same `op_id`, and
gets the recorded outcome, or waits for it if the call still runs. Nothing runs twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field

from ebbtide.srt.entrypoints.bodies import AnswerBody, Body
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.lossless import read
from ebbtide.srt.managers.api.control_client import MAX_CHARACTERS, build_request
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS, ControlRequest
from ebbtide.srt.managers.wire.message import Name

STEPS: Final[dict[str, type[ControlRequest]]] = {
    kind.row.op: kind for kind in CONTROL_REQUESTS if kind.row.op is not None
}
# How many outcomes are remembered. A retry comes within minutes, not after a thousand other transitions.
MAX_RECORDED = 1024
# Checking a step takes 25 µs in the event loop. An RL step needs about ten.
MAX_STEPS = 64


class TransitionRequest(Struct, frozen=True):
    """Steps to carry out in order.

    Attributes:
        steps: each an object with `op` (a key of `STEPS`) and the fields of that request.
        op_id: identifies this transition for retries; None: the engine makes one.
    """

    steps: Annotated[list[dict[str, Any]], Meta(max_length=MAX_STEPS)]
    op_id: Name | None = None


class StepOutcome(Struct, kw_only=True):
    """A step that was carried out, or failed. `status`: of the same request over HTTP."""

    op: str
    status: int
    duration_ms: float
    reply: dict[str, Any]


class TransitionReply(AnswerBody, kw_only=True):
    """The body of the answer. `replayed`: the outcome is a recorded one. `num_done`: of successful steps."""

    op_id: str
    replayed: bool
    num_done: int
    steps: list[StepOutcome] = field(default_factory=list)


class Transitions:
    """Carries out transitions, and remembers their outcomes by `op_id`.

    `control`: carries out one control request, given its type and fields.
    """

    def __init__(self, control: Callable[[type[Any], Mapping[str, Any]], Awaitable[Any]]) -> None:
        self._control = control
        self._recorded: OrderedDict[str, tuple[bytes, asyncio.Task[list[StepOutcome]]]] = OrderedDict()

    async def run(self, fields: Mapping[str, Any]) -> Body:
        """Check all steps, then carry them out in order, up to the first that fails.

        The steps run on even if the caller is cancelled. Returns the body of a `TransitionReply`.

        Raises:
            RequestRejected: 400: the request is malformed; 409: the `op_id` was used for other steps; in both
                cases nothing ran. Else a step was refused: its status, with the whole answer.
            EngineError: the engine failed in a step.
        """
        request, digest = _request(fields)
        op_id = request.op_id if request.op_id is not None else uuid.uuid4().hex
        replayed = op_id in self._recorded
        if replayed:
            recorded, task = self._recorded[op_id]
            if recorded != digest:
                raise RequestRejected(f"op_id {op_id!r} was used for other steps: take a new one", 409)
        else:
            task = asyncio.ensure_future(self._run(request.steps))
            self._recorded[op_id] = digest, task
            self._forget_old()
        steps = await asyncio.shield(task)
        failed = steps[-1] if steps and steps[-1].status != 200 else None
        if failed is None:
            message = f"{len(steps)} {'step' if len(steps) == 1 else 'steps'} done."
        else:
            message = f"step {len(steps)} ({failed.op}): {failed.reply['message']}"
        reply = TransitionReply(
            success=failed is None,
            message=message,
            op_id=op_id,
            replayed=replayed,
            num_done=len(steps) if failed is None else len(steps) - 1,
            steps=steps,
        )
        body: Body = msgspec.to_builtins(reply)
        if failed is None:
            return body
        if failed.status >= 500:
            raise EngineError(message)
        del body["success"], body["message"]
        raise RequestRejected(message, failed.status, **body)

    async def _run(self, steps: list[Body]) -> list[StepOutcome]:
        """Run the steps up to the first that fails. Returns their outcomes, with the failed one last."""
        outcomes: list[StepOutcome] = []
        for step in steps:
            outcomes.append(await self._step(step))
            if outcomes[-1].status != 200:
                break
        return outcomes

    async def _step(self, step: Body) -> StepOutcome:
        started = time.perf_counter()
        try:
            reply = await self._control(STEPS[step["op"]], _step_fields(step))
            # An incomplete flush is a normal answer, but ends the transition.
            status = 200 if reply["success"] else 400
        except (RequestRejected, EngineError) as error:
            reply, status = error.body, error.status
        duration_ms = (time.perf_counter() - started) * 1e3
        return StepOutcome(op=step["op"], status=status, duration_ms=duration_ms, reply=reply)

    def _forget_old(self) -> None:
        """Drop the oldest outcomes, except those of transitions that still run."""
        for op_id in list(self._recorded):
            if len(self._recorded) <= MAX_RECORDED:
                return
            if self._recorded[op_id][1].done():
                del self._recorded[op_id]


def _request(fields: Mapping[str, Any]) -> tuple[TransitionRequest, bytes]:
    """Read a transition and check its steps. Also returns a digest of the steps, without unknown fields."""
    request = read(TransitionRequest, fields)
    digest = hashlib.sha256()
    for number, step in enumerate(request.steps, 1):
        op = step.get("op")
        if not isinstance(op, str) or op not in STEPS:
            given = repr(op)[:MAX_CHARACTERS]
            raise RequestRejected(f"step {number}: unknown op {given}; expected one of {', '.join(STEPS)}")
        try:
            built, _ = build_request(STEPS[op], _step_fields(step))
        except RequestRejected as error:
            raise RequestRejected(f"step {number} ({op}): {error.message}") from None
        digest.update(msgspec.msgpack.encode(built, order="deterministic"))
    return request, digest.digest()


def _step_fields(step: Mapping[str, Any]) -> Body:
    return {name: value for name, value in step.items() if name != "op"}
