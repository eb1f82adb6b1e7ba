"""The model's tokenizer, reduced to what Ebbtide needs of it and made predictable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from ebbtide.srt.errors import ConfigurationError

if TYPE_CHECKING:
    from ebbtide.srt.config import ModelConfig

# Characters that NFC composes into one, at most: the longest canonical decomposition in Unicode.
NFC_SHRINKS_BY: Final = 4
# Steps that take no character away, whatever they put in its place.
_KEEPS_CHARACTERS: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "Prepend", "NFD", "NFC"})


class Tokenizer:
    """Text to token ids and back. `encode` and `decode` may be called from several threads at once.

    Attributes:
        hf: the transformers tokenizer itself, for chat templates.
        eos_token_ids: the tokenizer's own, to be added to the model's.
        byte_values: token id → byte, for vocabularies that spell unknown characters in bytes (`<0xE4>`).
    """

    def __init__(self, hf: Any) -> None:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        self.hf = hf
        self.eos_token_ids = frozenset(() if hf.eos_token_id is None else (hf.eos_token_id,))
        # transformers adds 20 µs to a decode of 2 µs; a class with a decode of its own is taken at its word.
        is_plain = getattr(type(hf), "_decode", None) is TokenizersBackend._decode
        self._backend = hf.backend_tokenizer if is_plain else None
        self._size = len(hf)
        self._special_ids = self._find_special_ids()
        self.byte_values = self._find_byte_values()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            add_special_tokens: with those that the tokenizer adds to a text by itself.
        """
        encoding = self.hf(
            text, add_special_tokens=add_special_tokens, verbose=False, return_attention_mask=False
        )
        ids: list[int] = encoding["input_ids"]
        return ids

    def spellings(self, words: Iterable[str] | None) -> list[list[int]]:
        """The ids of each word, at the beginning of a text and behind a space."""
        texts = [text for word in words or () for text in (word, f" {word.lstrip()}")]
        ids = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return [list(one) for one in dict.fromkeys(ids) if one]

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without tokenizing it; 0 if nothing is known."""
        return self._length_bound.least_tokens(text) if self._length_bound is not None else 0

    @cached_property
    def _length_bound(self) -> LengthBound | None:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        # A class that encodes in a way of its own may drop what it likes.
        is_plain = getattr(type(self.hf), "_encode_plus", None) is TokenizersBackend._encode_plus
        return LengthBound(self.hf.backend_tokenizer) if is_plain else None

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text that these ids spell out, exactly: no tidying of spaces before punctuation."""
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
        """What the vocabulary calls these tokens."""
        names: list[str] = self.hf.convert_ids_to_tokens(list(token_ids))
        return names

    def visible(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        """The ids that stand for text. Models often have a few more rows than their tokenizer has tokens."""
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
        # The name alone proves nothing: a code model may have "<0x41>" as plain text.
        return values if letter is not None and self.decode([letter]) == "A" else {}


class LengthBound:
    """The least number of tokens that a text of some length can become.

    Args:
        backend: a tokenizer of the `tokenizers` library.
    """

    def __init__(self, backend: Any) -> None:
        steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._composes = any(step["type"] == "NFC" for step in steps)
        self._longest: int | None = None
        if (
            all(map(_keeps_characters, steps))
            and _knows_every_character(backend.model, steps, vocabulary)
            # Such a token swallows all blanks around it.
            and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        ):
            self._longest = max(map(len, vocabulary))

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than this; 0 where the tokenizer may drop or merge characters without limit."""
        if self._longest is None:
            return 0
        # ASCII has nothing to compose.
        shrinks_by = NFC_SHRINKS_BY if self._composes and not text.isascii() else 1
        return -(-len(text) // (self._longest * shrinks_by))


def _steps(component: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, in order."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    members = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for member in members for step in _flat(member)]


def _keeps_characters(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return len(content) >= len(pattern)
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case _:
            return step["type"] in _KEEPS_CHARACTERS


def _knows_every_character(model: Any, steps: list[dict[str, Any]], vocabulary: dict[str, int]) -> bool:
    """Whether no character is dropped, or becomes one unknown token together with its neighbours."""
    from tokenizers import models, pre_tokenizers

    if not isinstance(model, models.BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk


def load_tokenizer(config: ModelConfig, revision: str | None = None) -> Tokenizer:
    """Load the model's tokenizer through transformers.

    Raises:
        ConfigurationError: there is none, or it cannot be read; the message names the folder.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer_path
    try:
        hf = AutoTokenizer.from_pretrained(
            path,
            use_fast=config.tokenizer_mode != "slow",
            trust_remote_code=config.trust_remote_code,
            revision=revision,
        )
        if len(hf) <= len(hf.all_special_ids):
            # Where the files are missing, transformers makes a tokenizer up that knows no words.
            raise ValueError("its vocabulary is empty")
        return Tokenizer(hf)
    except Exception as error:  # the libraries raise whatever they like, bare Exception included
        raise ConfigurationError(
            f"no usable tokenizer in {path}: expected tokenizer.json or what {config.model_type} uses "
            f"instead (skip_tokenizer_init does without). {type(error).__name__}: {error}"
        ) from error
