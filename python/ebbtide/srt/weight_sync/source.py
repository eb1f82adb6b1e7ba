"""What every weight source offers: the headers of its tensors first, then the tensors one by one.

Where they lie in memory of the sender's, that is opened, read, and given back once.
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
    """The values that were used last, as many as fit in `max_bytes`."""

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
        names, touched, sent, problems: see `WritePlan`.
        scales: the tensors that hold scales of others, and are written as they are.
        unpaired: 8-bit values without their scales, or scales without their values: by name, the name of
            the missing one and that of the weight.
        runs: where the tensors of a table go; None: it is no table, or a name stands in it twice.
        places: the same of a delta's, where a kernel reads it; None: nobody has asked yet.
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
    """Tensors in a run of bytes: the bytes at which they begin, their end, and planned copies of them."""

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

    def form(self, data: bytes) -> Slices[TensorForm]:
        """Names and shapes that a payload has in these bytes; in slices where they are new."""
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

    def fit(self, digest: Hashable, make: Callable[[], Slices[Fit]]) -> Slices[Fit]:
        """What tensors of a digest come to; None: it is not kept."""
        fit = None if digest is None else self._fits.get(digest)
        if fit is None:
            fit = yield from make()
            if digest is not None and not fit.problems:
                self._fits.put(digest, fit, TENSOR_BYTES * fit.num_tensors)
        return fit


class WeightSource:
    """A set of named tensors on their way into the engine; what is wrong with them is refused as it is made.

    Close it when the tensors are copied; those that it yielded may be views of memory of the sender's.

    Args:
        read: makes the tensors of `entries`, in that order; called for each iteration.
        memory: of the sender, in which they lie; None: none that is to be opened or given back.
        is_on_device: whether they lie on this rank's device although there is no such memory.

    Attributes:
        entries: what iteration will yield; known before any data is read.
        direct: whether names and shapes are the engine's own (fused, sharded) and not those of a checkpoint.
        is_sent: whether somebody has yet to send the tensors, see `BroadcastSource`.
        digest: the same for sources of the same headers, and of no others; None: nothing of it is kept.
        base_version: of the weights that it changes; None: it says nothing of that.
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
        """See `WritePlan.cost`; None: some of it lies where the device does not read."""
        return 1 if self._is_on_device else self._memory.cost

    @property
    def near_bytes(self) -> int | None:
        """How much it is, if the device reads all of it: in bytes of the device's own memory."""
        return None if self.cost is None else self.cost * self.num_bytes

    @property
    def spans(self) -> tuple[Spans | None, int]:
        """Copies that were planned from where its memory is, relative to an address; None: none are kept.

        To be asked for once it is open, where work is launched that reads it.
        """
        return self._memory.spans, 0

    def misfit(
        self, store: WeightStore, entry: TensorHeader, dtypes: Mapping[str, torch.dtype]
    ) -> TensorProblem | None:
        """What stands against a tensor that fits, because of what comes with it (by name) or how it comes."""
        return store.check_scales(entry.name, entry.dtype, dtypes, self.direct)

    def fit(self, store: WeightStore) -> Slices[Fit]:
        """Hold the headers against the model; yields bytes of names."""
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
        """Bring the tensors within reach before anything is written; yields bytes."""
        return self._memory.open()

    def arrived(self) -> bool:
        """Whether everything that others send is here; the first call begins to receive it."""
        return True

    def abandon(self) -> bool:
        """Receive no more of it; returns whether nothing writes to destinations any more."""
        return True

    def __iter__(self) -> Iterator[NamedTensor]:
        """Yields (name, tensor), again and again until the source is closed."""
        if self._read is None:
            raise EngineError("the weight source is closed")
        return iter(self._read())

    def detach(self) -> Slices[None]:
        """See `WritePlan.detach`."""
        self._read = None
        return self._memory.detach()

    def close(self) -> None:
        """Give everything back that is still held. Idempotent."""
        self._read = None
        self._memory.close()


def packed_source(flat: TensorRef, packed: PackedTensors, memory: BorrowedMemory) -> WeightSource:
    """The source of tensors that lie in a flat one, within its bytes: see `tensors_in`."""
    form, begin = packed.form, flat.offset * flat.dtype.itemsize
    begin_T = begin + packed.start_T
    if not (begin_T % form.itemsize_T).any():
        storage_T = np.zeros(len(begin_T), dtype=np.int64)
        # The flat tensor was checked to lie within its storage, and these within that.
        table = TensorTable(form, [flat.storage], storage_T, begin_T // form.itemsize_T)
        return TableSource(table, memory, packed=(packed, begin))
    # Such a place cannot be said in elements, so the bytes are copied.
    memory.require(flat.storage)
    headers = [header for header, _ in packed.places]
    return WeightSource(headers, lambda: tensors_in(memory.tensor(flat), packed.places), memory=memory)


class TableSource(WeightSource):
    """Tensors of a table, in a sender's memory.

    Args:
        packed: them, where they are one run of bytes, and the byte of its storage at which that begins.
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

        # One by one, so that no tensor outlives the memory that it views.
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
        """Where the tensors begin, once they are opened on a device."""
        table = self.table
        begin_S = np.array([self._memory.address(storage) for storage in table.storages], dtype=np.int64)
        return begin_S[table.storage_T] + table.offset_T * table.form.itemsize_T

    def tensor(self, index: int) -> torch.Tensor | StoredTensor:
        """One of them, as iteration gives it."""
        return self._memory.tensor(self.table.ref(index))
