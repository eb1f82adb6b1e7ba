"""Write plans: an update's tensors are checked, opened, copied into the weights, and given back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar

import torch
from torch import Tensor

from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.device import Device
from ebbtide.srt.errors import EngineError, RequestRejected, first_few
from ebbtide.srt.layers.fp8 import are_scales
from ebbtide.srt.managers.control import OutOfStep
from ebbtide.srt.managers.control.weights import How, PatchSums, Staging
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.model_executor.weight_copies import Destination, NonFinite, WeightCopies
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.custom_loader import CustomLoader, StagedModel
from ebbtide.srt.weight_sync.distributed_source import BroadcastSource
from ebbtide.srt.weight_sync.patch import PatchedWeights
from ebbtide.srt.weight_sync.source import Fit, NamedTensor, PlanCache, TableSource, WeightSource
from ebbtide.srt.weight_sync.sparse_source import DeltaSource, PlacedChanges

T = TypeVar("T")

# Copies that one slice plans; it takes less than a millisecond.
PLANNED_AT_ONCE: Final = 64


@dataclass(eq=False)
class WeightStaging:
    """Where plans are written: a second copy of the weights, or the live weights.

    Args:
        shadow: the copy; None: plans write to the live weights.

    Attributes:
        unpaired: tensors of 8-bit weights that came without their partner (values or scales): name → name of
            the missing partner.
        is_complete: whether the copy holds all tensors.
    """

    _store: WeightStore
    _device: Device
    shadow: Arena | None = None
    unpaired: dict[str, str] = field(default_factory=dict, init=False)
    is_complete: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.is_staged = self.shadow is not None
        # Tensors that no plan writes are copied from the live weights, so their checksums hold here too, as
        # long as the live weights are not written to.
        self._generation, self._sums = self._store.generation, self._store.sums

    def sums(self) -> Mapping[str, int]:
        """The known checksums of the tensors in this staging, see `WeightStore.sums`."""
        if self.shadow is None:
            return self._store.sums
        return self._sums if self._generation == self._store.generation else {}

    def note_write(self, names: Iterable[str], sums: Mapping[str, int] = MappingProxyType({})) -> None:
        """Note that these names are about to be written. `sums`: their new checksums, if they are known."""
        known = dict(self._store.sums if self.shadow is None else self._sums)
        for name in names if known else ():
            known.pop(name, None)
        known |= sums
        if self.shadow is None:
            self._store.note_write(known)
        else:
            self._sums = known

    def require_complete(self) -> None:
        if self.unpaired:
            missing = sorted(set(self.unpaired.values()))
            raise RequestRejected(
                f"the session is incomplete: {len(missing)} tensors that belong to others of 8 bits did not "
                f"come: {first_few(missing)}. Send them, or abort_weight_update; allow_incomplete "
                "leaves these weights as they were",
                409,
            )

    def complete(self, written: frozenset[str]) -> Slices[None]:
        assert self.shadow is not None, "only a copy is completed"
        yield from self._store.complete(self.shadow, written)
        self.is_complete = True

    def commit(self) -> None:
        if self.shadow is None:
            # Forward passes are queued behind the copies, so they see the new weights.
            self._device.follow_copies()
            return
        store = self._store
        self._device.synchronize()
        former, own = store.sums, self.sums()
        store.commit(self.shadow)
        store.sums, self._sums, self._generation = own, former, store.generation

    def roll_back(self) -> None:
        assert self.shadow is not None, "there is no way back from what was written in place"
        # A commit exchanges the two copies, so a second commit undoes it.
        self.commit()

    def repay(self) -> None:
        if self.shadow is not None:
            self.shadow.repay()

    def release(self) -> Slices[None]:
        if self.shadow is not None:
            yield from paced_by_time(self.shadow.close_by_chunks())

    def close(self) -> None:
        if self.shadow is not None:
            self.shadow.close()


def make_plan(
    source: WeightSource,
    store: WeightStore,
    device: Device,
    cache: PlanCache,
    loader: CustomLoader | None = None,
) -> Slices[TensorPlan]:
    """Make the plan of a source's tensors, checked against the model. The source is closed if that fails.

    Args:
        loader: writes the tensors to any parameters that it likes, so nothing is checked.
    """
    try:
        if loader is not None:
            return LoaderPlan(source, store, device, loader)
        fit = yield from cache.fit(source.digest, lambda: source.fit(store))
        if isinstance(source, DeltaSource):
            return PatchPlan(source, fit, store, device)
        return TensorPlan(source, fit, store, device)
    except BaseException:
        source.close()
        raise


class TensorPlan:
    """Whole tensors, copied, converted or quantised."""

    how: How = How.COPY
    patch: PatchSums | None = None

    def __init__(self, source: WeightSource, fit: Fit, store: WeightStore, device: Device) -> None:
        self.names, self.touched, self.sent = fit.names, fit.touched, fit.sent
        self.num_tensors, self.num_ignored = fit.num_tensors, fit.num_ignored
        self.problems = fit.problems
        self.base_version = source.base_version
        self.is_sent, self.near_bytes = source.is_sent, source.near_bytes
        # A patch moves data within the device's own memory.
        self.cost = (source.cost or 1) if self.how is How.COPY else 1
        self.opens = not self.is_sent or bool(fit.scales)
        self.incomplete = ""
        if fit.unpaired:
            missing = first_few(sorted({other for other, _ in fit.unpaired.values()}))
            self.incomplete = (
                f"{len(fit.unpaired)} tensors do not come with what belongs to them, nothing was written: "
                f"expected with them {missing}. In a session they may follow"
            )
        self._source = source
        self._fit = fit
        self._store = store
        self._device = device
        self._is_planned = source.near_bytes is not None and store.device.type == "cuda"
        self._copies = WeightCopies(store.device)
        # Tensors on the device without a planned copy.
        self._others: dict[str, Tensor] = {}
        # Tensors with a planned copy. They live until it has run: some are not in the sender's memory.
        self._covered: list[Tensor] = []
        self._looked_at = NonFinite()
        # If broadcasts are received directly into a staging: that staging, and the regions.
        self._receives_into: WeightStaging | None = None
        self._received: list[tuple[str, Tensor]] | None = None

    def receive_into(self, staging: Staging) -> bool:
        assert isinstance(staging, WeightStaging)
        source, store = self._source, self._store
        if not isinstance(source, BroadcastSource) or not source.can_receive_in_place(store.device):
            return False
        if self._fit.scales:  # Scales are checked before anything is written: receive them in buffers.
            return False

        def destinations() -> list[Destination | None]:
            made = [store.destination(entry.name, staging.shadow) for entry in source.entries]
            named = zip(source.entries, made, strict=True)
            self._received = [
                (entry.name, place.nonfinite_region(entry.dtype))
                for entry, place in named
                if place is not None
            ]
            return made

        self._receives_into = staging
        staging.note_write(self.names)
        source.receive_in_place(destinations)
        return True

    def arrived(self) -> bool:
        return self._source.arrived()

    def abandon(self) -> None:
        if not self._source.abandon():
            raise OutOfStep(
                "the group of a weight update was left, and its broadcasts do not end: memory that they may "
                "still write to cannot be given back"
            )
        if self._receives_into is not None:
            self._receives_into.note_write(self.names)

    def open(self, staging: Staging) -> Slices[None]:
        """Map the sender's memory, and plan the copies of tensors on the device."""
        assert isinstance(staging, WeightStaging)
        yield from self._source.open()
        yield from self._check_scales()
        if not self._is_planned:
            return
        planning = self._plan(staging)
        while True:
            # The current stream waits for the sender's events, so it must be the stream of the copies.
            with self._device.copying(beside=staging.is_staged):
                if (planned := next(planning, None)) is None:
                    return
            yield planned

    def _check_scales(self) -> Slices[None]:
        """Refuse scales that are not finite and above zero, before anything is written."""
        names = self._fit.scales
        if not names:
            return
        with self._device.copying():
            found = [(name, are_scales(whole(tensor))) for name, tensor in self._source if name in names]
            good = torch.stack([is_good.to(self._store.device) for _, is_good in found]).tolist()
        wrong = sorted({name for (name, _), is_good in zip(found, good, strict=True) if not is_good})
        if wrong:
            raise RequestRejected(
                f"nothing was written: scales are finite and above zero; {len(wrong)} tensors of scales have "
                f"others ({first_few(wrong)})"
            )
        yield len(found)

    def _plan(self, staging: WeightStaging) -> Slices[None]:
        (spans, origin), direct = self._source.spans, self._source.direct
        address = self._store.address(staging.shadow)
        known = None if spans is None else spans.get(direct)
        if known is not None and known.is_for(origin):
            self._copies.take(known, address, origin)
            return
        for number, (name, tensor) in enumerate(self._to_plan(address)):
            assert isinstance(tensor, Tensor), "copies are planned of tensors on the device only"
            self._others.pop(name, None)
            if not self._store.plan(self._copies, name, tensor, staging.shadow, direct):
                self._others[name] = tensor
            else:
                self._covered.append(tensor)
            if number % PLANNED_AT_ONCE == 0:
                yield 1
        planned = self._copies.prepare(address, origin)
        if spans is not None and planned is not None and not self._others:
            spans[direct] = planned

    def _to_plan(self, address: int) -> Iterable[NamedTensor]:
        """Plan most tensors of a table at once; returns the tensors that are left to plan one by one."""
        source, runs = self._source, self._fit.runs
        if not isinstance(source, TableSource) or runs is None:
            return source
        names = source.table.form.names
        left = self._copies.plan_table(names, source.address_T, runs, address)
        return ((names[index], source.tensor(index)) for index in left)

    def begin(self, staging: Staging) -> None:
        assert isinstance(staging, WeightStaging)
        for name in self._fit.unpaired:
            staging.unpaired.pop(name, None)

    def end(self, staging: Staging) -> frozenset[str]:
        assert isinstance(staging, WeightStaging)
        joined = set()
        for name, (other, weight) in self._fit.unpaired.items():
            if staging.unpaired.pop(other, None) is None:
                staging.unpaired[name] = other
            else:
                joined.add(weight)
        for name, other in list(staging.unpaired.items()):
            if name in self.names or other in self.names:
                del staging.unpaired[name]
        return frozenset(joined)

    def write(self, staging: Staging) -> Slices[None]:
        """Launch the copies. Tensors that were received in place need none."""
        assert isinstance(staging, WeightStaging)
        staging.note_write(self.names, {} if self.patch is None else self.patch.sums())
        yield from self._write(staging)
        self._looked_at.finish()

    def _write(self, staging: WeightStaging) -> Slices[None]:
        if self._received is not None:
            for name, region in self._received:
                self._looked_at.add(name, region)
                yield region.nbytes
            return
        yield from self._copies.launch(self.cost)
        named = self._others.items() if self._is_planned else self._source
        store, shadow, direct = self._store, staging.shadow, self._source.direct
        try:
            for name, tensor in named:
                yield from store.write_by_slices(name, tensor, shadow, direct)
                written = store.destination(name, shadow, direct)
                if written is not None:
                    self._looked_at.add(name, written.nonfinite_region(tensor.dtype))
        except RequestRejected as error:
            if staging.is_staged:
                raise
            # A refusal would say that nothing was written.
            raise EngineError(f"the update broke off half-way: {error.message}") from error

    def nonfinite(self) -> list[str]:
        return self._copies.nonfinite() + self._looked_at.names()

    def _forget(self) -> None:
        self._others.clear()
        self._covered.clear()

    def detach(self) -> Slices[None]:
        self._forget()
        return self._source.detach()

    def finish(self) -> None:
        # If the update ended early, copies from the sender's memory may still run.
        if not self._device.copies_done():
            self._device.synchronize()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._forget()
            self._source.close()


class PatchPlan(TensorPlan):
    """Changes of some elements, checked against the checksums that the tensors must have afterwards."""

    how = How.PATCH

    def __init__(self, source: DeltaSource, fit: Fit, store: WeightStore, device: Device) -> None:
        super().__init__(source, fit, store, device)
        self.patch = self
        self._is_planned = False
        self._delta = source
        self._changes: PlacedChanges | None = None
        self._new_sums: Tensor | None = None
        self._sums: dict[str, int] = {}

    def sum_up(self, staging: Staging) -> Slices[None]:
        assert isinstance(staging, WeightStaging)
        weights = PatchedWeights(self._store, staging.shadow, self._fit.places)
        self._changes = self._delta.place(weights)
        self._fit.places = weights.places_known
        yield from self._changes.verify()
        if self._delta.checksums:
            known = staging.sums()
            sums = [known.get(entry.name) for entry in self._delta.entries]
            self._new_sums = yield from self._changes.sums_after(sums)

    def sums(self) -> Mapping[str, int]:
        if self._new_sums is not None:
            names = [entry.name for entry in self._delta.entries]
            self._sums, self._new_sums = dict(zip(names, self._new_sums.tolist(), strict=True)), None
        return self._sums

    def check_sums(self, shares: Sequence[Mapping[str, int]]) -> None:
        first, *others = shares
        wrong = [
            name
            for name, expected in self._delta.checksums.items()
            if (first[name] + sum(share[name] for share in others) - expected) % 2**64
            and not self._store.ignored(name)
        ]
        if wrong:
            raise RequestRejected(
                f"nothing was written: the checksums of {len(wrong)} tensors would not be the sender's "
                f"({first_few(sorted(wrong))}). What serves is not what the delta is of, or it "
                "was damaged on its way: send the weights whole"
            )

    def _write(self, staging: WeightStaging) -> Slices[None]:
        assert self._changes is not None, "a delta is summed up first"
        yield from self._changes.apply()

    def nonfinite(self) -> list[str]:
        found = [] if self._changes is None else self._changes.nonfinite()
        return [self._delta.entries[index].name for index in found]

    def _forget(self) -> None:
        super()._forget()
        self._changes = None


class LoaderPlan(TensorPlan):
    """Tensors that a custom loader writes."""

    how = How.LOAD

    def __init__(
        self, source: WeightSource, store: WeightStore, device: Device, loader: CustomLoader
    ) -> None:
        sent = frozenset(entry.name for entry in source.entries)
        names = store.names if sent else frozenset[str]()
        fit = Fit(num_tensors=len(source.entries), names=names, touched=names, sent=sent)
        super().__init__(source, fit, store, device)
        self._is_planned = False
        self._loader = loader

    def _write(self, staging: WeightStaging) -> Slices[None]:
        """Call the loader, unless there are no tensors. It is one slice, since it cannot be interrupted."""
        if not self._source.entries:
            return
        assert staging.shadow is not None
        assert staging.is_complete, "a loader is given a whole copy"
        named = [(name, whole(tensor)) for name, tensor in self._source]
        self._loader.load(StagedModel(self._store, staging.shadow), named)
        yield self._source.num_bytes
        for name, region in self._store.parameters(staging.shadow):
            self._looked_at.add(name, region)


def paced_by_time(slices: Slices[T]) -> Slices[T]:
    """The same work with slices of 1 byte, so that it is paced by time alone: the device copies nothing."""
    with closing(slices):
        while True:
            try:
                next(slices)
            except StopIteration as end:
                result: T = end.value
                return result
            yield 1
