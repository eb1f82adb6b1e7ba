"""The state of one output as its tokens arrive, and the answers that are made from it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from ebbtide.srt.managers.api.array_forms import FlatForm, RoutedForm, encoded, flat_top_logprobs
from ebbtide.srt.managers.io_struct import (
    FinishReason,
    LogprobColumns,
    LogprobList,
    RequestOutput,
    RequestStart,
    RoutedExperts,
    TokenizedGenerateReqInput,
)
from ebbtide.srt.managers.wire.generation import LOWEST_LOGPROB, LogprobRows, SupportList, masks_of

# Logprob, token id, text. A tuple, because a list per token would keep the garbage collector busy.
Triple = tuple[float | None, int, str | None]


@dataclass(frozen=True)
class ResponseStyle:
    """What the answers to one request look like.

    Attributes:
        is_incremental: each chunk of a stream holds what is new, instead of everything so far.
        token_text: gives the text of a token, for logprobs; None: the texts are null.
        flat_top: the flat form of the most likely tokens; None: lists of triples.
        routed_form: how routed experts are encoded.
        precision: what the engine computes with, see `MetaInfo`.
        ignored_fields: names of the request's unknown fields.
    """

    is_incremental: bool
    return_prompt_token_ids: bool
    token_text: Callable[[int], str] | None
    flat_top: FlatForm | None = None
    routed_form: RoutedForm = "int32"
    precision: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: Sequence[str] = ()


class LogprobTable:
    """The logprob lists of one output, or of its prompt, by their names in the answer.

    Logprobs are kept as numbers, and become triples only when an answer asks for `columns`.

    Args:
        side: "output" or "input"; the names begin with it.
    """

    def __init__(self, side: str, request: TokenizedGenerateReqInput, style: ResponseStyle) -> None:
        self._chosen_ids = request.token_ids_logprob
        self._token_text = style.token_text
        self._token, self._top = f"{side}_token_logprobs", f"{side}_top_logprobs"
        self._chosen = f"{side}_token_ids_logprobs"
        wanted = {self._token: True, self._top: request.top_logprobs_num > 0, self._chosen: self._chosen_ids}
        self._columns: dict[str, list[Any]] = {name: [] for name, is_wanted in wanted.items() if is_wanted}
        self._new = LogprobList(request.top_logprobs_num, len(self._chosen_ids))
        self._new_ids: list[int] = []

    def add(self, positions: LogprobColumns, token_ids: Sequence[int]) -> None:
        """Add positions, and the tokens at them."""
        self._new.add(positions)
        self._new_ids += token_ids

    def add_token(self, rows: LogprobRows, place: int, token_id: int) -> None:
        """Add one position: row `place` of `rows`."""
        self._new.append(rows, place)
        self._new_ids.append(token_id)

    @property
    def num_new(self) -> int:
        """How many numbers have arrived since `columns` was last asked for."""
        return self._new.num_values

    def columns(self) -> dict[str, list[Any]]:
        """The lists with all that has arrived. They will grow: copy what must not."""
        columns, new = self._columns, self._new
        if columns and self._new_ids:
            # Without a Python call per token: the prompts of a request may have hundreds of thousands.
            columns[self._token] += zip(new.tokens, self._new_ids, self._texts(self._new_ids), strict=False)
            if self._top in columns:
                columns[self._top] += map(self._triples, new.tops())
            if self._chosen in columns:
                columns[self._chosen] += (
                    self._triples(None if row is None else zip(row, self._chosen_ids, strict=True))
                    for row in new.chosen()
                )
            new.clear()
            self._new_ids = []
        return columns

    def forget(self) -> None:
        """Begin new lists: those so far have been handed out."""
        self._columns = {name: [] for name in self._columns}

    def end(self) -> None:
        """Drop the lists: they have been handed out, and nothing more will arrive."""
        self._columns = {}

    def _texts(self, token_ids: Sequence[int]) -> Iterable[str | None]:
        """The texts of these tokens; an endless row of None if texts are not asked for."""
        return repeat(None) if self._token_text is None else map(self._token_text, token_ids)

    def _triples(self, pairs: Iterable[tuple[float, int]] | None) -> list[Triple] | None:
        return None if pairs is None else [self._triple(logprob, token_id) for logprob, token_id in pairs]

    def _triple(self, logprob: float, token_id: int) -> Triple:
        # Not `max`, which would let NaN through.
        if not logprob >= LOWEST_LOGPROB:
            logprob = LOWEST_LOGPROB
        return logprob, token_id, self._token_text(token_id) if self._token_text is not None else None


class OutputState:
    """The state of one output, which makes its answers. Source: wire_api section 2.3."""

    def __init__(self, request: TokenizedGenerateReqInput, style: ResponseStyle) -> None:
        self.request = request
        self.finish: FinishReason | None = None
        self._style = style
        self._text: list[str] | None = None
        self._output_ids: list[int] = []
        self._handed_out_ids = array("i")
        self._num_tokens = 0
        self._logprobs = self._input_logprobs = None
        if request.return_logprob:
            self._logprobs = LogprobTable("output", request, style)
            self._input_logprobs = LogprobTable("input", request, style)
        self._first_input = request.logprob_start or 0
        self._start: RequestStart | None = None
        # The part of `meta_info` that `apply` sets. Each answer copies it and adds the rest.
        self._meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": None,
            "prompt_tokens": len(request.input_ids) + len(request.continued_ids),
            "completion_tokens": 0,
            "cached_tokens": 0,
            "reasoning_tokens": 0,
            "num_retractions": 0,
            "dp_rank": request.dp_rank if request.dp_rank is not None else 0,
            "weight_version": "",
            "weight_versions": [],
            "kv_weight_versions": [],
            "prefill_weight_versions": [],
        }
        # Runs of tokens of one weight version: those that have ended, and the last one's version and start.
        self._ended_spans: list[dict[str, Any]] = []
        self._last_span: tuple[str, int] | None = None
        # (label, first token) for each version of its adapter.
        self._adapter_starts: list[tuple[str, int]] = []
        self._num_nonfinite = 0
        self._routed_experts: RoutedExperts | None = None
        self._wants_supports = request.wants_supports
        self._supports = SupportList()
        self._masks: list[list[int]] = []
        self._first_token_s: float | None = None
        self._finished_s = 0.0

    def apply(self, output: RequestOutput, text: str | None, weight_version: str) -> None:
        """Add what is new. `text` is None if there is no tokenizer."""
        meta = self._meta
        if output.start is not None:
            self._start = output.start
            meta["cached_tokens"] = output.start.cached_tokens
            if self._input_logprobs is not None and output.start.input_logprobs is not None:
                self._input_logprobs.add(
                    output.start.input_logprobs, self.request.input_ids[self._first_input :]
                )
        if text is not None:
            self._text = [] if self._text is None else self._text
            self._text.append(text)
        if output.token_ids:
            if self._num_tokens == 0:
                self._first_token_s = time.monotonic()
            self._num_tokens += len(output.token_ids)
            self._output_ids += output.token_ids
        if self._logprobs is not None and output.logprobs is not None:
            self._logprobs.add(output.logprobs, output.token_ids)
        if output.version_starts:
            self._last_span = output.version_starts[-1]
            self._ended_spans = _spans(output.version_starts[:-1], self._last_span[1])
        if output.adapter_starts is not None:
            self._adapter_starts = output.adapter_starts
        if output.kv_versions is not None:
            meta["kv_weight_versions"] = output.kv_versions
        if output.prefill_starts is not None:
            meta["prefill_weight_versions"] = _spans(output.prefill_starts, len(self.request.input_ids))
        self._num_nonfinite = output.num_nonfinite
        self._routed_experts = output.routed_experts
        if output.supports is not None:
            self._supports.add(output.supports)
            if self.request.return_sampling_mask:
                self._masks += masks_of(output.supports)
        meta["num_retractions"] = output.num_retractions
        meta["weight_version"] = weight_version
        if output.finish is not None:
            self.finish = output.finish
            meta["finish_reason"] = output.finish.to_dict()
            self._finished_s = time.monotonic()

    def apply_token(
        self, token_id: int, rows: LogprobRows | None, place: int, text: str | None, weight_version: str
    ) -> None:
        """Add one token of a stream, with nothing else new. `apply` must have been called before.

        Its logprobs are in row `place` of `rows`, which may be None if none are asked for.
        """
        if text is not None:
            self._text = [] if self._text is None else self._text
            self._text.append(text)
        self._num_tokens += 1
        self._output_ids.append(token_id)
        if self._logprobs is not None:
            assert rows is not None, "some stream of the step asked for logprobs"
            self._logprobs.add_token(rows, place, token_id)
        self._meta["weight_version"] = weight_version

    @property
    def num_logprobs(self) -> int:
        """How many logprobs the next answer has to turn into triples."""
        tables = self._logprobs, self._input_logprobs
        return sum(table.num_new for table in tables if table is not None)

    def response(self) -> dict[str, Any]:
        """The answer so far; if incremental, what is new since the last call."""
        body: dict[str, Any] = {}
        if self._text is not None:
            text = body["text"] = "".join(self._text)
            self._text = [] if self._style.is_incremental else [text]
        body["output_ids"] = self._handed_out(self._output_ids)
        if self._style.return_prompt_token_ids:
            body["prompt_token_ids"] = self.request.input_ids + self.request.continued_ids
        meta = body["meta_info"] = self.meta_info()
        if self._logprobs is not None and self._input_logprobs is not None:
            self._add_logprobs(meta, self._logprobs, self._input_logprobs)
        if self._wants_supports:
            meta.update(self._sampling_masks())
        if self._routed_experts is not None:
            meta["routed_experts"] = encoded(
                self._routed_experts, self._style.routed_form, self.request.routed_experts_start or 0
            )
            if self.request.routed_experts_start:
                meta["routed_experts_start_len"] = self.request.routed_experts_start
        if self._style.is_incremental:
            self._handed_out_ids.extend(self._output_ids)
            self._output_ids = []
            if self._wants_supports:
                self._supports.clear()
                self._masks = []
        return body

    def _handed_out(self, values: list[Any]) -> list[Any]:
        """These values in a list that will not grow: a copy, unless nothing will be added to this one."""
        is_ours_no_more = self._style.is_incremental or self.finish is not None
        return values if is_ours_no_more else values.copy()

    @property
    def all_ids(self) -> list[int]:
        """All token ids of the output, also those that have been handed out."""
        return [*self._handed_out_ids, *self._output_ids]

    @property
    def adapter(self) -> str | None:
        """The label of the adapter version of its last tokens; None: it uses no adapter."""
        return self._adapter_starts[-1][0] if self._adapter_starts else None

    def meta_info(self) -> dict[str, Any]:
        """The answer's `meta_info`, without logprobs, masks and routed experts."""
        meta = self._meta.copy()
        meta["completion_tokens"] = self._num_tokens
        meta["weight_versions"] = self._version_spans()
        if self._adapter_starts:
            starts = [(label.partition("@")[2], start) for label, start in self._adapter_starts]
            meta["lora_name"] = self._adapter_starts[-1][0].partition("@")[0]
            meta["lora_version"] = starts[-1][0]
            meta["lora_versions"] = _spans(starts, self._num_tokens)
        if self.finish is not None:
            meta.update(self._latencies())
            meta["num_nonfinite"] = self._num_nonfinite
            meta["precision"] = self._style.precision
            if self._style.ignored_fields:
                meta["ignored_fields"] = self._style.ignored_fields
        return meta

    def _version_spans(self) -> list[dict[str, Any]]:
        if self._last_span is not None and self._last_span[1] < self._num_tokens:
            version, start = self._last_span
            return [*self._ended_spans, {"version": version, "start": start, "end": self._num_tokens}]
        return self._ended_spans or [{"version": self._meta["weight_version"], "start": 0, "end": 0}]

    def _add_logprobs(self, meta: dict[str, Any], outputs: LogprobTable, inputs: LogprobTable) -> None:
        columns = outputs.columns()
        if self._style.is_incremental:
            meta.update(columns)
            outputs.forget()
        else:
            meta.update({name: self._handed_out(entries) for name, entries in columns.items()})
        if self._style.flat_top is not None and "output_top_logprobs" in meta:
            meta |= flat_top_logprobs(meta.pop("output_top_logprobs"), self._style.flat_top)
        meta["output_token_logprobs_length"] = self._num_tokens
        meta.update(inputs.columns())
        if self._style.is_incremental:
            inputs.end()

    def _sampling_masks(self) -> dict[str, Any]:
        """The masks in the forms that were asked for. Source: wire_vllm section 6.2."""
        meta: dict[str, Any] = {}
        if self.request.return_sampling_mask:
            meta["output_token_sampling_mask"] = self._handed_out(self._masks)
            meta["output_token_sampling_logprobs"] = self._supports.logprobs
            meta["output_token_sampling_mask_length"] = len(self._supports)
        if self.request.sampling_params.returns_top_p_ids:
            meta["top_p_token_ids"], meta["top_p_token_offsets"] = self._supports.encoded()
        return meta

    def _latencies(self) -> dict[str, float]:
        """Times in seconds since arrival. If it never ran, or had no token, that time is the whole one."""
        arrival_s, start = self.request.arrival_s, self._start
        e2e_s = self._finished_s - arrival_s
        first_token_s = e2e_s if self._first_token_s is None else self._first_token_s - arrival_s
        if start is not None and start.first_token_latency_s is not None:
            # Outputs that are not streamed arrive here whole: only the scheduler saw the first token.
            first_token_s = start.first_token_latency_s
        return {
            "e2e_latency": e2e_s,
            "queue_time": start.queue_time_s if start is not None else e2e_s,
            "first_token_latency": first_token_s,
        }


def _spans(starts: Sequence[tuple[str, int]], num_tokens: int) -> list[dict[str, Any]]:
    """The runs of tokens of one version, from their starts; each ends at the next one or `num_tokens`."""
    ends = [start for _, start in starts[1:]] + [num_tokens]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(starts, ends, strict=False)
        if start < end
    ]
