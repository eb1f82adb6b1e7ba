"""Measures the time per decode step without the model: messages, scheduling, batches, output processing.

The runner has no model. Outgoing messages are encoded as for the sockets. Requests return no logprobs, or
those of their tokens and of the `num_top` most likely ones. There are `--runs` repetitions of `--steps` steps
each, on one core. The goals are 0.5 ms per step with 256 running requests, and with 2,048 1.5 ms, or 3 ms if
they stream. The thread's CPU time is beside the wall time: the difference is due to the machine's other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from common import write_result

from ebbtide.srt.managers.io_struct import (
    ManagerInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    TokenizedGenerateReqInput,
)
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks, LogprobArrays, StepResult
from ebbtide.srt.model_executor.forward_batch import ForwardBatch
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.srt.this_process import freeze_heap
from ebbtide.testing import SchedulerHarness, default_schedule

PROMPT_LEN, PAGE_SIZE = 64, 16


class BenchHarness(SchedulerHarness):
    """A harness that encodes all messages, and keeps only replies."""

    encoder = msgspec.msgpack.Encoder()
    num_bytes = 0

    def send(self, message: ManagerInput) -> None:
        self.num_bytes += len(self.encoder.encode(message))
        if not hasattr(message, "outputs"):
            super().send(message)


class FinishedStep:
    """A step that is done."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class ConstantRunner:
    """A runner that always samples token 7.

    Args:
        builds_tensors: whether to build the batch's tensors as the model runner does.
        num_top: number of most likely tokens with logprobs, besides the sampled one; None: no logprobs.
    """

    def __init__(self, harness: SchedulerHarness, *, builds_tensors: bool, num_top: int | None) -> None:
        self._harness = harness
        self._builds_tensors = builds_tensors
        self._num_top = num_top

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> FinishedStep:
        if self._builds_tensors:
            ForwardBatch.from_plan(plan, self._harness.table.arrays, PAGE_SIZE)
        return FinishedStep(StepResult([7] * len(plan.specs), self._logprobs(len(plan.specs))))

    def forget_room(self) -> None: ...
    def _logprobs(self, num_requests: int) -> LogprobArrays | None:
        if self._num_top is None:
            return None
        tokens_N = np.full(num_requests, -1.0, np.float32)
        if not self._num_top:
            return LogprobArrays(tokens_N)
        shape = (num_requests, self._num_top)
        return LogprobArrays(tokens_N, np.full(shape, -1.0, np.float32), np.zeros(shape, np.int32))


def measure(
    num_running: int, num_steps: int, *, stream: bool, builds_tensors: bool, num_top: int | None
) -> tuple[float, float]:
    """Milliseconds per decode step with this many running requests: wall time, and time of this thread."""
    max_tokens = PROMPT_LEN + num_steps + 40
    harness = BenchHarness(
        num_pages=(num_running + 1) * -(-max_tokens // PAGE_SIZE),
        page_size=PAGE_SIZE,
        context_len=max_tokens,
        schedule=default_schedule(
            max_running_requests=num_running, chunked_prefill_size=None, max_prefill_tokens=1 << 20
        ),
    )
    harness.scheduler._runner = ConstantRunner(harness, builds_tensors=builds_tensors, num_top=num_top)
    max_new_tokens = num_steps + 30
    for index in range(num_running):
        harness.deliver(
            TokenizedGenerateReqInput(
                rid=f"request-{index}",
                input_ids=list(range(index * PROMPT_LEN, (index + 1) * PROMPT_LEN)),
                sampling_params=SamplingParams(max_new_tokens=max_new_tokens),
                max_new_tokens=max_new_tokens,
                seed=index,
                stream=stream,
                return_logprob=num_top is not None,
                top_logprobs_num=num_top or 0,
            )
        )
    harness.turn(20)
    assert len(harness.scheduler.policy.running) == num_running
    started, cpu_started = time.perf_counter(), time.thread_time()
    harness.turn(num_steps)
    elapsed_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu_started
    reply = harness.apply(PauseGenerationReqInput(), PauseGenerationReqOutput)
    assert reply.num_aborted == num_running, "every request was still decoding"
    return elapsed_s / num_steps * 1e3, cpu_s / num_steps * 1e3


def measure_row(
    num_runs: int, num_steps: int, num_running: int, stream: bool, builds_tensors: bool, num_top: int | None
) -> dict[str, Any]:
    runs = [
        measure(num_running, num_steps, stream=stream, builds_tensors=builds_tensors, num_top=num_top)
        for _ in range(num_runs)
    ]
    row = {
        "num_running": num_running,
        "stream": stream,
        "builds_tensors": builds_tensors,
        "num_top": num_top,
        "median_ms": statistics.median(wall_ms for wall_ms, _ in runs),
        "median_cpu_ms": statistics.median(cpu_ms for _, cpu_ms in runs),
        "runs_ms": [wall_ms for wall_ms, _ in runs],
        "runs_cpu_ms": [cpu_ms for _, cpu_ms in runs],
    }
    logprobs = "no logprobs" if num_top is None else f"logprobs, top {num_top}"
    print(
        f"{num_running:4d} running, {'stream' if stream else 'whole ':6s}, "
        f"{'with' if builds_tensors else 'no  '} tensors, {logprobs}: {row['median_ms']:.3f} ms/step, "
        f"cpu {row['median_cpu_ms']:.3f}",
        flush=True,
    )
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    freeze_heap()  # As the scheduler's process does.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    settings: list[tuple[int, bool, bool, int | None]] = [
        (num_running, stream, builds_tensors, None)
        for num_running in (1, 64, 256, 2048)
        for stream in (True, False)
        for builds_tensors in (False, True)
    ]
    settings += [(2048, stream, False, num_top) for num_top in (0, 1, 20) for stream in (True, False)]
    rows = [measure_row(args.runs, args.steps, *setting) for setting in settings]
    goals = {"goal_ms_at_256": 0.5, "goal_ms_at_2048": [1.5, 3.0]}
    path = write_result("scheduler_overhead", {**goals, "steps": args.steps, "rows": rows})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
