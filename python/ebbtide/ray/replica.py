"""One life of a replica of a fleet, and what several of them say to one question."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ebbtide.ray.engine import RayEngine
from ebbtide.ray.errors import ActorDied
from ebbtide.srt.errors import EbbtideError, EngineError, RequestRejected

# A request may hear of a death sooner than whoever watches for it.
DEATH_NEWS_S: Final = 5.0


class Replica:
    """An engine of a fleet, until it dies; its successor is another one.

    Attributes:
        slot: its place in the fleet, which its successor takes.
        life: how many there were in that place before.
        num_live: requests that it is working on.
        has_died: set once it has been found dead, with `reason`.
    """

    def __init__(self, slot: int, life: int, engine: RayEngine) -> None:
        self.slot = slot
        self.life = life
        self.engine = engine
        self.num_live = 0
        self.has_died = asyncio.Event()
        self.reason = ""

    @property
    def name(self) -> str:
        return replica_name(self.slot)

    def die(self, reason: str) -> None:
        """Note that it is dead. Idempotent: the first reason counts."""
        if not self.has_died.is_set():
            self.reason = reason
            self.has_died.set()

    async def watch(self) -> None:
        """Return when it is dead, whoever notes it."""
        ended = asyncio.create_task(self.engine.async_ended())
        died: asyncio.Task[Any] = asyncio.create_task(self.has_died.wait())
        try:
            await asyncio.wait([ended, died], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.die(ended.result())
        finally:
            ended.cancel()
            died.cancel()

    async def is_cause(self, error: EngineError) -> bool:
        """Whether this error came of its death, rather than being one that it told."""
        if isinstance(error, ActorDied):
            self.die(str(error))
        try:
            async with asyncio.timeout(DEATH_NEWS_S):
                await self.has_died.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def working(self) -> Iterator[None]:
        """While it works on one more request."""
        self.num_live += 1
        try:
            yield
        finally:
            self.num_live -= 1

    async def call(self, method: str, *args: Any) -> Any:
        """A method of its actor that `Engine` does not have."""
        return await self.engine.ask(method, *args)

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of its engine, without the prefix of the coroutine."""
        return await getattr(self.engine, f"async_{method}")(*args, **kwargs)


def replica_name(slot: int) -> str:
    return f"replica {slot}"


class Answers:
    """What replicas made of one request.

    Attributes:
        done: the replies of those that did it.
        failed: the errors of those that did not, but live.
        dead: those that died meanwhile, and do not count.
    """

    def __init__(self) -> None:
        self.done: dict[Replica, Any] = {}
        self.failed: dict[Replica, EbbtideError] = {}
        self.dead: list[Replica] = []

    def require_all_done(self, note: str = "") -> None:
        """Raise what those say that did not do it.

        Args:
            note: what became of the others.

        Raises:
            RequestRejected: they refused.
            EngineError: one of them failed, or none is left.
        """
        if not self.failed:
            if not self.done:
                told = "; ".join(f"{replica.name}: {replica.reason}" for replica in self.dead)
                raise EngineError(f"no replica is left to do this ({told})")
            return
        told = told_by({replica.name: str(error) for replica, error in self.failed.items()})
        message = f"{told}. {note}" if note else told
        fields = {"replicas": [{"replica": one.name, "success": one in self.done} for one in self._all]}
        statuses = [error.status for error in self.failed.values() if isinstance(error, RequestRejected)]
        if len(statuses) == len(self.failed):
            raise RequestRejected(message, max(statuses), **fields)
        raise EngineError(message, **fields)

    @property
    def merged(self) -> Any:
        """The body of the first, with those of all by their names."""
        bodies = {replica.name: body for replica, body in self.done.items()}
        first = next(iter(bodies.values()))
        return {**first, "replicas": bodies} if isinstance(first, dict) else first

    @property
    def _all(self) -> list[Replica]:
        return sorted([*self.done, *self.failed], key=lambda replica: replica.slot)


async def gather(asked: Mapping[Replica, Coroutine[Any, Any, Any]]) -> Answers:
    """Wait until each has answered, or died."""
    results = await asyncio.gather(*asked.values(), return_exceptions=True)
    answers = Answers()
    for replica, result in zip(asked, results, strict=True):
        if isinstance(result, EngineError) and await replica.is_cause(result):
            answers.dead.append(replica)
        elif isinstance(result, EbbtideError):
            answers.failed[replica] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.done[replica] = result
    return answers


def dealt(entries: Sequence[Any], num_replicas: int, slot: int) -> list[Any]:
    """A replica's own part of a list with an entry for every rank of the fleet."""
    per_replica = len(entries) // num_replicas
    return list(entries[slot * per_replica : (slot + 1) * per_replica])


def told_by(messages: Mapping[str, str]) -> str:
    """Who says what, each message once. By name."""
    speakers: dict[str, list[str]] = {}
    for name, message in messages.items():
        speakers.setdefault(message, []).append(name)
    return "; ".join(f"{', '.join(names)}: {message}" for message, names in speakers.items())
