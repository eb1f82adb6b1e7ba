"""The book of adapters: which exist, in which slot or host memory each is, and what requests may run on.

Plain bookkeeping without clock or torch, the same on every rank. `adapter_loads` changes it between forward
passes; the schedule policy asks it in each pass.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ebbtide.srt.errors import RequestRejected, first_few
from ebbtide.srt.managers.io_struct import AdapterReport

MAX_NAME_LENGTH: Final = 256
# How many checksums are remembered, also of versions that are gone: a version may never change its bytes.
MAX_REMEMBERED: Final = 1 << 14
_NAME: Final = re.compile(r"[^\s@\x00-\x1f\x7f]+")
CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One immutable version of an adapter.

    Attributes:
        number: unique, also among versions that are gone.
        digest: checksum of its config and tensors; empty: it was not computed.
        path: the folder that it was loaded from; empty: it came as tensors.
        slot: the slot that forward passes read; None: it is in none.
        copy: its slot's contents in host memory, from `AdapterMemory.save`; None: not saved yet.
        is_pinned: it keeps its slot.
        is_reachable: new requests may name it.
        is_wanted: a request waits until it is in a slot.
        may_leave: its name may be unloaded to make room for another one.
        num_live: requests that run or wait to run on it.
        num_running: those of them that hold KV.
        num_started: requests that have begun to run on it since it last became active.
        last_used: the count of admissions at its last one; before that, at its load.
    """

    name: str
    version: str
    number: int
    digest: str
    path: str
    slot: int | None
    copy: object | None = None
    is_pinned: bool = False
    is_reachable: bool = True
    is_wanted: bool = False
    may_leave: bool = False
    num_live: int = 0
    num_running: int = 0
    num_started: int = 0
    last_used: int = 0

    @property
    def label(self) -> str:
        """Its name in answers and requests: `name@version`."""
        return f"{self.name}@{self.version}"

    @property
    def namespace(self) -> str:
        """Its part of the prefix cache's key: versions share no KV."""
        return f"adapter={self.number}"

    @property
    def is_active(self) -> bool:
        """Whether a request runs on it, or waits until it is in a slot."""
        return self.is_wanted or self.num_running > 0


@dataclass(eq=False)
class AdapterBook:
    """The adapters, by name.

    At most `num_active` versions run at a time. There is one slot more, so that a version can be loaded while
    others run, or run beside pinned ones. If more versions are asked for, they take turns.

    Args:
        num_slots: slots that forward passes read, 2 or more; 0: there are no adapters.
        keep_versions: how many earlier versions of a name requests may still ask for.
        max_names: how many adapters there may be; None: no limit.
        reserved: names that mean the base model.
        turn: how many requests may begin to run on a version before it must make room for another.

    Attributes:
        wanted: the version to bring into a slot next, because a request waits for it.
        staged: checksums of versions that are loaded in a session and not committed, by (name, version).
        reports: the versions that requests may ask for; a new list after each change.
    """

    num_slots: int
    _keep_versions: int
    max_names: int | None = None
    reserved: frozenset[str] = frozenset()
    turn: int = 1

    def __post_init__(self) -> None:
        self.num_active = max(0, self.num_slots - 1)
        self.wanted: AdapterVersion | None = None
        # The versions of each name, in the order of their loads. The name means the last one.
        self._versions: dict[str, list[AdapterVersion]] = {}
        self._retired: list[AdapterVersion] = []
        self.staged: dict[tuple[str, str], str] = {}
        self._taken: set[int] = set()
        self._digests: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._num_loads = self._num_admissions = 0
        self._active: set[AdapterVersion] = set()
        self._pinned: set[AdapterVersion] = set()
        # While a request waits for a slot, no more requests begin on this version, to free its slot.
        self._leaving: AdapterVersion | None = None
        self._is_blocked = False
        self._num_loads_waiting = 0
        self.reports: list[AdapterReport] = []

    # ---------------------------------------------------------------------------------------------- asking

    @property
    def current(self) -> dict[str, str]:
        """The version that each name means."""
        return {name: versions[-1].version for name, versions in self._versions.items()}

    def resolve(self, asked: str) -> AdapterVersion:
        """The version that a request for `name` or `name@version` runs on.

        RequestRejected (404): there is none.
        """
        name, at, version = asked.partition("@")
        return self.meant(name, version if at else None)[-1]

    def meant(self, name: str, version: str | None) -> list[AdapterVersion]:
        """The versions of a name, or the one asked for; the latest is last.

        RequestRejected (404): there is none.
        """
        found = [one for one in self._versions.get(name, ()) if version in (None, one.version)]
        if not found:
            asked = name if version is None else f"{name}@{version}"
            known = first_few([one.label for versions in self._versions.values() for one in versions])
            there_are = f"there are {known}" if known else "none is loaded"
            raise RequestRejected(f"the adapter {asked[:MAX_NAME_LENGTH]!r} is not loaded: {there_are}", 404)
        return found

    def all(self) -> Iterator[AdapterVersion]:
        """Every version that requests run on or may ask for."""
        for versions in self._versions.values():
            yield from versions
        yield from self._retired

    # --------------------------------------------------------------------------------------- load and unload

    def check_name(self, name: str) -> None:
        """Refuse (400) a name that no request could ask for."""
        if not 0 < len(name) <= MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
            raise RequestRejected(
                f"lora_name: expected 1 to {MAX_NAME_LENGTH} characters without spaces and '@', "
                f"got {name[:MAX_NAME_LENGTH]!r}"
            )
        if name in self.reserved:
            raise RequestRejected(f"lora_name: {name!r} means the base model, expected another name")

    def check_load(self, name: str, version: str | None, digest: str, *, pinned: bool) -> bool:
        """Refuse a load that cannot be. Returns whether the same bytes are loaded already.

        RequestRejected (409): this version exists with other bytes, or there is no room.
        """
        if version is not None:
            known = self._digests.get((name, version), self.staged.get((name, version)))
            if known is not None and known != digest:
                raise RequestRejected(
                    f"{name}@{version} is there with other contents (checksum {known or 'unknown'}, not "
                    f"{digest}): a version never changes, give the new one another lora_version",
                    409,
                )
            if any(one.version == version for one in self._versions.get(name, ())):
                return True
        self._check_room(name, pinned=pinned)
        return False

    def _check_room(self, name: str, *, pinned: bool) -> None:
        limit = self.max_names
        if self._is_full(name) and self._leaving_name() is None:
            raise RequestRejected(
                f"max_loaded_loras is {limit}: {first_few(list(self._versions))} are loaded. Unload one",
                409,
            )
        others = sorted(one.name for one in self._pinned if one.name != name)
        if len(others) >= self.num_active:
            raise RequestRejected(
                f"every slot is taken by a pinned adapter (max_loras_per_batch is {self.num_active}): "
                f"{first_few(others)}. Unload one of them, or load it unpinned",
                409,
            )
        staged = [one for one, _ in self.staged if one != name]
        unpinned = [one for one in self._versions if one != name and one not in others] + staged
        if pinned and len(others) + len(staged) + 1 >= self.num_active and unpinned:
            raise RequestRejected(
                f"pinned: no slot would be left for {first_few(unpinned)} (max_loras_per_batch is "
                f"{self.num_active})",
                409,
            )

    def _is_full(self, name: str) -> bool:
        limit = self.max_names
        return limit is not None and name not in self._versions and len(self._versions) >= limit

    def _leaving_name(self, first: str | None = None) -> str | None:
        """The name to unload for another one: `first`, else one that no request uses if possible."""

        def rank(name: str) -> tuple[bool, bool, int, str]:
            versions = self._versions[name]
            is_in_use = any(one.num_live for one in versions)
            return name != first, is_in_use, max(one.last_used for one in versions), name

        leaving = [name for name, versions in self._versions.items() if versions[-1].may_leave]
        return min(leaving, key=rank, default=None)

    def check_stage(self, name: str) -> None:
        """Refuse (409) a staged adapter that would leave requests without a slot until the session ends."""
        kept = [f"{staged}@{version}" for staged, version in self.staged]
        kept += sorted(one.label for one in self._pinned if one.name != name)
        if len(kept) >= self.num_active:
            raise RequestRejected(
                f"session_id: no slot would be left for requests (max_loras_per_batch is {self.num_active}): "
                f"{first_few(kept)} are staged or pinned. End the session first",
                409,
            )

    def add(
        self,
        name: str,
        version: str | None,
        *,
        digest: str,
        path: str,
        slot: int,
        pinned: bool,
        may_leave: bool = False,
        instead_of: str | None = None,
    ) -> AdapterVersion:
        """Make the name mean what is in this slot."""
        if self._is_full(name) and (leaving := self._leaving_name(instead_of)) is not None:
            self.remove(leaving, None)
        self._num_loads += 1
        if version is None:
            numbers = map(str, itertools.count(self._num_loads))
            version = next(one for one in numbers if (name, one) not in self._digests)
        self._digests[name, version] = digest
        if len(self._digests) > MAX_REMEMBERED:
            self._digests.popitem(last=False)
        added = AdapterVersion(name, version, self._num_loads, digest, path, slot, is_pinned=pinned)
        added.may_leave, added.last_used = may_leave, self._num_admissions
        versions = self._versions.setdefault(name, [])
        for one in versions:
            one.is_pinned = False
            self._weigh(one)
        versions.append(added)
        self._weigh(added)
        self._retire(versions[: -1 - self._keep_versions])
        return added

    def remove(self, name: str, version: str | None) -> list[AdapterVersion]:
        """Unload a name, or one version of it; returns the versions."""
        removed = self.meant(name, version)
        self._retire(removed)
        return removed

    def _retire(self, retired: list[AdapterVersion]) -> None:
        for one in retired:
            versions = self._versions[one.name]
            versions.remove(one)
            if not versions:
                del self._versions[one.name]
            one.is_reachable = one.is_pinned = False
            self._weigh(one)
            self._retired.append(one)
        self._forget_unused()
        self.reports = [
            AdapterReport(
                name=one.name,
                version=one.version,
                path=one.path,
                pinned=one.is_pinned,
                checksum=one.digest,
            )
            for versions in self._versions.values()
            for one in versions
        ]

    def _forget_unused(self) -> None:
        for one in [one for one in self._retired if not one.num_live]:
            self._retired.remove(one)
            one.slot = one.copy = None

    # ------------------------------------------------------------------------------------------------ slots

    @contextmanager
    def taken(self, slot: int) -> Iterator[None]:
        """Within, this slot is given to nobody else."""
        self._taken.add(slot)
        try:
            yield
        finally:
            self._taken.discard(slot)

    def slot_for(self, name: str) -> tuple[int, AdapterVersion | None] | None:
        """A slot that may be overwritten, and the version in it; None: there is none now.

        A free slot; else that of the version that is unused for longest. A pinned one of this name is last.
        """
        holders = {one.slot: one for one in self.all() if one.slot is not None}
        free = [slot for slot in range(self.num_slots) if slot not in holders and slot not in self._taken]
        if free:
            return free[0], None
        idle = [one for slot, one in holders.items() if slot not in self._taken and self._may_go(one, name)]
        if not idle:
            return None
        chosen = min(idle, key=lambda one: (one.is_pinned, one.is_reachable, one.last_used, one.number))
        assert chosen.slot is not None
        return chosen.slot, chosen

    def vacate(self, version: AdapterVersion, name: str) -> bool:
        """Take a version's slot away for this name. False: a request has begun to use it."""
        if not self._may_go(version, name):
            return False
        version.slot = None
        return True

    def _may_go(self, version: AdapterVersion, name: str) -> bool:
        is_kept = version.is_pinned and version.name != name
        return not version.num_running and not version.is_wanted and not is_kept

    # --------------------------------------------------------------------------------------------- requests

    def begin_pass(self) -> None:
        """Begin to admit requests of a pass. If a load waits for a slot, one version makes room."""
        self._is_blocked = False
        if self._num_loads_waiting:
            self._make_room()

    @contextmanager
    def awaiting_slot(self) -> Iterator[None]:
        """Within, a load waits for a slot, and requests must let it have one in the end."""
        self._num_loads_waiting += 1
        try:
            yield
        finally:
            self._num_loads_waiting -= 1

    def admits(self, version: AdapterVersion) -> bool:
        """Whether a request may begin to run on a version now. If not, it is fetched, or room is made."""
        if version.slot is None or version not in self._active:
            # Versions that are staged in a session take slots from those that requests share.
            others = self._active - {version}
            num_slots = len(others | self._pinned | {version}) + len(self.staged)
            if len(others) >= max(1, self.num_active - len(self.staged)) or num_slots > self.num_slots:
                self._make_room()
                return False
        if self._is_blocked and version is self._leaving and version.num_started >= self.turn:
            return False
        if version.slot is None:
            version.is_wanted = True
            self._weigh(version)
            self.wanted = self.wanted or version
            return False
        return True

    def _make_room(self) -> None:
        """Choose the version that admits no more requests, unless one is chosen and still runs."""
        self._is_blocked = True
        if self._leaving is None or not self._leaving.num_running:
            running = [one for one in self._active - self._pinned if one.num_running]
            self._leaving = max(running, key=lambda one: (one.num_started, one.number), default=None)

    def _weigh(self, version: AdapterVersion) -> None:
        """Update the sets of active and pinned versions for this one."""
        if not version.is_active:
            version.num_started = 0
        for versions, is_in in ((self._active, version.is_active), (self._pinned, version.is_pinned)):
            if is_in:
                versions.add(version)
            else:
                versions.discard(version)

    def join(self, version: AdapterVersion) -> None:
        """Note that a request wants to run on a version."""
        version.num_live += 1

    def leave(self, version: AdapterVersion) -> None:
        """Note that a request has ended, or moved to another version."""
        version.num_live -= 1
        if not version.num_live:
            self.give_up(version)
            self._forget_unused()

    def give_up(self, version: AdapterVersion) -> None:
        """Do not fetch a version any more, unless another request asks for it."""
        version.is_wanted = False
        self._weigh(version)
        if self.wanted is version:
            self.wanted = None

    def start(self, version: AdapterVersion) -> None:
        """Note that a request begins to run on a version."""
        assert version.slot is not None, "a request runs on an adapter that no pass can read"
        self._num_admissions += 1
        version.last_used = self._num_admissions
        version.num_running += 1
        version.num_started += 1
        version.is_wanted = False
        self._weigh(version)

    def stop(self, version: AdapterVersion) -> None:
        """Note that a request on a version no longer holds KV."""
        version.num_running -= 1
        self._weigh(version)
