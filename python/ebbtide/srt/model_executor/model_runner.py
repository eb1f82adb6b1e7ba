"""Runs one batch plan: hidden states, logits where they are needed, tokens and logprobs.

Shapes: T tokens, R requests, S requests that sample, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionBackend
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks, PendingStep, StepResult
from ebbtide.srt.model_executor.forward_batch import ForwardBatch, Layout, PromptRows, resolve_tokens
from ebbtide.srt.model_executor.sampling.logprobs import LaunchedLogprobs, position_logprobs
from ebbtide.srt.model_executor.sampling.sampler import LaunchedSample, Sampler
from ebbtide.srt.model_executor.shared_prefixes import PrefixFinder
from ebbtide.srt.model_executor.transfers import upload
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.base import CausalLM

if TYPE_CHECKING:
    from ebbtide.srt.model_executor.graph_runner import DecodeGraphs

# Bound of the float32 logits that prompt logprobs hold at a time.
PROMPT_LOGITS_BYTES = 64 << 20


@dataclass(slots=True)
class LaunchedStep:
    """A step whose results are on their way to the host.

    Attributes:
        num_requests: R.
        sampled_R: the requests that sample.
        sample: None where none of them does.
        prompt_logprobs: per request with prompt positions in this step, piece by piece.
        has_run: recorded behind the last launch; None on a CPU, where to launch is to run.
    """

    num_requests: int
    sampled_R: Sequence[int]
    sample: LaunchedSample | None = None
    prompt_logprobs: dict[int, list[LaunchedLogprobs]] = field(default_factory=dict)
    has_run: torch.Event | None = None

    def wait(self) -> StepResult:
        if self.has_run is not None:
            self.has_run.synchronize()
        result = StepResult(token_ids=[-1] * self.num_requests)
        if self.prompt_logprobs:
            result.input_logprobs = [None] * self.num_requests
            for request, pieces in self.prompt_logprobs.items():
                result.input_logprobs[request] = [entry for piece in pieces for entry in piece.result()]
        if self.sample is None:
            return result
        sampled = self.sample.result()
        for request, token_id in zip(self.sampled_R, sampled.token_ids, strict=True):
            result.token_ids[request] = token_id
        if sampled.logprobs is not None:
            result.output_logprobs = [None] * self.num_requests
            for request, logprobs in zip(self.sampled_R, sampled.logprobs, strict=True):
                result.output_logprobs[request] = logprobs
        return result


class ModelRunner:
    """A model, its weights, its KV pool and what turns plans into tokens.

    The caller sees to it that both arenas are resident and the weights valid, and that the page table
    holds pages for every token of a plan.

    Args:
        device: where all of it is.
        next_tokens: int64, the token sampled last for each row of the page table, and one row more.
        graphs: decode steps that were captured; None to launch every kernel of every step.
        logprobs_mode: what the logprobs of outputs are of; see `Sampler`.
    """

    def __init__(
        self,
        model: CausalLM,
        weight_store: WeightStore,
        kv_pool: KVPool,
        page_table: PageTable,
        attention: AttentionBackend,
        vocab_size: int,
        device: torch.device,
        next_tokens: Tensor,
        graphs: DecodeGraphs | None = None,
        logprobs_mode: str = "scaled",
    ) -> None:
        self.model = model
        self.weight_store = weight_store
        self.kv_pool = kv_pool
        self.page_table = page_table
        self.graphs = graphs
        self.sampler = Sampler(vocab_size, device, logprobs_mode=logprobs_mode)
        self.attention = attention
        self._vocab_size = vocab_size
        self._device = device
        self._next_tokens = next_tokens
        self._prefixes = PrefixFinder(page_table.array, kv_pool.page_size, attention.is_worth_sharing)

    @torch.inference_mode()
    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> PendingStep:
        """Write the new tokens' KV and sample; returns at once on CUDA, and with the step done on a CPU.

        Where requests have masks it waits for what `before_masks` waits for, while the device computes.
        """
        if self.graphs is not None and self.graphs.fits(plan):
            step = self._replay(plan, self.graphs, before_masks)
        else:
            step = self._run(plan, before_masks)
        if self._device.type != "cpu":
            step.has_run = torch.Event(self._device)
            step.has_run.record()
        return step

    def _replay(self, plan: BatchPlan, graphs: DecodeGraphs, before_masks: BeforeMasks) -> LaunchedStep:
        prefixes = self._prefixes.find(plan) if graphs.can_share(plan) else None
        runs = prefixes.runs if prefixes is not None else None
        listed = plan.ordered(prefixes.order_R) if prefixes is not None else plan
        layout = Layout.of(listed, self.page_table.array, self.kv_pool.page_size)
        hidden_RD = graphs.replay(listed, layout, runs)
        page_rows_R = graphs.inputs.rows[: len(plan.specs)]
        if prefixes is not None:
            # Whoever samples finds the requests in the plan's order.
            places_R = upload(prefixes.places_R, self._device)
            hidden_RD, page_rows_R = hidden_RD[places_R], page_rows_R[places_R]
        step = LaunchedStep(len(plan.specs), range(len(plan.specs)))
        self._sample(plan, hidden_RD, page_rows_R, step, before_masks)
        return step

    def _run(self, plan: BatchPlan, before_masks: BeforeMasks) -> LaunchedStep:
        batch = ForwardBatch.from_plan(plan, self.page_table.array, self.kv_pool.page_size, self._device)
        self.attention.prepare(batch)
        input_ids_T = resolve_tokens(batch.input_ids_T, batch.rows_T, self._next_tokens)
        # A prompt's last row alone is wanted, unless it asks for the logits of each row.
        wants_last = bool(batch.sampled_R) and not plan.is_decode and not batch.prompt_rows
        rows_S = batch.sampled_rows_S if wants_last else None
        hidden_TD = self.model.forward(input_ids_T, batch.positions_T, self.attention, rows_S)
        step = LaunchedStep(len(plan.specs), batch.sampled_R)
        for rows in batch.prompt_rows:
            step.prompt_logprobs[rows.request] = self._prompt_logprobs(plan, rows, hidden_TD)
        if batch.sampled_R:
            hidden_SD = hidden_TD if wants_last or plan.is_decode else hidden_TD[batch.sampled_rows_S]
            self._sample(plan, hidden_SD, batch.sampled_page_rows_S, step, before_masks)
        return step

    def _sample(
        self,
        plan: BatchPlan,
        hidden_SD: Tensor,
        page_rows_S: Tensor,
        step: LaunchedStep,
        before_masks: BeforeMasks,
    ) -> None:
        specs = plan.specs
        if len(step.sampled_R) < len(specs):
            specs = [specs[request] for request in step.sampled_R]
        logits_SV = self.model.logits(hidden_SD)
        if before_masks is not None and any(spec.mask is not None for spec in specs):
            before_masks()
        step.sample = self.sampler.launch(logits_SV, specs, plan.num_outputs_R[plan.samples_R])
        self._next_tokens.index_copy_(0, page_rows_S, step.sample.tokens_S)

    def _prompt_logprobs(
        self, plan: BatchPlan, rows: PromptRows, hidden_TD: Tensor
    ) -> list[LaunchedLogprobs]:
        """Few rows at a time: a long prompt's logits are large."""
        spec = plan.specs[rows.request].logprobs
        assert spec is not None
        num_rows = max(1, PROMPT_LOGITS_BYTES // (4 * self._vocab_size))
        hidden_MD = hidden_TD[rows.first_row : rows.first_row + len(rows.token_ids)]
        token_ids_M = upload(rows.token_ids, self._device)
        return [
            position_logprobs(self.model.logits(piece_MD).float(), piece_M, [spec] * len(piece_MD))
            for piece_MD, piece_M in zip(
                torch.split(hidden_MD, num_rows), torch.split(token_ids_M, num_rows), strict=True
            )
        ]
