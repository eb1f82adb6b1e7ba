"""From the body of `/generate` to one checked message per output. Source: wire_api section 2."""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import TokenizedGenerateReqInput
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig

V = TypeVar("V")

MAX_RID_LENGTH = 256
# Each is a message and a state of its own: a number that was mistyped must not take all memory.
MAX_OUTPUTS = 1 << 16

# Fields of features that this version lacks. They would change the tokens, or clients read them back: so a
# value that asks for one is refused, while null, false and empty values, which clients send anyway, are not.
# Every other unknown field is ignored.
UNSUPPORTED_FIELDS = frozenset(
    {
        "image_data",
        "video_data",
        "audio_data",
        "mm_hashes",
        "input_embeds",
        "positional_embed_overrides",
        "lora_path",
        "lora_id",
        "custom_logit_processor",
        "return_hidden_states",
        "return_routed_experts",
        "return_indexer_topk",
        "return_sampling_mask",
        "return_entropy",
        "session_params",
        "watermark",
        "kv_hints",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
        "max_thinking_tokens",
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "multi_item_delimiter_indices",
    }
)


class GenerateReqInput(msgspec.Struct, kw_only=True):
    """The fields of `/generate`; None means "not given". In a batch, a list has one entry per prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Any = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    cache_salt: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class RequestLimits:
    """What one request may hold.

    Attributes:
        context_len: tokens of prompt and output together.
        max_total_num_tokens: tokens in the KV pool.
        stream_interval: tokens between chunks where the request does not say.
        num_replicas: data-parallel replicas that a request may be pinned to.
    """

    context_len: int
    vocab_size: int
    max_total_num_tokens: int
    stream_interval: int
    num_replicas: int

    @classmethod
    def of(cls, config: EngineConfig, max_total_num_tokens: int) -> Self:
        """The limits of an engine, once its scheduler has sized the pool."""
        return cls(
            context_len=config.model.context_len,
            vocab_size=config.model.vocab_size,
            max_total_num_tokens=max_total_num_tokens,
            stream_interval=config.schedule.stream_interval,
            num_replicas=config.server_args.dp_size,
        )

    @property
    def max_req_input_len(self) -> int:
        """The longest prompt that is taken."""
        return min(self.context_len - 1, self.max_total_num_tokens)

    def check_prompt(self, input_ids: Sequence[int]) -> None:
        """Refuse a prompt that is empty, too long, or has ids that the model does not know."""
        num_tokens = len(input_ids)
        if num_tokens == 0:
            raise RequestRejected("the prompt is empty: at least one token is needed")
        if num_tokens >= self.context_len:
            raise RequestRejected(
                f"the prompt has {num_tokens} tokens: it must be shorter than the context of "
                f"{self.context_len} tokens"
            )
        if num_tokens > self.max_total_num_tokens:
            raise RequestRejected(
                f"the prompt has {num_tokens} tokens: the KV pool holds {self.max_total_num_tokens} "
                "(max_total_tokens)"
            )
        self.check_ids("input_ids", input_ids)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise RequestRejected(f"{name}: {bad} is not in the vocabulary of {self.vocab_size} ids")

    def room(self, num_prompt_tokens: int) -> int:
        """How many output tokens fit behind a prompt."""
        # The last token is never fed back, so the pool need not hold its KV.
        in_pool = self.max_total_num_tokens - num_prompt_tokens + 1
        return min(self.context_len - num_prompt_tokens, in_pool)


@dataclass(frozen=True)
class GenerationPlan:
    """A request that has passed every check.

    Attributes:
        outputs: all samples of prompt 0, then of prompt 1, ...
        is_list: whether the answer is a list: a batch, or several samples.
        groups: a rid that was posted for several outputs → theirs.
    """

    outputs: list[TokenizedGenerateReqInput]
    is_list: bool
    groups: dict[str, list[str]]
    stream: bool
    return_prompt_token_ids: bool
    return_text_in_logprobs: bool
    timeout_s: float | None
    arrival_s: float


class RequestNormalizer:
    """Checks requests and spells them out, one message per output.

    Args:
        tokenizer: None where the engine deals in token ids only.
        rng: draws the seeds of requests that do not bring one.
    """

    def __init__(self, limits: RequestLimits, tokenizer: Tokenizer | None, rng: random.Random) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._rng = rng

    def plan(self, given: GenerateReqInput | Mapping[str, Any]) -> GenerationPlan:
        """The plan of a whole request.

        Raises:
            RequestRejected: status 400; one bad prompt refuses the whole batch.
        """
        arrival_s = time.monotonic()
        request = parse(given)
        self._check(request)
        prompts, is_batch = self._prompts(request)
        params = self._sampling_params(request.sampling_params, len(prompts))
        num_samples = params[0].n
        if len(prompts) * num_samples > MAX_OUTPUTS:
            raise RequestRejected(
                f"sampling_params.n: a request has at most {MAX_OUTPUTS} outputs, got {len(prompts)} prompts "
                f"with n = {num_samples}"
            )
        is_list = is_batch or num_samples > 1
        rids, groups = _rids(request.rid, len(prompts), num_samples, is_list)
        columns = _PerPrompt.split(request, len(prompts))
        outputs = [
            replaced
            for index, prompt in enumerate(prompts)
            for replaced in self._samples(
                self._message(prompt, params[index], columns[index], request, arrival_s),
                rids[index],
            )
        ]
        return GenerationPlan(
            outputs=outputs,
            is_list=is_list,
            groups=groups,
            stream=bool(request.stream),
            return_prompt_token_ids=bool(request.return_prompt_token_ids),
            return_text_in_logprobs=bool(request.return_text_in_logprobs),
            timeout_s=request.timeout_s,
            arrival_s=arrival_s,
        )

    def _check(self, request: GenerateReqInput) -> None:
        if (request.text is None) == (request.input_ids is None):
            both = "both were" if request.text is not None else "neither was"
            raise RequestRejected(f"exactly one of text and input_ids is needed: {both} given")
        if request.return_text_in_logprobs:
            self._need_tokenizer("return_text_in_logprobs")
        timeout_s = request.timeout_s
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise RequestRejected(f"timeout_s: expected a number of seconds above 0, got {timeout_s}")
        rank = _pinned_to(request)
        if rank is not None and not 0 <= rank < self._limits.num_replicas:
            raise RequestRejected(
                f"routed_dp_rank: expected 0 to {self._limits.num_replicas - 1}, got {rank}"
            )

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestRejected(f"{name} needs a tokenizer: the engine runs with skip_tokenizer_init")
        return self._tokenizer

    def _prompts(self, request: GenerateReqInput) -> tuple[list[list[int]], bool]:
        if request.text is not None:
            tokenizer = self._need_tokenizer("text")
            is_batch = isinstance(request.text, list)
            texts = request.text if isinstance(request.text, list) else [request.text]
            if "" in texts:
                raise RequestRejected("the prompt is empty: text must not be an empty string")
            prompts = [tokenizer.encode(text) for text in texts]
        else:
            prompts, is_batch = _split_ids(request.input_ids or [])
        if not prompts:
            raise RequestRejected("the batch is empty: at least one prompt is needed")
        for prompt in prompts:
            self._limits.check_prompt(prompt)
        return prompts, is_batch

    def _sampling_params(self, given: Any, num_prompts: int) -> list[SamplingParams]:
        params = [_one_sampling_params(entry) for entry in _per_prompt("sampling_params", given, num_prompts)]
        if len({one.n for one in params}) > 1:
            raise RequestRejected("sampling_params: n must be the same for every prompt of a batch")
        for one in params:
            if one.stop_strings:
                self._need_tokenizer("sampling_params.stop")
            self._limits.check_ids("sampling_params.logit_bias", list(one.logit_bias or ()))
        return params

    def _message(
        self,
        prompt: list[int],
        params: SamplingParams,
        own: _PerPrompt,
        request: GenerateReqInput,
        arrival_s: float,
    ) -> TokenizedGenerateReqInput:
        """The message of a prompt's samples, but for their rids and seeds."""
        own.check(self._limits, len(prompt))
        room = self._limits.room(len(prompt))
        max_new_tokens = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        if params.min_new_tokens > max_new_tokens:
            params = replace(params, min_new_tokens=max_new_tokens)
        start = own.logprob_start_len
        return TokenizedGenerateReqInput(
            rid="",
            input_ids=prompt,
            sampling_params=params,
            max_new_tokens=max_new_tokens,
            seed=0,
            stream=bool(request.stream),
            stream_interval=params.stream_interval or self._limits.stream_interval,
            return_logprob=own.return_logprob,
            logprob_start=start if own.return_logprob and start >= 0 else None,
            top_logprobs_num=own.top_logprobs_num if own.return_logprob else 0,
            token_ids_logprob=own.token_ids_logprob if own.return_logprob else (),
            cache_namespace=own.cache_namespace,
            arrival_s=arrival_s,
            dp_rank=_pinned_to(request),
        )

    def _samples(
        self, message: TokenizedGenerateReqInput, rids: list[str]
    ) -> Iterator[TokenizedGenerateReqInput]:
        """One message per sample. Sample k of a request with a seed gets that seed + k, in 64 bits."""
        seed = message.sampling_params.sampling_seed
        for index, rid in enumerate(rids):
            own_seed = self._rng.getrandbits(64) if seed is None else seed + index
            yield msgspec.structs.replace(message, rid=rid, seed=_signed64(own_seed))


@dataclass(frozen=True)
class _PerPrompt:
    """What a batch may set for each prompt by itself."""

    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    cache_namespace: tuple[str, ...]

    @classmethod
    def split(cls, request: GenerateReqInput, num_prompts: int) -> list[_PerPrompt]:
        def column(name: str) -> list[Any]:
            return _per_prompt(name, getattr(request, name), num_prompts)

        rows = zip(
            column("return_logprob"),
            column("logprob_start_len"),
            column("top_logprobs_num"),
            _split_token_ids_logprob(request.token_ids_logprob, num_prompts),
            column("cache_salt"),
            column("extra_key"),
            strict=True,
        )
        return [
            cls(
                return_logprob=bool(wanted),
                logprob_start_len=-1 if start is None else start,
                top_logprobs_num=top or 0,
                token_ids_logprob=tuple(ids or ()),
                cache_namespace=_namespace(cache_salt=salt, extra_key=key),
            )
            for wanted, start, top, ids, salt, key in rows
        ]

    def check(self, limits: RequestLimits, num_prompt_tokens: int) -> None:
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


def parse(given: GenerateReqInput | Mapping[str, Any]) -> GenerateReqInput:
    """Check the types of a request's fields.

    Raises:
        RequestRejected: status 400; a wrong type, with its path, or a feature that this version lacks.
    """
    fields = msgspec.structs.asdict(given) if isinstance(given, GenerateReqInput) else given
    for name in UNSUPPORTED_FIELDS & fields.keys():
        if not _is_empty(fields[name]):
            raise RequestRejected(f"{name}: not supported in this version")
    try:
        return msgspec.convert(dict(fields), GenerateReqInput)
    except msgspec.ValidationError as error:
        raise RequestRejected(str(error)) from None


def _pinned_to(request: GenerateReqInput) -> int | None:
    """The replica that a request asks for."""
    return request.routed_dp_rank if request.routed_dp_rank is not None else request.data_parallel_rank


def _is_empty(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_empty(item) for item in value)
    # Not `not value`: a port, room or rank of 0 is a value.
    return value is None or value is False or value in ("", {})


def _one_sampling_params(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    return SamplingParams.from_dict({} if given is None else given)


def _split_ids(ids: Sequence[int | list[int]]) -> tuple[list[list[int]], bool]:
    prompts = [entry for entry in ids if isinstance(entry, list)]
    singles = [entry for entry in ids if isinstance(entry, int)]
    if prompts and singles:
        raise RequestRejected("input_ids: expected a list of ids or a list of such lists, got a mixture")
    return (prompts, True) if prompts else ([singles], False)


def _split_token_ids_logprob(
    given: Sequence[int | list[int] | None] | None, num_prompts: int
) -> list[list[int] | None]:
    ids = [entry for entry in given or () if isinstance(entry, int)]
    if given is None or len(ids) == len(given):
        return [ids] * num_prompts
    if ids:
        raise RequestRejected(
            "token_ids_logprob: expected a list of ids or a list of such lists, got a mixture"
        )
    lists = [entry for entry in given if not isinstance(entry, int)]
    return _per_prompt("token_ids_logprob", lists, num_prompts)


def _per_prompt(name: str, value: V | list[V], num_prompts: int) -> list[V]:
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestRejected(
            f"{name}: a list must have one entry per prompt, got {len(value)} for {num_prompts}"
        )
    return value


def _namespace(**parts: str | None) -> tuple[str, ...]:
    # Named, so that a cache_salt never meets an extra_key of the same text.
    return tuple(f"{name}={value}" for name, value in parts.items() if value is not None)


def _rids(
    given: str | list[str] | None, num_prompts: int, num_samples: int, is_list: bool
) -> tuple[list[list[str]], dict[str, list[str]]]:
    """The rids of each prompt's samples, and the posted rids that stand for several outputs."""
    if given is None:
        return [[uuid.uuid4().hex for _ in range(num_samples)] for _ in range(num_prompts)], {}
    if isinstance(given, str) and is_list:
        flat = [f"{given}_{index}" for index in range(num_prompts * num_samples)]
        _check_rids([given])
        return [flat[start : start + num_samples] for start in range(0, len(flat), num_samples)], {
            given: flat
        }
    posted: list[str] = _per_prompt("rid", given, num_prompts)
    _check_rids(posted)
    if num_samples == 1:
        return [[rid] for rid in posted], {}
    groups = {rid: [f"{rid}_{sample}" for sample in range(num_samples)] for rid in posted}
    return list(groups.values()), groups


def _check_rids(rids: Sequence[str]) -> None:
    for rid in rids:
        if not 1 <= len(rid) <= MAX_RID_LENGTH:
            raise RequestRejected(f"rid: expected 1 to {MAX_RID_LENGTH} characters, got {len(rid)}")
    if len(set(rids)) < len(rids):
        twice = next(rid for rid in rids if rids.count(rid) > 1)
        raise RequestRejected(f"rid: {twice!r} is given twice")


def _signed64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
