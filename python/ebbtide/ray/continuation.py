"""One output that several replicas may work on, one after the other, and the answer that comes of it.

A replica that dies takes the state of its requests along. What the caller, or this process, was given of an
output is not lost: another replica goes on behind it, with the tokens of a request that was never cut. Where
text or records next to the tokens would have a gap, the output begins anew instead; if some of it has been
streamed by then, the request ends with an error.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ebbtide.srt.managers.api.array_forms import flat_form, flat_top_logprobs
from ebbtide.srt.managers.api.generate_fields import per_prompt
from ebbtide.srt.managers.api.generate_request import sampling_params_of
from ebbtide.srt.sampling_params import TOP_P_IDS, SamplingParams

# Of a request that is not streamed, what has been generated since the last report is generated again
# elsewhere: about this many tokens. Each time costs the fleet's process and the replica's a third of a
# millisecond.
CHECKPOINT_TOKENS: Final = 64

# Lists in `meta_info` that grow by what is new, and those that come once, with the prompt.
OUTPUT_LISTS: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
INPUT_LISTS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
# The two fields of a request, and the list, of which `flat_top_logprobs` makes arrays once it is whole.
FLAT_FIELDS: Final = ("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64")
TOP_LIST: Final = "output_top_logprobs"
# Spans of the output's tokens.
SPAN_LISTS: Final = ("weight_versions", "lora_versions")
# Taken from the first replica's work.
OF_THE_FIRST: Final = (
    *("prompt_tokens", "cached_tokens", "queue_time", "first_token_latency", "prefill_weight_versions"),
    *INPUT_LISTS,
)
# The prompt, and what is asked of it alone: a request that goes on brings them no more.
PROMPT_FIELDS: Final = ("text", "input_ids", "truncate_prompt_tokens", "logprob_start_len", "sampling_params")
# What a request that goes on would leave out of its answer.
WHOLE_FIELDS: Final = ("return_routed_experts", "return_sampling_mask", "replay_routed_experts")
# Fields of which a list has an entry for each prompt.
PER_PROMPT: Final = (
    *("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("cache_salt", "extra_key", "lora_path", "replay_routed_experts"),
)


@dataclass(frozen=True)
class OutputSoFar:
    """What an engine needs to know of an output to go on behind it. `params`: with the seed."""

    rid: str
    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams


class Continuation:
    """What is known of an output, and what is still to be asked for.

    Args:
        fields: of the request; one prompt, one output.
        is_incremental: answers hold what is new alone.

    Attributes:
        num_moves: how many replicas have died of those that worked on it.
        has_ended: whether all of it is there.
    """

    def __init__(self, fields: Mapping[str, Any], *, is_incremental: bool = False) -> None:
        self.rid: str = fields.get("rid") or uuid.uuid4().hex
        self._fields = {**fields, "rid": self.rid}
        self._params = sampling_params_of(fields.get("sampling_params"))
        if self._params.sampling_seed is None:
            # Any replica that goes on has to draw as the first one would have.
            self._params = replace(self._params, sampling_seed=random.getrandbits(63))
        self._is_stream = bool(self._fields.pop("stream", False))
        self._flat_form = flat_form(*(self._fields.pop(name, None) for name in FLAT_FIELDS))
        self._wants_prompt = bool(fields.get("return_prompt_token_ids"))
        self._is_incremental = is_incremental
        self._started_s = time.monotonic()
        self._prompt_ids: list[int] | None = None
        self._text: str | None = None
        self._output_ids: list[int] = []
        self._lists: dict[str, list[Any]] = {}
        self._kept: dict[str, Any] = {}
        self._spans: dict[str, list[dict[str, Any]]] = {}
        self._kv_versions: list[str] = []
        self._num_retractions = 0
        # What the replicas before this one have done.
        self._num_before = 0
        self._spans_before = self._spans
        self._retractions_before = 0
        self.num_moves = 0
        self.has_ended = False

    @property
    def num_tokens(self) -> int:
        return len(self._output_ids)

    @property
    def is_single(self) -> bool:
        """Whether it is one output."""
        return self._params.n == 1

    @property
    def obstacle(self) -> str:
        """What prevents going on after the tokens that there are; empty if nothing does."""
        params, fields = self._params, self._fields
        wholes = [name for name in WHOLE_FIELDS if fields.get(name)]
        if wholes:
            return wholes[0]
        if params.returns_top_p_ids:
            return TOP_P_IDS
        # Text that may be the beginning of a stop string was held back by the replica that died.
        return "stop" if params.stop_strings else ""

    def move(self) -> None:
        """The replica has died: another one goes on, or begins anew."""
        self.num_moves += 1
        if self.obstacle or self._prompt_ids is None:
            self._output_ids, self._text, self._lists = [], None, {}
            self._spans, self._kv_versions = {}, []
            self._kept = {}
        self._num_before = len(self._output_ids)
        self._spans_before = self._spans
        self._retractions_before = self._num_retractions + 1

    @property
    def so_far(self) -> OutputSoFar | None:
        """What the next replica goes on behind; None: it begins."""
        if self._num_before == 0:
            return None
        assert self._prompt_ids is not None, "it comes with the first tokens"
        return OutputSoFar(self.rid, self._prompt_ids, list(self._output_ids), self._params_in_pieces)

    def next_fields(self) -> dict[str, Any]:
        """The request to the next replica."""
        fields = {**self._fields, "return_prompt_token_ids": True}
        if self._num_before > 0:
            for name in PROMPT_FIELDS:
                fields.pop(name, None)
        else:
            fields["sampling_params"] = self._params_in_pieces
        if fields.get("timeout_s") is not None:
            elapsed_s = time.monotonic() - self._started_s
            fields["timeout_s"] = max(1e-3, fields["timeout_s"] - elapsed_s)
        return fields

    @property
    def _params_in_pieces(self) -> SamplingParams:
        if self._is_stream:
            return self._params
        interval = max(self._params.stream_interval or 0, CHECKPOINT_TOKENS)
        return replace(self._params, stream_interval=interval)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take a chunk of what is new in."""
        meta = chunk["meta_info"]
        self._prompt_ids = self._prompt_ids or chunk["prompt_token_ids"]
        self._output_ids += chunk["output_ids"]
        if "text" in chunk:
            self._text = (self._text or "") + chunk["text"]
        for name in OUTPUT_LISTS:
            if name in meta:
                self._lists.setdefault(name, []).extend(meta[name])
        if not self._kept:
            self._kept = {name: meta[name] for name in OF_THE_FIRST if name in meta}
        elif self._num_before == 0:
            # The prompt's own are in the first chunk, what comes at the end in the last.
            self._kept |= {name: meta[name] for name in OF_THE_FIRST if meta.get(name)}
        self._spans = {
            name: joined_spans(self._spans_before.get(name, ()), meta[name], self._num_before)
            for name in SPAN_LISTS
            if name in meta
        }
        self._kv_versions += [one for one in meta["kv_weight_versions"] if one not in self._kv_versions]
        self._num_retractions = self._retractions_before + meta["num_retractions"]
        self.has_ended = meta["finish_reason"] is not None

    def answer(self, chunk: Mapping[str, Any], replica: str) -> dict[str, Any]:
        """The answer as it stands, with this chunk, which came last from this replica."""
        fresh = self._is_incremental
        body: dict[str, Any] = {}
        if self._text is not None:
            body["text"] = chunk["text"] if fresh else self._text
        body["output_ids"] = chunk["output_ids"] if fresh else list(self._output_ids)
        if self._wants_prompt:
            body["prompt_token_ids"] = self._prompt_ids
        meta = {**chunk["meta_info"], **self._kept}
        if not fresh:
            meta |= {name: list(values) for name, values in self._lists.items()}
        if self._flat_form is not None and TOP_LIST in meta:
            meta |= flat_top_logprobs(meta.pop(TOP_LIST), self._flat_form)
        meta["completion_tokens"] = len(self._output_ids)
        if "output_token_logprobs_length" in meta:
            meta["output_token_logprobs_length"] = len(self._output_ids)
        meta |= self._spans
        meta["kv_weight_versions"] = list(self._kv_versions)
        meta["num_retractions"] = self._num_retractions
        meta |= self.told(replica)
        finish = meta["finish_reason"]
        if finish is not None and finish["type"] == "length" and self._num_before:
            meta["finish_reason"] = {**finish, "length": finish["length"] + self._num_before}
        if "e2e_latency" in meta and self.num_moves:
            meta["e2e_latency"] = time.monotonic() - self._started_s
        body["meta_info"] = meta
        return body

    def told(self, replica: str) -> dict[str, Any]:
        """What every answer says of where it was made; `replica` has finished it."""
        return {"replica": replica, "num_moves": self.num_moves}


def joined_spans(
    before: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], num_before: int
) -> list[dict[str, Any]]:
    """Spans of the output of one replica behind those of the tokens before."""
    joined = [dict(span) for span in before]
    for span in spans:
        start, end = span["start"] + num_before, span["end"] + num_before
        if joined and joined[-1]["version"] == span["version"]:
            joined[-1]["end"] = end
        elif end > start or not joined:
            joined.append({**span, "start": start, "end": end})
    return joined


def split_batch(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The request of each prompt, and whether they are a batch; refused where lists differ in length."""
    name = "text" if "text" in given else "input_ids"
    prompts = given.get(name)
    if not isinstance(prompts, list) or (
        name == "input_ids" and not (prompts and isinstance(prompts[0], list))
    ):
        return [dict(given)], False
    columns: dict[str, list[Any]] = {name: prompts}
    for key in PER_PROMPT:
        if key in given:
            columns[key] = per_prompt(key, given[key], len(prompts))
    ids = given.get("token_ids_logprob")
    if ids and not isinstance(ids[0], int):
        columns["token_ids_logprob"] = per_prompt("token_ids_logprob", ids, len(prompts))
    if isinstance(given.get("rid"), str):
        columns["rid"] = [f"{given['rid']}_{index}" for index in range(len(prompts))]
    rows = zip(*columns.values(), strict=True)
    return [{**given, **dict(zip(columns, row, strict=True))} for row in rows], True
