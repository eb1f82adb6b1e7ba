"""What may come next in an output: what its grammar allows, and what completes no sequence that is banned.

Shapes: M masks, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.managers.text.grammar import WORD_BITS, GrammarMask


class BannedSequences:
    """Sequences of token ids that an output must not have. It follows the output."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._longer = [list(sequence) for sequence in sequences if len(sequence) > 1]
        self._tail_len = max((len(sequence) - 1 for sequence in self._longer), default=0)
        self._tail: list[int] = []

    def note(self, token_id: int) -> None:
        """The output has this token now."""
        if self._tail_len:
            self._tail = [*self._tail, token_id][-self._tail_len :]

    def next_ids(self) -> list[int]:
        """What must not come next."""
        ends = (one[-1] for one in self._longer if one[:-1] == self._tail[-(len(one) - 1) :])
        return [*self._always, *ends]


class TokenRules:
    """What one output keeps to. Implements `batch_plan.TokenMask`.

    Args:
        grammar, banned: one of them, or both.
    """

    def __init__(self, grammar: GrammarMask | None, banned: BannedSequences | None) -> None:
        self.grammar = grammar
        self.banned = banned

    def fill(self, others: Sequence[TokenRules], words_MW: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next: here, and in each of the others."""
        rules = [self, *others]
        masks = {row: one.grammar for row, one in enumerate(rules) if one.grammar is not None}
        if len(masks) < len(rules):
            words_MW.fill(-1)
        if masks:
            first, *rest = masks.values()
            rows = list(masks)
            words_GW = words_MW if len(rows) == len(rules) else words_MW[rows]
            first.fill(rest, words_GW)
            if words_GW is not words_MW:
                words_MW[rows] = words_GW
        for one, bits_W in zip(rules, words_MW.view(np.uint32), strict=True):
            for token_id in one.banned.next_ids() if one.banned is not None else ():
                bits_W[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)

    def accept(self, token_id: int) -> bool:
        """A token was sampled; whether it may come."""
        if self.banned is not None:
            if token_id in self.banned.next_ids():
                return False
            self.banned.note(token_id)
        return self.grammar is None or self.grammar.accept(token_id)

    @property
    def has_ended(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self.grammar is not None and self.grammar.has_ended
