"""The base of all weight sources: first the headers of the tensors, then the tensors one by one.

If tensors are in the sender's memory, that is opened, read, and given back once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ebbtide.formats.bucket import Places, tensors_in
from ebbtide.formats.stored_tensor import StoredTensor
from ebbtide.formats.tensor_list import decode_form
from ebbtide.formats.tensor_refs import (
    TensorForm,
    TensorHeader,
    TensorRef,
    TensorTable,
    contiguous_layout,
)
from ebbtide.srt.errors import EngineError
from ebbtide.srt.model_executor.weight_copies import PlannedSpans, RunTable
from ebbtide.srt.model_executor.weight_store import TensorProblem, WeightStore
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.patch import MatrixParts

NamedTensor: TypeAlias = tuple[str, torch.Tensor | StoredTensor]
K = TypeVar("K")
V = TypeVar("V")

# The most bytes of each kind that caches keep: the sender chooses the number and names of tensors.
MAX_FORM_BYTES: Final = 16 << 20
MAX_LIST_BYTES: Final = 8 << 20
MAX_FIT_BYTES: Final = 64 << 20
# About what one cache entry takes in addition, and what one tensor takes.
ENTRY_BYTES: Final = 1024
TENSOR_BYTES: Final = 512

# Planned copies of the same tensors from the same places, by `direct`.
Spans = dict[bool, PlannedSpans]


class Recent(Generic[K, V]):
    """A cache of the most recently used values, as many as fit in `max_bytes`."""

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
    """The result of checking a source's tensors against the model.

    Attributes:
        names, touched, sent, problems: see `WritePlan`.
        scales: tensors that hold scales of others, and are written as they are.
        unpaired: 8-bit values without their scales, or scales without their values: name → (name of the
            missing one, name of the weight).
        runs: where the tensors of a table go; None: it is no table, or has a name twice.
        places: where the tensors of a delta are, for a kernel; None: not computed yet.
    """

    num_tensors: int = 0
    num_ignored: int = 0
    names: frozenset[str] = frozenset()
    touched: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    scales: frozenset[str] = frozenset()
    unpaired: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)
    runs: RunTable | None = None
    places: MatrixParts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """Tensors packed in a run of bytes: where each begins, the length of all, and planned copies."""

    places: Places
    form: TensorForm
    start_T: NDArray[np.int64]
    num_bytes: int
    spans: Spans = field(default_factory=dict)

    @classmethod
    def at(cls, places: Places) -> PackedTensors:
        headers = [header for header, _ in places]
        layouts = (contiguous_layout(one.dtype, one.shape) for one in headers)
        form = TensorForm.of([one.name for one in headers], layouts)
        start_T = np.array([start for _, start in places], dtype=np.int64)
        return cls(places, form, start_T, int((start_T + form.num_bytes_T).max(initial=0)))


@dataclass(slots=True, eq=False)
class KnownList:
    """The decoded metadata of a bucket that came before.

    Attributes:
        items: shared with later payloads, so they may not be changed.
        indices: the indices of the pickle memo where the list begins.
        outer: the memo's values that the items refer to.
        packed: the tensors that they describe; None: not checked yet.
    """

    items: list[object]
    indices: frozenset[int]
    outer: Mapping[int, object]
    packed: PackedTensors | None = None

    def fits(self, memo: Mapping[int, object]) -> bool:
        """Whether the same bytes mean the same after this memo."""
        return memo.keys() == self.indices and all(
            memo[index] is value or (type(value) is str and memo[index] == value)
            for index, value in self.outer.items()
        )


class PlanCache:
    """Caches of what payloads describe. Buckets differ in where they are, hardly in what they hold.

    Implements `pickle_reader.Tails`.
    """

    def __init__(self) -> None:
        self._forms: Recent[bytes, TensorForm] = Recent(MAX_FORM_BYTES)
        self._packed: Recent[tuple[object, ...], PackedTensors] = Recent(MAX_FORM_BYTES)
        self._lists: Recent[bytes, KnownList] = Recent(MAX_LIST_BYTES)
        self._fits: Recent[Hashable, Fit] = Recent(MAX_FIT_BYTES)

    def form(self, data: bytes) -> Slices[TensorForm]:
        """The names and shapes in these bytes of a payload; decoded in slices if they are new."""
        form = self._forms.get(data)
        if form is None:
            form = yield from decode_form(data)
            self._forms.put(data, form, len(data))
        return form

    def packed(self, places: Places) -> PackedTensors:
        """The packed tensors at these places."""
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

    def fit(self, digest: Hashable, make: Callable[[], Slices[Fit]]) -> Slices[Fit]:
        """The fit of tensors with this digest, made if it is new. Without a digest it is not kept."""
        fit = None if digest is None else self._fits.get(digest)
        if fit is None:
            fit = yield from make()
            if digest is not None and not fit.problems:
                self._fits.put(digest, fit, TENSOR_BYTES * fit.num_tensors)
        return fit


class WeightSource:
    """A set of named tensors from a sender. Malformed ones are refused when it is built.

    Close it after the tensors are copied: they may be views of the sender's memory.

    Args:
        entries: the headers of the tensors.
        read: makes the tensors of `entries`, in that order; called for each iteration.
        memory: the sender's memory that they are in; None: there is none to open or give back.
        is_on_device: whether they are on this rank's device although `memory` is None.

    Attributes:
        entries: the headers of the tensors, known before any data is read.
        direct: whether names and shapes are the engine's own (fused, sharded), not those of a checkpoint.
        is_sent: whether the tensors are broadcast later, see `BroadcastSource`.
        digest: equal for sources with the same headers, and only for those; None: plans are not cached.
        base_version: version of the weights that it changes; None: it does not say.
    """

    is_sent = direct = False
    digest: Hashable = None
    base_version: str | None = None

    def __init__(
        self,
        entries: Sequence[TensorHeader],
        read: Callable[[], Iterable[NamedTensor]],
        *,
        memory: BorrowedMemory | None = None,
        is_on_device: bool = False,
    ) -> None:
        self.entries = entries
        self._is_on_device = is_on_device
        self._read: Callable[[], Iterable[NamedTensor]] | None = read
        self._memory = BorrowedMemory() if memory is None else memory

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def cost(self) -> int | None:
        """See `WritePlan.cost`; None: some of it is in memory that the device cannot read."""
        return 1 if self._is_on_device else self._memory.cost

    @property
    def near_bytes(self) -> int | None:
        """See `WritePlan.near_bytes`."""
        return None if self.cost is None else self.cost * self.num_bytes

    @property
    def spans(self) -> tuple[Spans | None, int]:
        """Planned copies from this memory (None: none are kept), and the address that they are relative to.

        Ask for it after `open`, on the stream whose work reads the memory.
        """
        return self._memory.spans, 0

    def misfit(
        self, store: WeightStore, entry: TensorHeader, dtypes: Mapping[str, torch.dtype]
    ) -> TensorProblem | None:
        """Why a tensor that fits by itself cannot come like this, or with these others; None: it can."""
        return store.check_scales(entry.name, entry.dtype, dtypes, self.direct)

    def fit(self, store: WeightStore) -> Slices[Fit]:
        """Check the headers against the model; slices count the bytes of names."""
        direct, dtypes, fit = self.direct, {entry.name: entry.dtype for entry in self.entries}, Fit()
        covered, others, scales = set[str](), set[str](), set[str]()
        unpaired: dict[str, tuple[str, str]] = {}
        for entry in self.entries:
            name = entry.name
            if store.is_scales(name, direct):
                scales.add(name)
            problem = store.check(name, entry.shape, entry.dtype, direct) or self.misfit(store, entry, dtypes)
            if problem is not None and problem.missing is None:
                fit.problems.append({"name": problem.name, "reason": problem.reason})
            is_ignored = not direct and store.ignored(name)
            fit.num_ignored += is_ignored
            if problem is not None and problem.missing is not None:
                unpaired[name] = problem.missing
                others.add(name)
            elif is_ignored or not store.knows(name, direct):
                others.add(name)
            else:
                covered |= store.covered(name, direct)
            yield len(name)
        fit.num_tensors = len(self.entries) - fit.num_ignored
        fit.names = frozenset(covered)
        fit.touched = fit.names | {weight for _, weight in unpaired.values()}
        fit.sent, fit.scales, fit.unpaired = frozenset(covered | others), frozenset(scales), unpaired
        return fit

    def open(self) -> Slices[None]:
        """Map the tensors' memory before anything is written."""
        return self._memory.open()

    def arrived(self) -> bool:
        """Whether all broadcasts have arrived; the first call begins to receive them."""
        return True

    def abandon(self) -> bool:
        """Stop receiving; returns whether nothing writes to the destinations any more."""
        return True

    def __iter__(self) -> Iterator[NamedTensor]:
        """Yields (name, tensor). It can be iterated again until the source is closed."""
        if self._read is None:
            raise EngineError("the weight source is closed")
        return iter(self._read())

    def detach(self) -> Slices[None]:
        """See `WritePlan.detach`."""
        self._read = None
        return self._memory.detach()

    def close(self) -> None:
        """Give back everything that is still held. Idempotent."""
        self._read = None
        self._memory.close()


def packed_source(flat: TensorRef, packed: PackedTensors, memory: BorrowedMemory) -> WeightSource:
    """The source of tensors that are packed in the bytes of a flat one, see `tensors_in`."""
    form, begin = packed.form, flat.offset * flat.dtype.itemsize
    begin_T = begin + packed.start_T
    if not (begin_T % form.itemsize_T).any():
        storage_T = np.zeros(len(begin_T), dtype=np.int64)
        # The flat tensor was checked to be within its storage, and these within the flat tensor.
        table = TensorTable(form, [flat.storage], storage_T, begin_T // form.itemsize_T)
        return TableSource(table, memory, packed=(packed, begin))
    # Some tensors are not aligned to their elements: their bytes are copied.
    memory.require(flat.storage)
    headers = [header for header, _ in packed.places]
    return WeightSource(headers, lambda: tensors_in(memory.tensor(flat), packed.places), memory=memory)


class TableSource(WeightSource):
    """Tensors of a table, in a sender's memory.

    Args:
        packed: if they are packed in one run of bytes: the packed tensors, and the byte of the storage where
            the run begins.
    """

    def __init__(
        self,
        table: TensorTable,
        memory: BorrowedMemory,
        *,
        direct: bool = False,
        packed: tuple[PackedTensors, int] | None = None,
    ) -> None:
        for storage in table.used_storages:
            memory.require(storage)

        # Make tensors one by one, so that none outlives the memory that it views.
        def read() -> Iterator[NamedTensor]:
            return ((name, memory.tensor(ref)) for name, ref in table.refs())

        super().__init__(table.form.headers, read, memory=memory)
        self.table, self.direct = table, direct
        self.digest = table.form.digest, direct
        self._packed = packed

    @property
    def num_bytes(self) -> int:
        return self.table.form.num_bytes

    @property
    def spans(self) -> tuple[Spans | None, int]:
        if self._packed is None:
            return super().spans
        packed, begin = self._packed
        return packed.spans, self._memory.address(self.table.storages[0]) + begin

    def fit(self, store: WeightStore) -> Slices[Fit]:
        fit = yield from super().fit(store)
        if len({entry.name for entry in self.entries}) == len(self.entries):
            pairs = zip(self.entries, self.table.form.is_contiguous_T.tolist(), strict=True)
            fit.runs = RunTable(
                [store.run(one.name, one.dtype, self.direct) if is_run else None for one, is_run in pairs]
            )
        return fit

    @property
    def address_T(self) -> NDArray[np.int64]:
        """The addresses of the tensors, after they were opened on a device."""
        table = self.table
        begin_S = np.array([self._memory.address(storage) for storage in table.storages], dtype=np.int64)
        return begin_S[table.storage_T] + table.offset_T * table.form.itemsize_T

    def tensor(self, index: int) -> torch.Tensor | StoredTensor:
        """One tensor, as iteration yields it."""
        return self._memory.tensor(self.table.ref(index))
