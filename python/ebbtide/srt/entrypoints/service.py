"""The engine behind its two interfaces, the HTTP server and `Engine`: requests in, bodies of answers out."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.bodies import DrainReply
from ebbtide.srt.entrypoints.information import (
    Loads,
    ModelInfo,
    StartupTime,
    load_totals,
    loads_body,
    loads_of_rank,
    model_info,
    server_info,
    wanted_sections,
)
from ebbtide.srt.entrypoints.launch.child_process import EarlyProcesses
from ebbtide.srt.entrypoints.launch.launcher import NodeProcesses
from ebbtide.srt.entrypoints.metrics.observers import Timeline, open_tracing
from ebbtide.srt.entrypoints.metrics.operations import OPERATIONS, TRANSITION
from ebbtide.srt.entrypoints.metrics.prometheus import Metrics
from ebbtide.srt.entrypoints.occupation import (
    EngineState,
    MemoryOccupationBody,
    count_devices_once,
    memory_occupation,
)
from ebbtide.srt.entrypoints.served_models import ServedModels
from ebbtide.srt.entrypoints.transition import Transitions
from ebbtide.srt.errors import ConfigurationError, EngineError, RequestRejected
from ebbtide.srt.managers.api.control_client import Vote, build_request
from ebbtide.srt.managers.api.data_parallel_controller import DataParallelController
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GetLoadReqInput,
    GetLoadReqOutput,
    Load,
    ManagerInput,
    PauseGenerationReqInput,
    PingReqInput,
    ReleaseMemoryOccupationReqInput,
    Reply,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SchedulerInput,
    StateReport,
    TotalsReply,
)
from ebbtide.srt.managers.text.tokenizer import load_tokenizer
from ebbtide.srt.managers.tokenizer_manager import TokenizerManager
from ebbtide.srt.managers.wire.channel import Receiver, Sender
from ebbtide.srt.this_process import HeapHold

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 20.0
DRAINING: Final = "the server is draining: it takes no more requests"
# Control requests that are logged. Updates are logged where they are committed.
_LOGGED: Final = (
    PauseGenerationReqInput,
    ContinueGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
)


class ControlAnswer(NamedTuple):
    """The answer to a control request.

    `remark`: the reply's message if the body is a single field of the reply, else empty.
    """

    body: Any
    remark: str = ""
    reply: Reply = Reply()


class EngineService:
    """The processes of an engine, and the manager that talks to them.

    The constructor starts the processes and returns when they are ready. Call `open` and all requests in one
    event loop; `shutdown` in any thread.

    Args:
        targets, early: as for `NodeProcesses`.

    Attributes:
        heap: hides older objects from the garbage collector while streams of `Engine` run.
        at_close: functions that `close` awaits.
        tracing: None: off.

    Raises:
        ConfigurationError: the model, the tokenizer or the machine is not suitable.
        EngineError: a process died. In both cases all processes have ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        targets: Mapping[str, str] | None = None,
        early: EarlyProcesses | None = None,
    ) -> None:
        if config.parallel.node_rank != 0:
            raise ConfigurationError(
                f"node_rank={config.parallel.node_rank}: only node 0 takes requests; start the other nodes "
                "with `python -m ebbtide.launch_server`"
            )
        self.config = config
        self._started_s = time.monotonic()
        self._scheduler_s = self._open_s = 0.0
        self._failure: str | None = None
        self._manager: TokenizerManager | None = None
        self._draining: asyncio.Task[None] | None = None
        self._on_drained: Callable[[], None] = lambda: None
        self.metrics = Metrics(
            config.server_args.weight_version,
            config.server_args.metrics_aliases,
            model_name=config.model.served_model_name,
            page_size=config.cache.page_size,
        )
        self.timeline = Timeline(self._sample)
        self.heap = HeapHold()
        self.at_close: list[Callable[[], Awaitable[None]]] = []
        self.metrics.control.observers.append(self.timeline)
        self.tracing = open_tracing(config.server_args)
        if self.tracing is not None:
            self.metrics.control.observers.append(self.tracing)
        self._transitions = Transitions(self.control)
        self.models = ServedModels(config, self)
        self._processes = NodeProcesses(config, targets, early)
        try:
            # The tokenizer is loaded while the scheduler loads the weights.
            self._tokenizer = None if config.server_args.skip_tokenizer_init else load_tokenizer(config.model)
            self._facts = self._processes.wait_ready()
            self._scheduler_s = time.monotonic() - self._started_s
        except BaseException:
            self.shutdown()
            raise

    # -------------------------------------------------------------------------------------------- lifetime

    async def open(
        self, on_death: Callable[[str], None] | None = None, on_drained: Callable[[], None] = lambda: None
    ) -> None:
        """Connect to the processes, wait for their first report, and load the given adapters.

        Args:
            on_death: called in this loop, with the reason, after a process has ended by itself and all
                waiting requests have got the error.
            on_drained: called at the end of a drain.
        """
        self._on_drained = on_drained
        self.metrics.gc_pauses.start()
        self._manager = self._connect()
        self._manager.on_taken = self.metrics.note_taken
        self._manager.start()
        loop = asyncio.get_running_loop()

        def note_death(message: str) -> None:
            self.fail(message)
            if on_death is not None:
                on_death(message)

        def hand_over(message: str) -> None:
            loop.call_soon_threadsafe(note_death, message)

        self._processes.watch(hand_over)
        await self._manager.control.call(PingReqInput(), HEALTH_TIMEOUT_S)
        await self.models.load_given()
        self._open_s = time.monotonic() - self._started_s
        if sys.stderr.isatty():
            print(f"ready in {self._open_s:.1f} s", file=sys.stderr)

    def _connect(self) -> TokenizerManager:
        limits = RequestLimits.of(
            self.config, self._facts["max_total_num_tokens"], self._facts.get("experts")
        )
        replicas = self._processes.replicas
        inbox: Receiver[ManagerInput] = Receiver(replicas[0].manager, ManagerInput)
        if len(replicas) == 1:
            scheduler: Sender[SchedulerInput] = Sender(replicas[0].scheduler)
            return TokenizerManager(self.config, scheduler, inbox, limits, self._tokenizer)
        schedulers: list[Sender[SchedulerInput | msgspec.Raw]] = [
            Sender(replica.scheduler) for replica in replicas
        ]
        parallel = self.config.parallel
        controller = DataParallelController(schedulers, inbox, parallel.tp_size, parallel.load_balance_method)
        return TokenizerManager(
            self.config, controller, controller, limits, self._tokenizer, controller.place
        )

    def fail(self, message: str) -> None:
        """End all waiting and all future requests with `EngineDown`."""
        self._failure = message
        if self._manager is not None:
            self._manager.fail(message)

    async def close(self) -> None:
        """End all requests as `fail` does, and close the channels. `shutdown` ends the processes."""
        self.metrics.gc_pauses.stop()
        self.heap.thaw()
        self.timeline.close()
        for end in self.at_close:
            await end()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self._manager is not None:
            await self._manager.close()

    def shutdown(self) -> None:
        """End the processes. Returns when they have ended. Idempotent."""
        self._processes.shutdown()

    def drain(self, timeout_s: float | None = None) -> DrainReply:
        """Finish the requests that are there, refuse new ones with 503, then call `on_drained`.

        `timeout_s`: how long it may take, in seconds; None: no limit. A second drain sets a new limit.
        """
        if self._draining is not None:
            self._draining.cancel()
        self._draining = asyncio.create_task(self._drained(timeout_s))
        num_live = self.manager.num_live
        return DrainReply(message=f"{num_live} requests are served to their end.", num_live=num_live)

    async def _drained(self, timeout_s: float | None) -> None:
        logger.info("draining: %d requests will be served to their end", self.manager.num_live)
        try:
            async with asyncio.timeout(timeout_s):
                await self.manager.drain(DRAINING)
            logger.info("drained")
        except TimeoutError:
            num_left = self.manager.num_live
            logger.warning("the drain ended after %g s: %d requests were left", timeout_s, num_left)
        self._on_drained()

    @property
    def is_draining(self) -> bool:
        """Whether new generations are refused."""
        return self._draining is not None

    @property
    def not_ready(self) -> str:
        """Why a request would not run now; empty: it would."""
        if self.is_draining:
            return DRAINING
        if self.state.can_run:
            return ""
        pause = self.manager.pause
        lasts = f" (for {pause.blocked_s:.0f} s: is it forgotten?)" if pause.is_forgotten else ""
        return self.state.reason + lasts

    @property
    def is_down(self) -> bool:
        """Whether the engine has failed or is shutting down."""
        return self._failure is not None

    @property
    def pids(self) -> dict[str, int]:
        """Process name → process id."""
        return self._processes.pids

    @property
    def rank_devices(self) -> list[str]:
        """The device of every rank, replica by replica. Its index is that on the rank's own node."""
        parallel, device = self.config.parallel, self.config.runtime.device
        if parallel.num_ranks == 1 or not device.startswith("cuda"):
            return [device] * parallel.num_ranks
        places = (rank % parallel.ranks_per_node for rank in range(parallel.num_ranks))
        return [f"cuda:{parallel.base_gpu_id + place * parallel.gpu_id_step}" for place in places]

    # --------------------------------------------------------------------------------------------- requests

    @property
    def manager(self) -> TokenizerManager:
        assert self._manager is not None, "the service has not been opened"
        return self._manager

    @property
    def state(self) -> StateReport:
        """The state that the engine reported last."""
        state = self.manager.state
        assert state is not None, "the first report comes ahead of the reply that `open` waits for"
        return state

    async def next_report(self) -> None:
        """Wait until the engine reports its state again. Raises EngineDown: it has ended."""
        await self.manager.next_report()

    async def control(self, kind: type[Any], fields: Mapping[str, Any], vote: Vote | None = None) -> Any:
        """Carry out a control request, given its fields. Returns the body of the answer.

        `vote`: see `ControlClient.call`.

        Raises RequestRejected: it was refused, and nothing has changed; EngineError: the engine failed.
        """
        return (await self.answer(kind, fields, vote)).body

    async def answer(
        self, kind: type[Any], fields: Mapping[str, Any], vote: Vote | None = None
    ) -> ControlAnswer:
        """Like `control`, but return the whole answer."""
        ignored: list[str] = []

        async def carry_out() -> Reply:
            request, unknown = build_request(kind, fields)
            ignored.extend(unknown)
            return await self.manager.control.call(request, vote=vote)

        started = time.monotonic()
        try:
            reply = await self.metrics.control.observed(OPERATIONS[kind], carry_out())
        except RequestRejected as error:
            logger.info("%s is refused (%d): %s", OPERATIONS[kind], error.status, error)
            raise
        if kind in _LOGGED:
            logger.info("%s ms=%.1f", reply.message, 1000 * (time.monotonic() - started))
        if kind.row.body_field is not None:
            return ControlAnswer(getattr(reply, kind.row.body_field), reply.message, reply)
        if isinstance(reply, TotalsReply):
            reply = count_devices_once(reply, self.state.ranks)
        body = msgspec.to_builtins(reply)
        del body["type"]  # the tag of messages between processes
        return ControlAnswer({**body, "ignored_fields": ignored} if ignored else body, reply=reply)

    async def transition(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out several control requests; see `Transitions.run`."""
        return await self.metrics.control.observed(TRANSITION, self._transitions.run(fields))

    async def check_health(self) -> None:
        """Check that every rank responds, even while paused or asleep. Raises EngineError: one does not."""
        await self.manager.control.call(PingReqInput(), HEALTH_TIMEOUT_S)

    async def check_generation(self) -> None:
        """Like `check_health`; an idle engine that can run also generates a token."""
        await self.check_health()
        if not self.not_ready and self.manager.num_live == 0:
            await self.generate_one_token()

    async def generate_one_token(self) -> None:
        """Generate one token on each replica, which tests every process.

        It draws no random seed, and leaves nothing in the prefix cache. Raises EngineError: there is no
        answer although the engine can run.
        """
        params = {"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0}
        generations = [
            await self.manager.prepare(
                {"input_ids": [0], "sampling_params": params, "routed_dp_rank": dp_rank}
            )
            for dp_rank in range(self.config.parallel.dp_size)
        ]
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await asyncio.gather(*(generation.result() for generation in generations))
        except TimeoutError:
            if self.state.can_run:
                raise EngineError(f"no token was generated within {HEALTH_TIMEOUT_S:g} s") from None

    # ------------------------------------------------------------------------------------------ information

    async def read(self, what: str, **query: Any) -> dict[str, Any]:
        """Return the information that the method `what` of `EngineMethods` returns."""
        if what == "loads":
            reading: Awaitable[Any] = self.loads_body([query["include"]], query["dp_rank"])
        else:
            reading = (self.metric_values if what == "metrics" else getattr(self, what))()
        body: dict[str, Any] = msgspec.to_builtins(await reading)
        return body

    async def loads(self) -> list[Load]:
        """The load of every replica, by dp_rank."""
        reply = await self.manager.control.call(GetLoadReqInput(), HEALTH_TIMEOUT_S)
        assert isinstance(reply, GetLoadReqOutput)
        return reply.loads

    async def loads_body(self, include: Sequence[str] = (), dp_rank: int | str | None = None) -> Loads:
        """The body of `GET /v1/loads`. `include`: see `wanted_sections`. `dp_rank`: None: all replicas.

        Raises RequestRejected: 400; there is no such section or replica.
        """
        sections = wanted_sections(include)
        loads = loads_of_rank(await self.loads(), dp_rank)
        return loads_body(loads, sections, self.config)

    async def metrics_text(self) -> bytes:
        """The body of `GET /metrics`."""
        loads = await self.loads()
        return self.metrics.text(self.state, loads, self.manager.pause)

    async def metric_values(self) -> dict[str, float]:
        """The samples of `metrics_text`, by name and labels."""
        loads = await self.loads()
        return self.metrics.values(self.state, loads, self.manager.pause)

    async def _sample(self) -> dict[str, Any]:
        """A sample for the dashboard. The load is empty if the schedulers do not answer."""
        occupation = await self.memory_occupation()
        try:
            loads = await self.loads()
        except EngineError:
            loads = []
        return {
            "resident_bytes": {tag: report.resident_bytes for tag, report in occupation.tags.items()},
            "backup_bytes": {tag: report.backup_bytes for tag, report in occupation.tags.items()},
            "device": msgspec.to_builtins(occupation.device),
            "reason": self.not_ready,
            "weight_version": self.state.weight_version,
            "num_live": self.manager.num_live,
            "load": load_totals(loads),
        }

    async def memory_occupation(self) -> MemoryOccupationBody:
        """The body of `GET /memory_occupation`. Never waits for the engine."""
        return await asyncio.to_thread(memory_occupation, self.state, self.config.parallel)

    async def model_info(self) -> ModelInfo:
        """The body of `GET /model_info`."""
        return model_info(self.config, self.state, self._reports)

    async def server_info(self) -> dict[str, Any]:
        """The body of `GET /server_info`."""
        occupation = msgspec.convert(await self.memory_occupation(), EngineState, from_attributes=True)
        loads = await self.loads()
        startup_time = StartupTime(scheduler_e2e=self._scheduler_s, tokenizer_e2e=self._open_s)
        return server_info(
            self.config, self._facts, startup_time, self._reports, loads, self.state, occupation
        )

    @property
    def _reports(self) -> list[StateReport]:
        """The last report of each replica, by dp_rank."""
        return [report for _, report in sorted(self.manager.reports.items())]
