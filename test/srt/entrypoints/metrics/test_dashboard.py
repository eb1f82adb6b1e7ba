"""The dashboard: its timeline driven by hand, and its page over an engine."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import pytest

from ebbtide.srt.entrypoints.metrics import observers as module
from ebbtide.srt.entrypoints.metrics.observers import MAX_UNREAD, Timeline
from ebbtide.srt.entrypoints.metrics.operations import EndedOperation
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.testing.null_engine import NullEngine


class Sampled:
    """A timeline whose samples count themselves."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.timeline = Timeline(self._sample)

    async def _sample(self) -> Mapping[str, Any]:
        self.num_samples += 1
        if self.num_samples == 1:
            raise EngineError("the process 7 has ended")
        return {"number": self.num_samples}

    def end(self, operation: str) -> None:
        end = self.timeline.begin(operation)
        end(EndedOperation(operation, 1.0, 0.5, "done", "said", None))

    def generate(self, version: str, start: int, end: int) -> None:
        self.timeline.note_output({"weight_versions": [{"version": version, "start": start, "end": end}]})


async def first(events: AsyncGenerator[dict[str, Any]], kind: str) -> Any:
    """The next event of this kind."""
    while kind not in (event := await anext(events)):
        pass
    return event[kind]


def test_viewers_get_the_past_and_what_happens_and_nobody_else_costs_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SAMPLE_INTERVAL_S", 0.001)

    async def main() -> None:
        sampled = Sampled()
        sampled.end("flush_cache")
        sampled.generate("0", 0, 5)
        assert sampled.num_samples == 0

        events = sampled.timeline.events()
        history = await first(events, "history")
        assert [entry["operation"] for entry in history["operations"]] == ["flush_cache"]
        assert (await first(events, "sample"))["number"] == 2, "one that fails is left out"
        sampled.generate("1", 0, 3)
        sampled.generate("1", 3, 7)
        while not (sample := await first(events, "sample"))["tokens_by_version"]:
            pass
        assert sample["tokens_by_version"] == {"1": 7}, "of the viewer's own time alone"
        sampled.end("pause_generation")
        assert (await first(events, "operation"))["message"] == "said"

        await events.aclose()
        num_samples = sampled.num_samples
        await asyncio.sleep(0.02)
        assert sampled.num_samples == num_samples

    asyncio.run(main())


def test_outputs_that_met_an_update_are_counted_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_INTERVAL_S", 0.001)

    async def main() -> None:
        sampled = Sampled()
        spans = [{"version": str(version), "start": version, "end": version + 1} for version in range(3)]
        for seen in (spans[:1], spans[:2], spans, spans[1:]):
            sampled.timeline.note_output({"weight_versions": seen})
        events = sampled.timeline.events()
        assert (await first(events, "history"))["outputs_across"] == {"1": 2, "2": 2}
        sampled.timeline.note_output({"weight_versions": spans[1:]})
        assert (await first(events, "sample"))["outputs_across"] == {"1": 2, "2": 3}
        await events.aclose()

    asyncio.run(main())


def test_a_viewer_that_does_not_read_and_one_of_a_server_that_ends_are_let_go() -> None:
    async def main() -> None:
        sampled = Sampled()
        idle, reading = sampled.timeline.events(), sampled.timeline.events()
        for events in (idle, reading):
            assert "history" in await anext(events)
        for _ in range(MAX_UNREAD + 1):
            sampled.end("flush_cache")
            await first(reading, "operation")
        assert [event async for event in idle] == []
        sampled.timeline.close()
        assert [event async for event in reading] == []

    asyncio.run(main())


def test_an_engine_in_python_shows_itself_until_it_ends() -> None:
    with NullEngine() as engine:
        url = engine.serve_dashboard()
        page = httpx.get(url)
        assert "<title>Ebbtide</title>" in page.text
        assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
        assert httpx.get(f"{url}/events", headers={"Host": "evil.example"}).status_code == 400
        with httpx.stream("GET", f"{url}/events") as response:
            events = response.iter_lines()
            next(events)
            engine.flush_cache()
            assert any('"operation":"flush_cache"' in line for line in events)
            with pytest.raises(ConfigurationError, match=r"cannot listen on 127.0.0.1 port \d+ .*in use"):
                engine.serve_dashboard(response.url.port or 0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
