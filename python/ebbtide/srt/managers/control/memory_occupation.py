"""Which memory is occupied, per tag `Resident | Released`, and whether the weights' contents are whole.

Source: control_semantics section 1.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control.phases import at_once
from ebbtide.srt.managers.control.ports import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    Operation,
    PageStore,
    ParkingPlan,
    Ranks,
    Requests,
    TagMemory,
    Work,
)
from ebbtide.srt.managers.io_struct import (
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    TagReport,
    WeightsContent,
)
from ebbtide.srt.memory_saver.tags import MemoryTag

MAX_NAMES = 10


@dataclass(frozen=True)
class Valid:
    """Every parameter holds a committed value."""


@dataclass(frozen=True)
class Stale:
    """These parameters hold nothing: not written since their memory came back, or half-written."""

    missing: frozenset[str]


class WeightContent:
    """Whether the live weights may be computed with: `Valid | Stale(missing)`."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._report: WeightsContent | None = None
        self.state: Valid | Stale = Valid()

    def lose(self, names: frozenset[str] | None = None) -> None:
        """The contents of these parameters (all by default) are gone."""
        missing = self._names if names is None else names & self._names
        if isinstance(self.state, Stale):
            missing |= self.state.missing
        if missing:
            self._change(Stale(missing))

    def note_written(self, names: frozenset[str]) -> None:
        """A committed update has written these parameters."""
        if isinstance(self.state, Stale):
            missing = self.state.missing - names
            self._change(Stale(missing) if missing else Valid())

    @property
    def missing(self) -> frozenset[str]:
        return self.state.missing if isinstance(self.state, Stale) else frozenset()

    def report(self) -> WeightsContent:
        """The state as clients see it. It is asked for in every turn, and sorted when it has changed."""
        if self._report is None:
            missing = self.missing
            self._report = WeightsContent(
                content="stale" if missing else "valid",
                num_missing=len(missing),
                missing=sorted(missing)[:MAX_NAMES],
            )
        return self._report

    def _change(self, state: Valid | Stale) -> None:
        self.state = state
        self._report = None


class MemoryOccupation:
    """Releases and resumes the memory of tags.

    Args:
        memories: the memory of every tag.
        page_store: where pages of the KV pool are kept while it is released.
        free_bytes: device memory that is free right now.
        is_enabled: false without a memory saver; everything then stays resident.
    """

    def __init__(
        self,
        memories: Mapping[MemoryTag, TagMemory],
        page_store: PageStore,
        content: WeightContent,
        requests: Requests,
        free_bytes: Callable[[], int],
        ranks: Ranks,
        *,
        is_enabled: bool,
    ) -> None:
        self.content = content
        # Whoever updates weights sets this: what is on its way in has lost its destination.
        self.on_weights_release: Callable[[], None] = lambda: None
        self._memories = memories
        self._page_store = page_store
        self._released: frozenset[MemoryTag] = frozenset()
        self._requests = requests
        self._free_bytes = free_bytes
        self._ranks = ranks
        self._is_enabled = is_enabled
        # Of the last release of the weights.
        self._keeps_weights = False
        self.handlers: HandlerTable = {
            ReleaseMemoryOccupationReqInput: self.release,
            ResumeMemoryOccupationReqInput: self.resume,
        }

    @property
    def released(self) -> frozenset[MemoryTag]:
        return self._released

    @property
    def is_kv_released(self) -> bool:
        """Requests that still hold KV are parked then."""
        return MemoryTag.KV_CACHE in self._released

    @property
    def allows_forward(self) -> bool:
        """The memory that a forward pass needs is there, and the weights are whole."""
        return not self.lacking and isinstance(self.content.state, Valid)

    @property
    def lacking(self) -> list[MemoryTag]:
        """What a forward pass needs and is released, in the order of the enumeration."""
        return [tag for tag in MemoryTag if tag in self._released and self._memories[tag].is_needed]

    def release(self, request: ReleaseMemoryOccupationReqInput) -> Operation:
        """Save what must survive on every rank, then give the memory back."""
        started = time.perf_counter()
        self._require_memory_saver()
        tags = self._selected(request.tags)
        to_release = [tag for tag in tags if tag not in self._released or self._memories[tag].resident_bytes]
        free_before = self._free_bytes()
        plan = self._parking(to_release, request.preserve)
        keep = self._keeping(to_release, request.backup)
        if plan.pages or keep:
            try:
                yield from self._on_all_ranks(lambda: self._save(plan, with_weights=bool(keep)))
            except (RequestRejected, EngineError):
                self._page_store.drop()
                raise
        if keep is not None:
            self._keeps_weights = keep
            if not keep:
                self._memories[MemoryTag.WEIGHTS].prepare_release(keep=False)
        if MemoryTag.WEIGHTS in to_release:
            self.on_weights_release()
        num_retracted = self._requests.park(plan) if MemoryTag.KV_CACHE in to_release else 0
        freed_bytes = {
            tag: self._ranks.certainly(lambda tag=tag: self._release(tag))  # type: ignore[misc]
            for tag in to_release
        }
        return ReleaseMemoryOccupationReqOutput(
            changed=bool(to_release),
            tags=tags,
            freed_bytes={tag: freed_bytes.get(tag, 0) for tag in tags},
            num_retracted=num_retracted,
            num_parked=len(plan.rids),
            parked_bytes=self._page_store.num_bytes if plan.pages else 0,
            device_free_bytes_before=free_before,
            device_free_bytes_after=self._free_bytes(),
            duration_ms=(time.perf_counter() - started) * 1e3,
            message=_sentence("Released", to_release),
        )

    def resume(self, request: ResumeMemoryOccupationReqInput) -> Operation:
        """Take the memory again, on every rank or on none."""
        started = time.perf_counter()
        self._require_memory_saver()
        tags = self._selected(request.tags)
        to_resume = [tag for tag in tags if tag in self._released]
        free_before = self._free_bytes()
        mapped_bytes: dict[MemoryTag, int] = {}
        if to_resume:
            try:
                yield from self._on_all_ranks(lambda: mapped_bytes.update(self._map_all(to_resume)))
            except (RequestRejected, EngineError):
                for tag in mapped_bytes:
                    self._ranks.certainly(self._memories[tag].release)
                raise
            self._released -= set(to_resume)
            if MemoryTag.KV_CACHE in to_resume:
                self._page_store.drop()
        return ResumeMemoryOccupationReqOutput(
            changed=bool(to_resume),
            tags=tags,
            mapped_bytes={tag: mapped_bytes.get(tag, 0) for tag in tags},
            weights=self.content.report(),
            device_free_bytes_before=free_before,
            device_free_bytes_after=self._free_bytes(),
            duration_ms=(time.perf_counter() - started) * 1e3,
            message=_sentence("Resumed", to_resume),
        )

    def restore_cuda_graph(self) -> bool:
        """Before a forward pass, bring released CUDA graphs back: clients release all tags and resume two.

        Returns whether the state changed. Where there is no room for them, and while several ranks agree on
        it, steps run without graphs.
        """
        if MemoryTag.CUDA_GRAPH not in self._released:
            return False
        if not self._ranks.is_one:
            self._ranks.propose(ResumeMemoryOccupationReqInput(tags=(MemoryTag.CUDA_GRAPH,)))
            return False
        try:
            self._map_all([MemoryTag.CUDA_GRAPH])
        except RequestRejected:
            return False
        self._released -= {MemoryTag.CUDA_GRAPH}
        return True

    def report(self) -> dict[MemoryTag, TagReport]:
        return {tag: self._report(tag) for tag in MemoryTag}

    def _selected(self, tags: Iterable[MemoryTag] | None) -> list[MemoryTag]:
        """In the order of the enumeration, each once; none given means all."""
        chosen = set(tags or ()) or set(MemoryTag)
        return [tag for tag in MemoryTag if tag in chosen]

    def _on_all_ranks(self, act: Callable[[], None]) -> Work[None]:
        try:
            yield from self._ranks.phase(Activity.ALONE, at_once(act))
        except DeadlinePassed:
            raise EngineError("not every rank was ready in time, so none has done it") from None

    def _parking(self, tags: list[MemoryTag], preserve: Preserve) -> ParkingPlan:
        """What is kept of the KV; nothing where it is not released, or not to be kept."""
        if MemoryTag.KV_CACHE not in tags:
            return ParkingPlan(frozenset(), [], keeps_cache=True)
        max_pages = self._page_store.max_pages if preserve is not Preserve.NONE else 0
        return self._requests.plan_parking(max_pages, with_cache=preserve is Preserve.ALL)

    def _keeping(self, tags: list[MemoryTag], backup: bool | None) -> bool | None:
        """Whether the weights are kept. None: they are not released, or an earlier release broke off."""
        if MemoryTag.WEIGHTS not in tags or MemoryTag.WEIGHTS in self._released:
            return None
        return self._memories[MemoryTag.WEIGHTS].keeps_contents if backup is None else backup

    def _save(self, plan: ParkingPlan, *, with_weights: bool) -> None:
        try:
            if plan.pages:
                self._page_store.save(plan.pages)
            if with_weights:
                self._memories[MemoryTag.WEIGHTS].prepare_release(keep=True)
        except OutOfDeviceMemory as error:
            raise RequestRejected(
                f"no room to keep what is to outlive the release: {error}. Nothing was released",
                409,
                needed_bytes=error.needed_bytes,
                free_bytes=error.free_bytes,
            ) from error

    def _release(self, tag: MemoryTag) -> int:
        memory = self._memories[tag]
        # Where it fails half-way, some of the memory is gone, and nothing may run on the rest.
        self._released |= {tag}
        freed_bytes = memory.release()
        if tag is MemoryTag.WEIGHTS and not self._keeps_weights:
            self.content.lose()
        return freed_bytes

    def _map_all(self, tags: list[MemoryTag]) -> dict[MemoryTag, int]:
        """The memory of all of these tags, or none of it; returns the bytes."""
        mapped_bytes: dict[MemoryTag, int] = {}
        try:
            for tag in tags:
                mapped_bytes[tag] = self._memories[tag].resume()
                if tag is MemoryTag.KV_CACHE:
                    self._page_store.restore()
        except OutOfDeviceMemory as error:
            for tag in mapped_bytes:
                self._memories[tag].release()
            needed_bytes = sum(self._memories[tag].virtual_bytes for tag in tags)
            free_bytes = self._free_bytes()
            raise RequestRejected(
                f"not enough device memory to resume {', '.join(tags)}: {needed_bytes} bytes are needed, "
                f"{free_bytes} are free. Nothing was resumed; free memory and try again",
                409,
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            ) from error
        return mapped_bytes

    def _require_memory_saver(self) -> None:
        if not self._is_enabled:
            raise RequestRejected(
                "memory_saver_backend is 'none', so all memory stays resident: start the engine with another",
                409,
            )

    def _report(self, tag: MemoryTag) -> TagReport:
        memory = self._memories[tag]
        parked_bytes = self._page_store.num_bytes if tag is MemoryTag.KV_CACHE else 0
        report = TagReport(
            state="released" if tag in self._released else "resident",
            virtual_bytes=memory.virtual_bytes,
            resident_bytes=memory.resident_bytes,
            backup_bytes=memory.backup_bytes + parked_bytes,
        )
        if tag is not MemoryTag.WEIGHTS:
            return report
        content = self.content.report()
        return TagReport(
            state=report.state,
            virtual_bytes=report.virtual_bytes,
            resident_bytes=report.resident_bytes,
            backup_bytes=report.backup_bytes,
            content=content.content,
            num_missing=content.num_missing,
            missing=content.missing,
        )


def _sentence(verb: str, tags: list[MemoryTag]) -> str:
    return f"{verb} {', '.join(tags)}." if tags else "Nothing to do."
