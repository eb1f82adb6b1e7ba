"""Turns the body of `/generate` into one checked message per output. Source: wire_api section 2."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeAlias

import msgspec

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.array_forms import namespace_of
from ebbtide.srt.managers.api.ended_outputs import NOBODY, Caller, EndedOutput, EndedOutputs
from ebbtide.srt.managers.api.generate_fields import (
    GenerateReqInput,
    PerPrompt,
    parse,
    per_prompt,
    rids_of_outputs,
    split_ids,
    unknown_fields,
)
from ebbtide.srt.managers.api.request_limits import MAX_OUTPUTS, RequestLimits
from ebbtide.srt.managers.io_struct import TokenizedGenerateReqInput, VersionContract
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.sampling_params import SamplingParams

# Makes a prompt, as text or as token ids. It may take long, so it is called by `tokenize`.
Render: TypeAlias = Callable[[], str | list[int]]
# The token ids of a prompt, or that from which `tokenize` makes them.
Prompt: TypeAlias = list[int] | str | Render

# The most ids and characters of parameters in all messages of a request; each output's message has its own.
MAX_IDS = 1 << 24
# The most logprobs of one output besides those of its tokens. At 8 bytes each that is half a GiB in its
# message, and as much again while a forward pass makes them.
MAX_LOGPROBS = 1 << 26


@dataclass(frozen=True)
class GenerationDraft:
    """A request that has passed all checks that need no tokens.

    Attributes:
        prompts: either all are token ids, or none is.
        params, columns: one for each prompt.
        rids, seeds: for each prompt, one for each of its samples.
        is_list: whether the answer is a list, because the request is a batch or asks for several samples.
        groups: the rids of the outputs for which the request gives one rid in common, by that rid.
        arrival_s: when it arrived, by the monotonic clock.
        continued: the output that it continues; None: it continues none.
        ignored_fields: see `unknown_fields`.
    """

    request: GenerateReqInput
    prompts: Sequence[Prompt]
    params: list[SamplingParams]
    columns: list[PerPrompt]
    rids: list[list[str]]
    seeds: list[list[int]]
    is_list: bool
    groups: dict[str, list[str]]
    arrival_s: float
    continued: EndedOutput | None
    ignored_fields: list[str]

    @property
    def all_rids(self) -> list[str]:
        """The rids of all outputs, in the order of the outputs."""
        return [rid for rids in self.rids for rid in rids]


@dataclass(eq=False)
class RequestNormalizer:
    """Checks requests and makes one message of each output.

    It takes three steps: `draft`, `tokenize` and `plan`. They are apart because tokenizing may take seconds.
    Each raises `RequestRejected`; one bad prompt refuses the whole batch. `tokenizer` is None if the engine
    takes token ids only.
    """

    _limits: RequestLimits
    _tokenizer: Tokenizer | None
    _rng: random.Random
    _ended: EndedOutputs = field(default_factory=lambda: EndedOutputs(lambda rid: False))

    def draft(
        self,
        given: GenerateReqInput | Mapping[str, Any],
        render: Render | Sequence[Render] | None = None,
        client: Caller = NOBODY,
    ) -> GenerationDraft:
        """Check all that needs no tokens, and choose the outputs' rids and seeds.

        Args:
            render: makes the prompt, instead of `text` and `input_ids`; a sequence: one for each prompt.
            client: who sends the request. It can continue only outputs of its own requests.
        """
        arrival_s = time.monotonic()
        request = parse(given)
        self._check(request)
        rid = request.continue_from
        continued = None if rid is None else self._ended.get(rid, client)
        if continued is None:
            prompts, is_batch = self._prompts(request, render)
        else:
            prompts, is_batch = self._continued_prompt(request, continued), False
        num_prompts = len(prompts)
        params = self._sampling_params(request.sampling_params, num_prompts, continued)
        num_samples = params[0].n
        if num_prompts * num_samples > MAX_OUTPUTS:
            raise RequestRejected(
                f"sampling_params.n: a request has at most {MAX_OUTPUTS} outputs, got {num_prompts} prompts "
                f"with n = {num_samples}"
            )
        columns = PerPrompt.split(request, num_prompts)
        _check_num_ids(request, params, columns, num_samples)
        is_list = is_batch or num_samples > 1
        rids, groups = rids_of_outputs(request.rid, num_prompts, num_samples, is_list)
        return GenerationDraft(
            request=request,
            prompts=prompts,
            params=params,
            columns=columns,
            rids=rids,
            seeds=[self._seeds(one, num_samples) for one in params],
            is_list=is_list,
            groups=groups,
            arrival_s=arrival_s,
            continued=continued,
            ignored_fields=unknown_fields(given),
        )

    def tokenize(self, draft: GenerationDraft, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of some of a draft's prompts, checked. May be called from any thread."""
        return [self._ids(draft.request, prompt) for prompt in prompts]

    def plan(self, draft: GenerationDraft, prompts: Sequence[list[int]]) -> list[TokenizedGenerateReqInput]:
        """The messages: those of all samples of prompt 0, then of prompt 1, and so on.

        May be called from any thread.

        Args:
            prompts: the token ids of all prompts of the draft.
        """
        return [
            msgspec.structs.replace(message, rid=rid, seed=seed)
            for index, message in enumerate(self._messages(draft, prompts))
            for rid, seed in zip(draft.rids[index], draft.seeds[index], strict=True)
        ]

    def _check(self, request: GenerateReqInput) -> None:
        if request.return_text_in_logprobs:
            self._need_tokenizer("return_text_in_logprobs")
        if request.min_weight_version is not None and request.exact_weight_version is not None:
            raise RequestRejected("min_weight_version and exact_weight_version: expected one of them")
        rank = _pinned_to(request)
        if rank is not None and not 0 <= rank < self._limits.num_replicas:
            raise RequestRejected(
                f"routed_dp_rank: expected 0 to {self._limits.num_replicas - 1}, got {rank}"
            )

    def _routed_experts_start(self, request: GenerateReqInput, num_prompt_tokens: int) -> int | None:
        if not request.return_routed_experts:
            return None
        if not self._limits.records_routes:
            raise RequestRejected(
                "return_routed_experts: expected a server with --enable-return-routed-experts"
            )
        start = request.routed_experts_start_len or 0
        if not 0 <= start <= num_prompt_tokens:
            raise RequestRejected(
                f"routed_experts_start_len: expected 0 to the {num_prompt_tokens} tokens of the prompt, "
                f"got {start}"
            )
        return start

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestRejected(f"{name} needs a tokenizer: the engine runs with skip_tokenizer_init")
        return self._tokenizer

    def _prompts(
        self, request: GenerateReqInput, render: Render | Sequence[Render] | None
    ) -> tuple[Sequence[Prompt], bool]:
        """The prompts, and whether the request gave them as a batch."""
        prompts: Sequence[Prompt]
        if render is not None:
            self._need_tokenizer("a prompt that is rendered")
            prompts, is_batch = ([render], False) if callable(render) else (render, True)
            return _not_empty(prompts), is_batch
        text, input_ids = request.text, request.input_ids
        if (text is None) == (input_ids is None):
            both = "both were" if text is not None else "neither was"
            raise RequestRejected(f"exactly one of text and input_ids is needed: {both} given")
        if text is None:
            prompts, is_batch = split_ids("input_ids", input_ids or [])
        else:
            self._need_tokenizer("text")
            texts, is_batch = ([text], False) if isinstance(text, str) else (text, True)
            if "" in texts:
                raise RequestRejected("the prompt is empty: text must not be an empty string")
            prompts = texts
        return _not_empty(prompts), is_batch

    def _continued_prompt(self, request: GenerateReqInput, continued: EndedOutput) -> Sequence[Prompt]:
        if request.text is not None or request.input_ids or request.truncate_prompt_tokens:
            raise RequestRejected("continue_from: expected no prompt: it continues the output and its prompt")
        self._limits.check_prompt([*continued.prompt_ids, *continued.output_ids])
        return [list(continued.prompt_ids)]

    def _ids(self, request: GenerateReqInput, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, made if necessary, cut and checked."""
        kept = request.truncate_prompt_tokens
        made = prompt if isinstance(prompt, str | list) else prompt()
        if isinstance(made, list):
            ids = made
        else:
            tokenizer = self._need_tokenizer("text")
            if not kept:
                self._limits.check_text(made, tokenizer)
            ids = tokenizer.encode(made, add_special_tokens=request.add_special_tokens is not False)
        if kept:
            num_kept = kept if kept > 0 else self._limits.max_req_input_len
            ids = ids[:num_kept] if request.truncation_side == "right" else ids[-num_kept:]
        self._limits.check_prompt(ids)
        return ids

    def _sampling_params(
        self, given: Any, num_prompts: int, continued: EndedOutput | None
    ) -> list[SamplingParams]:
        if isinstance(given, list):
            entries = per_prompt("sampling_params", given, num_prompts)
            params = [sampling_params_of(entry) for entry in entries]
        else:
            params = [sampling_params_of(given)] * num_prompts
        if continued is not None:
            params = [continued.params_for(None if given is None else params[0])]
        if len({one.n for one in params}) > 1:
            raise RequestRejected("sampling_params: n must be the same for every prompt of a batch")
        for one in distinct(params):
            if one.stop_strings:
                self._need_tokenizer("sampling_params.stop")
            self._limits.check_ids("sampling_params.logit_bias", list(one.logit_bias or ()))
            self._limits.check_ids("sampling_params.allowed_token_ids", one.allowed_token_ids or ())
            if one.bad_words:
                self._need_tokenizer("sampling_params.bad_words")
            if one.grammar is not None:
                self._need_tokenizer(f"sampling_params.{one.grammar.kind}")
                _need_grammars(f"sampling_params.{one.grammar.kind}")
        return params

    def _seeds(self, params: SamplingParams, num_samples: int) -> list[int]:
        """A seed for each sample: the given seed + k for sample k, in 64 bits, or random ones."""
        seed = params.sampling_seed
        if seed is None:
            return [_signed64(self._rng.getrandbits(64)) for _ in range(num_samples)]
        return [_signed64(seed + index) for index in range(num_samples)]

    def _messages(
        self, draft: GenerationDraft, prompts: Sequence[list[int]]
    ) -> Iterator[TokenizedGenerateReqInput]:
        """A message for each prompt, which all its samples have but for their rids and seeds."""
        request = draft.request
        banned = {
            id(one): self._tokenizer.spellings(one.bad_words) if self._tokenizer else []
            for one in distinct(draft.params)
        }
        grammars = {id(one): one.grammar.key for one in distinct(draft.params) if one.grammar is not None}
        for prompt, params, own in zip(prompts, draft.params, draft.columns, strict=True):
            own.check(self._limits, len(prompt))
            given_routes = own.given_routes(self._limits, len(prompt))
            before, asked, output_ids = draft.continued, params.max_new_tokens, list[int]()
            namespace, adapter = own.cache_namespace, own.adapter
            if before is not None:
                output_ids, namespace = list(before.output_ids), namespace or before.namespace
                adapter = before.adapter if adapter is None else adapter
                asked = before.num_left if request.sampling_params is None else asked
            room = self._limits.room(len(prompt) + len(output_ids))
            max_new_tokens = (room if asked is None else min(asked, room)) + len(output_ids)
            if params.min_new_tokens > max_new_tokens:
                raise RequestRejected(
                    f"sampling_params.min_new_tokens: expected at most {max_new_tokens}, which fit "
                    f"after a prompt of {len(prompt)} tokens, got {params.min_new_tokens}"
                )
            start = own.logprob_start_len
            _check_num_logprobs(own, max_new_tokens + (len(prompt) - start if start >= 0 else 0))
            yield TokenizedGenerateReqInput(
                rid="",
                input_ids=prompt,
                sampling_params=params,
                max_new_tokens=max_new_tokens,
                seed=0,
                continued_ids=output_ids,
                stream=bool(request.stream),
                stream_interval=params.stream_interval or self._limits.stream_interval,
                return_logprob=own.return_logprob,
                logprob_start=start if own.return_logprob and start >= 0 else None,
                top_logprobs_num=own.top_logprobs_num if own.return_logprob else 0,
                token_ids_logprob=own.token_ids_logprob if own.return_logprob else (),
                cache_namespace=namespace + namespace_of(given_routes),
                adapter=adapter,
                given_routes=given_routes,
                arrival_s=draft.arrival_s,
                priority=self._limits.priority(request.priority),
                dp_rank=_pinned_to(request),
                contract=_contract(request),
                return_sampling_mask=_returns_sampling_mask(request, params, self._limits.vocab_size),
                routed_experts_start=self._routed_experts_start(request, len(prompt)),
                grammar=grammars.get(id(params)),
                banned=banned[id(params)],
            )


def distinct(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Each object once. The prompts of a batch usually share one, which is to be checked once."""
    return list({id(one): one for one in params}.values())


def _check_num_ids(
    request: GenerateReqInput,
    params: Sequence[SamplingParams],
    columns: Sequence[PerPrompt],
    num_samples: int,
) -> None:
    """Refuse parameters that are too large to send to the scheduler with each output."""
    versions = request.min_weight_version, request.exact_weight_version
    num_shared = sum(len(str(version)) for version in versions if version is not None)
    lengths = {id(one): num_shared + one.num_entries for one in distinct(params)}
    num_own = sum(
        lengths[id(one)]
        + len(own.token_ids_logprob)
        + sum(map(len, (*own.cache_namespace, own.adapter or "")))
        for one, own in zip(params, columns, strict=True)
    )
    if num_samples * num_own > MAX_IDS:
        raise RequestRejected(
            "token_ids_logprob, allowed_token_ids, logit_bias, stop_token_ids, stop, bad_words, lora_path, "
            "cache_salt, extra_key, min_weight_version, exact_weight_version: the outputs of a request have "
            f"at most {MAX_IDS} ids and characters in these, each output its own; got {num_samples * num_own}"
        )


def _check_num_logprobs(own: PerPrompt, num_positions: int) -> None:
    """Refuse more logprobs than a forward pass and the messages of an output should hold."""
    num_each = own.top_logprobs_num + len(own.token_ids_logprob)
    if own.return_logprob and num_positions * num_each > MAX_LOGPROBS:
        raise RequestRejected(
            f"top_logprobs_num, token_ids_logprob: an output has at most {MAX_LOGPROBS} logprobs of these; "
            f"{num_each} at each of up to {num_positions} tokens are too many. Ask for fewer, or give "
            "max_new_tokens"
        )


def _pinned_to(request: GenerateReqInput) -> int | None:
    """The data-parallel replica that a request asks for, by either of two names; None: any."""
    return request.routed_dp_rank if request.routed_dp_rank is not None else request.data_parallel_rank


def _contract(request: GenerateReqInput) -> VersionContract:
    def version(given: str | int | None) -> str | None:
        return None if given is None else str(given)

    return VersionContract(
        max_lag=request.max_version_lag,
        min_version=version(request.min_weight_version),
        exact_version=version(request.exact_weight_version),
        on_update=request.on_update if request.on_update is not None else "continue",
    )


def _returns_sampling_mask(request: GenerateReqInput, params: SamplingParams, vocab_size: int) -> bool:
    if not request.return_sampling_mask and not params.returns_top_p_ids:
        return False
    is_bounded = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    if not is_bounded and not params.is_greedy:
        name = "return_sampling_mask" if request.return_sampling_mask else "return_top_p_token_ids"
        raise RequestRejected(
            f"{name}: expected top_k, top_p or min_p, or greedy sampling: else it has no bound"
        )
    return bool(request.return_sampling_mask)


def _need_grammars(field: str) -> None:
    """Refuse structured output if xgrammar is not installed."""
    if find_spec("xgrammar") is None:
        hint = "pip install 'ebbtide[structured]' where the server runs"
        raise RequestRejected(
            f"{field}: structured output needs xgrammar, which is not installed: {hint}", 501
        )


def _not_empty(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if not prompts:
        raise RequestRejected("the batch is empty: at least one prompt is needed")
    return prompts


def sampling_params_of(given: Any) -> SamplingParams:
    """The sampling parameters of a prompt, as a request gives them.

    Raises:
        RequestRejected: they are not valid.
    """
    if isinstance(given, SamplingParams):
        return given
    return SamplingParams.from_dict({} if given is None else given)


def _signed64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
