"""Transitions over a control function that the tests script: order, refusals, retries."""

import asyncio
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from ebbtide.srt.entrypoints.transition import MAX_RECORDED, MAX_STEPS, Transitions
from ebbtide.srt.errors import EngineError, RequestRejected

SLEEP = [{"op": "pause", "mode": "retract"}, {"op": "release", "tags": ["kv_cache"]}, {"op": "continue"}]


class ScriptedControl:
    """Answers success, but for the request that `failures` names."""

    def __init__(self, **failures: Exception | dict[str, Any]) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.gate: asyncio.Event | None = None
        self._failures = failures

    async def __call__(self, kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append((kind.__name__, dict(fields)))
        if self.gate is not None:
            await self.gate.wait()
        failure = self._failures.get(kind.__name__)
        if isinstance(failure, Exception):
            raise failure
        return failure or {"success": True, "message": "done"}


def run(control: ScriptedControl, *bodies: Mapping[str, Any]) -> list[dict[str, Any]]:
    async def run_all() -> list[dict[str, Any]]:
        transitions = Transitions(control)
        return [await transitions.run(body) for body in bodies]

    return asyncio.run(run_all())


def refusal(control: ScriptedControl, body: Mapping[str, Any]) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        run(control, body)
    return caught.value


def test_steps_run_in_order_with_their_fields() -> None:
    control = ScriptedControl()
    [outcome] = run(control, {"steps": SLEEP, "op_id": "one"})
    assert control.calls == [
        ("PauseGenerationReqInput", {"mode": "retract"}),
        ("ReleaseMemoryOccupationReqInput", {"tags": ["kv_cache"]}),
        ("ContinueGenerationReqInput", {}),
    ]
    assert (outcome["success"], outcome["op_id"]) == (True, "one")
    assert (outcome["replayed"], outcome["num_done"]) == (False, 3)
    assert [step["op"] for step in outcome["steps"]] == ["pause", "release", "continue"]
    assert all(step["status"] == 200 and step["duration_ms"] >= 0 for step in outcome["steps"])


def test_it_stops_at_the_first_refusal_and_says_what_was_done() -> None:
    control = ScriptedControl(ReleaseMemoryOccupationReqInput=RequestRejected("no memory saver", 409))
    error = refusal(control, {"steps": SLEEP})
    assert error.status == 409
    assert "step 2 (release): no memory saver" in error.message
    assert error.body["num_done"] == 1
    assert [step["status"] for step in error.body["steps"]] == [200, 409]
    assert len(control.calls) == 2


def test_a_flush_that_is_not_full_stops_it_too() -> None:
    partial = {"success": False, "message": "2 requests still hold KV", "fully_flushed": False}
    error = refusal(
        ScriptedControl(FlushCacheReqInput=partial), {"steps": [{"op": "flush"}, {"op": "continue"}]}
    )
    assert (error.status, error.body["num_done"]) == (400, 0)


def test_the_same_op_id_returns_the_recorded_outcome() -> None:
    control = ScriptedControl()
    first, again = run(control, *[{"steps": SLEEP, "op_id": "x"}] * 2)
    assert len(control.calls) == 3
    assert again == {**first, "replayed": True}


def test_a_recorded_refusal_is_refused_again_without_running() -> None:
    control = ScriptedControl(PauseGenerationReqInput=RequestRejected("superseded", 409))

    async def run_twice() -> None:
        transitions = Transitions(control)
        for _ in range(2):
            with pytest.raises(RequestRejected, match="superseded"):
                await transitions.run({"steps": SLEEP, "op_id": "x"})

    asyncio.run(run_twice())
    assert len(control.calls) == 1


def test_a_retry_while_it_runs_waits_for_it_and_a_lost_caller_does_not_end_it() -> None:
    control = ScriptedControl()

    async def lose_and_retry() -> dict[str, Any]:
        control.gate = asyncio.Event()
        transitions = Transitions(control)
        lost = asyncio.create_task(transitions.run({"steps": SLEEP, "op_id": "x"}))
        await asyncio.sleep(0)
        retry = asyncio.create_task(transitions.run({"steps": SLEEP, "op_id": "x"}))
        await asyncio.sleep(0)
        lost.cancel()
        control.gate.set()
        return await retry

    outcome = asyncio.run(lose_and_retry())
    assert (outcome["replayed"], outcome["num_done"], len(control.calls)) == (True, 3, 3)


def test_an_op_id_cannot_be_reused_for_other_steps() -> None:
    with pytest.raises(RequestRejected, match="other steps"):
        run(ScriptedControl(), {"steps": SLEEP, "op_id": "x"}, {"steps": SLEEP[:1], "op_id": "x"})


def test_an_engine_failure_is_one() -> None:
    control = ScriptedControl(PauseGenerationReqInput=EngineError("rank 0 failed"))
    with pytest.raises(EngineError, match="rank 0 failed"):
        run(control, {"steps": SLEEP})


def test_without_an_op_id_each_call_runs() -> None:
    control = ScriptedControl()
    first, second = run(control, {"steps": []}, {"steps": []})
    assert first["op_id"] != second["op_id"]
    assert [outcome["success"] for outcome in (first, second)] == [True, True]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "steps"),
        ({"steps": "pause"}, "Expected `array`"),
        ({"steps": [{"op": "nap"}]}, "step 1: unknown op 'nap'; expected one of .*pause"),
        ({"steps": [{"op": "continue"}, {"op": "pause", "mode": "hard"}]}, "step 2 (pause): .*in_place"),
        ({"steps": [{"op": "release", "tags": ["vram"]}]}, "step 1 (release): .*kv_cache"),
        ({"steps": [{"op": ["pause"]}]}, "step 1: unknown op ['pause']; expected one of .*pause"),
        ({"steps": [{"op": {"a": 1}}]}, "step 1: unknown op {'a': 1}; expected one of .*pause"),
        ({"steps": [{"op": "continue"}] * (MAX_STEPS + 1)}, f"length <= {MAX_STEPS} - at `$.steps`"),
        ({"steps": [], "op_id": 7}, "op_id"),
        ({"steps": [], "op_id": "a" * 257}, "length <= 256 - at `$.op_id`"),
        (
            {"steps": [{"op": "update_from_disk", "weight_version": "a" * 257}]},
            "<= 256 - at `$.weight_version`",
        ),
    ],
)
def test_what_is_malformed_is_refused_before_the_first_step(body: dict[str, Any], message: str) -> None:
    control = ScriptedControl()
    error = refusal(control, body)
    assert error.status == 400
    for part in message.split(".*"):
        assert part in error.message
    assert control.calls == []


def test_old_outcomes_are_forgotten() -> None:
    control = ScriptedControl()
    bodies = [{"steps": SLEEP[:1], "op_id": str(number)} for number in range(MAX_RECORDED + 1)]
    outcomes = run(control, *bodies, bodies[-1], bodies[0])
    assert [outcome["replayed"] for outcome in outcomes[-2:]] == [True, False]


def test_steps_that_are_long_are_not_kept() -> None:
    async def done(kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"success": True, "message": "done"}

    async def num_bytes_kept() -> int:
        transitions = Transitions(done)
        tracemalloc.start()
        try:
            long = {"input_ids": list(range(1000, 100_000))}
            step = {"op": "update_from_disk", "model_path": "a", "canary": long, "unknown": long}
            await transitions.run({"steps": [step], "op_id": "x"})
            del long, step
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert asyncio.run(num_bytes_kept()) < 1 << 18
