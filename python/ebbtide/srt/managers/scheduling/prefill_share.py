"""How prompts share a forward pass: none takes so much of it that short ones wait for long ones to end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ebbtide.srt.managers.scheduling.request import Req

if TYPE_CHECKING:
    from ebbtide.srt.config import ScheduleConfig


# Streams that have begun stand still until their KV is computed again: a pass takes this part of the usual
# prompt tokens then, so that each goes on as soon as its own is there, and not with all that share its pass.
AGAIN_PARTS: Final = 4


class PrefillShare:
    """What one prompt gets of a pass at most, whoever else is there: who comes next waits for that pass.

    Attributes:
        budget: prompt tokens of a pass.
        tokens: of one prompt; without chunks there are no shares.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        chunk = config.chunked_prefill_size
        self.budget = config.max_prefill_tokens if chunk is None else chunk
        self.tokens = self.budget if chunk is None else max(1, int(chunk * config.prefill_share))
        self._is_chunked = chunk is not None
        self._has_stepped_aside = False

    def of_running(self, running: Iterable[Req], next_up: Sequence[Req]) -> tuple[dict[Req, int], int]:
        """How many tokens a pass computes of each prompt that is being prefilled, where it computes any.

        Those that end with it come first. Returns what is left of the pass too.

        Args:
            next_up: the first of those that wait to be admitted: a share is left to them.
        """
        prefilling = [req for req in running if req.num_missing > 1]
        budget = self._of_pass([*prefilling, *next_up])
        left = self.tokens if next_up and 2 * self.tokens <= budget else 0
        budget -= left
        chunks: dict[Req, int] = {}
        for req in sorted(prefilling, key=lambda req: req.num_missing > self.tokens):
            if budget > 0:
                chunks[req] = min(req.num_missing, self.tokens, budget)
                budget -= chunks[req]
        return chunks, budget + left

    def _of_pass(self, requests: Iterable[Req]) -> int:
        """Prompt tokens of the next pass, where these come first."""
        is_again = self._is_chunked and any(req.num_retractions > 0 for req in requests)
        return max(self.budget // AGAIN_PARTS, self.tokens) if is_again else self.budget

    def short_first(self, chunks: dict[Req, int]) -> dict[Req, int]:
        """The chunks of a pass. Where short prompts end with it, those that go on wait for the next one, so
        that first tokens do not wait for them; but never twice in a row, nor for more than a share.
        """
        ending = {req: chunk for req, chunk in chunks.items() if chunk == req.num_missing}
        steps_aside = len(ending) < len(chunks) and 0 < sum(ending.values()) <= self.tokens
        self._has_stepped_aside = steps_aside and not self._has_stepped_aside
        return ending if self._has_stepped_aside else chunks

    def of_admitted(self, req: Req, budget: int) -> int:
        """How many tokens a pass computes of a prompt that it begins with."""
        return min(req.num_missing, budget, self.tokens) if self._is_chunked else req.num_missing
