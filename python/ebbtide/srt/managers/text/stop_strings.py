"""Stop strings, found while tokens are generated: with the match, the request has ended."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.srt.managers.text.incremental_detokenizer import IncrementalDetokenizer, StopTrimmer


class StopStringMatcher:
    """Looks for the first of some stop strings in the text of one request's output."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._trimmer = StopTrimmer(stop_strings)

    def pass_over(self, token_ids: Sequence[int]) -> None:
        """Output that there is already: a stop string in it counts for nothing, but may begin in it."""
        for token_id in token_ids:
            if self.push(token_id) is not None:
                self._trimmer = StopTrimmer(self._stop_strings)

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, if it does."""
        self._trimmer.push(self._detokenizer.push([token_id]))
        return self._trimmer.matched
