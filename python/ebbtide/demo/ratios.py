"""How far the probabilities of the trainer and of the engine are apart, where the engine rounds more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

# A token's weight in the trainer's loss is its importance ratio, but no more than this: truncated importance
# sampling. Source: fengyao.notion.site/off-policy-rl; the same in verl, slime and miles.
LARGEST_WEIGHT = 2.0


@dataclass(frozen=True)
class Ratios:
    """Importance ratios of the tokens of a step: the trainer's probability by the engine's, same weights.

    Attributes:
        low, high: the 1st and the 99th percentile.
        truncated: the share above `LARGEST_WEIGHT`.
        divergence: KL(engine | trainer) per token in nats, estimated by ratio - 1 - log(ratio).
    """

    low: float
    mean: float
    high: float
    largest: float
    truncated: float
    divergence: float

    @classmethod
    def of(cls, trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> Ratios:
        """The ratios by both sides' logprobs of the same tokens, at least one."""
        logs = np.array([*chain.from_iterable(trainer)]) - np.array([*chain.from_iterable(engine)])
        ratios = np.exp(logs)
        low, high = np.percentile(ratios, (1, 99)).tolist()
        return cls(
            low=low,
            mean=float(ratios.mean()),
            high=high,
            largest=float(ratios.max()),
            truncated=float((ratios > LARGEST_WEIGHT).mean()),
            divergence=float((ratios - 1.0 - logs).mean()),
        )
