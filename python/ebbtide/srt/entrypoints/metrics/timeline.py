"""What the dashboard shows: control operations, and samples of memory and load while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from ebbtide.srt.entrypoints.metrics.operations import EndedOperation, Ending
from ebbtide.srt.errors import EngineError

# How many past operations a page begins with: an hour of a training loop has a few hundred.
MAX_OPERATIONS: Final = 512
MAX_SAMPLES: Final = 1800
SAMPLE_INTERVAL_S: Final = 1.0
# How many of the versions that outputs have met lately a sample tells of.
MAX_TOLD: Final = 8
# A viewer with this many unread events does not read: a page that was left open on a sleeping machine.
MAX_UNREAD: Final = 256
# What a reply tells that is worth a line on the page.
_REPLY_FIELDS: Final = (
    *("stall_ms", "num_bytes", "staged", "weight_version", "new_version"),
    *("num_retracted", "num_parked", "num_aborted", "freed_bytes", "mapped_bytes", "moved_bytes"),
)

Event = dict[str, Any]


class Timeline:
    """The recent past of an engine, and a stream of events for each page that shows it.

    Everything belongs to one event loop. Without viewers it costs a record for each control operation.
    `sample`: measures now: the fields of a sample beside its time and the tokens by version. Where it raises
    EngineError there is no sample of that moment.
    """

    def __init__(self, sample: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._sample = sample
        self._operations: deque[Event] = deque(maxlen=MAX_OPERATIONS)
        self._samples: deque[Event] = deque(maxlen=MAX_SAMPLES)
        self._tokens_by_version: Counter[str] = Counter()
        # Outputs that have ended, by each version that came while they ran.
        # The last `MAX_OPERATIONS` versions.
        self._outputs_across: dict[str, int] = {}
        self._viewers: set[asyncio.Queue[Event | None]] = set()
        self._sampling: asyncio.Task[None] | None = None

    def begin(self, operation: str) -> Ending:
        """A control operation begins; what is returned is called when it has ended."""
        return self._note_ended

    def _note_ended(self, ended: EndedOperation) -> None:
        numbers = ((name, getattr(ended.reply, name, None)) for name in _REPLY_FIELDS)
        event: Event = {
            "operation": ended.operation,
            "started_s": ended.started_s,
            "duration_s": ended.duration_s,
            "outcome": ended.outcome,
            "message": ended.message,
            **{name: value for name, value in numbers if value},
        }
        self._operations.append(event)
        self._publish({"operation": event})

    def note_output(self, meta: Mapping[str, Any]) -> None:
        """An output has ended: its `meta_info`."""
        for span in meta["weight_versions"]:
            self._tokens_by_version[span["version"]] += span["end"] - span["start"]
        for span in meta["weight_versions"][1:]:
            self._outputs_across[span["version"]] = self._outputs_across.pop(span["version"], 0) + 1
        while len(self._outputs_across) > MAX_OPERATIONS:
            del self._outputs_across[next(iter(self._outputs_across))]

    async def events(self) -> AsyncGenerator[Event]:
        """First the past, as one event, then what happens. Ends at `close`, or for a reader too slow."""
        unread: asyncio.Queue[Event | None] = asyncio.Queue(MAX_UNREAD)
        self._viewers.add(unread)
        if self._sampling is None:
            self._tokens_by_version.clear()  # A second's tokens are shown, not those since the last viewer.
            self._sampling = asyncio.create_task(self._keep_sampling())
        try:
            history = {"operations": list(self._operations), "samples": list(self._samples)}
            yield {"history": history | {"outputs_across": dict(self._outputs_across)}}
            while (event := await unread.get()) is not None:
                yield event
        finally:
            self._viewers.discard(unread)
            if not self._viewers:
                self._stop_sampling()

    def close(self) -> None:
        """End the streams of all viewers."""
        self._stop_sampling()
        for unread in list(self._viewers):
            self._end(unread)

    def _publish(self, event: Event) -> None:
        for unread in list(self._viewers):
            if unread.full():
                self._end(unread)
            else:
                unread.put_nowait(event)

    def _end(self, unread: asyncio.Queue[Event | None]) -> None:
        self._viewers.discard(unread)
        while not unread.empty():
            unread.get_nowait()
        unread.put_nowait(None)

    def _stop_sampling(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    async def _keep_sampling(self) -> None:
        while True:
            # A rank may have ended that nobody has heard of yet.
            with suppress(EngineError):
                measured = await self._sample()
                tokens, self._tokens_by_version = dict(self._tokens_by_version), Counter()
                # Of the newest versions: outputs of older ones have ended.
                across = dict(list(self._outputs_across.items())[-MAX_TOLD:])
                sample: Event = {
                    "time_s": time.time(),
                    "tokens_by_version": tokens,
                    "outputs_across": across,
                    **measured,
                }
                self._samples.append(sample)
                self._publish({"sample": sample})
            await asyncio.sleep(SAMPLE_INTERVAL_S)
