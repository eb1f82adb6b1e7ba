"""What vLLM's calls make of control requests that do not succeed."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from fixtures.scripted_engine import STATE
from msgspec.structs import replace

from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.occupation import VllmOccupation
from ebbtide.srt.entrypoints.vllm.parameters import PauseParameters, SleepParameters
from ebbtide.srt.errors import EbbtideError, EngineDown, EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    StateReport,
)

pytestmark = pytest.mark.unit


class ScriptedEngine:
    """Pauses and continues; requests of the kinds in `errors` end with those."""

    def __init__(self, errors: Mapping[type[Any], EbbtideError], paused: PauseMode | None) -> None:
        self.paused = paused
        self._errors = errors

    @property
    def state(self) -> StateReport:
        return replace(STATE, paused=self.paused, can_run=self.paused is None)

    async def control(self, kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        if kind in self._errors:
            raise self._errors[kind]
        if kind is PauseGenerationReqInput:
            self.paused = fields["mode"]
        elif kind is ContinueGenerationReqInput:
            self.paused = None
        return {"success": True, "message": "", "changed": True, "mode": self.paused}


REFUSAL = RequestRejected("memory_saver_backend is 'none'", 409)
FAILURE = EngineError("rank 1: a handler raised")


@pytest.mark.parametrize(
    ("asked", "kind", "error"),
    [
        (SleepParameters(level=1), ReleaseMemoryOccupationReqInput, REFUSAL),
        (PauseParameters(), FlushCacheReqInput, FAILURE),
    ],
)
@pytest.mark.parametrize("paused", [None, PauseMode.ABORT])
def test_a_call_that_does_not_succeed_leaves_generation_as_it_was(
    asked: SleepParameters | PauseParameters, kind: type[Any], error: EbbtideError, paused: PauseMode | None
) -> None:
    engine = ScriptedEngine({kind: error}, paused)
    occupation = VllmOccupation(cast("EngineService", engine))
    call = occupation.sleep(asked) if isinstance(asked, SleepParameters) else occupation.pause(asked)
    with pytest.raises(type(error)) as raised:
        asyncio.run(call)
    assert raised.value is error
    assert engine.paused == paused


def test_the_first_failure_is_told_where_the_pause_cannot_be_ended() -> None:
    first, second = EngineDown("the scheduler ended"), EngineDown("the engine is down")
    engine = ScriptedEngine(
        {ReleaseMemoryOccupationReqInput: first, ContinueGenerationReqInput: second}, paused=None
    )
    with pytest.raises(EngineDown) as raised:
        asyncio.run(VllmOccupation(cast("EngineService", engine)).sleep(SleepParameters(level=1)))
    assert raised.value is first
