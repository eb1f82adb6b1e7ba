"""What the API process says in the log: of requests, and of waits and pauses that last."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from ebbtide.srt.managers.api.output_state import OutputState
from ebbtide.srt.managers.io_struct import StateReport
from ebbtide.srt.managers.wire.generation import TokenizedGenerateReqInput
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# The levels of detail from which on each of these is logged.
SAMPLING_PARAMS: Final = 1
PROMPTS: Final = 3


class RequestLog:
    """Writes the lines.

    `level`: how much they say: counts and times, sampling parameters too, or the prompts as well.
    """

    def __init__(self, level: int) -> None:
        self._level = level

    def came(self, outputs: Iterable[TokenizedGenerateReqInput]) -> None:
        """A request has been taken: one line for each output."""
        for output in outputs:
            facts: dict[str, Any] = {
                "prompt_tokens": len(output.input_ids),
                "max_new_tokens": output.max_new_tokens,
                "stream": output.stream,
            }
            if self._level >= SAMPLING_PARAMS:
                facts["sampling_params"] = _changed(output.sampling_params)
            if self._level >= PROMPTS:
                facts["input_ids"] = output.input_ids
            logger.info("request %r arrived: %s", output.rid, _as_text(facts))

    def ended(self, output: OutputState) -> None:
        """An output has ended that somebody waits for."""
        meta = output.meta_info()
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "num_retractions", "weight_version")
        facts = {name: meta[name] for name in names}
        times = ("queue_time", "first_token_latency", "e2e_latency")
        facts |= {name: f"{meta[name]:.3f}" for name in times}
        logger.info(
            "request %r ended: finish_reason=%s %s",
            meta["id"],
            meta["finish_reason"]["type"],
            _as_text(facts),
        )

    def left(self, rid: str) -> None:
        """Nobody waits for an output any more."""
        logger.info("request %r is aborted: its client has disconnected", rid)


def _as_text(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Those that are not at their defaults."""
    default = SamplingParams()
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


# Weight updates with everything around them take less.
SILENT_S: Final = 5.0


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]


@dataclass(eq=False)
class PauseWatch:
    """Knows for how long nothing may have run, and says in the log what would help.

    Once of each reason for which requests have waited a while; and again and again when it is long, though
    nobody waits: a trainer that has died in a pause leaves an engine that looks well.

    Args:
        limit_s: how long is long; 0: never.
        state: the engine's state machines as last reported; None if not all of it is known.
        num_waiting: how many outputs have not ended.
        call_later: as an event loop's.
    """

    _limit_s: float
    _state: Callable[[], StateReport | None]
    _num_waiting: Callable[[], int]
    _call_later: CallLater
    _now: Callable[[], float] = time.monotonic
    _since_s: float | None = None
    _logged_reason: str | None = None
    _timers: dict[Callable[[], None], Timer] = field(default_factory=dict)

    @property
    def blocked_s(self) -> float:
        """Seconds since a forward pass might have run; 0 while one may."""
        return 0.0 if self._since_s is None else self._now() - self._since_s

    @property
    def is_forgotten(self) -> bool:
        """Whether that is long."""
        return 0 < self._limit_s <= self.blocked_s

    def note(self) -> None:
        """A request has been sent, or a state reported."""
        state = self._state()
        if state is None:
            return
        if state.can_run:
            self.cancel()
            self._since_s = self._logged_reason = None
            return
        if self._since_s is None:
            self._since_s = self._now()
            self._set(self._limit_s, self._tell_it_lasts)
        if self._num_waiting() and state.reason != self._logged_reason:
            self._set(SILENT_S, self._tell_who_waits)

    def cancel(self) -> None:
        """Say nothing about what goes on now."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _set(self, delay_s: float, tell: Callable[[], None]) -> None:
        if delay_s > 0 and tell not in self._timers:
            self._timers[tell] = self._call_later(delay_s, tell)

    def _tell_who_waits(self) -> None:
        del self._timers[self._tell_who_waits]
        state, num_waiting = self._state(), self._num_waiting()
        assert state is not None, "it was there when the pause began"
        if not num_waiting:
            return
        self._logged_reason = state.reason
        logger.warning(
            "%d requests have waited for %g s or longer: %s. To go on: %s",
            num_waiting,
            SILENT_S,
            state.reason,
            ", ".join(_remedies(state)),
        )

    def _tell_it_lasts(self) -> None:
        del self._timers[self._tell_it_lasts]
        state = self._state()
        assert state is not None, "it was there when the pause began"
        logger.warning(
            "nothing has been allowed to run for %.0f s: %s. If that was forgotten: %s",
            self.blocked_s,
            state.reason,
            ", ".join(_remedies(state)),
        )
        self._set(self._limit_s, self._tell_it_lasts)


def _remedies(state: StateReport) -> list[str]:
    """The control requests after which something can run, in the order of need."""
    tags = [rank.tags for rank in state.ranks]
    needed = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
    remedies: list[str] = []
    if any(of_rank[tag].state == "released" for of_rank in tags for tag in needed):
        remedies.append("/resume_memory_occupation")
    if any(of_rank[MemoryTag.WEIGHTS].content == "stale" for of_rank in tags):
        remedies.append("an update of all weights")
    if state.paused is not None:
        remedies.append("/continue_generation")
    return remedies
