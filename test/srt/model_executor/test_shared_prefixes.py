"""Which requests of a decode step share pages."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.model_runs import Run, RunnerDriver

from ebbtide.srt.layers.attention.shared_runs import SharedRuns, best_runs
from ebbtide.srt.model_executor.batch_plan import BatchPlan, LogprobSpec, SampleSpec
from ebbtide.srt.model_executor.forward_batch import BatchLayout, ForwardBatch, shared_prefixes
from ebbtide.srt.model_executor.model_runner import ModelRunner
from ebbtide.srt.sampling_params import SamplingParams

PAGE_SIZE, WIDTH = 4, 32


class Table:
    """A page table, and requests in its rows."""

    def __init__(self) -> None:
        self.array = np.zeros((16, WIDTH), dtype=np.int32)
        self.new_pages: Iterator[int] = count(1)
        self.lens = np.zeros(16, dtype=np.int32)

    def take(self, num_pages: int) -> list[int]:
        return [next(self.new_pages) for _ in range(num_pages)]

    def put(self, row: int, shared: list[int], num_own: int) -> None:
        """A request whose next token goes to the last of its own pages. What was there stays behind it."""
        pages = shared + self.take(num_own)
        self.array[row, : len(pages)] = pages
        self.lens[row] = (len(pages) - 1) * PAGE_SIZE + 1

    def groups(self, rows: list[int]) -> dict[frozenset[int], int]:
        """Rows that share → how many pages."""
        size = len(rows)
        spec = SampleSpec(SamplingParams(), 0, frozenset(), [], [])
        plan = BatchPlan(
            input_ids_T=np.zeros(size, dtype=np.int64),
            page_rows_R=np.array(rows, dtype=np.int32),
            starts_R=self.lens[rows],
            num_new_R=np.ones(size, dtype=np.int32),
            samples_R=np.ones(size, dtype=np.bool_),
            num_outputs_R=np.zeros(size, dtype=np.int64),
            specs=[spec] * size,
        )
        found = shared_prefixes(plan, self.array, PAGE_SIZE, lambda _, num_saved, __: num_saved > 2)
        if found is None:
            return {}
        in_order = plan.ordered(found.order_R).page_rows_R
        assert in_order[found.places_R].tolist() == rows
        runs = zip(found.runs.first_row_G, found.runs.num_rows_G, found.runs.num_pages_G, strict=True)
        return {frozenset(in_order[first : first + rows].tolist()): int(pages) for first, rows, pages in runs}


def test_samples_of_a_prompt_are_found_wherever_they_stand() -> None:
    table = Table()
    first, second = table.take(5), table.take(7)
    for row in (1, 4, 2):
        table.put(row, first, 2)
    for row in (0, 9):
        table.put(row, second, 1)
    table.put(3, [], 6)

    assert table.groups([4, 0, 3, 1, 9, 2]) == {frozenset({1, 2, 4}): 5, frozenset({0, 9}): 7}
    assert table.groups([4, 3, 9]) == {}
    # Only pages that are full are read and no longer written to.
    table.lens[4] = 3 * PAGE_SIZE + 1
    assert table.groups([4, 1]) == {frozenset({1, 4}): 3}


def test_what_stands_behind_the_pages_of_a_request_is_not_shared() -> None:
    table = Table()
    prompt = table.take(6)
    for row in range(3):
        table.put(row, prompt, 2)
    assert table.groups([0, 1, 2]) == {frozenset({0, 1, 2}): 6}
    # A short request, behind whose pages those of the one before it are still in the table.
    table.put(2, [], 2)
    assert table.groups([0, 1, 2]) == {frozenset({0, 1}): 6}


@pytest.mark.parametrize(
    ("num_common", "runs"),
    [
        ([], []),
        ([0, 0], []),
        ([3, 3, 0, 5], [(0, 3, 3), (3, 2, 5)]),
        # A system prompt for all, and prompts behind it: whatever leaves out more.
        ([2, 9, 2, 9], [(1, 2, 9), (3, 2, 9)]),
        ([8, 9, 8, 9], [(0, 5, 8)]),
        ([1, 2, 3, 4], [(2, 3, 3)]),
    ],
)
def test_the_runs_are_those_that_save_most(num_common: list[int], runs: list[tuple[int, int, int]]) -> None:
    found = best_runs(num_common)

    columns = (found.first_row_G, found.num_rows_G, found.num_pages_G)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == runs


class EagerGraphs:
    """Stands in for captured steps: computes the listed requests, in the order in which they come."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.inputs = SimpleNamespace(rows=torch.zeros(0))
        self.orders: list[list[int]] = []

    def fits(self, plan: BatchPlan) -> bool:
        return plan.is_decode

    can_share = fits

    def replay(self, plan: BatchPlan, layout: BatchLayout, runs: SharedRuns | None) -> torch.Tensor:
        runner = self.runner
        batch = ForwardBatch.from_plan(plan, runner.page_table.arrays, runner.kv_pool.page_size)
        self.orders.append(plan.page_rows_R.tolist() if runs is not None else [])
        self.inputs.rows = batch.rows_T
        attention = runner.attention.prepare(batch.paged)
        return runner.forward(batch.input_ids_T, batch.positions_T, attention)


def test_requests_that_are_computed_in_another_order_get_their_own_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of two prompts, taken alternately: groups are put together, and nobody notices."""
    checkpoint = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    prompts = [list(b"The tide turns twice a day, and the marsh knows it."), list(range(60, 130))]

    def generated(*, shared: bool) -> list[Run]:
        driver = RunnerDriver(checkpoint, device="cpu")
        runner = driver.runner
        graphs: Any = EagerGraphs(runner)
        if shared:
            runner.graphs = graphs
            monkeypatch.setattr(runner.attention, "is_worth_sharing", lambda *_: True)
        owners = [driver.start(prompt) for prompt in prompts]
        driver.step(*((owner, len(owner.token_ids)) for owner in owners))
        runs = [
            driver.start(
                prompts[sample % 2],
                SamplingParams(temperature=1.0),
                seed=sample,
                logprobs=LogprobSpec(),
                shares=owners[sample % 2],
                num_shared=48,
            )
            for sample in range(6)
        ]
        driver.generate(runs, 12)
        assert not shared or any(rows != sorted(rows) for rows in graphs.orders)
        return runs

    for plain, one in zip(generated(shared=False), generated(shared=True), strict=True):
        assert one.output_ids == plain.output_ids
        assert one.logprobs == plain.logprobs
