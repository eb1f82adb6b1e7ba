"""Runs batch plans: the forward pass, logits of the rows that need them, sampling and logprobs.

Shapes: T tokens, R requests, S requests that sample, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ebbtide.srt.errors import EngineError, drop_frames
from ebbtide.srt.layers.attention.base import AttentionBackend, AttentionStep
from ebbtide.srt.layers.lora import StepAdapters
from ebbtide.srt.layers.state import StateStep
from ebbtide.srt.layers.step import Kernels, Step
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.page_allocator import PageTable
from ebbtide.srt.model_executor.adapters import AdapterSlots
from ebbtide.srt.model_executor.batch_plan import (
    BatchPlan,
    BeforeMasks,
    LogprobArrays,
    LogprobSpec,
    PassOutOfMemory,
    PendingStep,
    StepResult,
)
from ebbtide.srt.model_executor.forward_batch import (
    BatchLayout,
    ForwardBatch,
    PromptRows,
    resolve_tokens,
    shared_prefixes,
    state_step,
)
from ebbtide.srt.model_executor.host_copies import download, upload
from ebbtide.srt.model_executor.pass_room import PassRoom
from ebbtide.srt.model_executor.sampling.logprobs import (
    LOWEST,
    LaunchedLogprobs,
    alternatives,
    marked_nonfinite,
    token_logprobs,
)
from ebbtide.srt.model_executor.sampling.sampler import LISTED_BYTES, LaunchedSample, Sampler
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.base import CausalLM

if TYPE_CHECKING:
    from ebbtide.srt.device import Device
    from ebbtide.srt.model_executor.graph_runner import DecodeGraphs

# Rows of logits that prompt logprobs hold at a time: 300 MiB of bfloat16 with 150,000 ids.
PROMPT_LOGITS_ROWS = 1024
# Top and named logprobs of a prompt that are made at a time: they take as much memory again.
PROMPT_ALTERNATIVES = 1 << 24


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt positions on their way to the host.

    Attributes:
        rows: the positions, request by request.
        specs: what each of these requests wants.
        tokens_M: logprobs of the tokens at all positions, from `marked_nonfinite`.
        others: the other wanted logprobs, in pieces of `rows_at_once` positions.
    """

    rows: Sequence[PromptRows]
    specs: Sequence[LogprobSpec]
    tokens_M: Tensor
    others: Sequence[LaunchedLogprobs]
    rows_at_once: int

    def result(self) -> dict[int, LogprobArrays]:
        """The logprobs by index of the request. Call it after the device has run the pass."""
        parts = torch.split(self.tokens_M, self.rows_at_once)
        pieces = [other.result(part.numpy()) for other, part in zip(self.others, parts, strict=True)]
        ends = np.cumsum([len(piece.tokens_N) for piece in pieces]).tolist()
        results = {}
        first = 0
        for rows, spec in zip(self.rows, self.specs, strict=True):
            last = first + len(rows.token_ids)
            results[rows.request] = LogprobArrays.joined(
                [
                    piece.part(slice(max(first - start, 0), last - start), spec)
                    for piece, start, end in zip(pieces, [0, *ends], ends, strict=False)
                    if start < last and first < end
                ]
            )
            first = last
        return results


@dataclass(slots=True)
class LaunchedStep:
    """A step whose results are on their way to the host.

    Attributes:
        num_requests: R.
        sampled_R: indices of the requests that sample.
        sample: None: no request samples.
        prompt_logprobs: None: no request wants any in this step.
        has_run: an event recorded after the last launch; None on a CPU, where a launch runs at once.
        routes: the experts of all tokens; None: they are not recorded.
    """

    num_requests: int
    sampled_R: Sequence[int]
    sample: LaunchedSample | None = None
    prompt_logprobs: PromptLogprobs | None = None
    has_run: torch.Event | None = None
    routes: Tensor | None = None

    def wait(self) -> StepResult:
        if self.has_run is not None:
            self.has_run.synchronize()
        result = StepResult(token_ids=[-1] * self.num_requests)
        if self.routes is not None:
            result.routes = self.routes.numpy()
        if self.prompt_logprobs is not None:
            result.input_logprobs = self.prompt_logprobs.result()
            for request, positions in result.input_logprobs.items():
                is_nan_N = np.isnan(positions.tokens_N)
                if is_nan_N.any():
                    positions.tokens_N[is_nan_N] = LOWEST
                    result.num_nonfinite[request] = int(is_nan_N.sum())
        if self.sample is None:
            return result
        sampled = self.sample.result()
        for request, token_id in zip(self.sampled_R, sampled.token_ids, strict=True):
            result.token_ids[request] = token_id
        for request in (self.sampled_R[row] for row in sampled.num_nonfinite):
            result.num_nonfinite[request] = result.num_nonfinite.get(request, 0) + 1
        if sampled.supports is not None:
            requests = [self.sampled_R[row] for row in sampled.supports.rows]
            result.supports = replace(sampled.supports, rows=requests)
        if sampled.output_logprobs is not None:
            result.output_logprobs = sampled.output_logprobs.spread(self.sampled_R, self.num_requests)
        return result


@dataclass(eq=False)
class ModelRunner:
    """A model with its weights and KV pool; runs plans.

    The caller makes sure that both arenas are resident, that the weights are valid, and that the page table
    has pages for every token of a plan.

    Args:
        device: where all of it is.
        next_tokens: int64, the last sampled token of each page-table row, and one spare row.
        kernels: which products use our own kernels.
        adapters: None: no plan has any.

    Attributes:
        graphs: captured decode steps; None: every kernel of every step is launched.
        routes_TLK: buffer at a fixed address for the experts of a pass's tokens; None: they are not recorded.
        room: memory that several ranks make sure of before a pass; None: there is one rank, and a pass may
            run out of memory anywhere.
    """

    model: CausalLM
    weight_store: WeightStore
    kv_pool: KVPool
    page_table: PageTable
    attention: AttentionBackend
    sampler: Sampler
    device: Device
    _next_tokens: Tensor
    kernels: Kernels
    adapters: AdapterSlots | None = None
    graphs: DecodeGraphs | None = field(default=None, init=False)
    routes_TLK: Tensor | None = field(default=None, init=False)
    room: PassRoom | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._device = torch.device(self.device.name)

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> PendingStep:
        """Launch a step: write the new tokens' KV and sample. On CUDA it does not wait for the device.

        If a request has a mask, `before_masks` is called while the device computes.

        Raises:
            PassOutOfMemory: see `Runner.launch`.
            EngineError: memory ran out in the middle of a pass of several ranks.
        """
        try:
            if self.room is not None:
                self.room.make(*self._size(plan))
            return self._launch(plan, before_masks)
        except PassOutOfMemory:
            self.sampler.forget()
            raise
        except torch.OutOfMemoryError as error:
            asked = ". ".join(str(error).split(". ")[:2])
            drop_frames(error)
        self.sampler.forget()
        self.device.synchronize()
        self.device.trim()
        message = f"{asked}; {self.device.free_bytes()} bytes are free"
        if self.room is not None:
            raise EngineError(f"this rank ends in the middle of a forward pass, where others wait: {message}")
        raise PassOutOfMemory(message)

    def forget_room(self) -> None:
        if self.room is not None:
            self.room.forget()

    def _size(self, plan: BatchPlan) -> tuple[int, int, int]:
        """How many tokens of a pass take memory from torch, how many rows of logits at a time, and how many
        bytes it takes beside them."""
        num_rows = int(plan.samples_R.sum())
        if plan.is_decode:
            is_replayed = self.graphs is not None and self.graphs.fits(plan)
            return 0 if is_replayed else num_rows, num_rows, self.sampler.room_bytes(plan.specs)
        num_tokens = len(plan.input_ids_T)
        sampled = [spec for spec, samples in zip(plan.specs, plan.samples_R.tolist(), strict=True) if samples]
        more_bytes = self.sampler.room_bytes(sampled)
        scored = [spec.logprobs for spec in plan.specs if spec.logprobs and spec.logprobs.start is not None]
        if scored:
            # Counted twice: prompt logprobs also make a float32 copy of the logits.
            num_rows = max(num_rows, 2 * min(num_tokens, PROMPT_LOGITS_ROWS))
            widest = max(each.top + len(each.token_ids) for each in scored)
            more_bytes += LISTED_BYTES * min(widest * num_tokens, PROMPT_ALTERNATIVES)
        return num_tokens, num_rows, more_bytes

    @torch.inference_mode()
    def _launch(self, plan: BatchPlan, before_masks: BeforeMasks) -> PendingStep:
        states = self.kv_pool.states
        if states is not None:
            states.copy(plan.copies_before)
        if self.adapters is not None:
            self.adapters.last_read_R = plan.adapters_R
        if self.graphs is not None and self.graphs.fits(plan):
            step = self._replay(plan, self.graphs, before_masks)
        else:
            step = self._run(plan, before_masks)
        if states is not None:
            states.copy(plan.copies_after)
        if self._device.type != "cpu":
            step.has_run = torch.Event(self._device)
            step.has_run.record()
        return step

    def _replay(self, plan: BatchPlan, graphs: DecodeGraphs, before_masks: BeforeMasks) -> LaunchedStep:
        table, page_size = self.page_table, self.kv_pool.page_size
        prefixes = None
        if graphs.can_share(plan):
            prefixes = shared_prefixes(plan, table.array, page_size, self.attention.is_worth_sharing)
        runs = prefixes.runs if prefixes is not None else None
        listed = plan.ordered(prefixes.order_R) if prefixes is not None else plan
        layout = BatchLayout.of(listed, table.arrays, page_size)
        hidden_RD = graphs.replay(listed, layout, runs)
        page_rows_R = graphs.inputs.rows[: len(plan.specs)]
        if prefixes is not None:
            # Sampling takes the requests in the plan's order.
            places_R = upload(prefixes.places_R, self._device)
            hidden_RD, page_rows_R = hidden_RD[places_R], page_rows_R[places_R]
        step = LaunchedStep(len(plan.specs), range(len(plan.specs)))
        step.routes = self._routes(len(plan.specs), None if prefixes is None else places_R)
        self._sample(plan, hidden_RD, page_rows_R, step, before_masks)
        return step

    def _routes(self, num_tokens: int, places_T: Tensor | None = None) -> Tensor | None:
        """Launch the copy to the host of the experts of the last launched pass.

        Args:
            places_T: the place in the pass of each token of the plan; None: the same as in the plan.
        """
        if self.routes_TLK is None:
            return None
        routes_TLK = self.routes_TLK[:num_tokens]
        return download(routes_TLK.clone() if places_T is None else routes_TLK[places_T])

    def _run(self, plan: BatchPlan, before_masks: BeforeMasks) -> LaunchedStep:
        batch = ForwardBatch.from_plan(plan, self.page_table.arrays, self.kv_pool.page_size, self._device)
        attention = self.attention.prepare(batch.paged)
        input_ids_T = resolve_tokens(batch.input_ids_T, batch.rows_T, self._next_tokens)
        # The last layer need only compute the last row of each prompt, unless prompt logprobs are wanted.
        wants_last = bool(batch.sampled_R) and not plan.is_decode and not batch.prompt_rows
        # If experts are recorded or given, the last layer needs all rows.
        wants_last = wants_last and self.routes_TLK is None and not plan.given_routes
        # Adapter slots are given per row, and must match the rows of every layer.
        wants_last = wants_last and plan.adapters_R is None
        wanted_M = batch.sampled_rows_S if wants_last else None
        hidden_TD = self.forward(
            input_ids_T,
            batch.positions_T,
            attention,
            None if self.kv_pool.states is None else state_step(self.kv_pool.states, plan, batch),
            self._slots(plan),
            wanted_M,
            self._given(plan),
        )
        step = LaunchedStep(len(plan.specs), batch.sampled_R)
        step.routes = self._routes(len(plan.input_ids_T))
        if batch.prompt_rows:
            step.prompt_logprobs = self._prompt_logprobs(plan, batch.prompt_rows, hidden_TD)
        if batch.sampled_R:
            hidden_SD = hidden_TD if wants_last or plan.is_decode else hidden_TD[batch.sampled_rows_S]
            self._sample(plan, hidden_SD, batch.sampled_page_rows_S, step, before_masks)
        return step

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        attention: AttentionStep,
        states: StateStep | None = None,
        slots_T: Tensor | None = None,
        wanted_M: Tensor | None = None,
        given_TLK: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states. Arguments as in `Step`; `slots_T`: the slot of each token's adapter."""
        adapters = None
        if slots_T is not None:
            assert self.adapters is not None, "a plan has adapters, and the engine has no slots for them"
            adapters = StepAdapters.of(slots_T, self.adapters.num_slots)
        return self.model.forward(
            Step(
                input_ids_T,
                positions_T,
                attention,
                self.kernels,
                wanted_M,
                given_TLK,
                self.routes_TLK,
                adapters,
                states,
            )
        )

    def _slots(self, plan: BatchPlan) -> Tensor | None:
        """The slot of each token's adapter, as `StepAdapters.of` takes them."""
        if plan.adapters_R is None:
            return None
        return upload(np.repeat(plan.adapters_R, plan.num_new_R), self._device)

    def _given(self, plan: BatchPlan) -> Tensor | None:
        """The given experts of the plan's tokens as `Step` takes them: −1 where none are given."""
        if not plan.given_routes:
            return None
        firsts_R = plan.num_new_R.cumsum() - plan.num_new_R
        [(num_layers, top_k), *_] = [rows.shape[1:] for rows in plan.given_routes.values()]
        experts_TLK = np.full((len(plan.input_ids_T), num_layers, top_k), -1, dtype=np.int64)
        for request, rows_NLK in plan.given_routes.items():
            experts_TLK[firsts_R[request] :][: len(rows_NLK)] = rows_NLK
        return upload(experts_TLK, self._device)

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
        logits_SV = self.model.logits(hidden_SD, self.kernels)
        if before_masks is not None and any(spec.mask is not None for spec in specs):
            before_masks()
        step.sample = self.sampler.launch(logits_SV, specs, plan.num_outputs_R[plan.samples_R])
        self._next_tokens.index_copy_(0, page_rows_S, step.sample.tokens_S)

    def _prompt_logprobs(self, plan: BatchPlan, rows: list[PromptRows], hidden_TD: Tensor) -> PromptLogprobs:
        """Launch the logprobs of prompt positions, some rows at a time, since logits are large."""
        specs = [spec for each in rows if (spec := plan.specs[each.request].logprobs) is not None]
        specs_M: list[LogprobSpec] = []
        for each, spec in zip(rows, specs, strict=True):
            specs_M += [spec] * len(each.token_ids)
        token_ids_M = upload(np.concatenate([np.array(each.token_ids) for each in rows]), self._device)
        rows_M = upload(
            np.concatenate([np.arange(len(each.token_ids)) + each.first_row for each in rows]), self._device
        )
        hidden_MD = hidden_TD[rows_M]
        tokens, norms, others = [], [], []
        widest = max(1, *(spec.top + len(spec.token_ids) for spec in specs))
        rows_at_once = max(1, min(PROMPT_LOGITS_ROWS, PROMPT_ALTERNATIVES // widest))
        for first in range(0, len(rows_M), rows_at_once):
            part = slice(first, first + rows_at_once)
            logits_MV = self.model.logits(hidden_MD[part], self.kernels)
            tokens_M, norm_M1 = token_logprobs(logits_MV, token_ids_M[part])
            tokens.append(tokens_M)
            norms.append(norm_M1)
            others.append(alternatives(logits_MV, norm_M1, specs_M[part]))
            # Free it for the next piece.
            del logits_MV
        # One copy to the host for all pieces: each copy delays the device.
        tokens_M = marked_nonfinite(torch.cat(tokens), torch.cat(norms))
        return PromptLogprobs(rows, specs, download(tokens_M), others, rows_at_once)
