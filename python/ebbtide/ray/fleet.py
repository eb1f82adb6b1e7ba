"""Several engines as one, which survives the death of some of them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup

from ebbtide.ray.continuation import Continuation, split_batch
from ebbtide.ray.controller import FleetController, Replica, by_speaker, replica_name
from ebbtide.ray.engine import RayEngine, RemoteMethods, shut_down
from ebbtide.ray.launch import places_of_replicas, rank_as_cause
from ebbtide.ray.supervisor import Supervisor
from ebbtide.srt.entrypoints.loop_thread import LoopThread, blocking
from ebbtide.srt.errors import ConfigurationError, EbbtideError, EngineError, RequestRejected
from ebbtide.srt.managers.api.generate_request import sampling_params_of
from ebbtide.srt.managers.io_struct import AbortReq, ControlRequest, PauseGenerationReqInput, PauseMode
from ebbtide.srt.sampling_params import TOP_P_IDS

# A replica that does not know a request yet is asked again so soon.
AGAIN_S: Final = 0.1
# A request that a replica has no room for is given to one again so soon.
TURNED_AWAY_S: Final = 1.0


class RayFleet(RemoteMethods):
    """Several replicas on Ray, each an engine of its own; the fleet survives the death of a replica.

    The constructor returns when all are ready. Control methods ask every live replica and return the first
    one's reply, with all of them in `replicas`. An update is prepared by all replicas, then committed by all
    or by none.

    `generate` sends each prompt to the replica with the fewest requests; consecutive equal prompts stay
    together, up to a replica's share of the batch.

    A replica that dies is replaced by a new one, which takes the weights of a live one, loads its adapters
    from their folders, and then serves; what came as tensors it lacks until the next load. The requests of
    the dead one continue elsewhere, after the tokens generated so far, whose versions are kept, as if there
    had been one replica. A request with stop strings, `n` > 1, or records other than logprobs starts over
    there, unless it was streamed. In that case, and if it says `on_death="error"`, it ends with an
    `EngineError`.

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
        # The rids of batches that were posted with a single one.
        self._batches: dict[str, list[str]] = {}
        self._aborts = _Aborts()
        starts: list[Future[RayEngine]] = []
        try:
            starts += [self._threads.submit(self._start_engine, slot, {}) for slot in range(num_replicas)]
            failures = {
                replica_name(slot): error
                for slot, start in enumerate(starts)
                if (error := start.exception()) is not None
            }
            if failures:
                raise _start_failure(failures)
            engines = [start.result() for start in starts]
            self._controller = FleetController(
                [Replica(slot, 0, engine) for slot, engine in enumerate(engines)]
            )
            self._supervisor = Supervisor(self._controller, self._start_engine, self._threads)
            self._runner = LoopThread("fleet")
            self._finalizer = weakref.finalize(
                self,
                self._runner.end,
                self._supervisor.end,
                _stopping(self._controller.replicas, self._threads, self._is_ending),
            )
            self._runner.wait(self._open())
        except BaseException:
            # Whoever interrupts this does not wait for those that still start.
            self._is_ending.set()
            for start in starts:
                start.add_done_callback(_kill_started)
            raise

    async def _open(self) -> None:
        self._supervisor.begin()

    def _start_engine(self, slot: int, changes: Mapping[str, Any]) -> RayEngine:
        arguments = {**self._arguments, **self._places[slot], **changes, "name": replica_name(slot)}
        engine = RayEngine(**arguments, abandoned=self._is_ending)
        if self._is_ending.is_set():
            engine.kill()
            raise EngineError("the fleet has been shut down")
        return engine

    # ------------------------------------------------------------------------------------------ generation

    async def _generate(self, fields: Mapping[str, Any]) -> Any:
        given = {name: value for name, value in fields.items() if value is not None}
        on_death = given.pop("on_death", "continue")
        if on_death not in ("continue", "error"):
            raise RequestRejected(f"on_death: expected continue or error, got {on_death!r}")
        singles, is_list = split_batch(given)
        if given.get("stream"):
            params = sampling_params_of(given.get("sampling_params"))
            if is_list or params.n > 1:
                raise RequestRejected("a stream through a fleet is of one output: ask for each by itself")
            if not self._is_incremental and (given.get("return_sampling_mask") or params.returns_top_p_ids):
                raise RequestRejected(
                    f"return_sampling_mask, {TOP_P_IDS}: not in a stream whose chunks repeat those before"
                )
            return self._runner.stream(self._relay(singles[0], on_death, None))
        batch = given.get("rid") if is_list and isinstance(given.get("rid"), str) else None
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
        try:
            for single in singles:
                prompt = single.get("input_ids", single.get("text"))
                # They share the prompt's KV, but no replica gets more of the batch than its part.
                is_full = replica is not None and placed[replica] * len(self._controller.living) >= len(
                    singles
                )
                together = prompt == before and not is_full
                replica = await self._choose(single, replica if together else None, placed)
                placed[replica] += 1
                before = prompt
                tasks.append(asyncio.create_task(self._generate_one(single, on_death, replica)))
            return await asyncio.gather(*tasks)
        finally:
            if batch is not None:
                self._batches.pop(batch, None)
            for task in tasks:
                task.cancel()

    async def _generate_one(self, fields: Mapping[str, Any], on_death: str, first: Replica) -> Any:
        [answer] = [one async for one in self._relay(fields, on_death, first)]
        return answer

    async def _relay(
        self, fields: Mapping[str, Any], on_death: str, first: Replica | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The answer, on as many replicas as it takes: as it grows if it is streamed, else once whole."""
        is_stream = bool(fields.get("stream"))
        output = Continuation(fields, is_incremental=self._is_incremental and is_stream)
        in_chunks = is_stream or (output.is_single and not output.obstacle)
        with self._aborts.known(output.rid) as asked:
            while True:
                replica = await self._choose(fields, first)
                first = None
                try:
                    with replica.working(), _repeated(asked, replica, output):
                        if not in_chunks:
                            whole = await replica.engine.answer({**fields, "rid": output.rid})
                            for one in whole if isinstance(whole, list) else [whole]:
                                one["meta_info"] |= output.told(replica.name)
                            yield whole
                            return
                        chunks = replica.engine.stream(output.so_far, output.next_fields())
                        async with aclosing(chunks):
                            async for chunk in chunks:
                                output.add(chunk)
                                # An answer holds all of the output: only those are made that are asked for.
                                if is_stream or output.has_ended:
                                    yield output.answer(chunk, replica.name)
                        return
                except RequestRejected as error:
                    if error.status != 503 or not output.num_moves or asked.is_set():
                        raise
                    # One that was taken once is not lost to a queue that is full elsewhere, or to a pause.
                    await asyncio.sleep(TURNED_AWAY_S)
                except EngineError as error:
                    if output.has_ended:
                        # It died before it could say that nothing follows.
                        return
                    await self._after(replica, error, on_death, output.num_tokens)
                    if is_stream and output.num_tokens and output.obstacle:
                        raise EngineError(
                            f"{replica.name} has died after {output.num_tokens} tokens of this request, "
                            f"which cannot go on elsewhere with {output.obstacle}: {replica.reason}"
                        ) from None
                    output.move()

    async def _after(self, replica: Replica, error: EngineError, on_death: str, num_tokens: int) -> None:
        """Return if a request may go on elsewhere; raise otherwise."""
        if not await replica.is_cause(error):
            raise error
        if on_death == "error":
            raise EngineError(
                f"{replica.name} has died after {num_tokens} tokens of this request: {replica.reason}"
            ) from None

    async def _choose(
        self,
        request: Mapping[str, Any],
        wanted: Replica | None = None,
        placed: Mapping[Replica, int] | None = None,
    ) -> Replica:
        """This replica if it lives, or the one with the fewest requests; waits while there is none.

        One that has the adapter that is asked for, if there is any: what none has, none will take.

        Args:
            placed: requests that are about to go to each.
        """
        while not self._controller.living:
            if self._supervisor.failure:
                raise EngineError(self._supervisor.failure)
            await self._supervisor.next_change()
        living, adapter = self._controller.living, request.get("lora_path")
        able = [one for one in living if adapter not in one.lacks] or living
        if wanted in able:
            return wanted
        return min(able, key=lambda one: one.num_live + (placed or {}).get(one, 0))

    # ---------------------------------------------------------------------------------------------- control

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._runner.run(self._controller.ask_all(method, *args, **kwargs))

    async def _carry_out(self, kind: type[ControlRequest], fields: Mapping[str, Any]) -> Any:
        return await self._runner.run(self._control_all(kind, fields))

    async def _control_all(self, kind: type[ControlRequest], fields: Mapping[str, Any]) -> Any:
        if self._supervisor.failure:
            raise EngineError(self._supervisor.failure)
        if kind is AbortReq:
            rids = [fields["rid"]] if isinstance(fields["rid"], str) else fields["rid"]
            alone = [one for rid in rids for one in self._batches.get(rid, [rid])]
            self._aborts.ask(alone, fields["abort_all"])
            fields = {**fields, "rid": alone}
        elif kind is PauseGenerationReqInput and fields["mode"] == PauseMode.ABORT:
            self._aborts.ask([], abort_all=True)
        return await self._controller.control(kind, fields)

    async def async_wait_for_all(self, /, timeout_s: float | None = None) -> None:
        """Wait until every replica serves; raises EngineError if one stays out, or takes longer."""
        await self._runner.run(self._wait_for_all(timeout_s))

    async def _wait_for_all(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                # One may have died that nobody has heard of yet.
                await self._controller.ask_all("loads")
                await self._supervisor.wait_for_all()
        except TimeoutError:
            pass
        missing = [one for one in self._controller.replicas if one.has_died.is_set()]
        if missing:
            reasons = "; ".join(f"{one.name}: {self._supervisor.why_out(one.slot)}" for one in missing)
            raise EngineError(f"not all replicas serve: {reasons}")

    def status(self) -> list[dict[str, Any]]:
        """Of each replica: name, whether it serves, earlier lives, running requests, why it last died.

        `lacks`: adapters that the others have. Requests for them go elsewhere; a load brings them back.
        """
        return [
            {
                "replica": one.name,
                "serves": not one.has_died.is_set(),
                "num_deaths": one.life + one.has_died.is_set(),
                "num_live": one.num_live,
                "lacks": sorted(one.lacks),
                "last_death": self._supervisor.deaths.get(one.slot),
            }
            for one in self._controller.replicas
        ]

    @property
    def engines(self) -> list[RayEngine]:
        """The replicas' engines, as they are now; one that has died may be among them."""
        return [one.engine for one in self._controller.replicas]

    wait_for_all = blocking(async_wait_for_all)


class _Aborts:
    """What the fleet has been asked to end, among the requests that it works on."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Event] = {}

    @contextmanager
    def known(self, rid: str) -> Iterator[asyncio.Event]:
        """While the fleet works on this request. The event is set once it is asked to end."""
        self._asked[rid] = asked = asyncio.Event()
        try:
            yield asked
        finally:
            # Another one may have come under the same name.
            if self._asked.get(rid) is asked:
                del self._asked[rid]

    def ask(self, rids: Collection[str], abort_all: bool) -> None:
        """An abort has come: of these, or of all."""
        for rid in self._asked if abort_all else rids:
            if rid in self._asked:
                self._asked[rid].set()


@contextmanager
def _repeated(asked: asyncio.Event, replica: Replica, output: Continuation) -> Iterator[None]:
    """While a replica works on a request: one that moved there ends even if its abort came before it."""

    async def repeat() -> None:
        await asked.wait()
        with suppress(EbbtideError):
            while True:
                await replica.ask("abort_request", output.rid)
                await asyncio.sleep(AGAIN_S)

    task = asyncio.create_task(repeat()) if output.num_moves else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


def _kill_started(start: Future[RayEngine]) -> None:
    if start.exception() is None:
        start.result().kill()


def _start_failure(failures: Mapping[str, BaseException]) -> BaseException:
    """What to raise where these replicas did not start: the likeliest cause, with what all of them say."""
    cause = min(failures.values(), key=rank_as_cause)
    if not isinstance(cause, ConfigurationError | EngineError):
        return cause
    return type(cause)(by_speaker({name: str(error) for name, error in failures.items()}))


def _stopping(
    replicas: Sequence[Replica], threads: ThreadPoolExecutor, is_ending: threading.Event
) -> Callable[[], None]:
    def stop() -> None:
        is_ending.set()
        threads.shutdown(cancel_futures=True)
        shut_down([one.engine for one in replicas])

    return stop
