"""The model's tokenizer, and what turns token ids into text as they come and finds stop strings in it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Final

from ebbtide.srt.errors import ConfigurationError, RequestRejected

if TYPE_CHECKING:
    from ebbtide.srt.config import ModelConfig

# The most characters that NFC composes into one: the longest canonical decomposition in Unicode.
NFC_SHRINKS_BY: Final = 4
# The longest text to tokenize: two million tokens of prose. Tokenizing takes 250 bytes of memory per
# character.
MAX_CHARACTERS: Final = 1 << 23
_BLANKS: Final = re.compile(r"\s+")
_FEW: Final = 8


class Tokenizer:
    """Text to token ids and back. `encode` and `decode` may be called from several threads at once.

    Attributes:
        hf: the transformers tokenizer itself, for chat templates.
        eos_token_ids: those that the tokenizer names. The model's configuration may name others.
        byte_values: token id → byte, for vocabularies with tokens for single bytes (`<0xE4>`); else empty.
    """

    def __init__(self, hf: Any) -> None:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        self.hf = hf
        self.eos_token_ids = frozenset(() if hf.eos_token_id is None else (hf.eos_token_id,))
        # transformers adds 20 µs to a decode of 2 µs, so the backend is called directly, unless the class
        # decodes in a way of its own.
        is_plain = getattr(type(hf), "_decode", None) is TokenizersBackend._decode
        self._backend = hf.backend_tokenizer if is_plain else None
        self._size = len(hf)
        self._special_ids = self._find_special_ids()
        self.byte_values = self._find_byte_values()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            add_special_tokens: whether to add those that the tokenizer adds to a text, such as BOS.

        Raises:
            RequestRejected: it has more than `MAX_CHARACTERS`.
        """
        if len(text) > MAX_CHARACTERS:
            raise RequestRejected(
                f"a text has {len(text)} characters: expected at most {MAX_CHARACTERS} to tokenize"
            )
        encoding = self.hf(
            text, add_special_tokens=add_special_tokens, verbose=False, return_attention_mask=False
        )
        ids: list[int] = encoding["input_ids"]
        return ids

    def spellings(self, words: Iterable[str] | None) -> list[list[int]]:
        """The ids of each word, both at the beginning of a text and after a space."""
        texts = [text for word in words or () for text in (word, f" {word.lstrip()}")]
        ids = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return [list(one) for one in dict.fromkeys(ids) if one]

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.hf.get_vocab()))

    @cached_property
    def _drops_blanks(self) -> bool:
        """Whether the tokenizer drops blanks: a run of them has fewer tokens than its length needs."""
        runs = (blank * _FEW * self._longest for blank in " \t\n")
        return any(len(self.encode(run, add_special_tokens=False)) < _FEW for run in runs)

    def num_characters(self, text: str) -> int:
        """The number of characters that tokens stand for: without blanks, if the tokenizer drops them."""
        return len(_BLANKS.sub("", text)) if self._drops_blanks else len(text)

    def most_characters(self, text: str, num_tokens: int) -> int:
        """An upper bound of `num_characters` of this text, if it has `num_tokens` tokens."""
        # NFC composes nothing in ASCII.
        return num_tokens * self._longest * (1 if text.isascii() else NFC_SHRINKS_BY)

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The exact text of these ids: spaces before punctuation are not cleaned up."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(
            self.hf.decode(
                self.visible(token_ids, skip_special_tokens),
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The names of these tokens in the vocabulary."""
        names: list[str] = self.hf.convert_ids_to_tokens(list(token_ids))
        return names

    def visible(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        """The ids that have a text: models often have a few more ids than their tokenizer has tokens."""
        if skip_special_tokens:
            return [i for i in token_ids if i < self._size and i not in self._special_ids]
        return [i for i in token_ids if i < self._size]

    def _find_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self.hf.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _find_byte_values(self) -> dict[int, int]:
        vocabulary = self.hf.get_vocab()
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        values = {vocabulary[name]: byte for byte, name in names.items() if name in vocabulary}
        letter = vocabulary.get(names[ord("A")])
        # The name alone is no proof: in the vocabulary of a code model, "<0x41>" may be plain text.
        return values if letter is not None and self.decode([letter]) == "A" else {}


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Load the model's tokenizer through transformers.

    Raises:
        ConfigurationError: there is none, or it cannot be read. The message names the folder.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer_path
    try:
        hf = AutoTokenizer.from_pretrained(
            path,
            use_fast=config.tokenizer_mode != "slow",
            trust_remote_code=config.trust_remote_code,
        )
        if len(hf) <= len(hf.all_special_ids):
            # If files are missing, transformers makes up a tokenizer with an empty vocabulary.
            raise ValueError("its vocabulary is empty")
        return Tokenizer(hf)
    except Exception as error:  # the libraries raise whatever they like, bare Exception included
        raise ConfigurationError(
            f"no usable tokenizer in {path}: expected tokenizer.json or what {config.model_type} uses "
            f"instead (skip_tokenizer_init does without). {type(error).__name__}: {error}"
        ) from error


# How many earlier tokens are decoded together with new ones. One is enough for the space that a word may
# begin with, and three for an unfinished character, which has at most three bytes.
CONTEXT_TOKENS = 8
UNFINISHED = "\ufffd"


class IncrementalDetokenizer:
    """Turns the token ids of one output into text as they come.

    The joined pieces are the text that the output adds to the prompt's, if both are decoded at once. No piece
    ends in half a character. Bytes that are not UTF-8 become U+FFFD; a character that the prompt leaves
    unfinished belongs to the output. A push decodes the new ids and at most 16 before them, no matter how
    long the output is.

    Args:
        prompt_tail: the last ids of the prompt, so that the first word keeps the space before it.
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
        """The text that these ids complete. An unfinished character at the end is held back."""
        visible = self._tokenizer.visible(token_ids, self._skip_special_tokens)
        byte_values = self._tokenizer.byte_values
        if not byte_values:
            return self._push_text(visible) if visible else ""
        runs = groupby(visible, key=byte_values.__contains__)
        return "".join(
            self._push_bytes(list(run)) if is_bytes else self._push_text(list(run)) for is_bytes, run in runs
        )

    def finish(self) -> str:
        """The text that was held back; an unfinished character becomes U+FFFD."""
        held, self._held = self._held, ""
        return held + self._bytes.decode(b"", final=True) if self._in_bytes else held

    def _push_text(self, token_ids: list[int]) -> str:
        before = ""
        if self._in_bytes:
            # The run of bytes has ended. Only now is the length of its text final.
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
        # Not by the tokenizer: as long as the last character is unfinished, it decodes the run to U+FFFD.
        self._in_bytes = True
        self._window += token_ids
        self._trim()
        byte_values = self._tokenizer.byte_values
        return self._bytes.decode(bytes(byte_values[token_id] for token_id in token_ids))

    def _whole(self, text: str) -> int:
        """The length of `text` without an unfinished character at its end, which tokens may complete."""
        # All bytes of an unfinished character are decoded to one U+FFFD. A vocabulary with tokens for single
        # bytes has none here: its other tokens are whole characters.
        may_grow = text.endswith(UNFINISHED) and not self._tokenizer.byte_values
        return len(text) - may_grow

    def _trim(self) -> None:
        if len(self._window) > 2 * CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._num_sent = len(self._decode(self._window)) - len(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens, self._spaces_between)


class StopTrimmer:
    """Passes on the text of one output up to its first stop string.

    Text that may be the beginning of a stop string is held back. The first stop string is the one that is
    complete first, or the longer of two that end at the same character. So the result does not depend on the
    pieces in which the text arrives.

    Args:
        keep_match: whether the stop string itself is passed on.

    Attributes:
        matched: the first stop string; None: there has been none.
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
        """The text that is now known to be part of the answer; empty after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        # Most pieces have no character that begins a stop string, so this is fast with many stop strings too.
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
        """The text that was held back: no more text comes that could complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _is_beginning(self, text: str, place: int) -> bool:
        """Whether the text from this place on may become a stop string."""
        if len(text) - place >= self._longest:
            return False
        rest = text[place:]
        return any(stop.startswith(rest) for stop in self._stop_strings)


class StopStringMatcher:
    """Looks for the first stop string in the text of one output, token by token."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._trimmer = StopTrimmer(stop_strings)

    def pass_over(self, token_ids: Sequence[int]) -> None:
        """Advance through earlier output. A stop string in it does not count, but one may begin in it."""
        for token_id in token_ids:
            if self.push(token_id) is not None:
                self._trimmer = StopTrimmer(self._stop_strings)

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes; None: it completes none."""
        self._trimmer.push(self._detokenizer.push([token_id]))
        return self._trimmer.matched


def _last_bytes(token_ids: list[int], byte_values: dict[int, int]) -> list[int]:
    """The bytes of the byte tokens at the end of these ids."""
    last = list(takewhile(byte_values.__contains__, reversed(token_ids)))
    return [byte_values[token_id] for token_id in reversed(last)]
