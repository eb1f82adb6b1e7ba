"""Logs of the API process: requests, and long pauses."""

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

# The lowest level of detail at which each of these is logged.
SAMPLING_PARAMS: Final = 1
PROMPTS: Final = 3


class RequestLog:
    """Logs requests.

    Args:
        level: the detail. 0: counts and times; from `SAMPLING_PARAMS` on also sampling parameters; from
            `PROMPTS` on also the prompts' token ids.
    """

    def __init__(self, level: int) -> None:
        self._level = level

    def came(self, outputs: Iterable[TokenizedGenerateReqInput]) -> None:
        """Log that a request has been accepted: one line for each of its outputs."""
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
        """Log that an output has ended whose client still waits for it."""
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
        """Log that a client has disconnected, and its output is aborted."""
        logger.info("request %r is aborted: its client has disconnected", rid)


def _as_text(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _changed(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults."""
    default = SamplingParams()
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


# Seconds for which requests may wait before that is logged. A weight update with all around it takes less.
SILENT_S: Final = 5.0


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]


@dataclass(eq=False)
class PauseWatch:
    """Measures for how long nothing has been allowed to run, and logs which control requests would end that.

    It logs each reason once, after requests have waited for `SILENT_S`. It also logs every `limit_s` seconds
    for which nothing may run, even if no request waits: a trainer that died during a pause leaves an engine
    that looks healthy.

    Args:
        limit_s: seconds after which a pause may have been forgotten; 0: never.
        state: gives the engine's state as last reported; None if a replica has not reported yet.
        num_waiting: gives the number of outputs that have not ended.
        call_later: `call_later` of an event loop.
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
        """Seconds for which no forward pass has been allowed to run; 0 if one may."""
        return 0.0 if self._since_s is None else self._now() - self._since_s

    @property
    def is_forgotten(self) -> bool:
        """Whether that has lasted for `limit_s`, so that the pause may have been forgotten."""
        return 0 < self._limit_s <= self.blocked_s

    def note(self) -> None:
        """Look at the state again: a request has been sent, or a state has been reported."""
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
        """Log nothing more about the pause that there is now."""
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
    """The control requests after which something can run again, in the order in which to send them."""
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
