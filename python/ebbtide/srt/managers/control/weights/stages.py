"""How long each stage of an update took, one after the other, for its reply and for traces."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import structs

from ebbtide.srt.managers.control.ports import Operation
from ebbtide.srt.managers.io_struct import UpdateWeightsReqOutput


class Stages:
    """The stages of one operation, from its first slice to its reply; every moment belongs to one of them.

    decode: the payload is read and checked, on all ranks. wait: for the updates before it. stage: a place is
    found, and what overwrites no weights that serve is written. drain: requests end first, and a boundary
    comes. canary: the trial pass. vote: all replicas are ready. write: what does overwrite them is written.
    commit: other weights begin to serve. release: memory is given back.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._ms: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What was done since the last stage ended was this; more of the same adds to it."""
        now_s = time.perf_counter()
        self._ms[name] = self._ms.get(name, 0.0) + 1e3 * (now_s - self._began_s)
        self._began_s = now_s

    @property
    def told_ms(self) -> dict[str, float]:
        return {name: round(took_ms, 3) for name, took_ms in self._ms.items()}


def timed(make: Callable[[Stages], Operation]) -> Operation:
    """The operation that is made, with its stages in its reply."""
    stages = Stages()
    reply = yield from make(stages)
    if not isinstance(reply, UpdateWeightsReqOutput):
        return reply
    stages.end("release" if reply.committed else "stage")
    return structs.replace(reply, stages_ms=stages.told_ms)
