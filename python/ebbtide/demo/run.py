"""`ebbtide demo`: runs the demo, shows its progress, and checks the results."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers.utils import logging as transformers_logging

from ebbtide import Engine
from ebbtide.demo.loop import (
    FIRST_REWARD_BELOW,
    LAST_REWARD_ABOVE,
    Loop,
    Results,
    StepRecord,
    heading,
    row,
)
from ebbtide.demo.report import write_report
from ebbtide.demo.trainer import KV_BYTES_PER_TOKEN, DemoFailed, ProblemSet, Trainer, make_tokenizer


@dataclass(frozen=True)
class Settings:
    """Settings of the demo.

    Attributes:
        num_prompts: questions per step.
        group_size: answers per question.
        num_disturbed: requests at the end that run while their memory is taken away.
        warm_up_goal: the probability of a right answer at which the warm-up ends.
        kv_pool_bytes: size of the KV cache in float32, large enough to be seen in the memory plots.
        is_fp8: whether the engine has weights and KV cache in FP8, on the CPU.
        dashboard_port: port of the engine's dashboard; None: it is not served.
    """

    num_steps: int = 70
    num_prompts: int = 256
    group_size: int = 4
    num_disturbed: int = 512
    warm_up_goal: float = 0.16
    kv_pool_bytes: int = 256_000_000
    is_fp8: bool = False
    dashboard_port: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status: 0: all checks passed; 1: one failed; 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="ebbtide demo",
        description="A small model learns addition by GRPO; the rollouts are Ebbtide's. Writes report.html, "
        f"demo.png and the model. Fails unless the reward rises from under {FIRST_REWARD_BELOW} to over "
        f"{LAST_REWARD_ABOVE}, among other checks.",
    )
    parser.add_argument("--steps", type=int, default=Settings.num_steps, help="GRPO steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder to write to (%(default)s)")
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="weights and KV cache of the engine in FP8, emulated on the CPU: shows importance ratios",
    )
    parser.add_argument("--dashboard-port", type=int, help="serve the live dashboard on this local port")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected a positive number, got {options.steps}")
    console = Console()
    try:
        settings = Settings(options.steps, is_fp8=options.fp8, dashboard_port=options.dashboard_port)
        run(settings, options.seed, options.out, console)
    except DemoFailed as error:
        console.print(Text(f"demo failed: {error}", "bold red"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0


def run(settings: Settings, seed: int, out: Path, console: Console) -> Results:
    """Run the demo, and write the report and the trained model.

    The report is also written after a failure, if at least one step was done.

    Raises:
        DemoFailed: a check failed.
    """
    start = time.perf_counter()
    _use_one_thread()
    transformers_logging.disable_progress_bar()
    problems, trainer = ProblemSet(seed), Trainer(settings.num_steps, seed)
    display = Display(console)
    with display.progress:
        _warm_up(trainer, problems, settings.warm_up_goal, display)
        warm_up_s = time.perf_counter() - start
        checkpoint = _save(trainer, out)
        display.doing("starting the engine", 0.0)
        with _start_engine(checkpoint, settings, seed) as engine:
            if settings.dashboard_port is not None:
                display.line(f"watch it at {engine.serve_dashboard(settings.dashboard_port)}")
            loop = Loop(
                engine,
                trainer,
                problems,
                num_prompts=settings.num_prompts,
                group_size=settings.group_size,
                on_stage=lambda step, stage: display.doing(
                    f"step {step + 1} of {settings.num_steps}: {stage}", step / settings.num_steps
                ),
                is_rounded=settings.is_fp8,
            )
            results = Results(seed, warm_up_s, loop.start, loop.examine(), is_fp8=settings.is_fp8)
            try:
                _train(loop, settings, results, display)
                results.total_s = time.perf_counter() - start
                results.check()
            except DemoFailed as error:
                results.failure = str(error)
                raise
            finally:
                if results.steps:
                    display.line(f"wrote {write_report(out, results)}")
        _save(trainer, out)
    return results


def _use_one_thread() -> None:
    """Use one thread in the trainer and, by the environment, in the engine, unless the user has set a number.

    The matrices are so small that threads cost more than they gain: measured on two cores, three times the
    CPU time, and steps of half a minute if other programs run too.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def _warm_up(trainer: Trainer, problems: ProblemSet, goal: float, display: Display) -> None:
    display.line("warming up on sums with their answers")
    probability = 0.0
    for probability in trainer.warm_up(problems, goal):
        display.doing("warm-up: probability of a right answer", probability / goal)
    display.line(f"warmed up: a sampled answer is right with a probability of {probability:.2f}")


def _train(loop: Loop, settings: Settings, results: Results, display: Display) -> None:
    for record in loop.run(settings.num_steps):
        results.steps.append(record)
        display.step(record)
    results.after = loop.examine()
    results.elastic = loop.disturb(settings.num_disturbed)
    for span in results.elastic.spans:
        display.line(f"for {span.end_s - span.start_s:.1f} s {span.label}".replace("\n", ": "))
    results.failure = None
    display.line(
        f"reward {results.first_reward:.3f} → {results.last_reward:.3f}; held-out sums answered right "
        f"(greedy): {results.before:.1%} → {results.after:.1%}",
        "bold",
    )


def _save(trainer: Trainer, out: Path) -> Path:
    """Write the model and its tokenizer as a checkpoint folder."""
    folder = out / "model"
    trainer.model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _start_engine(checkpoint: Path, settings: Settings, seed: int) -> Engine:
    bytes_per_token = KV_BYTES_PER_TOKEN // (4 if settings.is_fp8 else 1)
    return Engine(
        device="cpu" if settings.is_fp8 else None,
        quantization="fp8" if settings.is_fp8 else None,
        kv_cache_dtype="fp8_e4m3" if settings.is_fp8 else "auto",
        model_path=str(checkpoint),
        weight_version="0",
        random_seed=seed,
        max_total_tokens=settings.kv_pool_bytes // bytes_per_token,
        max_running_requests=512,
        chunked_prefill_size=4096,
    )


class Display:
    """Prints lines, and below them, on a terminal, a bar with the current activity."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.progress.add_task("", total=1.0)

    def doing(self, what: str, share_done: float) -> None:
        """Show the current activity, and the share of it that is done, from 0 to 1."""
        self.progress.update(self._task, description=what, completed=share_done)

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        if record.step == 0:
            self.line(heading(), "bold")
        self.line(row(record))
