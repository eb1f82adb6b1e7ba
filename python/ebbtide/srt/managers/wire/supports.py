"""Sampling masks on their way to the API process: tokens that could have been sampled, in columns of numbers.

There may be hundreds of ids per token: as objects they would cost more than the tokens themselves.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from ebbtide.srt.model_executor.batch_plan import Supports


# Lists are made of columns while the request runs, so many tokens at a time: otherwise requests that end
# together would wait for the lists of all of them.
MASKS_AT_ONCE = 32


class SupportColumns(Struct, frozen=True, array_like=True):
    """The sampling masks of N tokens in a row, as numbers of this machine.

    Attributes:
        ids: int32, of the tokens that could have been sampled in the place of the first, then of the next.
        counts: int32, how many those are, per token.
        logprobs: float32, of each token among them.
    """

    ids: bytes
    counts: bytes
    logprobs: bytes


def masks_of(columns: SupportColumns) -> list[list[int]]:
    """The ids of each token's mask, in ascending order."""
    ids, counts = array("i", columns.ids), array("i", columns.counts)
    return [ids[start:end].tolist() for start, end in pairwise(accumulate(counts, initial=0))]


class SupportList:
    """The sampling masks of tokens in a row."""

    __slots__ = ("_counts", "_ids", "_logprobs")

    def __init__(self) -> None:
        self._ids, self._counts, self._logprobs = array("i"), array("i"), array("f")

    def __len__(self) -> int:
        return len(self._counts)

    def clear(self) -> None:
        del self._ids[:], self._counts[:], self._logprobs[:]

    def append(self, supports: Supports, index: int) -> None:
        """Add one token, with the support at this index."""
        start = int(supports.ends_G[index - 1]) if index else 0
        end = int(supports.ends_G[index])
        self._ids.frombytes(supports.ids[start:end].tobytes())
        self._counts.append(end - start)
        self._logprobs.append(supports.logprobs_G[index])

    def add(self, columns: SupportColumns) -> None:
        """Further tokens."""
        self._ids.frombytes(columns.ids)
        self._counts.frombytes(columns.counts)
        self._logprobs.frombytes(columns.logprobs)

    def take(self) -> SupportColumns:
        """All tokens, which are here no more."""
        columns = SupportColumns(self._ids.tobytes(), self._counts.tobytes(), self._logprobs.tobytes())
        self.clear()
        return columns

    @property
    def logprobs(self) -> list[float]:
        return self._logprobs.tolist()

    def encoded(self) -> tuple[str, str]:
        """The ids, and where those of each token begin, and the last ones end; both as int32 in base64."""
        offsets = array("i", accumulate(self._counts, initial=0))
        return b64encode(self._ids).decode(), b64encode(offsets).decode()
