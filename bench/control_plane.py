"""How soon a pause is acknowledged, and how long an update keeps live requests waiting.

Pause: each trial starts so many requests, waits until all of them decode, pauses at a random moment of a
step and measures from request to reply; the goal is one step and 2 ms. Of a pause in mode `wait` counts the
time from the last token to the reply. Twice: on a runner that only sleeps for 5 ms per step, in a scheduler
process of its own behind its real ZMQ channels; and on a tiny model through `Engine`.

Stall: requests decode while all weights are replaced in one session, staged, or in place in a scheduler that
gets no address space for a copy. The trainer's tensors lie in shared memory before it begins. `stall_ms` as
the reply has it, and the longest gap between two tokens of a stream beyond the usual one. The goal: staged,
neither depends on the number of bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from common import write_result
from occupation import buckets, engine_of_layers
from transformers import Qwen3Config

from ebbtide import Engine, ServerArgs
from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.entrypoints.launch.launcher import EngineProcesses
from ebbtide.srt.managers.assembly import RankParts, SchedulerConfig, assemble_scheduler
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AnyControlRequest,
    ContinueGenerationReqInput,
    ControlCall,
    ControlReply,
    ManagerInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    SchedulerInput,
    TextOutput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from ebbtide.srt.managers.scheduling.ranks.lockstep import Inbox
from ebbtide.srt.managers.wire.channel import ChannelAddresses, Receiver, Sender
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.testing import FinishedStep, NullDevice, NullMemory, NullRunner, NullWeights
from ebbtide.trainer.payload_encoding import serialize_tensors

MB = 1e6
STEP_S = 0.005
GOAL_MS = 2.0
NUM_RUNNING = (1, 64, 256)
PROMPT_LEN = 8
# Tokens that the last request has got when the pause comes, and that those have which a `wait` waits for.
WARM_TOKENS, SHORT_TOKENS, LONG_TOKENS = 8, 24, 900
CONTEXT_LEN = 1024
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NUM_STREAMS_OF_UPDATE = 8
SMALL_BUCKET_BYTES = 32 << 20  # what a scheduler can map that has no room for a copy of one layer


class Subject(Protocol):
    """An engine, as the pauses see it."""

    def start(self, num_requests: int, num_tokens: int) -> None:
        """Start requests; of the last, token times are noted."""
        ...

    def token_times(self) -> list[float]:
        """When the tokens of the last request came, on the clock of `time.perf_counter`."""
        ...

    def pause(self, mode: PauseMode) -> int:
        """Pause; returns how many requests it found running."""
        ...

    def reset(self) -> None:
        """End all requests, and the pause."""
        ...


# ------------------------------------------------------------------------------------------ the null engine


class PacedRunner:
    """Samples without a model, in steps that take as long as a model's."""

    def __init__(self, runner: NullRunner) -> None:
        self._runner = runner

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> FinishedStep:
        time.sleep(STEP_S)
        return self._runner.launch(plan)


def run_null_scheduler(config: EngineConfig, addresses: ChannelAddresses, ready: Connection) -> None:
    """The scheduler's process without a model; see `run_scheduler_process`. Does not return."""
    inbox: Receiver[SchedulerInput] = Receiver(addresses.scheduler, SchedulerInput)
    manager: Sender[ManagerInput] = Sender(addresses.manager)
    runner, device = NullRunner(), NullDevice(1 << 40)
    page_size = config.cache.page_size
    parts = RankParts(
        runner=PacedRunner(runner),
        num_pages=max(NUM_RUNNING) * CONTEXT_LEN // page_size,
        table=PageTable(config.schedule.max_running_requests, -(-CONTEXT_LEN // page_size)),
        memories={tag: NullMemory(device, 1 << 20) for tag in MemoryTag},
        weights=NullWeights(runner),
        free_bytes=lambda: device.free_bytes,
        device="null",
        tokenizer=None,
    )
    scheduler = assemble_scheduler(SchedulerConfig.of(config), parts, Inbox(inbox, manager), manager)
    ready.send({"status": "ready"})
    scheduler.run()


class NullSubject:
    """Speaks to a null scheduler over its channels, as the API process does."""

    def __init__(self, processes: EngineProcesses) -> None:
        self._scheduler: Sender[SchedulerInput] = Sender(processes.addresses.scheduler)
        self._inbox: Receiver[ManagerInput] = Receiver(processes.addresses.manager, ManagerInput)
        self._ids = (f"id-{number}" for number in itertools.count())
        self._last_rid = ""
        self._times: list[float] = []

    def start(self, num_requests: int, num_tokens: int) -> None:
        self._times = []
        for index in range(num_requests):
            self._last_rid = next(self._ids)
            self._scheduler.send(
                TokenizedGenerateReqInput(
                    rid=self._last_rid,
                    input_ids=[index % 250 + position for position in range(PROMPT_LEN)],
                    sampling_params=SamplingParams(max_new_tokens=num_tokens, ignore_eos=True),
                    max_new_tokens=num_tokens,
                    seed=index,
                    stream=index == num_requests - 1,
                )
            )

    def token_times(self) -> list[float]:
        self._take(0.001)
        return self._times

    def pause(self, mode: PauseMode) -> int:
        return _num_found(self._call(PauseGenerationReqInput(mode=mode)))

    def reset(self) -> None:
        self._call(AbortReq(abort_all=True))
        self._call(ContinueGenerationReqInput())

    def _call(self, request: AnyControlRequest) -> Any:
        call_id = next(self._ids)
        self._scheduler.send(ControlCall(id=call_id, request=request))
        while True:
            for reply in self._take(None):
                if reply.id == call_id:
                    return reply.reply

    def _take(self, timeout_s: float | None) -> list[ControlReply]:
        """Replies that have come; notes tokens on the way."""
        messages = self._inbox.receive(timeout_s)
        now = time.perf_counter()
        for message in messages:
            if isinstance(message, TokenOutput | TextOutput):
                self._times += [now for output in message.outputs if output.rid == self._last_rid]
        return [message for message in messages if isinstance(message, ControlReply)]


def _num_found(reply: PauseGenerationReqOutput) -> int:
    return reply.num_running + reply.num_retracted + reply.num_aborted


# ------------------------------------------------------------------------------------------ the real engine


class EngineSubject:
    """An `Engine`; the last of its requests streams, the others are one batch."""

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._pool = pool
        self._times: list[float] = []
        self._running: list[Any] = []

    def start(self, num_requests: int, num_tokens: int) -> None:
        prompts = [
            [index % 240 + position for position in range(PROMPT_LEN)] for index in range(num_requests)
        ]
        params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        self._times = []
        # The stream is to be the last in the queue: when it has tokens, everything decodes.
        self._engine.pause_generation("in_place")
        if batch := prompts[1:]:
            self._running.append(
                self._pool.submit(self._engine.generate, input_ids=batch, sampling_params=params)
            )
        self._wait_for_queue(len(batch))
        chunks = self._engine.generate(input_ids=prompts[0], sampling_params=params, stream=True)
        self._running.append(self._pool.submit(_note_times, chunks, self._times))
        self._wait_for_queue(num_requests)
        self._engine.continue_generation()

    def _wait_for_queue(self, num_requests: int) -> None:
        while self._engine.pause_generation("in_place")["num_queued"] < num_requests:
            time.sleep(0.005)

    def token_times(self) -> list[float]:
        time.sleep(0.001)
        return list(self._times)

    def pause(self, mode: PauseMode) -> int:
        reply = self._engine.pause_generation(mode.value)
        return int(reply["num_running"] + reply["num_retracted"] + reply["num_aborted"])

    def reset(self) -> None:
        self._engine.abort_request(abort_all=True)
        self._engine.continue_generation()
        for one in self._running:
            one.result()
        self._running = []


def _note_times(chunks: Iterator[Any], times: list[float]) -> None:
    for chunk in chunks:
        # One chunk brings several tokens when this process has fallen behind.
        times += [time.perf_counter()] * (len(chunk["output_ids"]) - len(times))


# ----------------------------------------------------------------------------------------------- the pauses


def trial(subject: Subject, num_requests: int, mode: PauseMode, rng: random.Random) -> dict[str, float]:
    """One pause: its latency, and the mean step before it."""
    num_tokens = SHORT_TOKENS if mode is PauseMode.WAIT else LONG_TOKENS
    subject.start(num_requests, num_tokens)
    while len(times := list(subject.token_times())) < WARM_TOKENS:
        pass
    step_s = _mean_gap_s(times)
    time.sleep(rng.random() * step_s)
    started = time.perf_counter()
    num_found = subject.pause(mode)
    ended = time.perf_counter()
    if mode is PauseMode.WAIT:
        started = max(started, subject.token_times()[-1])
    else:
        assert num_found == num_requests, f"{num_found} of {num_requests} were running"
    subject.reset()
    return {"latency_ms": (ended - started) * 1e3, "step_ms": step_s * 1e3}


def _mean_gap_s(times: list[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


def measure_pauses(name: str, subject: Subject, num_trials: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for num_requests in NUM_RUNNING:
        for mode in PauseMode:
            runs = [trial(subject, num_requests, mode, rng) for _ in range(num_trials)]
            # A pause(wait) has no step to wait for: it counts from the last token.
            excess = [run["latency_ms"] - (0.0 if mode is PauseMode.WAIT else run["step_ms"]) for run in runs]
            row = {
                "subject": name,
                "mode": mode.value,
                "num_running": num_requests,
                "median_latency_ms": statistics.median(run["latency_ms"] for run in runs),
                "median_step_ms": statistics.median(run["step_ms"] for run in runs),
                "worst_beyond_step_ms": max(excess),
                "share_within_goal": sum(one <= GOAL_MS for one in excess) / len(excess),
                "runs": runs,
            }
            rows.append(row)
            print(
                f"{name:11s} {num_requests:4d} running, pause({mode.value + ')':9s} "
                f"{row['median_latency_ms']:7.2f} ms, step {row['median_step_ms']:7.2f} ms, worst "
                f"{row['worst_beyond_step_ms']:6.2f} ms beyond it, {row['share_within_goal']:4.0%} in time",
                flush=True,
            )
    return rows


@contextmanager
def tiny_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3Config(**SHAPE)
        config.architectures = ["Qwen3ForCausalLM"]
        Path(folder, "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "float32"}))
        yield folder


def measure_all_pauses(num_trials: int) -> list[dict[str, Any]]:
    rows = []
    with tiny_folder() as folder:
        args = ServerArgs(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_running_requests=max(NUM_RUNNING),
            max_total_tokens=max(NUM_RUNNING) * CONTEXT_LEN,
            log_level="error",
        )
        processes = EngineProcesses(resolve(args), {"scheduler": "control_plane:run_null_scheduler"})
        try:
            processes.wait_ready()
            rows += measure_pauses("null runner", NullSubject(processes), num_trials)
        finally:
            processes.shutdown()
        with Engine(server_args=args) as engine, ThreadPoolExecutor(2) as pool:
            rows += measure_pauses("tiny model", EngineSubject(engine, pool), num_trials)
    return rows


# ----------------------------------------------------------------------------------------------- the stalls


@contextmanager
def no_room_for_a_copy(engine: Engine) -> Iterator[None]:
    """Within, the scheduler may map a tensor of the trainer's, but no second copy of the weights."""
    [rank] = engine.memory_occupation()["ranks"]
    scheduler = psutil.Process(rank["pid"])
    before = scheduler.rlimit(psutil.RLIMIT_AS)
    scheduler.rlimit(psutil.RLIMIT_AS, (scheduler.memory_info().vms + (48 << 20), before[1]))
    try:
        yield
    finally:
        scheduler.rlimit(psutil.RLIMIT_AS, before)


class Streams:
    """Requests that decode for as long as it takes; token times of one of them."""

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        self._subject = EngineSubject(engine, pool)
        self.times: Callable[[], list[float]] = self._subject.token_times
        self._subject.start(NUM_STREAMS_OF_UPDATE, LONG_TOKENS)
        self.wait_for(WARM_TOKENS)

    def wait_for(self, num_tokens: int) -> None:
        """Return when so many more tokens have come."""
        target = len(self.times()) + num_tokens
        while len(self.times()) < target:
            time.sleep(0.002)

    def end(self) -> None:
        self._subject.reset()


def update_under_load(
    engine: Engine, named_tensors: list[tuple[str, torch.Tensor]], *, staged: bool
) -> dict[str, float]:
    """Replace all weights while requests decode."""
    with ExitStack() as scope:
        parts = buckets(named_tensors, SMALL_BUCKET_BYTES)
        blocks = [scope.enter_context(serialize_tensors(part)) for part in parts]
        pool = scope.enter_context(ThreadPoolExecutor(2))
        if not staged:
            scope.enter_context(no_room_for_a_copy(engine))
        streams = Streams(engine, pool)
        first = len(streams.times())
        engine.begin_weight_update()
        for block in blocks:
            engine.update_weights_from_tensor([block.payload], flush_cache=False)
        reply = engine.end_weight_update(pause_mode="in_place", flush_cache=False)
        assert (reply["staged"], reply["content"]) == (staged, "valid"), reply
        streams.wait_for(WARM_TOKENS)
        gaps = [later - earlier for earlier, later in itertools.pairwise(streams.times())]
        streams.end()
    usual_s = _mean_gap_s(streams.times()[:first])
    return {
        "bytes": reply["num_bytes"],
        "stall_ms": reply["stall_ms"],
        "usual_gap_ms": usual_s * 1e3,
        "longest_gap_beyond_usual_ms": (max(gaps[first - 1 :]) - usual_s) * 1e3,
    }


def measure_stalls(layers: Sequence[int], num_runs: int) -> list[dict[str, Any]]:
    rows = []
    for num_layers in layers:
        with engine_of_layers(num_layers, max_total_tokens=1 << 14) as (engine, named_tensors):
            for staged in (True, False):
                runs = [update_under_load(engine, named_tensors, staged=staged) for _ in range(num_runs)]
                median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                rows.append({"staged": staged, "median": median, "runs": runs})
                print(
                    f"{median['bytes'] / MB:6.0f} MB {'staged  ' if staged else 'in place'}: "
                    f"stall_ms {median['stall_ms']:8.1f}, usual gap {median['usual_gap_ms']:6.1f} ms, "
                    f"longest {median['longest_gap_beyond_usual_ms']:8.1f} ms beyond it",
                    flush=True,
                )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="pauses per mode and number of requests")
    parser.add_argument("--runs", type=int, default=3, help="updates per size")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 16], help="64 MiB of weights each")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    # Inherited by the engines. Threads that hand tiny pieces to each other measure the machine's other load.
    os.environ["OMP_NUM_THREADS"] = "1"
    results = {
        "goal_beyond_step_ms": GOAL_MS,
        "pauses": measure_all_pauses(args.trials),
        "stalls": measure_stalls(args.layers, args.runs),
    }
    print(f"written to {write_result('control_plane', results)}")


if __name__ == "__main__":
    main()
