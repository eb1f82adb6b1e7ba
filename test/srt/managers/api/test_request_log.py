"""`--log-requests`: what the log tells of a request at each level, and what it does not."""

import asyncio
import logging

import pytest
from fixtures.scripted_engine import Engine, run, start

from ebbtide.srt.managers.io_struct import FinishReason, RequestOutput

FIELDS = {
    "input_ids": [41, 42, 43],
    "rid": "r",
    "sampling_params": {"max_new_tokens": 5, "temperature": 0.25, "stop": ["END"]},
}
PARAMS = {"max_new_tokens": 5, "temperature": 0.25, "stop": ("END",)}


def lines_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What is logged of one request."""
    caplog.set_level(logging.INFO)

    async def script(engine: Engine) -> None:
        result = asyncio.create_task((await engine.manager.prepare(FIELDS)).result())
        await engine.send(RequestOutput("r", [7, 8], FinishReason("length", length=2), start()))
        await result

    run(script, log_requests_level=level)
    return caplog.messages


@pytest.mark.parametrize(
    ("level", "more"),
    [
        (0, ""),
        (2, f" sampling_params={PARAMS}"),
        (3, f" sampling_params={PARAMS} input_ids=[41, 42, 43]"),
    ],
)
def test_one_line_as_it_comes_and_one_as_it_ends(
    caplog: pytest.LogCaptureFixture, level: int, more: str
) -> None:
    came, ended = lines_of(caplog, level)
    assert came == f"request 'r' arrived: prompt_tokens=3 max_new_tokens=5 stream=False{more}"
    assert ended.startswith(
        "request 'r' ended: finish_reason=length prompt_tokens=3 cached_tokens=1 completion_tokens=2"
        " num_retractions=0 weight_version=1 queue_time=0.250 "
    )


def test_a_client_that_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def script(engine: Engine) -> None:
        (await engine.manager.prepare(FIELDS)).close()

    run(script, log_requests_level=0)
    assert caplog.messages[1:] == ["request 'r' is aborted: its client has disconnected"]
