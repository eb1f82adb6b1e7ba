"""How prompts share a forward pass: short ones do not wait for long ones, nor streams for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from ebbtide.srt.managers.scheduling.request import Req

if TYPE_CHECKING:
    from ebbtide.srt.config import ScheduleConfig


# A pass that streams wait for takes prompt tokens for so many shares only. By default they take about as long
# as 1,024 requests that decode: beside those, a pass takes twice as long as one without prompts. Nothing here
# is measured, so all ranks decide alike.
SHARES_BESIDE_STREAMS: Final = 3
# Smaller passes serve fewer tokens per second, which whoever has no token yet waits for: as long as there are
# more than so many of them to each stream, passes are whole.
NEWCOMERS_PER_STREAM: Final = 7


class PrefillShare:
    """What one prompt gets of a pass at most, whoever else is there: who comes next waits for that pass.

    Attributes:
        budget: prompt tokens of a pass.
        budget_beside_streams: the same, where streams wait for it.
        tokens: of one prompt; without chunks there are no shares.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        chunk = config.chunked_prefill_size
        self.budget = config.max_prefill_tokens if chunk is None else chunk
        self.tokens = self.budget if chunk is None else max(1, int(chunk * config.prefill_share))
        self.budget_beside_streams = min(self.budget, SHARES_BESIDE_STREAMS * self.tokens)
        self._is_chunked = chunk is not None
        self._has_stepped_aside = False

    def of_running(
        self, prefilling: Sequence[Req], upcoming: Sequence[Req], num_streams: int
    ) -> tuple[dict[Req, int], int]:
        """How many tokens a pass computes of each prompt that is being prefilled, where it computes any.

        Those that end with it come first. Returns what is left of the pass too.

        Args:
            upcoming: those that wait and may be admitted: a share is left to them. Those that have begun
                come first.
            num_streams: requests that decode and are streamed.
        """
        budget = self._of_pass(prefilling, upcoming, num_streams)
        left = self.tokens if upcoming and 2 * self.tokens <= budget else 0
        budget -= left
        chunks: dict[Req, int] = {}
        for req in sorted(prefilling, key=lambda req: req.num_missing > self.tokens):
            if budget > 0:
                chunks[req] = min(req.num_missing, self.tokens, budget)
                budget -= chunks[req]
        return chunks, budget + left

    def _of_pass(self, prefilling: Sequence[Req], upcoming: Sequence[Req], num_streams: int) -> int:
        """Prompt tokens of the next pass.

        Streams that have begun and lost their KV stand still until it is there again: they wait for it too.
        """
        begun = [req for req in prefilling if req.has_begun]
        begun += takewhile(lambda req: req.has_begun, upcoming)
        num_newcomers = len(prefilling) + len(upcoming) - len(begun)
        num_streams += sum(req.is_streamed for req in begun)
        is_whole = num_newcomers > NEWCOMERS_PER_STREAM * num_streams
        return self.budget if is_whole or not num_streams else self.budget_beside_streams

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
