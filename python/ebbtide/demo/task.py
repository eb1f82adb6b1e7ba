"""The task: sums of two-digit numbers, the ones digit of the answer first, as one adds by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+=")
PAD_ID, EOS_ID = 0, 1
# Three digits and the end of the text.
MAX_ANSWER_TOKENS = 4
_NUM_HELD_OUT = 500


@dataclass(frozen=True)
class Problem:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """Digits of the sum, ones first: the answer to 37+58= is 59."""
        return str(self.left + self.right)[::-1]


class ProblemSet:
    """All sums of two-digit numbers: some held out, the others drawn from at random."""

    def __init__(self, seed: int) -> None:
        problems = [Problem(left, right) for left in range(10, 100) for right in range(10, 100)]
        self._rng = random.Random(seed)
        self._rng.shuffle(problems)
        self.held_out = problems[:_NUM_HELD_OUT]
        self._training = problems[_NUM_HELD_OUT:]

    def draw(self, num_problems: int) -> list[Problem]:
        """Distinct problems that are not held out."""
        return self._rng.sample(self._training, num_problems)


def encode(text: str) -> list[int]:
    """Token ids of a text of the task, one per character."""
    return [VOCABULARY.index(character) for character in text]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """What `encode` does, as a tokenizer that is saved with a checkpoint."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
