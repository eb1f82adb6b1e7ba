"""A scheduler on null parts that tests turn step by step, so that they can reach every state."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from ebbtide.srt.config import EngineConfig, ScheduleConfig
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.assembly import RankParts, assemble_scheduler
from ebbtide.srt.managers.control.adapter_loads import AdapterPlan
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlReply,
    DetokenizerInput,
    FinishReason,
    LoadLoRAAdapterReqInput,
    LoadRequest,
    ManagerInput,
    RankMessage,
    Refusal,
    SchedulerInput,
    StateReport,
    Tick,
    TokenizedGenerateReqInput,
    TokenOutput,
    VersionContract,
)
from ebbtide.srt.managers.scheduling.lockstep import (
    Demand,
    FollowerInbox,
    LeaderInbox,
    NoOutputs,
    RankInbox,
)
from ebbtide.srt.managers.wire.channel import SendEnd
from ebbtide.srt.mem_cache import WHOLE, Windows
from ebbtide.srt.mem_cache.page_allocator import PageTable
from ebbtide.srt.mem_cache.state_slots import StateSlots
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.srt.slices import Slices
from ebbtide.testing.null_kv import NUM_WEIGHT_CHUNKS, PAGE_IDS, NullChunks, NullDevice, NullKV, NullPageStore
from ebbtide.testing.null_runner import NullRunner, null_args, null_config
from ebbtide.testing.null_weights import NullCopies, NullWeights, null_memories

Body = TypeVar("Body")


@dataclass
class Output:
    """The output of a request so far."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    adapter_starts: list[tuple[str, int]] = field(default_factory=list)
    kv_versions: list[str] = field(default_factory=list)
    prefill_starts: list[tuple[str, int]] = field(default_factory=list)
    num_retractions: int = 0
    num_nonfinite: int = 0
    cached_tokens: int = 0


class NullRank:
    """One rank's scheduler on null parts."""

    def __init__(
        self,
        config: EngineConfig,
        inbox: RankInbox,
        outputs: SendEnd[DetokenizerInput],
        device: NullDevice,
        *,
        num_pages: int,
        windows: Windows,
        num_adapter_slots: int,
        num_checkpoints: int | None,
    ) -> None:
        self.runner = NullRunner()
        self.adapters = NullAdapters(self.runner, num_adapter_slots)
        self.weights = NullWeights(self.runner)
        self.device = device
        page_size = config.cache.page_size
        max_pages = -(-config.model.context_len // page_size)
        self.table = PageTable(config.schedule.max_running_requests, max_pages, len(windows))
        slots = None
        if num_checkpoints is not None:
            num_rows = config.schedule.max_running_requests
            slots = StateSlots(num_rows, num_checkpoints, 3 * page_size, 10_000, pages_per_slot=2)
        self.kv = self.runner.kv = NullKV(self.table, page_size, num_pages, windows, slots)
        memories = null_memories(
            device, self.weights, keeps_weights=config.server_args.enable_weights_cpu_backup, kv=self.kv
        )
        self.chunks = NullChunks(memories[MemoryTag.KV_CACHE], self.kv)
        self.page_store = NullPageStore(kv=self.kv)
        self.weights.take_chunks = self.chunks.take_spare
        self.weights.return_chunks = self.chunks.return_spare
        parts = RankParts(
            runner=self.runner,
            num_pages=num_pages,
            table=self.table,
            page_store=self.page_store,
            memories=memories,
            weights=self.weights,
            free_bytes=lambda: device.free_bytes,
            device="null",
            uuid=None,
            tokenizer=None,
            page_ids=PAGE_IDS,
            windows=windows,
            state_slots=slots,
            kv_memory=self.chunks,
            num_weight_chunks=NUM_WEIGHT_CHUNKS,
            adapters=self.adapters if num_adapter_slots else None,
        )
        self.scheduler = assemble_scheduler(config, parts, inbox, outputs)


class _FollowerLink:
    """The channels between the leader and one follower."""

    def __init__(self, to_leader: list[RankMessage]) -> None:
        self._to_leader = to_leader
        self.ticks: deque[Tick] = deque()
        self.num_sent = 0

    def receive(self, timeout_s: float | None) -> list[Tick]:
        return [self.ticks.popleft()] if self.ticks else []

    def send(self, message: Tick | RankMessage) -> None:
        # Through the wire format: ranks share no objects, and what cannot be encoded must fail here too.
        data = msgspec.msgpack.encode(message)
        if isinstance(message, Tick):
            self.num_sent += 1
            self.ticks.append(msgspec.msgpack.decode(data, type=Tick))
        else:
            self._to_leader.append(msgspec.msgpack.decode(data, type=RankMessage))

    def close(self) -> None: ...


class SchedulerHarness:
    """A scheduler on null parts: send it messages, turn its loop, and look at the replies and outputs.

    Args:
        device: of rank 0; every other rank has its own device of the same size. None: a new one.
        num_ranks: number of schedulers. `turn` turns the leader, and then the others until they have caught
            up; `turn_rank` turns one of them.
        windows: sliding windows of the groups of layers, which have pages of their own in the pool.
        num_checkpoints: slots for recurrent states of cached prefixes; None: no layer has a state.

    Attributes:
        replies: to control requests, by call id.
        outputs: by rid.
        state: the latest state report.
        ranks: all ranks. `runner`, `weights`, `device`, `table`, `page_store`, `scheduler` are the leader's.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        context_len: int = 128,
        schedule: ScheduleConfig | None = None,
        cache_by_version: bool = False,
        enable_prefix_cache: bool = True,
        has_memory_saver: bool = True,
        keeps_weights: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        device: NullDevice | None = None,
        num_ranks: int = 1,
        windows: Windows = WHOLE,
        num_adapter_slots: int = 0,
        keep_adapter_versions: int = 1,
        num_checkpoints: int | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.device = device if device is not None else NullDevice(10_000)
        self.schedule = schedule if schedule is not None else default_schedule()
        self.replies: dict[str, AnyReply] = {}
        self.outputs: dict[str, Output] = {}
        self.state: StateReport | None = None
        self._incoming: list[SchedulerInput] = []
        self._from_ranks: list[RankMessage] = []
        self._ids = itertools.count()
        args = null_args(
            context_length=context_len,
            page_size=page_size,
            prefix_cache_scope="version" if cache_by_version else "any",
            disable_radix_cache=not enable_prefix_cache,
            enable_memory_saver=has_memory_saver,
            enable_weights_cpu_backup=keeps_weights,
            lora_keep_versions=keep_adapter_versions,
        )
        config = null_config(args)
        model = replace(config.model, eos_token_ids=eos_token_ids, names_answered=frozenset())
        config = replace(config, model=model, schedule=self.schedule)
        rank = partial(
            NullRank,
            config,
            num_pages=num_pages,
            windows=windows,
            num_adapter_slots=num_adapter_slots,
            num_checkpoints=num_checkpoints,
        )
        self._links = [_FollowerLink(self._from_ranks) for _ in range(num_ranks - 1)]
        self._inbox = LeaderInbox(self, self, self._links)
        self.ranks = [rank(self._inbox, self, self.device)]
        for index, link in enumerate(self._links, 1):
            follower = FollowerInbox(link, link, index)
            self.ranks.append(rank(follower, NoOutputs(), NullDevice(self.device.total_bytes)))
        self.runner, self.weights = self.ranks[0].runner, self.ranks[0].weights
        self.table, self.scheduler = self.ranks[0].table, self.ranks[0].scheduler
        self.page_store = self.ranks[0].page_store
        for follower_rank in self.ranks[1:]:
            follower_rank.scheduler.answer()
        self.scheduler.answer()
        if self._links:
            self.turn()

    def generate(
        self,
        prompt: Sequence[int],
        *,
        rid: str | None = None,
        stream: bool = True,
        stream_interval: int = 1,
        seed: int = 0,
        max_new_tokens: int = 16,
        namespace: tuple[str, ...] = (),
        contract: VersionContract | None = None,
        priority: int = 0,
        grammar: str | None = None,
        adapter: str | None = None,
        **params: Any,
    ) -> str:
        """Queue a request; returns its rid."""
        rid = rid if rid is not None else f"req-{next(self._ids)}"
        self.outputs[rid] = Output()
        self._incoming.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=list(prompt),
                sampling_params=SamplingParams(max_new_tokens=max_new_tokens, **params),
                max_new_tokens=max_new_tokens,
                seed=seed,
                stream=stream,
                stream_interval=stream_interval,
                cache_namespace=namespace,
                contract=contract if contract is not None else VersionContract(),
                priority=priority,
                grammar=grammar,
                adapter=adapter,
            )
        )
        return rid

    def abort(self, rid: str) -> None:
        """Abort a request as the API process does when its client has disconnected."""
        self._incoming.append(AbortGeneration(rid=rid, message="Aborted: the client went away"))

    def deliver(self, message: SchedulerInput) -> None:
        self._incoming.append(message)

    def call(self, request: AnyControlRequest) -> str:
        call_id = f"call-{next(self._ids)}"
        self._incoming.append(ControlCall(id=call_id, request=request))
        return call_id

    def apply(self, request: AnyControlRequest, kind: type[Body]) -> Body:
        """Carry out a control request; returns its reply, which must be of this kind."""
        call_id = self.call(request)
        self.turn_until(lambda: call_id in self.replies)
        reply = self.replies[call_id]
        assert isinstance(reply, kind), reply
        return reply

    def refuse(self, request: AnyControlRequest) -> Refusal:
        """Carry out a control request that must be refused; returns the refusal."""
        return self.apply(request, Refusal)

    @property
    def num_waiting(self) -> int:
        return len(self._incoming)

    def turn(self, count: int = 1) -> None:
        """Turn the loop `count` times; turns without work count too."""
        for _ in range(count):
            self.scheduler.turn()
            for index in range(1, len(self.ranks)):
                self.turn_rank(index)
                while self._links[index - 1].ticks:
                    self.turn_rank(index)

    def turn_rank(self, index: int) -> None:
        """Turn one rank, unless it would wait for a turn that the leader has not made yet."""
        scheduler = self.ranks[index].scheduler
        if index == 0 or self._links[index - 1].ticks or scheduler.demand is not Demand.TURN:
            scheduler.turn()

    def num_turns(self, index: int) -> int:
        """Number of turns that a rank has made of those that all ranks make together. Needs several ranks."""
        link = self._links[max(index - 1, 0)]
        return link.num_sent - (len(link.ticks) if index > 0 else 0)

    @property
    def is_busy(self) -> bool:
        """Whether any rank has anything left to do."""
        has_ticks = any(link.ticks for link in self._links)
        is_runnable = any(rank.scheduler.is_runnable for rank in self.ranks)
        return bool(self._incoming or self._from_ranks) or self._inbox.is_due or has_ticks or is_runnable

    def turn_until(self, condition: Callable[[], bool], limit: int = 10_000) -> None:
        """Turn until the condition is true. AssertionError: nothing is left to do, or `limit` is reached."""
        for _ in range(limit):
            self.turn()
            if condition():
                return
            assert self.is_busy, "the scheduler sleeps and would not wake up"
        raise AssertionError(f"still running after {limit} turns")

    def run_until_idle(self) -> None:
        """Turn until every request has ended or nothing can run."""
        self.turn_until(lambda: not self.is_busy)

    def receive(self, timeout_s: float | None) -> list[Any]:
        """Called by the leader: the messages since its last turn. Does not wait."""
        messages = [*self._from_ranks, *self._incoming]
        self._incoming.clear()
        self._from_ranks.clear()
        return messages

    def send(self, message: ManagerInput) -> None:
        """Called by the scheduler: a message to the API process."""
        # Through the wire format, so that what cannot be encoded fails here too.
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ManagerInput)
        match message:
            case ControlReply():
                assert message.id not in self.replies
                self.replies[message.id] = message.reply
            case StateReport():
                self.state = message
            case TokenOutput():
                collect(self.outputs, message)

    def close(self) -> None: ...


def collect(outputs: Mapping[str, Output], message: TokenOutput) -> None:
    """Add a message to the outputs so far, by rid."""
    for output in message.outputs:
        known = outputs[output.rid]
        assert known.finish is None, f"{output.rid} goes on after its end"
        known.token_ids += output.token_ids
        known.finish = output.finish
        known.num_retractions = output.num_retractions
        known.num_nonfinite = output.num_nonfinite
        if output.start is not None:
            known.cached_tokens = output.start.cached_tokens
        for name in ("version_starts", "adapter_starts", "kv_versions", "prefill_starts"):
            if (told := getattr(output, name)) is not None:
                setattr(known, name, told)
    for streamed in message.streamed:
        for rid, token_id in zip(streamed.rids, streamed.token_ids, strict=True):
            assert outputs[rid].finish is None, f"{rid} goes on after its end"
            outputs[rid].token_ids.append(token_id)


# Whether `default_schedule` overlaps steps. Tests that must pass either way set it.
OVERLAP = False


def default_schedule(**changes: Any) -> ScheduleConfig:
    """A schedule with limits that are small enough for tests to reach. `changes`: other fields."""
    limits: dict[str, Any] = {
        "max_running_requests": 8,
        "max_queued_requests": None,
        "chunked_prefill_size": 16,
        "max_prefill_tokens": 64,
        "policy": "fcfs",
        "overlap": OVERLAP,
    }
    return ScheduleConfig(**{**limits, **changes})


class NullAdapters:
    """Adapters that are an integer each, given as the `lora_path` of a load.

    Attributes:
        faults: exceptions to raise, once each, at "open", "write", "save" or "restore".
        slowness: number of empty slices before each slice that copies.
        num_restored, num_saved: number of copies from and to host memory.
    """

    def __init__(self, runner: NullRunner, num_slots: int) -> None:
        self.num_slots = num_slots
        self.runner = runner
        runner.adapters = [None] * num_slots
        self.faults: dict[str, Exception] = {}
        self.slowness = 0
        self.num_restored = self.num_saved = 0

    @property
    def copies(self) -> NullCopies:
        return NullCopies(self.runner)

    def fail_at(self, step: str) -> None:
        error = self.faults.pop(step, None)
        if error is not None:
            raise error

    def open(self, request: LoadRequest, *, with_digest: bool) -> Slices[AdapterPlan]:
        yield from ()
        self.fail_at("open")
        given = request.lora_path if isinstance(request, LoadLoRAAdapterReqInput) else ""
        if not given.isdigit():
            raise RequestRejected(f"lora_path: expected an integer, got {given!r}")
        return _NullPlan(self, int(given), given if with_digest else "")

    def write(self, slot: int, value: int) -> Slices[None]:
        """Write a slot. No pass may read it from the first slice to the last."""
        self.runner.adapters[slot] = None
        for _ in range(self.slowness):
            yield 0
        self.fail_at("write")
        self.runner.adapters[slot] = value
        yield 1

    def is_read(self, slot: int) -> bool:
        return any(slot in step.read for step in self.runner.under_way)

    def save(self, slot: int) -> object:
        self.fail_at("save")
        self.num_saved += 1
        return self.runner.adapters[slot]

    def restore(self, slot: int, copy: object) -> None:
        self.fail_at("restore")
        self.num_restored += 1
        assert isinstance(copy, int)
        self.runner.adapters[slot] = copy


class _NullPlan:
    num_tensors, num_bytes = 2, 8

    def __init__(self, adapters: NullAdapters, value: int, digest: str) -> None:
        self.digest = digest
        self._adapters = adapters
        self._value = value

    def write(self, slot: int) -> Slices[None]:
        return self._adapters.write(slot, self._value)

    def detach(self) -> Slices[None]:
        yield 1

    def close(self) -> None:
        """Does nothing: no memory was borrowed."""
