"""Replaces replicas of a fleet that die, and brings the new ones to the state of the live ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgspec

from ebbtide.ray.controller import FleetController, Replica, replica_name
from ebbtide.ray.engine import RayEngine
from ebbtide.ray.errors import ActorDied
from ebbtide.srt.errors import EbbtideError, EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import AdapterReport

logger = logging.getLogger(__name__)

# The most attempts in a row to start a replica, and the pause between them.
MAX_ATTEMPTS: Final = 3
RETRY_S: Final = 2.0
# Interval of checks whether a live replica can give its weights.
LOOK_S: Final = 0.5


class Supervisor:
    """Watches replicas, and replaces those that die.

    Args:
        start: starts the engine of a slot; its second argument has changes to the engine's arguments.
        threads: the pool in which engines are started.

    Attributes:
        failure: why the fleet has ended; empty: it has not.
        deaths: by slot, why the last replica died, or a new one did not start.
    """

    def __init__(
        self,
        controller: FleetController,
        start: Callable[[int, Mapping[str, Any]], RayEngine],
        threads: ThreadPoolExecutor,
    ) -> None:
        self.failure = ""
        self.deaths: dict[int, str] = {}
        self._controller = controller
        self._start = start
        self._threads = threads
        # By slot, what a new replica that has started waits for.
        self._waits: dict[int, str] = {}
        self._changes = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Begin to watch all replicas, in this event loop."""
        self._tasks += [asyncio.create_task(self._watch(one.slot)) for one in self._controller.replicas]

    async def end(self) -> None:
        """Stop watching, and end all requests that wait for a replica."""
        self.failure = "the fleet has been shut down"
        self._note_change()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self._controller.living:
            # Its engine ends next: its requests then go nowhere else.
            replica.die(self.failure)
        await self._controller.end()

    async def next_change(self) -> None:
        """Wait until a replica dies, begins to serve, or is given up."""
        await self._changes.wait()

    async def wait_for_all(self) -> None:
        """Wait until every replica serves, or one was given up."""
        while len(self._controller.living) < len(self._tasks) and not any(
            task.done() for task in self._tasks
        ):
            await self.next_change()

    def why_out(self, slot: int) -> str:
        """Why the replica of this slot does not serve."""
        waits_for = self._waits.get(slot)
        return self.deaths[slot] if waits_for is None else f"it has started, and waits: {waits_for}"

    async def _watch(self, slot: int) -> None:
        """Replace the replica of a slot whenever it dies, until that fails."""
        while True:
            replica = self._controller.replicas[slot]
            await replica.watch()
            logger.warning(
                "%s is taken out with %d requests: %s", replica.name, replica.num_live, replica.reason
            )
            self.deaths[slot] = replica.reason
            self._controller.bury(replica)
            self._note_change()
            await asyncio.to_thread(replica.engine.kill)
            if not await self._replace_soon(replica):
                if not self._controller.living:
                    reasons = "; ".join(f"{replica_name(one)}: {why}" for one, why in self.deaths.items())
                    self.failure = f"no replica of the fleet is left, nor are its weights ({reasons})"
                self._note_change()
                return

    async def _replace_soon(self, dead: Replica) -> bool:
        """Try to replace a dead replica, up to `MAX_ATTEMPTS` times; returns whether the new one serves."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._replace(dead)
                return True
            except EbbtideError as error:
                logger.warning("%s did not come back (%d): %s", dead.name, attempt, error)
                self.deaths[dead.slot] = str(error)
            await asyncio.sleep(RETRY_S)
        return False

    async def _replace(self, dead: Replica) -> None:
        """Start a replica in place of a dead one, and let it serve what the others serve.

        Raises:
            EbbtideError: it does not start, or dies, or no live replica has the weights.
        """
        # It takes a live replica's weights. If there is none, it loads the first ones, if they never changed.
        from_peer = {"load_format": "dummy"} if self._controller.living else {}
        if not from_peer and self._controller.has_committed:
            raise EngineError("no replica is left to take the weights from")
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        engine = await loop.run_in_executor(self._threads, self._start, dead.slot, from_peer)
        replica = Replica(dead.slot, dead.life + 1, engine)
        started_s = time.monotonic()
        try:
            while from_peer and (obstacle := await self._admit(replica)):
                if obstacle != self._waits.get(dead.slot):
                    logger.warning("%s has started, and waits: %s", replica.name, obstacle)
                    self._waits[dead.slot] = obstacle
                await asyncio.sleep(LOOK_S)
        except BaseException:
            await asyncio.to_thread(engine.kill)
            raise
        finally:
            self._waits.pop(dead.slot, None)
        if not from_peer:
            self._controller.admit(replica)
        logger.warning(
            "%s serves again: %.1f s to start, %.1f s to become as the others",
            *(replica.name, started_s - began_s, time.monotonic() - started_s),
        )
        self._note_change()

    async def _admit(self, replica: Replica) -> str:
        """Bring a new replica to the state of the live ones, and let it serve.

        Returns what it must wait for; empty: it serves.
        """
        async with self._controller.without("session"):
            peers = self._controller.living
            obstacle = await bring_up_to_date(replica, peers)
            if obstacle:
                return obstacle
            async with self._controller.without("adapters"):
                peer = min(self._controller.living, key=lambda one: len(one.lacks), default=None)
                try:
                    if peer is not None:
                        await take_adapters(replica, peer)
                except ActorDied:
                    if await _lives(replica):
                        return "the replica that was to tell of its adapters has died"
                    raise
                self._controller.admit(replica)
            # The new replica did not get a pause or release that came meanwhile.
            for peer in peers:
                if not peer.has_died.is_set():
                    await imitate(replica, peer)
                    break
            return ""

    def _note_change(self) -> None:
        self._changes.set()
        self._changes = asyncio.Event()


async def bring_up_to_date(replica: Replica, living: Sequence[Replica]) -> str:
    """Give a new replica the weights of a live one, and pause and release the same as there.

    The caller must keep weight updates waiting. Returns what the replica must wait for; empty: it is done.

    Raises:
        EngineError: no replica lives, the new one has died, or its weights differ afterwards.
    """
    if not living:
        raise EngineError("no replica is left to take the weights from")
    peer = min(living, key=lambda one: one.num_live)
    try:
        state = await peer.ask("server_info")
        weights = state["state"]["tags"]["weights"]
        if state["weight_update"]["session_open"]:
            return "a weight update session is open"
        if weights["state"] != "resident":
            return f"the weights of {peer.name} are {weights['state']}"
        if weights.get("content", "valid") != "valid":
            return f"the weights of {peer.name} are {weights['content']}"
        version = (await peer.ask("model_info"))["weight_version"]
        began_s = time.monotonic()
        # At the same time, since a busy replica takes long for its checksum, which it computes piece by piece
        # between forward passes.
        num_bytes, theirs = await asyncio.gather(
            replica.ask("take_weights", peer.engine.actor, version), peer.ask("check_weights")
        )
        logger.info(
            "%s has the weights of %s: bytes=%s s=%.1f",
            *(replica.name, peer.name, num_bytes, time.monotonic() - began_s),
        )
        mine = await replica.ask("check_weights")
        await imitate(replica, peer)
    except ActorDied:
        if peer.engine is not replica.engine and await _lives(replica):
            return f"{peer.name}, which was to give its weights, has died"
        raise
    except RequestRejected as error:
        return f"it cannot take the weights of {peer.name} now: {error}"
    if mine["per_engine_checksum"] != theirs["per_engine_checksum"]:
        raise EngineError(f"{replica.name} holds other weights than {peer.name} after taking them")
    return ""


async def imitate(replica: Replica, peer: Replica) -> None:
    """Pause and release the same as on a live replica; repeat if that changes meanwhile."""
    while (theirs := await _state(peer))[:2] != (mine := await _state(replica))[:2]:
        for method, tags in (
            ("release_memory_occupation", theirs.released - mine.released),
            ("resume_memory_occupation", mine.released - theirs.released),
        ):
            if tags:
                await replica.ask(method, sorted(tags))
        if theirs.is_paused:
            await replica.ask("pause_generation", theirs.mode)
        else:
            await replica.ask("continue_generation")


class _State(NamedTuple):
    """Whether generation is paused, which tags are released, and the mode of the pause."""

    is_paused: bool
    released: frozenset[str]
    mode: str


async def _state(replica: Replica) -> _State:
    state = (await replica.ask("server_info"))["state"]
    generation = state["generation"]
    released = frozenset(tag for tag, report in state["tags"].items() if report["state"] == "released")
    return _State(generation["state"] == "paused", released, generation.get("mode") or "")


async def _lives(replica: Replica) -> bool:
    try:
        await replica.ask("model_info")
    except EngineError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ adapters


async def take_adapters(replica: Replica, peer: Replica) -> None:
    """Load the adapters of a live replica from their folders; note those that cannot be loaded in `lacks`.

    The caller must keep loads waiting. Adapters that were sent as tensors, or are no longer in their folder,
    cannot be loaded. The next load of a name makes it available again.
    """
    theirs, mine = await _adapters_of(peer), await _adapters_of(replica)
    replica.lacks = set(peer.lacks)
    for name in mine.keys() | theirs.keys():
        wanted, given = theirs.get(name, []), mine.get(name, [])
        if wanted == given:
            continue
        if given:
            await replica.ask("unload_lora_adapter", name, timeout_s=0)
        has = [await _load(replica, name, one) for one in wanted]
        if has and not has[-1]:
            # Unload the name, which would stand for an earlier version here.
            if any(has):
                await replica.ask("unload_lora_adapter", name, timeout_s=0)
            has = [False] * len(has)
            replica.lacks.add(name)
        replica.lacks |= {
            f"{name}@{one.version}" for one, there in zip(wanted, has, strict=True) if not there
        }
    if replica.lacks:
        logger.warning(
            "%s has no adapter %s, and gets no requests for it: load it again",
            *(replica.name, ", ".join(sorted(replica.lacks))),
        )


async def _load(replica: Replica, name: str, wanted: AdapterReport) -> bool:
    """Load a version of an adapter from its folder; returns whether the replica has it now."""
    if not wanted.path:
        return False
    try:
        reply = await replica.ask(
            "load_lora_adapter", name, wanted.path, lora_version=wanted.version, pinned=wanted.pinned
        )
    except RequestRejected as refusal:
        logger.warning("%s cannot load %s@%s: %s", replica.name, name, wanted.version, refusal)
        return False
    if reply["checksum"] == wanted.checksum:
        return True
    await replica.ask("unload_lora_adapter", name, lora_version=wanted.version, timeout_s=0)
    return False


async def _adapters_of(replica: Replica) -> Mapping[str, Sequence[AdapterReport]]:
    """A replica's adapter versions by name. The last one is that for which the name stands."""
    found: dict[str, list[AdapterReport]] = {}
    reports = (await replica.ask("server_info"))["state"]["adapters"]
    for one in msgspec.convert(reports, list[AdapterReport]):
        found.setdefault(one.name, []).append(one)
    return found
