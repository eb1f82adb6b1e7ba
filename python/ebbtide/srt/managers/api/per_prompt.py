"""What a request may give once for all its prompts, or as a list with an entry for each."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.ended_outputs import EndedOutput
from ebbtide.srt.managers.api.generate_fields import GenerateReqInput, asks_for_nothing
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.api.routed_experts import decoded
from ebbtide.srt.managers.io_struct import RoutedExperts

V = TypeVar("V")

MAX_RID_LENGTH = 256


def per_prompt(name: str, value: V | list[V], num_prompts: int) -> list[V]:
    """One entry per prompt: of a list, or the value for all. Raises RequestRejected: 400, not as many."""
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestRejected(
            f"{name}: a list must have one entry per prompt, got {len(value)} for {num_prompts}"
        )
    return value


@dataclass(frozen=True)
class PerPrompt:
    """What was given for one prompt, sampling parameters and rids apart."""

    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    cache_namespace: tuple[str, ...]
    adapter: str | None
    replay_routed_experts: Any

    @classmethod
    def split(cls, request: GenerateReqInput, num_prompts: int) -> list[PerPrompt]:
        """Of each prompt. Raises RequestRejected: 400, a list has not one entry per prompt."""

        def column(name: str) -> list[Any]:
            return per_prompt(name, getattr(request, name), num_prompts)

        given = request.replay_routed_experts
        chosen = _split_token_ids_logprob(request.token_ids_logprob, num_prompts)
        rows = zip(
            column("return_logprob"),
            column("logprob_start_len"),
            column("top_logprobs_num"),
            chosen,
            column("cache_salt"),
            column("extra_key"),
            column("lora_path"),
            per_prompt("replay_routed_experts", None if asks_for_nothing(given) else given, num_prompts),
            strict=True,
        )
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
            for wanted, start, top, ids, salt, key, adapter, routes in rows
        ]

    def check(self, limits: RequestLimits, num_prompt_tokens: int) -> None:
        """Raises RequestRejected: 400, a number or an id is out of its range."""
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

    def namespace_behind(self, before: EndedOutput | None) -> tuple[str, ...]:
        """The cache namespace: the given one, else that of the output that is continued."""
        return self.cache_namespace if self.cache_namespace or before is None else before.namespace

    def adapter_behind(self, before: EndedOutput | None) -> str | None:
        """The adapter: the given one, else the version that the continued output ended with."""
        return self.adapter if self.adapter is not None or before is None else before.adapter

    def given_routes(self, limits: RequestLimits, num_prompt_tokens: int) -> RoutedExperts | None:
        """The experts that its tokens are to take. Raises RequestRejected: 400, they cannot be these."""
        if asks_for_nothing(self.replay_routed_experts):
            return None
        if limits.experts is None:
            raise RequestRejected("replay_routed_experts: this model has no experts")
        return decoded(self.replay_routed_experts, limits.experts, num_prompt_tokens)


def rids_of_outputs(
    given: str | list[str] | None, num_prompts: int, num_samples: int, is_list: bool
) -> tuple[list[list[str]], dict[str, list[str]]]:
    """The rids of each prompt's samples, and the posted rids that stand for several outputs.

    Raises RequestRejected: 400, one is too long, empty or given twice, or there is another number of them.
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
    # Named, so that a cache_salt never meets an extra_key of the same text.
    return tuple(f"{name}={value}" for name, value in parts.items() if value is not None)


def _check_rids(rids: Sequence[str]) -> None:
    for rid in rids:
        if not 1 <= len(rid) <= MAX_RID_LENGTH:
            raise RequestRejected(f"rid: expected 1 to {MAX_RID_LENGTH} characters, got {len(rid)}")
    [(most, count)] = Counter(rids).most_common(1)
    if count > 1:
        raise RequestRejected(f"rid: {most!r} is given twice")
