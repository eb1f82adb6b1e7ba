"""Token ids to text, a few at a time: whole characters only, and stop strings found and cut off."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import groupby, takewhile

from ebbtide.srt.managers.text.tokenizer import Tokenizer

# How many tokens of what came before are decoded along. One would do for the space that a word may begin
# with; an unfinished character (at most three bytes, so three tokens) must lie inside too.
CONTEXT_TOKENS = 8
UNFINISHED = "\ufffd"


class IncrementalDetokenizer:
    """Turns one request's output ids into text as they come.

    The pieces joined are what decoding prompt and output at once adds to the text of the prompt, and no piece
    ends in half a character. Where the bytes are not UTF-8 at all, U+FFFD stands for them; a character that
    the prompt leaves unfinished belongs to the output. A push costs the decoding of the new ids and of at
    most 16 before them, however long the output is.

    Args:
        prompt_tail: the last ids of the prompt, so that the first word keeps its space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces_between = spaces_between_special_tokens
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._in_bytes = False
        self._window = tokenizer.visible(prompt_tail, skip_special_tokens)[-CONTEXT_TOKENS:]
        self._num_sent = self._whole(self._decode(self._window))
        self._held = ""
        if tokenizer.byte_values:
            self._bytes.decode(bytes(_last_bytes(self._window, tokenizer.byte_values)))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; what is not yet a whole character is held back."""
        visible = self._tokenizer.visible(token_ids, self._skip_special_tokens)
        byte_values = self._tokenizer.byte_values
        if not byte_values:
            return self._push_text(visible) if visible else ""
        runs = groupby(visible, key=byte_values.__contains__)
        return "".join(
            self._push_bytes(list(run)) if is_bytes else self._push_text(list(run)) for is_bytes, run in runs
        )

    def finish(self) -> str:
        """What was held back, an unfinished character as U+FFFD."""
        held, self._held = self._held, ""
        return held + self._bytes.decode(b"", final=True) if self._in_bytes else held

    def _push_text(self, token_ids: list[int]) -> str:
        before = ""
        if self._in_bytes:
            # A run of bytes is decoded as one: only now, with its end known, is its length in text final.
            self._in_bytes = False
            before = self._bytes.decode(b"", final=True)
            self._num_sent = len(self._decode(self._window))
        else:
            self._bytes.reset()
        self._window += token_ids
        text = self._decode(self._window)
        end = self._whole(text)
        piece = text[self._num_sent : end]
        self._held = text[end:]
        self._num_sent = end
        self._trim()
        return before + piece

    def _push_bytes(self, token_ids: list[int]) -> str:
        # The tokenizer would turn a whole run into U+FFFD for as long as its last character is unfinished.
        self._in_bytes = True
        self._window += token_ids
        self._trim()
        byte_values = self._tokenizer.byte_values
        return self._bytes.decode(bytes(byte_values[token_id] for token_id in token_ids))

    def _whole(self, text: str) -> int:
        """Length of `text` without a character at its end that further tokens may complete."""
        # Bytes that may yet become a character are one U+FFFD, whatever their number. Not so where single
        # bytes are tokens of their own: there every other token is whole characters.
        may_grow = text.endswith(UNFINISHED) and not self._tokenizer.byte_values
        return len(text) - may_grow

    def _trim(self) -> None:
        if len(self._window) > 2 * CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._num_sent = len(self._decode(self._window)) - len(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens, self._spaces_between)


class StopTrimmer:
    """Passes one request's text on up to its first stop string; what may be the beginning of one waits.

    The first stop string is the one that is complete first; of two that end together, the longer. So the text
    may arrive in any pieces: the result is the same.

    Args:
        keep_match: let the stop string itself through, instead of cutting it off.
    """

    def __init__(self, stop_strings: Sequence[str], keep_match: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._keep_match = keep_match
        self._held = ""
        self._longest = max(map(len, stop_strings), default=0)
        first_letters = "".join({stop[0] for stop in stop_strings})
        self._beginning = re.compile(f"[{re.escape(first_letters)}]") if first_letters else None
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now sure to be part of the answer; nothing more after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        # Most pieces of text have no such place, however many stop strings there are.
        places = () if self._beginning is None else [each.start() for each in self._beginning.finditer(text)]
        if any(text.startswith(self._stop_strings, place) for place in places):
            found = [(start, stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
            start, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return text[: start + len(self.matched) if self._keep_match else start]
        end = next((place for place in places if self._is_beginning(text, place)), len(text))
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """What was held back: no more text can complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _is_beginning(self, text: str, place: int) -> bool:
        """Whether what stands from this place on may become a stop string."""
        if len(text) - place >= self._longest:
            return False
        rest = text[place:]
        return any(stop.startswith(rest) for stop in self._stop_strings)


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


def _last_bytes(token_ids: list[int], byte_values: dict[int, int]) -> list[int]:
    """The bytes that these ids end in."""
    last = list(takewhile(byte_values.__contains__, reversed(token_ids)))
    return [byte_values[token_id] for token_id in reversed(last)]
