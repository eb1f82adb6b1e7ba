"""Loading, unloading and fetching adapters.

An adapter is checked on every rank, written to a slot that no request reads, and committed between two
forward passes. Source: control_semantics section 2.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from msgspec import structs

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import (
    Activity,
    CopyStream,
    DeadlinePassed,
    HandlerTable,
    Operation,
    Requests,
    Superseded,
    Work,
)
from ebbtide.srt.managers.control.adapters import CONTROL_CHARACTERS, AdapterBook, AdapterVersion
from ebbtide.srt.managers.control.memory_occupation import MemoryOccupation
from ebbtide.srt.managers.control.operations import Line, Operations, in_turn
from ebbtide.srt.managers.control.pace import Pace, Ranks, Stall, at_once, guarded
from ebbtide.srt.managers.control.weights.update import WeightUpdates
from ebbtide.srt.managers.io_struct import (
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    LoadLoRAAdapterReqOutput,
    LoadRequest,
    UnloadLoRAAdapterReqInput,
    UnloadLoRAAdapterReqOutput,
)
from ebbtide.srt.slices import Slices

logger = logging.getLogger(__name__)

T = TypeVar("T")

RELEASED = "the weights were released in between"


class AdapterPlan(Protocol):
    """An adapter that was read and fits the model.

    Attributes:
        digest: checksum of its config and tensors, whatever device they are on; empty: it was not asked for.
    """

    digest: str
    num_tensors: int
    num_bytes: int

    def write(self, slot: int) -> Slices[None]:
        """Launch the copies to a slot.

        RequestRejected (400): what was written holds NaN or Inf, and that is refused.
        """

    def detach(self) -> Slices[None]:
        """After every copy has run: see `WritePlan.detach`."""

    def close(self) -> None:
        """Give the sender's memory back, at any point of the load. Idempotent."""


class AdapterMemory(Protocol):
    """The slots of adapters on this rank.

    They belong to the tag `weights`. Their contents survive every release of it, even one without a backup.
    """

    num_slots: int

    @property
    def copies(self) -> CopyStream: ...

    def open(self, request: LoadRequest, *, with_digest: bool) -> Slices[AdapterPlan]:
        """Read an adapter as far as needed to check it.

        RequestRejected (400): it cannot be read, or does not fit the model.
        """

    def is_read(self, slot: int) -> bool:
        """Whether the last launched forward pass reads the slot."""

    def save(self, slot: int) -> object:
        """Launch a copy of a slot to host memory. RequestRejected (409): the host has no room."""

    def restore(self, slot: int, copy: object) -> None:
        """Launch the copy of saved contents to a slot."""


@dataclass(eq=False)
class AdapterLoads:
    """Handles the control requests about adapters, and brings adapters into slots for requests.

    Args:
        given_slots: None: adapters are not enabled.

    Attributes:
        book: which adapters there are.
    """

    _given_slots: AdapterMemory | None
    book: AdapterBook
    _memory: MemoryOccupation
    _updates: WeightUpdates
    _requests: Requests
    _operations: Operations
    _ranks: Ranks
    _pace: Pace

    def __post_init__(self) -> None:
        self._line = Line()
        self._is_fetching = False
        # Counts releases of the weights. A copy to a slot sees by it that the slot is gone.
        self._num_releases = 0
        self.handlers: HandlerTable = {
            LoadLoRAAdapterReqInput: self.load,
            LoadLoRAAdapterFromTensorsReqInput: self.load,
            UnloadLoRAAdapterReqInput: self.unload,
        }
        if self._given_slots is not None:
            self._memory.on_weights_release.append(self._end_for_release)

    # ------------------------------------------------------------------------------------- control requests

    def load(self, request: LoadRequest) -> Operation:
        """Load a new version of an adapter."""
        self._require_enabled()
        self._check(request)
        try:
            return (yield from self._load(request))
        except Exception as error:
            failure = error
            if isinstance(error, DeadlinePassed):
                message = f"{request.lora_name} was not loaded in time, nothing has changed"
                failure = RequestRejected(message, 409)
            if request.session_id is not None:
                # The session is incomplete without this adapter.
                with suppress(RequestRejected):
                    label = frozenset({f"{request.lora_name}@{request.version}"})
                    self._updates.session_named(request.session_id).refused.add(str(failure), label)
            raise failure from failure.__cause__

    def unload(self, request: UnloadLoRAAdapterReqInput) -> Operation:
        """Unload an adapter, or one version of it."""
        self._require_enabled()
        version = None if request.lora_version is None else str(request.lora_version)
        with self._line.turn() as has_come:
            yield from in_turn(has_come, f"{request.lora_name} stays loaded", 409)
            self.book.meant(request.lora_name, version)
            yield Activity.BOUNDARY
            yield Activity.PREPARED
            removed = self.book.remove(request.lora_name, version)
        logger.info("adapter unloaded: %s", ", ".join(one.label for one in removed))
        try:
            while request.timeout_s != 0 and any(one.num_live for one in removed):
                yield Activity.WAITING
        except DeadlinePassed:
            logger.info("requests still run on %s", request.lora_name)
        num_in_use = sum(one.num_live for one in removed)
        goes_on = f" {num_in_use} requests go on with it to their ends." if num_in_use else ""
        return UnloadLoRAAdapterReqOutput(
            changed=True,
            num_in_use=num_in_use,
            loaded_adapters=self.book.current,
            message=f"Unloaded {', '.join(one.label for one in removed)}.{goes_on}",
        )

    def _load(self, request: LoadRequest) -> Operation:
        name, version = request.lora_name, request.version
        with self._line.turn() as has_come, ExitStack() as opened:
            plan = yield from self._open(request, opened)
            yield from in_turn(has_come, f"{name} was not loaded", 409)
            self._check(request)
            if self.book.check_load(name, version, plan.digest, pinned=request.pinned):
                yield Activity.BOUNDARY
                yield Activity.PREPARED
                assert version is not None, "only what has a version is known"
                message = f"{name}@{version} was loaded before."
                return self._reply(name, version, plan, message, is_changed=False)
            if version is not None and (name, version) in self.book.staged:
                if request.session_id is None:
                    raise RequestRejected(f"{name}@{version} is staged in the open session", 409)
                return self._reply(name, version, plan, "It was staged before.", is_changed=False)
            if request.session_id is not None:
                self.book.check_stage(name)
            held = opened.enter_context(ExitStack())
            slot = yield from self._take_slot(name, held)
            yield from self._copied(plan.write(slot))
            tried = ""
            if request.canary is not None:
                yield Activity.BOUNDARY
                tried = " " + (yield from self._updates.trials.run(request.canary, at_once, slot))
            commit = partial(self._commit, request, plan.digest, slot)
            if request.session_id is not None and version is not None:
                self.book.staged[name, version] = plan.digest
                held.callback(self.book.staged.pop, (name, version), None)
                session = self._updates.session_named(request.session_id)
                session.joined.append(commit)
                session.held.push(held.pop_all())
                session.refused.make_up(frozenset({f"{name}@{version}"}))
                return self._reply(name, version, plan, f"Staged {name}@{version}.", is_changed=True)
            if self._requests.moves_running(name, request.in_flight):
                yield Activity.BOUNDARY
            yield Activity.PREPARED
            stall = Stall()
            with stall.measure():
                added, num_moved = commit()
            self._give_back(plan)
        logger.info(
            "adapter loaded: %s tensors=%d bytes=%d stall_ms=%.1f",
            *(added.label, plan.num_tensors, plan.num_bytes, stall.longest_s * 1e3),
        )
        reply = self._reply(name, added.version, plan, f"Loaded {added.label}.{tried}", is_changed=True)
        return structs.replace(reply, num_moved=num_moved, stall_ms=stall.longest_s * 1e3)

    def _give_back(self, plan: AdapterPlan) -> None:
        """Unmap the sender's memory after the reply, since the driver waits for passes when it unmaps."""
        unmapping = self._pace.turns(plan.detach(), Activity.WORKING)
        self._operations.go_on(self._ranks.phase(Activity.WORKING, unmapping))

    def _commit(self, request: LoadRequest, digest: str, slot: int) -> tuple[AdapterVersion, int]:
        """Make the name mean what is in the slot; returns the version, and how many requests moved to it."""
        path, may_leave, instead_of = "", False, None
        if isinstance(request, LoadLoRAAdapterReqInput):
            path, may_leave, instead_of = request.lora_path, request.may_leave, request.instead_of
        added = self.book.add(
            *(request.lora_name, request.version),
            digest=digest,
            path=path,
            slot=slot,
            pinned=request.pinned,
            may_leave=may_leave,
            instead_of=instead_of,
        )
        return added, self._requests.move_to(added, request.in_flight)

    def _open(self, request: LoadRequest, opened: ExitStack) -> Work[AdapterPlan]:
        """Read the adapter and check it against the slots, on every rank."""

        def read() -> Work[AdapterPlan]:
            is_stored = isinstance(request, LoadLoRAAdapterReqInput)
            slices = self._slots.open(request, with_digest=is_stored or request.version is not None)
            _, plan = yield from self._pace.turns(slices, Activity.COPYING)
            opened.enter_context(closing(plan))
            return plan

        plan, facts = yield from self._ranks.survey(
            Activity.COPYING, read(), lambda plan: (plan.digest, plan.num_tensors)
        )
        if len(set(map(tuple, facts))) > 1:
            raise RequestRejected(f"every rank must be given the same tensors of {request.lora_name}")
        return plan

    def _reply(
        self, name: str, version: str, plan: AdapterPlan, message: str, *, is_changed: bool
    ) -> LoadLoRAAdapterReqOutput:
        return LoadLoRAAdapterReqOutput(
            changed=is_changed,
            lora_name=name,
            lora_version=version,
            checksum=plan.digest,
            num_tensors=plan.num_tensors,
            num_bytes=plan.num_bytes,
            num_moved=0,
            stall_ms=0.0,
            loaded_adapters=self.book.current,
            message=message,
        )

    def _check(self, request: LoadRequest) -> None:
        self.book.check_name(request.lora_name)
        version = request.version
        if version is not None and (not 0 < len(version) <= 256 or CONTROL_CHARACTERS.search(version)):
            raise RequestRejected(
                f"lora_version: expected 1 to 256 characters that print, got {len(version)}: {version[:64]!r}"
            )
        if getattr(request, "added_tokens_config", None):
            raise RequestRejected("added_tokens_config: adapters that add tokens are not supported")
        if request.canary is not None:
            self._updates.trials.check(request.canary)
            if request.session_id is not None or not self._memory.allows_forward:
                raise RequestRejected("canary: not in a session, nor while the weights cannot run", 409)
        if request.session_id is not None:
            self._updates.session_named(request.session_id)
            if version is None:
                raise RequestRejected("lora_version: expected one with a session_id")
        self._memory.require_weights()  # The slots of adapters are released with them.

    @property
    def _slots(self) -> AdapterMemory:
        assert self._given_slots is not None, "without slots there is no adapter"
        return self._given_slots

    def _require_enabled(self) -> None:
        if self._given_slots is None:
            raise RequestRejected("LoRA is not enabled: start the server with --enable-lora")

    # ------------------------------------------------------------------------------------------------ slots

    def fetch_wanted(self) -> None:
        """Begin to bring the adapter that a request waits for into a slot."""
        if self.book.wanted is not None and not self._is_fetching:
            self._is_fetching = True
            self._operations.go_on(self._fetch(self.book.wanted))

    def _fetch(self, version: AdapterVersion) -> Work[None]:
        num_releases = self._num_releases
        try:
            with ExitStack() as opened:
                slot = yield from self._take_slot(version.name, opened)
                copy = version.copy
                if copy is None:
                    return  # Its last request has ended.
                yield from self._copied(at_once(lambda: self._slots.restore(slot, copy)))
                if version.copy is not None:
                    version.slot = slot
        except (RequestRejected, EngineError) as error:
            # If the weights were released meanwhile, requests ask for it again after the resume.
            if num_releases == self._num_releases:
                yield Activity.BOUNDARY
                self._requests.end_on(
                    version, f"the adapter {version.label} could not be brought in: {error}"
                )
        finally:
            self._is_fetching = False
            if self.book.wanted is version:
                self.book.wanted = None

    def _take_slot(self, name: str, opened: ExitStack) -> Work[int]:
        """Take a slot for a version of this name, until the stack is closed.

        Its former contents are saved to host memory first.
        """
        while True:
            found = self.book.slot_for(name)
            if found is None:
                with self.book.awaiting_slot():
                    yield Activity.WAITING
                continue
            slot, holder = found
            with ExitStack() as attempt:
                attempt.enter_context(self.book.taken(slot))
                if holder is not None and holder.copy is None:
                    yield from self._save(holder, slot)
                if holder is None or self.book.vacate(holder, name):
                    opened.push(attempt.pop_all())
                    if self._slots.is_read(slot):
                        # Its requests have ended or were retracted, but the pass in flight still reads it.
                        yield Activity.BOUNDARY
                    return slot

    def _save(self, version: AdapterVersion, slot: int) -> Work[None]:
        """Save a slot to host memory, on all ranks or on none."""
        copy = yield from self._copied(at_once(lambda: self._slots.save(slot)))
        if version.slot == slot:
            version.copy = copy

    def _copied(self, slices: Slices[T]) -> Work[T]:
        """Copy from or to slots while forward passes run; passes never write to slots."""
        num_releases = self._num_releases

        def require_slots() -> None:
            if num_releases != self._num_releases:
                raise RequestRejected(RELEASED, 409)

        work = self._pace.turns(guarded(slices, require_slots), Activity.COPYING, copies=self._slots.copies)
        _, result = yield from self._ranks.phase(Activity.COPYING, work)
        require_slots()
        return result

    def _end_for_release(self) -> None:
        """End loads and copies to slots, because the weights are about to be released.

        The contents of slots come back with their memory.
        """
        self._num_releases += 1
        refusal = Superseded(f"{RELEASED}: resume them, then load again", 409)
        for kind in (LoadLoRAAdapterReqInput, LoadLoRAAdapterFromTensorsReqInput):
            self._operations.cancel(kind, refusal)
        while not self._slots.copies.copies_done():
            time.sleep(1e-4)
