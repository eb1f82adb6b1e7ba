"""Runs one batch plan: hidden states, logits where they are needed, tokens and logprobs.

Shapes: T tokens, R requests, S requests that sample, D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionBackend
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.model_executor.batch_plan import BatchPlan, PendingStep, PositionLogprobs, StepResult
from ebbtide.srt.model_executor.forward_batch import ForwardBatch, PromptRows
from ebbtide.srt.model_executor.logprobs import position_logprobs
from ebbtide.srt.model_executor.sampler import Sampler
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.base import CausalLM

# Bound of the float32 logits that prompt logprobs hold at a time.
PROMPT_LOGITS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ran where it was launched: on the CPU there is nothing to wait for."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class ModelRunner:
    """A model, its weights, its KV pool and what turns plans into tokens.

    The caller sees to it that both arenas are resident and the weights valid, and that the page table
    holds pages for every token of a plan.
    """

    def __init__(
        self,
        model: CausalLM,
        weight_store: WeightStore,
        kv_pool: KVPool,
        page_table: PageTable,
        attention: AttentionBackend,
        vocab_size: int,
    ) -> None:
        self.model = model
        self.weight_store = weight_store
        self.kv_pool = kv_pool
        self.page_table = page_table
        self._attention = attention
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size)

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> PendingStep:
        """Write the new tokens' KV and sample; on the CPU the step is done on return."""
        batch = ForwardBatch.from_plan(plan, self.page_table.array, self.kv_pool.page_size)
        self._attention.prepare(batch)
        hidden_TD = self.model.forward(batch.input_ids_T, batch.positions_T, self._attention)
        result = StepResult(token_ids=[-1] * len(plan.specs))
        if batch.prompt_rows:
            result.input_logprobs = self._prompt_logprobs(plan, batch.prompt_rows, hidden_TD)
        if batch.sampled_R:
            self._sample(plan, batch, hidden_TD, result)
        return FinishedStep(result)

    def _sample(self, plan: BatchPlan, batch: ForwardBatch, hidden_TD: Tensor, result: StepResult) -> None:
        hidden_SD = hidden_TD if plan.is_decode else hidden_TD[batch.sampled_rows_S]
        sampled = self._sampler.sample(
            self.model.logits(hidden_SD), [plan.specs[request] for request in batch.sampled_R]
        )
        for request, token_id in zip(batch.sampled_R, sampled.token_ids, strict=True):
            result.token_ids[request] = token_id
        if sampled.logprobs is not None:
            result.output_logprobs = [None] * len(plan.specs)
            for request, logprobs in zip(batch.sampled_R, sampled.logprobs, strict=True):
                result.output_logprobs[request] = logprobs

    def _prompt_logprobs(
        self, plan: BatchPlan, prompt_rows: list[PromptRows], hidden_TD: Tensor
    ) -> list[list[PositionLogprobs] | None]:
        """Request by request, and few rows at a time: a long prompt's logits are large."""
        num_rows = max(1, PROMPT_LOGITS_BYTES // (4 * self._vocab_size))
        results: list[list[PositionLogprobs] | None] = [None] * len(plan.specs)
        for rows in prompt_rows:
            spec = plan.specs[rows.request].logprobs
            assert spec is not None
            hidden_MD = hidden_TD[rows.first_row : rows.first_row + len(rows.token_ids)]
            entries: list[PositionLogprobs] = []
            for piece_MD, token_ids_M in zip(
                torch.split(hidden_MD, num_rows),
                torch.split(torch.tensor(rows.token_ids), num_rows),
                strict=True,
            ):
                scores_MV = self.model.logits(piece_MD).float()
                entries += position_logprobs(scores_MV, token_ids_M, [spec] * len(piece_MD))
            results[rows.request] = entries
        return results
