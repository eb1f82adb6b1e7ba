"""How much of the KV pool is kept for what running requests may still generate."""

from __future__ import annotations


class GrowthReserve:
    """How many pages to leave free for running requests, when a new one asks to be admitted.

    Few requests use all of their `max_new_tokens`, so a share of it is set aside: more after a retraction,
    which costs a second prefill, and slowly less while all goes well.
    """

    SHARE_AT_START, SHARE_MIN, STEP_UP, DECAY = 0.4, 0.1, 0.2, 0.999

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._share = self.SHARE_AT_START

    def pages(self, num_tokens: int) -> int:
        """How many are kept for so many tokens that running requests may still generate."""
        return int(self._share * num_tokens) // self._page_size

    def note_step(self) -> None:
        self._share = max(self.SHARE_MIN, self._share * self.DECAY)

    def note_retraction(self) -> None:
        self._share = min(1.0, self._share + self.STEP_UP)
