"""How many characters one token stands for at most: what is too long is known before it is tokenized."""

from __future__ import annotations

import json
from typing import Any, Final

# A character that NFC composes stands for at most so many: the longest canonical decomposition in Unicode.
NFC_SHRINKS_BY: Final = 4
# Steps that take no character away, whatever they put in its place.
_KEEPS_CHARACTERS: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "Prepend", "NFD", "NFC"})


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
            # Such a token swallows all blanks beside it.
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
