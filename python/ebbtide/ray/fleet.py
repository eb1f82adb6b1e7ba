"""Several engines as one. Some may die: their requests go on elsewhere, and others take their place."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Self

import ray
from ray.util.placement_group import PlacementGroup

from ebbtide.ray.aborts import Aborts, repeated
from ebbtide.ray.actor import ENGINE_METHODS
from ebbtide.ray.batches import split_batch
from ebbtide.ray.continuation import Continuation
from ebbtide.ray.engine import RayEngine, shut_down
from ebbtide.ray.joint_updates import JOINT_METHODS, JointUpdates
from ebbtide.ray.launch import places_of_replicas, rank_as_cause
from ebbtide.ray.replica import Answers, Replica, gather, replica_name, told_by
from ebbtide.ray.succession import bring_up_to_date
from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking, refuse_in_event_loop
from ebbtide.srt.errors import ConfigurationError, EbbtideError, EngineError, RequestRejected

logger = logging.getLogger(__name__)

# A replica that does not come up is tried so often in a row, with a pause in between.
MAX_ATTEMPTS: Final = 3
RETRY_S: Final = 2.0
# How often a new replica looks whether the others have weights to give.
LOOK_S: Final = 0.5


class RayFleet:
    """Several replicas on Ray, each an engine of its own; the fleet survives the death of a replica.

    The constructor returns when all are ready. Each method `m` blocks; its coroutine `async_m` works in any
    event loop. Control methods ask every live replica and return the first one's reply, with all of them in
    `replicas`. An update is prepared by all replicas, then committed by all or by none.

    A replica that dies is replaced by a new one, which takes the weights of a live one and then serves. The
    requests of the dead one continue elsewhere: see `async_generate`.

    Args:
        num_replicas: number of replicas, 1 or more.
        placement_group: for all replicas; None: each creates its own, from `bundles` or its ranks' needs.
        bundle_indices: a list for each replica; None: equal shares of the group.
        tp, dp, nnodes, bundles, gpus_per_rank, …: for each replica, see `RayEngine`.
        **arguments: fields of `ServerArgs`.

    Raises:
        ConfigurationError, EngineError: as for `RayEngine`; no replica is left running.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        placement_group: PlacementGroup | None = None,
        bundle_indices: Sequence[Sequence[int]] | None = None,
        incremental_streaming_output: bool = False,
        **arguments: Any,
    ) -> None:
        if num_replicas < 1:
            raise ConfigurationError(f"num_replicas: expected 1 or more, got {num_replicas}")
        self._is_incremental = incremental_streaming_output
        self._arguments = {**arguments, "incremental_streaming_output": True}
        self._places = places_of_replicas(placement_group, bundle_indices, num_replicas)
        if not ray.is_initialized():
            # A cluster that the first call makes ends with the thread of that call; here it is the caller's.
            ray.init()
        # Starts are abandoned when it is set, and none begins any more.
        self._is_ending = threading.Event()
        self._threads = ThreadPoolExecutor(num_replicas, thread_name_prefix="start-replica")
        starts = [self._threads.submit(self._start_engine, slot, {}) for slot in range(num_replicas)]
        engines = [start.result() for start in starts if start.exception() is None]
        failures = {
            replica_name(slot): error
            for slot, start in enumerate(starts)
            if (error := start.exception()) is not None
        }
        if failures:
            for engine in engines:
                engine.kill()
            raise _start_failure(failures)
        self._replicas = [Replica(slot, 0, engine) for slot, engine in enumerate(engines)]
        self._updates = JointUpdates(lambda: self._living, num_replicas)
        self._failure = ""
        # The rids of batches that were posted with a single one.
        self._batches: dict[str, list[str]] = {}
        self._aborts = Aborts()
        self._changes = asyncio.Event()
        self._supervisors: list[asyncio.Task[None]] = []
        self._deaths: dict[int, str] = {}
        # What new replicas wait for that have started.
        self._waits: dict[int, str] = {}
        self._runner = LoopThread()
        self._finalizer = weakref.finalize(
            self,
            self._runner.end,
            _ending(self._supervisors),
            _stopping(self._replicas, self._threads, self._is_ending),
        )
        self._runner.wait(self._open())

    async def _open(self) -> None:
        self._supervisors += [
            asyncio.create_task(self._supervise(slot)) for slot in range(len(self._replicas))
        ]

    # ------------------------------------------------------------------------------------------ generation

    async def async_generate(
        self,
        /,
        prompt: str | list[str] | None = None,
        sampling_params: Any = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        on_death: str = "continue",
        **fields: Any,
    ) -> Any:
        """Like `Engine.async_generate`. Each prompt goes to the replica with the fewest requests; consecutive
        equal prompts stay together, up to a replica's share of the batch.

        Args:
            on_death: what happens when the replica dies. "continue": another one continues after the tokens
                generated so far, whose versions are kept, as if there had been one replica. A request with
                stop strings, `n` > 1, or records other than logprobs starts over there, unless it was
                streamed. In that case, and with "error", it ends with an `EngineError`.

        Raises:
            EngineError: the replica died and the request could not continue, or no replica is left.
        """
        if on_death not in ("continue", "error"):
            raise RequestRejected(f"on_death: expected continue or error, got {on_death!r}")
        given = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **fields}
        singles, is_list = split_batch({name: value for name, value in given.items() if value is not None})
        if stream:
            if is_list:
                raise RequestRejected("a stream through a fleet is of one output: ask for each by itself")
            chunks = self._relay({**singles[0], "stream": True}, on_death, None)
            return self._runner.stream(chunks, lambda: asyncio.ensure_future(chunks.aclose()))
        batch = fields.get("rid") if is_list and isinstance(fields.get("rid"), str) else None
        answers = await self._runner.run(self._generate_all(singles, on_death, batch))
        flat = [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]
        return flat if is_list else flat[0]

    async def _generate_all(
        self, singles: Sequence[Mapping[str, Any]], on_death: str, batch: str | None
    ) -> list[Any]:
        """Answers in the order of the prompts. `batch`: the rid that stands for all of them."""
        if batch is not None:
            self._batches[batch] = [single["rid"] for single in singles]
        tasks: list[asyncio.Task[Any]] = []
        before: Any = None
        replica: Replica | None = None
        placed: Counter[Replica] = Counter()
        for single in singles:
            prompt = single.get("input_ids", single.get("text"))
            # They share the prompt's KV, but no replica gets more of the batch than its part.
            is_full = replica is not None and placed[replica] * len(self._living) >= len(singles)
            together = prompt == before and not is_full
            replica = await self._choose(replica if together else None, placed)
            placed[replica] += 1
            before = prompt
            tasks.append(asyncio.create_task(self._generate_one(single, on_death, replica)))
        try:
            return await asyncio.gather(*tasks)
        finally:
            if batch is not None:
                self._batches.pop(batch, None)
            for task in tasks:
                task.cancel()

    async def _generate_one(self, fields: Mapping[str, Any], on_death: str, first: Replica) -> Any:
        output = Continuation(fields)
        if output.is_single and not output.obstacle:
            [answer] = [one async for one in self._relay(fields, on_death, first)]
            return answer
        replica: Replica | None = first
        with self._aborts.known(output.rid) as asked:
            while True:
                replica = await self._choose(replica)
                try:
                    with replica.working(), repeated(asked, replica, output):
                        return await replica.ask("generate", **{**fields, "rid": output.rid})
                except EngineError as error:
                    await self._after(replica, error, on_death, 0)
                output.move()
                replica = None

    async def _relay(
        self, fields: Mapping[str, Any], on_death: str, first: Replica | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The answer, on as many replicas as it takes: as it grows if it is streamed, else once whole."""
        output = Continuation(fields, is_incremental=self._is_incremental and "stream" in fields)
        is_stream = bool(fields.get("stream"))
        replica = first
        with self._aborts.known(output.rid) as asked:
            while True:
                replica = await self._choose(replica)
                try:
                    with replica.working(), repeated(asked, replica, output):
                        chunks = replica.engine.stream_behind(output.so_far, output.next_fields())
                        async with aclosing(chunks):
                            async for chunk in chunks:
                                output.add(chunk)
                                # An answer holds all of the output: only those are made that are asked for.
                                if is_stream or chunk["meta_info"]["finish_reason"] is not None:
                                    yield output.answer(chunk, replica.name)
                        return
                except EngineError as error:
                    await self._after(replica, error, on_death, output.num_tokens)
                    if is_stream and output.num_tokens and output.obstacle:
                        raise EngineError(
                            f"{replica.name} has died after {output.num_tokens} tokens of this request, "
                            f"which cannot go on elsewhere with {output.obstacle}: {replica.reason}"
                        ) from None
                output.move()
                replica = None

    async def _after(self, replica: Replica, error: EngineError, on_death: str, num_tokens: int) -> None:
        """Return if a request may go on elsewhere; raise otherwise."""
        if not await replica.is_cause(error):
            raise error
        if on_death == "error":
            raise EngineError(
                f"{replica.name} has died after {num_tokens} tokens of this request: {replica.reason}"
            ) from None

    async def _choose(
        self, wanted: Replica | None = None, placed: Mapping[Replica, int] | None = None
    ) -> Replica:
        """This replica if it lives, or the one with the fewest requests; waits while there is none.

        Args:
            placed: requests that are about to go to each.
        """
        if wanted is not None and wanted in self._living:
            return wanted
        while not self._living:
            if self._failure:
                raise EngineError(self._failure)
            await self._changes.wait()
        return min(self._living, key=lambda one: one.num_live + (placed or {}).get(one, 0))

    # -------------------------------------------------------------------------------------- deaths and births

    @property
    def _living(self) -> list[Replica]:
        return [one for one in self._replicas if not one.has_died.is_set()]

    async def _supervise(self, slot: int) -> None:
        """Wait for the death of a replica, and put another one in its place; again and again."""
        while True:
            replica = self._replicas[slot]
            await replica.watch()
            logger.warning(
                "%s is taken out with %d requests: %s", replica.name, replica.num_live, replica.reason
            )
            self._deaths[slot] = replica.reason
            self._note_change()
            await asyncio.to_thread(replica.engine.kill)
            if not await self._replace_soon(replica):
                if not self._living:
                    told = "; ".join(f"{replica_name(one)}: {why}" for one, why in self._deaths.items())
                    self._failure = f"no replica of the fleet is left, nor are its weights ({told})"
                self._note_change()
                return

    async def _replace_soon(self, dead: Replica) -> bool:
        """Try a few times; returns whether another one serves in its place."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._replace(dead)
                return True
            except EbbtideError as error:
                logger.warning("%s did not come back (%d): %s", dead.name, attempt, error)
                self._deaths[dead.slot] = str(error)
            await asyncio.sleep(RETRY_S)
        return False

    async def _replace(self, dead: Replica) -> None:
        """Start a replica in the place of another one, and let it serve what the others serve.

        Raises:
            EbbtideError: it does not start, or has died again, or nobody is left who has the weights.
        """
        # The weights come from those that live; only where nothing was ever changed are the first ones those.
        from_peer = {"load_format": "dummy"} if self._living else {}
        if not from_peer and self._updates.has_committed:
            raise EngineError("no replica is left to take the weights from")
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        engine = await loop.run_in_executor(self._threads, self._start_engine, dead.slot, from_peer)
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
            self._replicas[dead.slot] = replica
        logger.warning(
            "%s serves again: %.1f s to start, %.1f s to become as the others",
            *(replica.name, started_s - began_s, time.monotonic() - started_s),
        )
        self._note_change()

    async def _admit(self, replica: Replica) -> str:
        """Let a new replica serve, once it is as those that live; what it has to wait for, or nothing."""
        async with self._updates.lock:
            obstacle = await bring_up_to_date(replica, self._living)
            if not obstacle:
                # From here on it serves, and takes part in every update.
                self._replicas[replica.slot] = replica
            return obstacle

    def _start_engine(self, slot: int, changes: Mapping[str, Any]) -> RayEngine:
        arguments = {**self._arguments, **self._places[slot], **changes, "name": replica_name(slot)}
        engine = RayEngine(**arguments, abandoned=self._is_ending)
        if self._is_ending.is_set():
            engine.kill()
            raise EngineError("the fleet has been shut down")
        return engine

    def _note_change(self) -> None:
        self._changes.set()
        self._changes = asyncio.Event()

    # ---------------------------------------------------------------------------------------------- control

    async def async_abort_request(self, rid: str | list[str] = "", abort_all: bool = False) -> Any:
        """Like `Engine.async_abort_request`, on whichever replicas the requests are."""
        return await self._runner.run(self._abort([rid] if isinstance(rid, str) else rid, abort_all))

    async def _abort(self, rids: Sequence[str], abort_all: bool) -> Any:
        alone = [one for rid in rids for one in self._batches.get(rid, [rid])]
        self._aborts.ask(alone, abort_all)
        return await self._control("abort_request", (alone, abort_all), {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The control methods of `Engine`, on all replicas."""
        method = name.removeprefix("async_")
        if method not in ENGINE_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(self._in_loop if method != name else self._wait, method)

    async def _in_loop(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._runner.run(self._control(method, args, kwargs))

    def _wait(self, method: str, *args: Any, **kwargs: Any) -> Any:
        refuse_in_event_loop(f"async_{method}")
        return self._runner.wait(self._control(method, args, kwargs))

    async def _control(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._failure:
            raise EngineError(self._failure)
        if method == "pause_generation" and "abort" in (*args[:1], kwargs.get("mode")):
            self._aborts.ask([], abort_all=True)
        if method in JOINT_METHODS:
            answers = await self._updates.update(method, args, kwargs)
        elif method == "begin_weight_update":
            answers = await self._updates.begin(
                lambda: self._ask_all(method, *args, **kwargs),
                lambda replica: replica.ask("abort_weight_update"),
            )
        elif method == "init_weights_update_group":
            answers = await self._join_group(args, kwargs)
        else:
            answers = await self._ask_all(method, *args, **kwargs)
            answers.require_all_done()
        return answers.merged

    async def _ask_all(self, method: str, *args: Any, **kwargs: Any) -> Answers:
        return await gather({one: one.ask(method, *args, **kwargs) for one in self._living})

    async def _join_group(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answers:
        """Have the ranks of all replicas join a group, replica by replica."""
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        fields = {**dict(zip(names, args, strict=False)), **kwargs}
        first = fields.pop("rank_offset")
        places = {one: first + index * one.engine.num_ranks for index, one in enumerate(self._living)}
        answers = await gather(
            {
                one: one.ask("init_weights_update_group", rank_offset=place, **fields)
                for one, place in places.items()
            }
        )
        if answers.failed:
            name = {"group_name": fields["group_name"]} if "group_name" in fields else {}
            await gather({one: one.ask("destroy_weights_update_group", **name) for one in answers.done})
        answers.require_all_done("The group was left again")
        return answers

    async def async_wait_for_all(self, /, timeout_s: float | None = None) -> None:
        """Wait until every replica serves; raises EngineError if one stays out, or takes longer."""
        await self._runner.run(self._wait_for_all(timeout_s))

    async def _wait_for_all(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                # One may have died that nobody has heard of yet.
                await self._ask_all("loads")
                while len(self._living) < len(self._replicas):
                    if any(task.done() for task in self._supervisors):
                        break
                    await self._changes.wait()
        except TimeoutError:
            pass
        missing = [one for one in self._replicas if one not in self._living]
        if missing:
            told = "; ".join(f"{one.name}: {self._why_out(one.slot)}" for one in missing)
            raise EngineError(f"not all replicas serve: {told}")

    def _why_out(self, slot: int) -> str:
        if slot in self._waits:
            return f"it has started, and waits: {self._waits[slot]}"
        return self._deaths[slot]

    def status(self) -> list[dict[str, Any]]:
        """Of each replica: name, whether it serves, earlier lives, running requests, why it last died."""
        return [
            {
                "replica": one.name,
                "serves": not one.has_died.is_set(),
                "num_deaths": one.life + one.has_died.is_set(),
                "num_live": one.num_live,
                "last_death": self._deaths.get(one.slot),
            }
            for one in self._replicas
        ]

    @property
    def weight_version(self) -> str:
        """The version of the serving weights."""
        version: str = self._wait("model_info")["weight_version"]
        return version

    @property
    def engines(self) -> list[RayEngine]:
        """The replicas' engines, as they are now; one that has died may be among them."""
        return [one.engine for one in self._replicas]

    def shutdown(self) -> None:
        """End all replicas. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    generate = blocking(async_generate)
    abort_request = blocking(async_abort_request)
    wait_for_all = blocking(async_wait_for_all)


def _start_failure(failures: Mapping[str, BaseException]) -> BaseException:
    """What to raise where these replicas did not start: the likeliest cause, with what all of them say."""
    cause = min(failures.values(), key=rank_as_cause)
    if not isinstance(cause, ConfigurationError | EngineError):
        return cause
    return type(cause)(told_by({name: str(error) for name, error in failures.items()}))


def _ending(supervisors: Sequence[asyncio.Task[None]]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def end() -> None:
        for task in supervisors:
            task.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)

    return end


def _stopping(
    replicas: Sequence[Replica], threads: ThreadPoolExecutor, is_ending: threading.Event
) -> Callable[[], None]:
    def stop() -> None:
        is_ending.set()
        threads.shutdown(cancel_futures=True)
        shut_down([one.engine for one in replicas])

    return stop
