"""From logits to tokens: penalties, bias, masks, temperature, filters, and one draw per request.

For requests that want it, also the support: the tokens that the filters left, so that could have been drawn.

Shapes: S requests that sample, G of them random (not greedy), K listed ids per row at most, V vocabulary,
W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import LogprobSpec, SampleSpec, StepResult, Supports
from ebbtide.srt.model_executor.host_copies import download, upload
from ebbtide.srt.model_executor.sampling.adjustments import AllowedTokens, Penalties, TokenMasks, bias_entries
from ebbtide.srt.model_executor.sampling.choosing import (
    Chosen,
    Filters,
    HostChooser,
    MakeChooser,
    has_top_k,
    is_filtered,
    mixed_seeds,
    uniforms,
)
from ebbtide.srt.model_executor.sampling.logprobs import (
    LOWEST,
    LaunchedLogprobs,
    alternatives,
    position_logprobs,
)
from ebbtide.srt.sampling_params import SamplingParams

# The most ids that a support lists. A larger one is given as one bit per token of the vocabulary.
MAX_LISTED = 1024
# The number of listed ids is a multiple of this, so that rows stay aligned.
_LISTED_STEP = 16
# Columns before the ids: their number, and the logprob of the sampled token.
_NUM_HEADS = 2
# Bytes per number that a request lists or asks for (biases, token ids, logprobs), with what sorting it takes.
LISTED_BYTES = 128


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """A launched sampling step, whose results may not be on the host yet.

    Attributes:
        tokens_S: int64, on the device, for work that is launched later.
    """

    tokens_S: Tensor
    _on_host: Chosen
    _logprob_rows: list[int]
    _logprobs: LaunchedLogprobs | None
    _supports: LaunchedSupports | None = None

    def result(self) -> StepResult:
        """The result by row. Call it after the work launched up to `Sampler.launch` has run."""
        chosen = self._on_host
        token_ids_S, logprobs_S = chosen.tokens_S.numpy(), chosen.logprobs_S.numpy()
        num_nonfinite: dict[int, int] = dict.fromkeys(np.flatnonzero(np.isnan(logprobs_S)).tolist(), 1)
        logprobs = None
        if self._logprobs is not None:
            rows = self._logprob_rows
            tokens_M = None
            if self._logprobs.tokens_M is None:
                tokens_M = np.nan_to_num(logprobs_S[rows], nan=LOWEST)
            logprobs = self._logprobs.result(tokens_M, token_ids_S[rows]).spread(rows, chosen.num_rows)
        token_ids: list[int] = token_ids_S.tolist()
        supports = None if self._supports is None else self._supports.result(token_ids_S)
        return StepResult(token_ids, logprobs, supports=supports, num_nonfinite=num_nonfinite)


@dataclass(eq=False)
class Sampler:
    """Samples a batch of requests. Data that does not change between steps is kept while the batch is the
    same.

    A token depends only on the request's scores, its seed, and its number of output tokens. The CPU and CUDA
    draw by the same rule, but rounding may differ, and tokens with it.

    Args:
        vocab_size: V.
        device: where the logits are.
        make_chooser: makes the chooser; by default Triton's kernels on CUDA, and torch on the CPU.
        logprobs_mode: which scores logprobs are of. "scaled": after penalties and temperature;
            "raw_logprobs": the unchanged logits; "processed_logprobs": scaled, with −∞ for tokens that the
            filters drop.
    """

    _vocab_size: int
    _device: torch.device
    make_chooser: MakeChooser | None = None
    logprobs_mode: str = "scaled"
    _batch: _Batch | None = field(default=None, init=False)
    _counted: tuple[list[SampleSpec], int] = field(default=([], 0), init=False)

    def launch(
        self, logits_SV: Tensor, specs: list[SampleSpec], positions_S: NDArray[np.int64]
    ) -> LaunchedSample:
        """Choose a token per row. The host never waits for the device.

        A row whose scores are all −∞, or not finite, gives some token with the lowest float as logprob.

        Args:
            logits_SV: of any float type, with contiguous rows; may be overwritten.
            specs: per row. Their `output_ids` are only read for penalties (`SampleSpec.needs_output_ids`).
            positions_S: number of output tokens before this one, also those in flight.
        """
        if self._batch is None or self._batch.specs != specs:
            make_chooser = self.make_chooser or _chooser_of(self._device)
            self._batch = _Batch(specs, self._vocab_size, self._device, make_chooser, self._batch)
        batch = self._batch
        wants_raw = bool(batch.logprob_rows) and self.logprobs_mode == "raw_logprobs"
        # Copy them now, since the next steps overwrite the logits.
        raw_MV = batch.raw_scores(logits_SV) if wants_raw else None
        scores_SV = batch.adjusted(logits_SV, positions_S)
        chosen = batch.chooser.choose(scores_SV, batch.noise(positions_S))
        logprobs = None
        if raw_MV is not None:
            logprobs = batch.logprobs_of(raw_MV, chosen)
        elif batch.logprob_rows and self.logprobs_mode == "processed_logprobs" and batch.dropping is not None:
            logprobs = batch.logprobs_of(batch.processed_scores(scores_SV, chosen), chosen)
        elif batch.logprob_rows:
            logprobs = batch.logprobs(scores_SV, chosen)
        supports = None if batch.supports is None else batch.supports.read(scores_SV, chosen)
        on_host = replace(chosen, packed=download(chosen.packed), cut_rows=None)
        return LaunchedSample(chosen.tokens_S, on_host, batch.logprob_rows, logprobs, supports)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Run every kernel once on logits of this dtype, so that none is compiled while requests wait."""
        filters = {"top_p": 0.5, "min_p": 0.1}
        # A bias makes the scores float32; without any filter, other kernels run.
        for params in ({}, filters, {"logit_bias": {0: 0.0}}, filters | {"logit_bias": {0: 0.0}}):
            has_filters = "top_p" in params
            spec = SampleSpec(
                SamplingParams(**params),
                seed=0,
                stop_ids=frozenset(),
                prompt_ids=[0],
                output_ids=[],
                returns_support=has_filters,
            )
            logits_SV = torch.zeros((1, self._vocab_size), dtype=dtype, device=self._device)
            self.launch(logits_SV, [spec], np.zeros(1, dtype=np.int64))
        for scores_SV in (logits_SV, logits_SV.float()):
            token_ids_S = torch.zeros(1, dtype=torch.int64, device=self._device)
            position_logprobs(scores_SV, token_ids_S, [LogprobSpec()])
        self.forget()

    def forget(self) -> None:
        """Drop the kept batch data, which a failed launch may have left incomplete."""
        self._batch, self._counted = None, ([], 0)

    def room_bytes(self, specs: list[SampleSpec]) -> int:
        """Return the most memory in bytes that `launch` takes for these rows, beside their logits.

        What is kept of the rows before counts too, and alone if there are no rows.
        """
        before, kept_bytes = self._counted
        if not specs or specs == before:
            return kept_bytes
        self._counted = list(specs), self._scratch_bytes(specs)
        return max(kept_bytes, self._counted[1])

    def _scratch_bytes(self, specs: list[SampleSpec]) -> int:
        """Add up what adjustments, logprobs and supports allocate."""
        wanted = [(spec.params, each) for spec in specs if (each := spec.logprobs) is not None]
        num_each = max((each.top + len(each.token_ids) for _, each in wanted), default=0)
        num_listed = len(wanted) * num_each
        # Bytes per token of the vocabulary.
        width = len(wanted) * (8 if self.logprobs_mode == "raw_logprobs" else 4 * (num_each > 0))
        if self.logprobs_mode == "processed_logprobs":
            # 50 as counted on a CPU, and 40 as estimated for the sort of a GPU.
            width += 90 * sum(is_filtered(params, self._vocab_size) for params, _ in wanted)
        are_copied = False
        for spec in specs:
            bias, allowed = spec.params.logit_bias or (), spec.params.allowed_token_ids or ()
            num_listed += len(bias) + len(allowed) + len(spec.stop_ids)
            width += 9 * bool(allowed) + 6 * (spec.mask is not None) + 20 * spec.returns_support
            are_copied |= bool(bias or allowed) or spec.needs_output_ids or spec.params.min_new_tokens > 0
            if spec.needs_output_ids:
                width += 22
                num_listed += len(spec.prompt_ids) + len(spec.output_ids)
        # All scores become float32.
        width += 4 * len(specs) * are_copied
        return width * self._vocab_size + num_listed * LISTED_BYTES


class _Batch:
    """The data of one composition of the batch, kept while the same requests are sampled."""

    def __init__(
        self,
        specs: list[SampleSpec],
        vocab_size: int,
        device: torch.device,
        make_chooser: MakeChooser,
        previous: _Batch | None,
    ) -> None:
        self.specs = list(specs)
        self._device = device
        penalised = [row for row, spec in enumerate(specs) if spec.needs_output_ids]
        known = previous._penalties if previous is not None else None
        self._penalties: Penalties | None = (
            Penalties(penalised, [specs[row] for row in penalised], vocab_size, device, known)
            if penalised
            else None
        )
        self._bias = bias_entries(specs, [], device)
        self._allowed = AllowedTokens.of(specs, vocab_size, device)
        self._minimum_S = np.array([spec.params.min_new_tokens for spec in specs])
        asks = any(spec.returns_support for spec in specs)
        self.supports = SupportReader(specs, vocab_size, device) if asks else None
        has_masks = any(spec.mask is not None for spec in specs)
        self._token_masks = TokenMasks(specs, vocab_size, device) if has_masks else None
        self._rows_without_stop: list[int] = []
        random = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
        self._random_G = np.array(random, dtype=np.int64)
        self._seeds_G = mixed_seeds([specs[row].seed for row in random])
        self.chooser = make_chooser([spec.params for spec in specs], vocab_size, device)
        self.logprob_rows = [row for row, spec in enumerate(specs) if spec.logprobs is not None]
        self._logprob_specs = [spec.logprobs for spec in specs if spec.logprobs is not None]
        self._vocab_size = vocab_size
        self._has_alternatives = any(each.top or each.token_ids for each in self._logprob_specs)
        # The rows whose logprobs are wanted; None: all rows.
        self._logprob_rows_M = (
            upload(self.logprob_rows, device) if 0 < len(self.logprob_rows) < len(specs) else None
        )

    def adjusted(self, logits_SV: Tensor, positions_S: NDArray[np.int64]) -> Tensor:
        """Scores after penalties, bias and masks. Divided by the temperature, they give the logprobs."""
        rows: list[int] = np.flatnonzero(positions_S < self._minimum_S).tolist()
        if rows != self._rows_without_stop:  # only when a request reaches its minimum
            self._rows_without_stop, self._bias = rows, bias_entries(self.specs, rows, self._device)
        changes = (self._penalties, self._bias, self._allowed)
        # On CUDA, choosers read half precision directly, and masks do not need float32.
        is_plain = logits_SV.is_cuda and all(change is None for change in changes)
        scores_SV = logits_SV if is_plain else logits_SV.float()
        if self._penalties is not None:
            self._penalties.apply(scores_SV)
        if self._bias is not None:
            where, values = self._bias
            scores_SV.index_put_(where, values, accumulate=True)
        if self._allowed is not None:
            self._allowed.apply(scores_SV)
        if self._token_masks is not None:
            self._token_masks.apply(scores_SV)
        return scores_SV

    def noise(self, positions_S: NDArray[np.int64]) -> NDArray[np.float64]:
        """The noise of each row for the chooser; −1 for greedy rows."""
        noise_S = np.full(len(self.specs), -1.0)
        if len(self._random_G):
            noise_S[self._random_G] = uniforms(self._seeds_G, positions_S[self._random_G])
        return noise_S

    def logprobs(self, scores_SV: Tensor, chosen: Chosen) -> LaunchedLogprobs:
        """Logprobs of the chosen tokens, unless the chooser gave them, and the other wanted logprobs."""
        if chosen.norm_S1 is None:
            return position_logprobs(
                self._wanted(scores_SV), self._wanted(chosen.tokens_S), self._logprob_specs
            )
        if not self._has_alternatives:
            return LaunchedLogprobs(None, None, None)
        return alternatives(
            self._wanted(scores_SV),
            self._wanted(chosen.norm_S1),
            self._logprob_specs,
            scale_M1=None if chosen.scale_S1 is None else self._wanted(chosen.scale_S1),
        )

    @cached_property
    def dropping(self) -> tuple[Tensor, Filters] | None:
        """Of the rows whose logprobs are wanted: those with filters, and the filters; None: no row has."""
        params = [self.specs[row].params for row in self.logprob_rows]
        rows = [
            row
            for row, each in enumerate(params)
            if not each.is_greedy and is_filtered(each, self._vocab_size)
        ]
        if not rows:
            return None
        filters = Filters([params[row] for row in rows], self._vocab_size, self._device)
        return upload(rows, self._device), filters

    def raw_scores(self, logits_SV: Tensor) -> Tensor:
        """A float32 copy of the logits whose logprobs are wanted."""
        return self._wanted(logits_SV).to(torch.float32, copy=True)

    def processed_scores(self, scores_SV: Tensor, chosen: Chosen) -> Tensor:
        """The wanted rows' scores over the temperature, with −∞ for tokens that the filters drop."""
        scores_MV = self._wanted(scores_SV).float()
        if chosen.scale_S1 is not None:
            scores_MV = scores_MV * self._wanted(chosen.scale_S1)
        if self.dropping is None:
            return scores_MV
        rows_F, filters = self.dropping
        support_FV = filters.support(scores_MV[rows_F].softmax(-1))
        # The chosen token stays, even if rounding would drop it.
        support_FV.scatter_(1, self._wanted(chosen.tokens_S)[rows_F].unsqueeze(1), value=True)
        keeps_MV = torch.ones_like(scores_MV, dtype=torch.bool)
        keeps_MV[rows_F] = support_FV
        return scores_MV.masked_fill(~keeps_MV, float("-inf"))

    def logprobs_of(self, scores_MV: Tensor, chosen: Chosen) -> LaunchedLogprobs:
        """The wanted logprobs, of these scores of the wanted rows."""
        return position_logprobs(scores_MV, self._wanted(chosen.tokens_S), self._logprob_specs)

    def _wanted(self, rows: Tensor) -> Tensor:
        return rows if self._logprob_rows_M is None else rows[self._logprob_rows_M]


@dataclass(frozen=True, slots=True)
class LaunchedSupports:
    """Supports on their way to the host.

    Attributes:
        random: the G rows, in the order of the arrays.
        greedy: rows whose support is their token alone.
        listed_GK: int32, as `support_kernel.listed` lays them out; None: `kept_GV` and `logprobs_G` instead.
        words_GW: as `support_kernel.bits` does; None: every row has room for all its ids.
    """

    random: list[int]
    greedy: list[int]
    listed_GK: Tensor | None = None
    words_GW: Tensor | None = None
    kept_GV: Tensor | None = None
    logprobs_G: Tensor | None = None

    def result(self, token_ids_S: NDArray[np.int64]) -> Supports:
        """The supports. Call it after the launched work has run."""
        counts_G = np.zeros(0, dtype=np.int64)
        ids, logprobs_G = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        if self.listed_GK is not None:
            listed_GK = self.listed_GK.numpy()
            counts_G = listed_GK[:, 0].astype(np.int64)
            logprobs_G = listed_GK[:, 1].copy().view(np.float32)
            ids = self._ids(listed_GK[:, _NUM_HEADS:], counts_G)
        elif self.kept_GV is not None and self.logprobs_G is not None:
            kept_GV = self.kept_GV.numpy()
            counts_G, logprobs_G = kept_GV.sum(-1), self.logprobs_G.numpy()
            ids = kept_GV.nonzero()[1].astype(np.int32)
        num_greedy = len(self.greedy)
        return Supports(
            rows=self.random + self.greedy,
            ids=np.concatenate([ids, token_ids_S[self.greedy].astype(np.int32)]),
            ends_G=np.concatenate([counts_G, np.ones(num_greedy, dtype=np.int64)]).cumsum(),
            logprobs_G=np.concatenate(
                [np.nan_to_num(logprobs_G, nan=LOWEST), np.zeros(num_greedy, dtype=np.float32)]
            ),
        )

    def _ids(self, ids_GK: NDArray[np.int32], counts_G: NDArray[np.int64]) -> NDArray[np.int32]:
        num_listed = ids_GK.shape[1]
        if counts_G.max() <= num_listed:
            return ids_GK[np.arange(num_listed) < counts_G[:, None]]
        assert self.words_GW is not None, "there are rows without a bound"
        words_GW = self.words_GW.numpy()
        return np.concatenate(
            [
                ids_GK[row, :count] if count <= num_listed else _ids_of(words_GW[row])
                for row, count in enumerate(counts_G.tolist())
            ]
        )


def _ids_of(words_W: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little")).astype(np.int32)


class SupportReader:
    """Reads the supports of the requests of a batch that want them."""

    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
        rows = [row for row, spec in enumerate(specs) if spec.returns_support]
        self._greedy = [row for row in rows if specs[row].params.is_greedy]
        self._random = [row for row in rows if not specs[row].params.is_greedy]
        params = [specs[row].params for row in self._random]
        # None if no request filters: nothing has to be sorted then.
        has_filters = any(is_filtered(each, vocab_size) for each in params)
        self._filters = Filters(params, vocab_size, device) if has_filters else None
        self._rows_G = upload(np.array(self._random, dtype=np.int32), device)
        bounds = [each.top_k if has_top_k(each, vocab_size) else vocab_size for each in params]
        self._is_bounded = max(bounds, default=0) <= MAX_LISTED
        num_listed = min(max(bounds, default=0), MAX_LISTED)
        self._num_listed = -(-num_listed // _LISTED_STEP) * _LISTED_STEP

    def read(self, scores_SV: Tensor, chosen: Chosen) -> LaunchedSupports:
        """Launch the reading. `scores_SV`: the scores that the tokens were chosen from."""
        if not self._random:
            return LaunchedSupports([], self._greedy)
        if chosen.cut_rows is None:
            return self._sorted(scores_SV, chosen)
        # Rows are cut by Triton kernels only, so Triton can be imported here.
        from ebbtide.srt.model_executor.sampling import support_kernel

        listed_GK = support_kernel.listed(scores_SV, chosen, self._rows_G, self._num_listed)
        words_GW = None if self._is_bounded else support_kernel.bits(scores_SV, chosen, self._rows_G)
        return LaunchedSupports(
            self._random,
            self._greedy,
            listed_GK=download(listed_GK),
            words_GW=None if words_GW is None else download(words_GW),
        )

    def _sorted(self, scores_SV: Tensor, chosen: Chosen) -> LaunchedSupports:
        scores_GV = scores_SV[self._rows_G].float()
        if chosen.scale_S1 is not None:
            scores_GV = scores_GV * chosen.scale_S1[self._rows_G]
        probs_GV = scores_GV.softmax(-1)
        tokens_G1 = chosen.tokens_S[self._rows_G].unsqueeze(1)
        # The chosen token belongs to the support, even if rounding would drop it.
        kept_GV = (probs_GV > 0).scatter_(1, tokens_G1, value=True)
        if self._filters is not None:
            kept_GV &= self._filters.support(probs_GV).scatter_(1, tokens_G1, value=True)
        left_GV = scores_GV.masked_fill(~kept_GV, float("-inf"))
        logprobs_G = (left_GV.gather(1, tokens_G1) - left_GV.logsumexp(-1, keepdim=True)).squeeze(1)
        return LaunchedSupports(
            self._random, self._greedy, kept_GV=download(kept_GV), logprobs_G=download(logprobs_G)
        )


def _chooser_of(device: torch.device) -> MakeChooser:
    if device.type == "cpu":
        return HostChooser
    # Triton is only installed on CUDA machines.
    from ebbtide.srt.model_executor.sampling.kernel import KernelChooser

    return KernelChooser
