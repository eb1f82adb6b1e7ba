"""Noise that depends on a seed and a position alone, not on the batch nor on what was drawn before."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position) pair, with 53 random bits.

    Args:
        seeds: any integers; taken modulo 2**64.
        positions: ≥ 0.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014), applied to the seed and again to the position.
    """
    return uniforms_at(mixed_seeds(seeds), np.array(positions, dtype=np.int64))


def mixed_seeds(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The part of `uniforms` that depends on the seeds alone."""
    # The seed is mixed before the position is added: seeds that differ by little must not be
    # one another's sequence at other positions.
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms_at(mixed: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """`uniforms` of seeds that went through `mixed_seeds`."""
    state = mixed + positions.astype(np.uint64) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
