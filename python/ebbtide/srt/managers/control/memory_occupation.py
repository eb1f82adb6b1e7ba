"""Releasing and resuming the memory of each tag. Source: control_semantics section 1.2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, TypeVar

from msgspec import structs

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control import (
    Activity,
    DeadlinePassed,
    HandlerTable,
    KVMemory,
    Operation,
    PageStore,
    ParkingPlan,
    Requests,
    TagMemory,
    Work,
)
from ebbtide.srt.managers.control.operations import wait_until
from ebbtide.srt.managers.control.pace import Pace, Ranks, at_once
from ebbtide.srt.managers.io_struct import (
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    TagReport,
    WeightsContent,
)
from ebbtide.srt.memory_saver import MemoryTag

T = TypeVar("T")

NOTHING_PARKED: Final = ParkingPlan(frozenset(), [], keeps_cache=False)
# How many names of stale parameters a report lists.
MAX_NAMES: Final = 10


class WeightContent:
    """Whether the live weights are valid.

    Attributes:
        missing: the stale parameters: not written since their memory was resumed, or only half-written.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.missing: frozenset[str] = frozenset()
        self._names = names
        self._report: WeightsContent | None = None

    @property
    def is_valid(self) -> bool:
        """Whether every parameter holds a committed value."""
        return not self.missing

    def lose(self, names: frozenset[str] | None = None) -> None:
        """Note that these parameters (default: all) have lost their contents."""
        self.missing |= self._names if names is None else names & self._names
        self._report = None

    def note_written(self, names: frozenset[str]) -> None:
        """Note that a committed update has written these parameters."""
        self.missing -= names
        self._report = None

    def report(self) -> WeightsContent:
        """The state as clients see it. Kept until it changes, since it is asked for in every turn."""
        if self._report is None:
            self._report = WeightsContent(
                content="valid" if self.is_valid else "stale",
                num_missing=len(self.missing),
                missing=sorted(self.missing)[:MAX_NAMES],
            )
        return self._report


@dataclass
class MemoryOccupation:
    """The state machine of memory: releases and resumes the memory of tags.

    Args:
        page_store: keeps pages of the KV pool while it is released.
        go_on: does work in the background.
        is_enabled: False without a memory saver: all memory then stays resident.
    """

    _memories: Mapping[MemoryTag, TagMemory]
    _kv: KVMemory
    _page_store: PageStore
    content: WeightContent
    _requests: Requests
    _free_bytes: Callable[[], int]
    _ranks: Ranks
    _pace: Pace
    _go_on: Callable[[Work[None]], None]
    _: KW_ONLY
    is_enabled: bool
    # Called before the weights are released: ends what is being written to them.
    on_weights_release: list[Callable[[], None]] = field(default_factory=list, init=False)
    # The KV that is parked while the KV cache is released, and the store's slots that hold its pages.
    _parked: ParkingPlan = field(default=NOTHING_PARKED, init=False)
    _parked_slots: list[int] = field(default_factory=list, init=False)
    # How often the KV cache was released. A resume that still takes memory sees by it that it is void.
    _num_kv_releases: int = field(default=0, init=False)
    # The count at the last release that was made because a resume did not get all of its memory.
    _failed_at: int = field(default=0, init=False)
    # Whether the last release of the weights kept their contents.
    _keeps_weights: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.released: frozenset[MemoryTag] = frozenset()
        self._requests.on_kv_given_up = self._forget_what_nobody_holds
        self.handlers: HandlerTable = {
            ReleaseMemoryOccupationReqInput: self.release,
            ResumeMemoryOccupationReqInput: self.resume,
        }

    @property
    def is_kv_released(self) -> bool:
        """Whether the KV cache is released. Requests that still have KV are parked then."""
        return MemoryTag.KV_CACHE in self.released

    @property
    def allows_forward(self) -> bool:
        """Whether the memory that a forward pass needs is resident, and the weights are valid."""
        return not self.needed_but_released and self.content.is_valid

    @property
    def needed_but_released(self) -> list[MemoryTag]:
        """The released tags that a forward pass needs, in the order of the enumeration."""
        return [tag for tag in MemoryTag if tag in self.released and self._memories[tag].is_needed]

    def release(self, request: ReleaseMemoryOccupationReqInput) -> Operation:
        """Save what must survive, on all ranks or none; then give the memory back."""
        started = time.perf_counter()
        self._require_memory_saver()
        tags = self._selected(request.tags)
        to_release = [tag for tag in tags if tag not in self.released or self._memories[tag].resident_bytes]
        free_before = self._free_bytes()
        # If an earlier release failed half-way, its KV has been saved already.
        gives_up_kv = MemoryTag.KV_CACHE in to_release and not self.is_kv_released
        plan = self._parking(request.preserve) if gives_up_kv else NOTHING_PARKED
        keep = self._keeping(to_release, request.backup)
        bytes_before = self._page_store.num_bytes
        if plan.pages or keep is not None:
            try:
                yield from self._on_all_ranks(lambda: self._save(plan, keep))
            except (RequestRejected, EngineError):
                if plan.pages:
                    self._drop_parked()
                raise
        parked_bytes = self._page_store.num_bytes - bytes_before
        if keep is not None:
            self._keeps_weights = keep
        if MemoryTag.WEIGHTS in to_release:
            for end in self.on_weights_release:
                end()
        num_retracted = self._give_up_kv(plan) if gives_up_kv else 0
        freed_bytes = {tag: self._ranks.certainly(partial(self._release, tag)) for tag in to_release}
        self._forget_what_nobody_holds()  # Requests may have ended while their pages were saved.
        return ReleaseMemoryOccupationReqOutput(
            changed=bool(to_release),
            tags=tags,
            freed_bytes={tag: freed_bytes.get(tag, 0) for tag in tags},
            num_retracted=num_retracted,
            num_parked=len(plan.rids),
            parked_bytes=parked_bytes,
            device_free_bytes_before=free_before,
            device_free_bytes_after=self._free_bytes(),
            duration_ms=(time.perf_counter() - started) * 1e3,
            message=_sentence("Released", to_release),
        )

    def resume(self, request: ResumeMemoryOccupationReqInput) -> Operation:
        """Take the memory again, on all ranks or none.

        The KV cache comes in parts: forward passes run as soon as the first one is there.
        """
        started = time.perf_counter()
        self._require_memory_saver()
        tags = self._selected(request.tags)
        to_resume = [tag for tag in tags if tag in self.released]
        free_before = self._free_bytes()
        mapped_bytes: dict[MemoryTag, int] = {}
        if to_resume:
            yield from self._resume(to_resume, mapped_bytes)
        if MemoryTag.KV_CACHE in to_resume:
            if request.lazy:
                self._go_on(self._map_rest(self._num_kv_releases, mapped_bytes))
            else:
                yield from self._map_rest(self._num_kv_releases, mapped_bytes)
        elif MemoryTag.KV_CACHE in tags and not request.lazy:
            yield from self._await_rest()
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

    def _resume(self, tags: list[MemoryTag], mapped_bytes: dict[MemoryTag, int]) -> Work[None]:
        """Take the memory of these tags, of the KV cache the first part. Adds bytes to `mapped_bytes`."""
        has_kv = MemoryTag.KV_CACHE in tags
        if has_kv:
            self._kv.hold_back(self._parked.pages)
        try:
            yield from self._on_all_ranks(lambda: mapped_bytes.update(self._map_all(tags)))
        except (RequestRejected, EngineError):
            for tag in mapped_bytes:
                self._ranks.certainly(self._memories[tag].release)
            if has_kv:
                self._kv.give_up()
            raise
        self.released -= set(tags)
        if has_kv:
            self._drop_parked()

    def _map_rest(self, num_releases: int, mapped_bytes: dict[MemoryTag, int]) -> Work[None]:
        """Take the rest of the KV cache's memory between forward passes, unless it is released meanwhile.

        If not all of it can be had, the KV cache is released again.

        Args:
            num_releases: the count of releases when the resume began.
        """
        try:
            while self._kv.next_part():
                # A forward pass first: the memory that is there may be enough for it.
                yield Activity.WORKING
                if num_releases != self._num_kv_releases:
                    break
                part = self._kv.next_part()
                mapping = self._pace.turns(self._kv.map(part), Activity.WORKING)
                num_bytes, _ = yield from self._ranks.phase(Activity.WORKING, _out_of_memory_refused(mapping))
                if num_releases != self._num_kv_releases:
                    break
                self._kv.put_back(part)
                mapped_bytes[MemoryTag.KV_CACHE] += num_bytes
        except (RequestRejected, EngineError, DeadlinePassed) as error:
            yield Activity.BOUNDARY
            if num_releases == self._num_kv_releases:
                self._give_up_kv(NOTHING_PARKED)
                self._failed_at = self._num_kv_releases
                self._ranks.certainly(partial(self._release, MemoryTag.KV_CACHE))
            if isinstance(error, DeadlinePassed):
                raise RequestRejected(
                    "not all of kv_cache was there in time: it is released again", 409
                ) from None
            raise

    def _await_rest(self) -> Work[None]:
        """Wait until an earlier resume has all memory of the KV cache, or was ended by a release."""
        num_releases = self._num_kv_releases
        yield from wait_until(
            lambda: not self.is_kv_partial or num_releases != self._num_kv_releases,
            "kv_cache is still being resumed",
        )
        if num_releases < self._num_kv_releases == self._failed_at:
            raise RequestRejected("not all of kv_cache was there: it is released again; try again", 409)

    @property
    def is_kv_partial(self) -> bool:
        """Whether the KV cache serves while some of its memory is still to come."""
        return not self.is_kv_released and bool(self._kv.next_part())

    def restore_cuda_graph(self) -> bool:
        """Resume released CUDA graphs before a forward pass, since clients often resume the other tags only.

        Returns whether the state changed. Steps run without graphs while there is no room for them, and while
        several ranks agree on the resume.
        """
        if MemoryTag.CUDA_GRAPH not in self.released:
            return False
        if not self._ranks.is_one:
            self._ranks.propose(ResumeMemoryOccupationReqInput(tags=(MemoryTag.CUDA_GRAPH,)))
            return False
        try:
            self._map_all([MemoryTag.CUDA_GRAPH])
        except RequestRejected:
            return False
        self.released -= {MemoryTag.CUDA_GRAPH}
        return True

    def report(self) -> dict[MemoryTag, TagReport]:
        return {tag: self._report(tag) for tag in MemoryTag}

    def _selected(self, tags: Iterable[MemoryTag] | None) -> list[MemoryTag]:
        """The tags in the order of the enumeration, each once; all if none are given."""
        chosen = set(tags or ()) or set(MemoryTag)
        return [tag for tag in MemoryTag if tag in chosen]

    def _on_all_ranks(self, act: Callable[[], None]) -> Work[None]:
        try:
            yield from self._ranks.phase(Activity.ALONE, at_once(act))
        except DeadlinePassed:
            raise EngineError("not every rank was ready in time, so none has done it") from None

    def _parking(self, preserve: Preserve) -> ParkingPlan:
        max_pages = self._page_store.num_free if preserve is not Preserve.NONE else 0
        return self._requests.plan_parking(max_pages, with_cache=preserve is Preserve.ALL)

    def _give_up_kv(self, plan: ParkingPlan) -> int:
        """Let requests drop all KV but that of the plan; returns how many were retracted."""
        self._num_kv_releases += 1
        self._kv.give_up()
        return self._requests.park(plan)

    def _drop_parked(self) -> None:
        self._page_store.drop(self._parked_slots)
        self._parked, self._parked_slots = NOTHING_PARKED, []

    def _forget_what_nobody_holds(self) -> None:
        """Drop parked KV once no request and no kept prefix cache uses it."""
        if not self._parked_slots or not self.is_kv_released or self._requests.num_running > 0:
            return
        if not self._parked.keeps_cache:
            # Pages that requests shared are still in the prefix cache, which was not to be kept.
            self._requests.park(NOTHING_PARKED)
        if not self._requests.holds_pages:
            self._drop_parked()

    def _keeping(self, tags: list[MemoryTag], backup: bool | None) -> bool | None:
        """Whether the weights are kept. None: they are not to be released, or an earlier release failed."""
        if MemoryTag.WEIGHTS not in tags or MemoryTag.WEIGHTS in self.released:
            return None
        return self._memories[MemoryTag.WEIGHTS].keeps_contents if backup is None else backup

    def _save(self, plan: ParkingPlan, keeps_weights: bool | None) -> None:
        try:
            if plan.pages:
                (self._parked_slots,) = self._page_store.save([plan.pages])
                self._parked = plan
            if keeps_weights is not None:
                self._memories[MemoryTag.WEIGHTS].prepare_release(keeps_weights)
        except OutOfDeviceMemory as error:
            raise error.refusal(
                f"no room to keep what is to outlive the release: {error}. Nothing was released"
            ) from error

    def _release(self, tag: MemoryTag) -> int:
        memory = self._memories[tag]
        # Mark it first: if the release fails half-way, nothing may run on what is left.
        self.released |= {tag}
        if tag is MemoryTag.WEIGHTS and not self._keeps_weights:
            self.content.lose()
        return memory.release()

    def _map_all(self, tags: list[MemoryTag]) -> dict[MemoryTag, int]:
        """Take the memory of all these tags, or none; returns the bytes.

        If memory may run short, the KV cache is mapped whole, so that a lack shows before requests run.
        """
        mapped_bytes: dict[MemoryTag, int] = {}
        is_short = self._free_bytes() < sum(self._memories[tag].virtual_bytes for tag in tags)
        try:
            for tag in tags:
                mapped_bytes[tag] = self._memories[tag].resume()
                if tag is MemoryTag.KV_CACHE and is_short:
                    mapped_bytes[tag] += sum(self._kv.map())
                if tag is MemoryTag.KV_CACHE:
                    self._page_store.restore(self._parked_slots, self._parked.pages)
        except Exception as error:
            for tag in tags:
                self._memories[tag].release()
            if not isinstance(error, OutOfDeviceMemory):
                raise
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

    def require_weights(self, status: int = 409) -> None:
        """Refuse what cannot be done while the weights are released."""
        if MemoryTag.WEIGHTS in self.released:
            raise RequestRejected(
                "the weights are released: resume_memory_occupation(['weights']) first", status
            )

    def _require_memory_saver(self) -> None:
        if not self.is_enabled:
            raise RequestRejected(
                "memory_saver_backend is 'none', so all memory stays resident: start the engine with another",
                409,
            )

    def _report(self, tag: MemoryTag) -> TagReport:
        memory = self._memories[tag]
        parked_bytes = self._page_store.num_bytes if tag is MemoryTag.KV_CACHE else 0
        report = TagReport(
            state="released" if tag in self.released else "resident",
            virtual_bytes=memory.virtual_bytes,
            resident_bytes=memory.resident_bytes,
            backup_bytes=memory.backup_bytes + parked_bytes,
        )
        if tag is not MemoryTag.WEIGHTS:
            return report
        content = self.content.report()
        return structs.replace(
            report, content=content.content, num_missing=content.num_missing, missing=content.missing
        )


def _out_of_memory_refused(work: Work[T]) -> Work[T]:
    """Do the work; a lack of memory is refused."""
    try:
        return (yield from work)
    except OutOfDeviceMemory as error:
        raise error.refusal(
            f"not enough device memory for all of kv_cache: {error.needed_bytes} bytes are needed, "
            f"{error.free_bytes} are free. It is released again; free memory and try again"
        ) from error


def _sentence(verb: str, tags: list[MemoryTag]) -> str:
    return f"{verb} {', '.join(tags)}." if tags else "Nothing to do."
