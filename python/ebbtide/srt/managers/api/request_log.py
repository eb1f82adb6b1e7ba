"""Requests in the log (`--log-requests`): as they come, and as they end. Keys are never among it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from ebbtide.srt.managers.api.live_generation import OutputState
from ebbtide.srt.managers.wire.generation import TokenizedGenerateReqInput
from ebbtide.srt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# The levels of detail from which on each of these is logged.
SAMPLING_PARAMS: Final = 1
PROMPTS: Final = 3


class RequestLog:
    """Writes the lines.

    Args:
        level: how much they tell: counts and times, sampling parameters too, or the prompts as well.
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
            logger.info("request %r arrived: %s", output.rid, _told(facts))

    def ended(self, output: OutputState) -> None:
        """An output has ended that somebody waits for."""
        meta = output.meta_info()
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "num_retractions", "weight_version")
        facts = {name: meta[name] for name in names}
        times = ("queue_time", "first_token_latency", "e2e_latency")
        facts |= {name: f"{meta[name]:.3f}" for name in times}
        logger.info(
            "request %r ended: finish_reason=%s %s", meta["id"], meta["finish_reason"]["type"], _told(facts)
        )

    def left(self, rid: str) -> None:
        """Nobody waits for an output any more."""
        logger.info("request %r is aborted: its client has disconnected", rid)


def _told(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Those that are not at their defaults."""
    default = SamplingParams()
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
