"""One forward pass over tokens of nobody's request, between two passes of the scheduler.

Null engines make one too: their processes import no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.pace import Ranks
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.mem_cache.page_allocator import PageTable
from ebbtide.srt.model_executor.batch_plan import BatchPlan, LogprobSpec, Runner, SampleSpec
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ebbtide.srt.mem_cache.kv_scales import KVScales


@dataclass
class SchedulerTrialPass:
    """A forward pass over tokens of nobody's request, between two passes of the scheduler.

    Implements `control.weights.TrialPass` with pages of the pool, and with a row of the page table.

    Args:
        kv_scales: they do not follow what this pass computes: its weights may never serve.
    """

    _policy: SchedulePolicy
    _table: PageTable
    _runner: Runner
    _ranks: Ranks
    _: KW_ONLY
    max_tokens: int
    vocab_size: int
    kv_scales: KVScales | None = None

    def logprobs(self, input_ids: Sequence[int], adapter_slot: int | None = None) -> list[float]:
        ids = list(input_ids)
        unrecorded = self.kv_scales.paused() if self.kv_scales is not None else nullcontext()
        with unrecorded, self._pages(self._policy.pages_of(len(ids))):
            plan = _plan(ids, self._table.spare_row, adapter_slot)
            # The others would wait in the middle of it for one that has failed.
            result = self._ranks.certainly(lambda: self._runner.launch(plan).wait())
        logprobs: list[float] = result.input_logprobs[0].tokens_N.tolist()
        return logprobs

    @contextmanager
    def _pages(self, num_pages: int) -> Iterator[None]:
        """Pages in the spare row."""
        pages = self._policy.borrow_pages(num_pages)
        if pages is None:
            raise RequestRejected(
                f"canary: its forward pass needs {num_pages} pages of KV cache, and the pool has not so many"
            )
        entries = self._table.arrays[:, self._table.spare_row, : num_pages // len(self._table.arrays)]
        entries[:] = np.array(pages).reshape(entries.shape)
        try:
            yield
        finally:
            self._policy.allocator.free(pages)


def _plan(ids: list[int], row: int, adapter_slot: int | None) -> BatchPlan:
    """The logprobs of a prompt, and no token behind it."""
    spec = SampleSpec(SamplingParams(max_new_tokens=0), 0, frozenset(), ids, [], LogprobSpec(start=0))
    return BatchPlan(
        input_ids_T=np.array(ids, dtype=np.int64),
        page_rows_R=np.full(1, row, dtype=np.int32),
        starts_R=np.zeros(1, dtype=np.int32),
        num_new_R=np.array([len(ids)], dtype=np.int32),
        samples_R=np.zeros(1, dtype=np.bool_),
        num_outputs_R=np.zeros(1, dtype=np.int64),
        specs=[spec],
        adapters_R=None if adapter_slot is None else np.full(1, adapter_slot, dtype=np.int32),
    )
