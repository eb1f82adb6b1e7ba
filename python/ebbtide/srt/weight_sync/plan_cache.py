"""What was worked out of the names, shapes and dtypes of earlier updates, for the next ones of the same.

Shapes: T tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ebbtide.formats.bucket import Places
from ebbtide.formats.tensor_list import decode_form
from ebbtide.formats.tensor_refs import TensorForm, TensorLayout, contiguous_layout
from ebbtide.srt.model_executor.weight_copies import PlannedSpans, RunTable
from ebbtide.srt.weight_sync.delta.patch import PlaceTable

K = TypeVar("K")
V = TypeVar("V")

# What may be kept of each kind; the sender chooses how many tensors there are, and their names.
MAX_FORM_BYTES: Final = 16 << 20
MAX_LIST_BYTES: Final = 8 << 20
MAX_FIT_BYTES: Final = 64 << 20
# About what one entry takes besides, and what one tensor does.
ENTRY_BYTES: Final = 1024
TENSOR_BYTES: Final = 512

# By `direct`: copies of the same tensors from the same places, into either copy of the weights.
Spans = dict[bool, PlannedSpans]


class Recent(Generic[K, V]):
    """The values that were used last, as many as take so little memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[K, tuple[V, int]] = {}
        self._num_bytes = 0

    def get(self, key: K) -> V | None:
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._kept[key] = found
        return found[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        _, old_bytes = self._kept.pop(key, (None, 0))
        self._kept[key] = value, num_bytes + ENTRY_BYTES
        self._num_bytes += num_bytes + ENTRY_BYTES - old_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped_bytes = self._kept.pop(next(iter(self._kept)))
            self._num_bytes -= dropped_bytes


@dataclass
class Fit:
    """What tensors come to that were held against the model.

    Attributes:
        names: the checkpoint names that are valid once they are written.
        touched: the names whose old values are gone once writing has begun.
        sent: their own names, where the model does not know them, and `names`.
        scales: the tensors that hold scales of others, and are written as they are.
        halves: which come without what belongs to them: by name, the missing one's and the weight's.
        problems: what stands against writing them, as `{"name", "reason"}`.
        runs: where the tensors of a table go; None: it is no table, or a name stands in it twice.
        places: the same of a delta's, where a kernel reads it; None: nobody has asked yet.
    """

    num_tensors: int = 0
    num_ignored: int = 0
    names: frozenset[str] = frozenset()
    touched: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    scales: frozenset[str] = frozenset()
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)
    runs: RunTable | None = None
    places: PlaceTable | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """Tensors in a run of bytes, wherever that lies.

    Attributes:
        start_T: the bytes at which they begin.
        num_bytes: up to the end of the last one.
        spans: planned copies of them.
    """

    places: Places
    form: TensorForm
    start_T: NDArray[np.int64]
    num_bytes: int
    spans: Spans = field(default_factory=dict)

    @classmethod
    def at(cls, places: Places) -> PackedTensors:
        headers = [header for header, _ in places]
        numbers: dict[TensorLayout, int] = {}
        layouts = (contiguous_layout(one.dtype, one.shape) for one in headers)
        layout_T = [numbers.setdefault(layout, len(numbers)) for layout in layouts]
        form = TensorForm([one.name for one in headers], list(numbers), np.array(layout_T, dtype=np.int64))
        form.headers += headers
        start_T = np.array([start for _, start in places], dtype=np.int64)
        return cls(places, form, start_T, int((start_T + form.num_bytes_T).max(initial=0)))


@dataclass(slots=True, eq=False)
class KnownList:
    """The metadata of a bucket that came before.

    Attributes:
        items: not to be changed: what comes later may have them too.
        indices: of the memo where its items begin.
        outer: what they refer to of that.
        packed: the tensors that they describe; None: they were not looked at.
    """

    items: list[object]
    indices: frozenset[int]
    outer: Mapping[int, object]
    packed: PackedTensors | None = None

    def fits(self, memo: Mapping[int, object]) -> bool:
        """Whether the same bytes say the same behind this memo."""
        return memo.keys() == self.indices and all(
            memo[index] is value or (type(value) is str and memo[index] == value)
            for index, value in self.outer.items()
        )


class PlanCache:
    """Implements `pickle_reader.Tails` too: buckets differ in where they lie, hardly in what they hold."""

    def __init__(self) -> None:
        self._forms: Recent[bytes, TensorForm] = Recent(MAX_FORM_BYTES)
        self._packed: Recent[tuple[object, ...], PackedTensors] = Recent(MAX_FORM_BYTES)
        self._lists: Recent[bytes, KnownList] = Recent(MAX_LIST_BYTES)
        self._fits: Recent[Hashable, Fit] = Recent(MAX_FIT_BYTES)

    def form(self, data: bytes) -> Generator[int, None, TensorForm]:
        """Names and shapes that a payload has in these bytes; in slices where they are new.

        Raises:
            RequestRejected: they are not of this kind.
        """
        form = self._forms.get(data)
        if form is None:
            form = yield from decode_form(data)
            self._forms.put(data, form, len(data))
        return form

    def packed(self, places: Places) -> PackedTensors:
        """Tensors that lie in a run of bytes."""
        key = tuple(places)
        packed = self._packed.get(key)
        if packed is None:
            packed = PackedTensors.at(places)
            num_bytes = sum(64 + len(header.name) + 8 * len(header.shape) for header, _ in places)
            self._packed.put(key, packed, num_bytes)
        return packed

    def find(self, data: bytes, memo: Mapping[int, object]) -> KnownList | None:
        known = self._lists.get(data)
        return known if known is not None and known.fits(memo) else None

    def keep(self, data: bytes, memo: Mapping[int, object], read: set[int], items: list[object]) -> KnownList:
        made = KnownList(items, frozenset(memo), {index: memo[index] for index in read if index in memo})
        self._lists.put(data, made, len(data))
        return made

    def fit(
        self, digest: Hashable, make: Callable[[], Generator[int, None, Fit]]
    ) -> Generator[int, None, Fit]:
        """What tensors of a digest come to; None: it is not kept."""
        fit = None if digest is None else self._fits.get(digest)
        if fit is None:
            fit = yield from make()
            if digest is not None and not fit.problems:
                self._fits.put(digest, fit, TENSOR_BYTES * fit.num_tensors)
        return fit
