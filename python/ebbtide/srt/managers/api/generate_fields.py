"""The fields of `/generate` as clients send them, and their values per prompt. See wire_api section 2."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import read
from ebbtide.srt.managers.api.array_forms import decoded
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.io_struct import RoutedExperts
from ebbtide.srt.sampling_params import MAX_TOKEN_IDS

# Fields of features that this version lacks. They change the tokens, or clients expect something back for
# them: so a value that asks for the feature is refused. Null, false and empty values are accepted, because
# clients send them anyway. All other unknown fields are ignored.
UNSUPPORTED_FIELDS = frozenset(
    (
        *("image_data", "video_data", "audio_data", "mm_hashes", "input_embeds"),
        *("positional_embed_overrides", "lora_id", "custom_logit_processor"),
        *("return_hidden_states", "return_indexer_topk", "return_entropy", "session_params", "watermark"),
        *("kv_hints", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
        *("max_thinking_tokens", "return_flat_raw_top_logprobs", "return_bytes"),
        *("return_outputs_via_store", "mm_content_hashes", "token_indices_to_pool"),
        *("multi_item_delimiter_indices",),
    )
)

MAX_UNKNOWN: Final = 10
MAX_NAME_LENGTH: Final = 50

# The range of integers in messages between processes. JSON and Python have larger ones.
INT64_MAX: Final = 2**63 - 1
Int64: TypeAlias = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]


def said(description: str | None = None, **schema: Any) -> Meta:
    """Add a description and schema keywords to a field, for the OpenAPI document."""
    return Meta(description=description, extra_json_schema=schema)


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of generation that all APIs share, besides sampling parameters. None means "not given".

    For those about versions, see `VersionContract`.
    """

    routed_dp_rank: Annotated[int | None, said("The replica to run on.", minimum=0)] = None
    priority: Int64 | None = None
    max_version_lag: Annotated[
        Annotated[int, Meta(ge=0, le=INT64_MAX)] | None, said("Updates that may be committed while it runs.")
    ] = None
    min_weight_version: Annotated[
        str | Int64 | None, said("Wait until this version, or a later one, serves.")
    ] = None
    exact_weight_version: Annotated[str | Int64 | None, said("Wait until this version serves.")] = None
    on_update: Annotated[
        Literal["continue", "recompute", "abort"] | None, said("What happens to it at a commit.")
    ] = None
    replay_routed_experts: Annotated[
        Any, said("The experts of the first tokens of the prompt, in any form that answers have.")
    ] = None
    return_sampling_mask: bool | None = None


class PromptFields(CommonFields, kw_only=True):
    """Fields of the APIs that take texts and batches. In a batch, a list has one entry per prompt."""

    add_special_tokens: Annotated[bool | None, said("False if the text contains them.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None,
        said("How many tokens of a prompt are kept; -1: as many as fit; 0: all."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        said("The side on which a prompt is cut; left, the default, keeps its end."),
    ] = None
    stream: bool | None = None
    cache_salt: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    lora_path: Annotated[
        str | list[str | None] | None, said("The name of a loaded adapter, or `name@version`.")
    ] = None
    data_parallel_rank: int | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=sys.float_info.max)] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    sampling_logprobs_mode: Annotated[
        Literal["selected"] | None,
        said("Of the sampling mask, return only the logprob of the sampled token."),
    ] = None


class GenerateReqInput(PromptFields, kw_only=True):
    """The fields of `/generate`. In a batch, a list has one entry per prompt.

    `continue_from`: the rid of an output that has ended, instead of a prompt; see `EndedOutput`.
    `return_flat_raw_output_top_logprobs`, `return_flat_raw_top_logprobs_b64`: see `flat_top_logprobs`.
    """

    text: Annotated[str | list[str] | None, said(minLength=1, minItems=1, items={"minLength": 1})] = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Any = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_flat_raw_output_top_logprobs: bool | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None
    continue_from: str | None = None


def parse(given: GenerateReqInput | Mapping[str, Any]) -> GenerateReqInput:
    """Check the types of a request's fields.

    Raises RequestRejected: status 400; a wrong type, with its path, or a feature that this version lacks.
    """
    fields = msgspec.structs.asdict(given) if isinstance(given, GenerateReqInput) else given
    for name, value in fields.items():
        if isinstance(value, list) and len(value) > MAX_TOKEN_IDS and name != "input_ids":
            raise RequestRejected(f"{name}: expected at most {MAX_TOKEN_IDS} entries, got {len(value)}")
    for name in UNSUPPORTED_FIELDS & fields.keys():
        if not asks_for_nothing(fields[name]):
            raise RequestRejected(f"{name}: not supported in this version")
    return read(GenerateReqInput, fields)


def unknown_fields(given: GenerateReqInput | Mapping[str, Any]) -> list[str]:
    """The names of fields that are ignored because they are unknown.

    At most `MAX_UNKNOWN` names of `MAX_NAME_LENGTH` characters: each output's answer may repeat them.
    """
    if isinstance(given, GenerateReqInput):
        return []
    named = {name for name, value in given.items() if value is not None}
    unknown = named - set(GenerateReqInput.__struct_fields__) - UNSUPPORTED_FIELDS
    return [name[:MAX_NAME_LENGTH] for name in sorted(unknown)[:MAX_UNKNOWN]]


def asks_for_nothing(value: Any) -> bool:
    """Whether a field with this value is the same as none: null, false, empty, or a list of such."""
    # Not by recursion, because a client may nest lists to any depth.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list | tuple):
            left += item
        # Not `not item`: a port, room or rank of 0 is a value.
        elif not (item is None or item is False or item in ("", {})):
            return False
    return True


def split_ids(name: str, ids: list[int | list[int]]) -> tuple[list[list[int]], bool]:
    """The ids of each prompt, and whether they are a batch. The types of the entries have been checked."""
    # No Python loop, since there may be a million ids.
    kinds = set(map(type, ids))
    if len(kinds) > 1:
        raise RequestRejected(f"{name}: expected a list of ids or a list of such lists, got a mixture")
    if list in kinds:
        return cast("list[list[int]]", ids), True
    return [cast("list[int]", ids)], False


V = TypeVar("V")

MAX_RID_LENGTH = 256


def per_prompt(name: str, value: V | list[V], num_prompts: int) -> list[V]:
    """One entry per prompt: those of a list, or the value for each.

    Raises:
        RequestRejected: a list has another number of entries.
    """
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestRejected(
            f"{name}: a list must have one entry per prompt, got {len(value)} for {num_prompts}"
        )
    return value


@dataclass(frozen=True)
class PerPrompt:
    """The fields' values for one prompt, without sampling parameters and rids."""

    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    cache_namespace: tuple[str, ...]
    adapter: str | None
    replay_routed_experts: Any

    @classmethod
    def split(cls, request: GenerateReqInput, num_prompts: int) -> list[PerPrompt]:
        """The values for each prompt.

        Raises:
            RequestRejected: a list has another number of entries.
        """
        names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "cache_salt", "extra_key")
        given: dict[str, Any] = {name: getattr(request, name) for name in (*names, "lora_path")}
        routes = request.replay_routed_experts
        given["replay_routed_experts"] = None if asks_for_nothing(routes) else routes
        given["token_ids_logprob"] = _split_token_ids_logprob(request.token_ids_logprob, num_prompts)
        columns = [per_prompt(name, value, num_prompts) for name, value in given.items()]
        return [
            cls(
                return_logprob=bool(wanted),
                logprob_start_len=-1 if start is None else start,
                top_logprobs_num=top or 0,
                token_ids_logprob=ids,
                cache_namespace=_namespace(cache_salt=salt, extra_key=key),
                adapter=adapter or None,
                replay_routed_experts=routes,
            )
            for wanted, start, top, salt, key, adapter, routes, ids in zip(*columns, strict=True)
        ]

    def check(self, limits: RequestLimits, num_prompt_tokens: int) -> None:
        """Check that numbers and ids are in their ranges.

        Raises:
            RequestRejected: one is not.
        """
        start, top = self.logprob_start_len, self.top_logprobs_num
        if not -1 <= start <= num_prompt_tokens:
            raise RequestRejected(
                f"logprob_start_len: expected -1 (none of the prompt) or 0 to the prompt's "
                f"{num_prompt_tokens} tokens, got {start}"
            )
        if not 0 <= top <= limits.vocab_size:
            raise RequestRejected(
                f"top_logprobs_num: expected 0 to the vocabulary size of {limits.vocab_size}, got {top}"
            )
        limits.check_ids("token_ids_logprob", self.token_ids_logprob)
        if self.adapter is not None and not limits.has_adapters:
            raise RequestRejected(
                f"lora_path: {self.adapter[:200]!r} was asked for, and LoRA is not enabled: start the server "
                "with --enable-lora"
            )

    def given_routes(self, limits: RequestLimits, num_prompt_tokens: int) -> RoutedExperts | None:
        """The experts that the prompt's first tokens shall go through; None: the request sets none.

        Raises:
            RequestRejected: the model has no such experts.
        """
        if asks_for_nothing(self.replay_routed_experts):
            return None
        if limits.experts is None:
            raise RequestRejected("replay_routed_experts: this model has no experts")
        return decoded(self.replay_routed_experts, limits.experts, num_prompt_tokens)


def rids_of_outputs(
    given: str | list[str] | None, num_prompts: int, num_samples: int, is_list: bool
) -> tuple[list[list[str]], dict[str, list[str]]]:
    """The rids of each prompt's samples; and, by each given rid that means several outputs, their rids.

    Raises:
        RequestRejected: a rid is empty, too long or given twice, or their number is wrong.
    """
    if given is None:
        return [[uuid.uuid4().hex for _ in range(num_samples)] for _ in range(num_prompts)], {}
    if isinstance(given, str) and is_list:
        flat = [f"{given}_{index}" for index in range(num_prompts * num_samples)]
        _check_rids([given])
        return [flat[start : start + num_samples] for start in range(0, len(flat), num_samples)], {
            given: flat
        }
    posted: list[str] = per_prompt("rid", given, num_prompts)
    _check_rids(posted)
    if num_samples == 1:
        return [[rid] for rid in posted], {}
    groups = {rid: [f"{rid}_{sample}" for sample in range(num_samples)] for rid in posted}
    return list(groups.values()), groups


def _split_token_ids_logprob(
    given: Sequence[int | list[int] | None] | None, num_prompts: int
) -> list[tuple[int, ...]]:
    ids = tuple(entry for entry in given or () if isinstance(entry, int))
    if given is None or len(ids) == len(given):
        return [ids] * num_prompts
    if ids:
        raise RequestRejected(
            "token_ids_logprob: expected a list of ids or a list of such lists, got a mixture"
        )
    lists = [entry for entry in given if not isinstance(entry, int)]
    own: list[list[int] | None] = per_prompt("token_ids_logprob", lists, num_prompts)
    return [tuple(ids or ()) for ids in own]


def _namespace(**parts: str | None) -> tuple[str, ...]:
    # With names, so that a cache_salt differs from an extra_key of the same text.
    return tuple(f"{name}={value}" for name, value in parts.items() if value is not None)


def _check_rids(rids: Sequence[str]) -> None:
    for rid in rids:
        if not 1 <= len(rid) <= MAX_RID_LENGTH:
            raise RequestRejected(f"rid: expected 1 to {MAX_RID_LENGTH} characters, got {len(rid)}")
    [(most, count)] = Counter(rids).most_common(1)
    if count > 1:
        raise RequestRejected(f"rid: {most!r} is given twice")
