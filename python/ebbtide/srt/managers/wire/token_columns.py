"""Logprobs and sampling masks on their way to the API process: columns of numbers, no object for any token.

A garbage collector looks at every object that lives; hundreds of thousands of live tokens would cost it
hundreds of milliseconds at a time.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from itertools import accumulate, pairwise
from math import isnan, nan
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ebbtide.srt.model_executor.batch_plan import LogprobArrays, Supports

# JSON has neither infinities nor NaN: the lowest float32 stands for them.
LOWEST_LOGPROB: Final = -3.4028234663852886e38
# Lists are made of columns while the request runs, so many tokens at a time: otherwise requests that end
# together would wait for the lists of all of them.
MASKS_AT_ONCE: Final = 32


class LogprobColumns(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Logprobs at N positions in a row, as numbers of this machine: float32, and ids as int32.

    Attributes:
        tokens: of the tokens there. Not a number: nothing predicts the position, and it has nothing else.
        top, top_ids: of the most likely tokens, best first; equally many at each position.
        chosen: of the ids that the request named, in their order.
    """

    tokens: bytes = b""
    top: bytes = b""
    top_ids: bytes = b""
    chosen: bytes = b""

    @classmethod
    def of(cls, positions: LogprobArrays) -> LogprobColumns:
        return cls(*(b"" if column is None else column.tobytes() for column in positions.columns))


def finite(logprob: float) -> float | None:
    """A logprob that JSON can tell: none below `LOWEST_LOGPROB`; None for one that is no number."""
    if logprob >= LOWEST_LOGPROB:
        return logprob
    return None if isnan(logprob) else LOWEST_LOGPROB


class LogprobRows:
    """One position of each of many requests, all equally wide: a `LogprobList` takes what it asks for."""

    __slots__ = ("chosen", "chosen_bytes", "tokens", "top", "top_bytes", "top_ids")

    def __init__(self, columns: LogprobColumns) -> None:
        self.tokens = array("f", columns.tokens)
        self.top, self.top_ids, self.chosen = columns.top, columns.top_ids, columns.chosen
        num_rows = max(1, len(self.tokens))
        self.top_bytes, self.chosen_bytes = len(self.top) // num_rows, len(self.chosen) // num_rows


class LogprobList:
    """Logprobs at positions in a row, of a request that asks for so many at each of them.

    Args:
        num_top: of the most likely tokens.
        num_chosen: of ids that the request named.
    """

    __slots__ = ("_chosen", "_num_chosen", "_num_top", "_tokens", "_top", "_top_ids")

    def __init__(self, num_top: int, num_chosen: int) -> None:
        self._num_top, self._num_chosen = num_top, num_chosen
        self._tokens, self._top, self._chosen = array("f"), array("f"), array("f")
        self._top_ids = array("i")

    def __len__(self) -> int:
        return len(self._tokens)

    def clear(self) -> None:
        # New arrays would be objects that the collector looks at, four for each chunk of each stream.
        del self._tokens[:], self._top[:], self._top_ids[:], self._chosen[:]

    def append(self, rows: LogprobRows, index: int) -> None:
        """Add one position, with what is in this row."""
        self._tokens.append(rows.tokens[index])
        if self._num_top:
            start = index * rows.top_bytes
            end = start + self._num_top * self._top.itemsize
            self._top.frombytes(rows.top[start:end])
            self._top_ids.frombytes(rows.top_ids[start:end])
        if self._num_chosen:
            start = index * rows.chosen_bytes
            self._chosen.frombytes(rows.chosen[start : start + self._num_chosen * self._chosen.itemsize])

    def append_nothing(self) -> None:
        """A position that nothing predicts."""
        self._tokens.append(nan)
        self._top.extend([nan] * self._num_top)
        self._top_ids.extend([0] * self._num_top)
        self._chosen.extend([nan] * self._num_chosen)

    def extend(self, positions: LogprobArrays, start: int, end: int) -> None:
        """Positions [start, end) of these."""
        self._tokens.frombytes(positions.tokens_N[start:end].tobytes())
        if self._num_top:
            assert positions.top_NK is not None
            assert positions.top_ids_NK is not None
            self._top.frombytes(positions.top_NK[start:end, : self._num_top].tobytes())
            self._top_ids.frombytes(positions.top_ids_NK[start:end, : self._num_top].tobytes())
        if self._num_chosen:
            assert positions.chosen_NC is not None
            self._chosen.frombytes(positions.chosen_NC[start:end, : self._num_chosen].tobytes())

    def add(self, columns: LogprobColumns) -> None:
        """Further positions."""
        self._tokens.frombytes(columns.tokens)
        self._top.frombytes(columns.top)
        self._top_ids.frombytes(columns.top_ids)
        self._chosen.frombytes(columns.chosen)

    def columns(self) -> LogprobColumns:
        return LogprobColumns(
            self._tokens.tobytes(), self._top.tobytes(), self._top_ids.tobytes(), self._chosen.tobytes()
        )

    @property
    def tokens(self) -> list[float | None]:
        """The tokens' own logprobs, none of them below `LOWEST_LOGPROB`."""
        return [value if value >= LOWEST_LOGPROB else finite(value) for value in self._tokens]

    def tops(self) -> Iterator[list[tuple[float, int]] | None]:
        """(logprob, id) of the most likely tokens, by position."""
        width = self._num_top
        for index, token in enumerate(self._tokens):
            part = slice(index * width, (index + 1) * width)
            yield None if isnan(token) else list(zip(self._top[part], self._top_ids[part], strict=True))

    def chosen(self) -> Iterator[list[float] | None]:
        """Logprobs of the ids that were named, by position."""
        width = self._num_chosen
        for index, token in enumerate(self._tokens):
            yield None if isnan(token) else self._chosen[index * width : (index + 1) * width].tolist()


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
