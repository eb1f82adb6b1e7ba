"""Limits of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.array_forms import ExpertSlots
from ebbtide.srt.managers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig

# Outputs of one request. Each takes a message and a state: a mistyped number must not fill the memory.
MAX_OUTPUTS = 1 << 16


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        context_len: the most tokens of a prompt and its output together.
        max_total_num_tokens: tokens in the KV pool.
        stream_interval: tokens between the chunks of a stream, unless the request says.
        num_replicas: data-parallel replicas that a request may be pinned to.
        records_routes: whether the engine records which experts each token goes through.
        experts: the model's experts; None: it has none.
        default_priority: the priority of requests that name none.
        low_priority_first: whether a lower priority value is more urgent.
        has_adapters: whether the engine has memory for adapters.
    """

    context_len: int
    vocab_size: int
    max_total_num_tokens: int
    stream_interval: int
    num_replicas: int
    records_routes: bool = False
    experts: ExpertSlots | None = None
    default_priority: int = 0
    low_priority_first: bool = False
    has_adapters: bool = False

    @classmethod
    def of(
        cls, config: EngineConfig, max_total_num_tokens: int, experts: Mapping[str, Any] | None = None
    ) -> Self:
        """The limits of an engine, whose scheduler has reported the size of its KV pool."""
        return cls(
            context_len=config.model.context_len,
            vocab_size=config.model.vocab_size,
            max_total_num_tokens=max_total_num_tokens,
            stream_interval=config.server_args.stream_interval,
            num_replicas=config.server_args.dp_size,
            records_routes=config.server_args.enable_return_routed_experts,
            experts=None if experts is None else ExpertSlots(**experts),
            default_priority=config.server_args.default_priority_value or 0,
            has_adapters=config.model.adapters is not None,
            low_priority_first=config.server_args.schedule_low_priority_values_first,
        )

    def priority(self, given: int | None) -> int:
        """The priority that the scheduler goes by: it admits higher ones first."""
        value = self.default_priority if given is None else given
        return -value if self.low_priority_first else value

    @property
    def max_req_input_len(self) -> int:
        """The most tokens that a prompt may have."""
        return min(self.context_len - 1, self.max_total_num_tokens)

    def check_prompt(self, input_ids: Sequence[int]) -> None:
        """Refuse a prompt that is empty, too long, or has ids outside the vocabulary."""
        num_tokens = len(input_ids)
        if num_tokens == 0:
            raise RequestRejected("the prompt is empty: at least one token is needed")
        self._check_length(num_tokens, f"{num_tokens} tokens")
        self.check_ids("input_ids", input_ids)

    def check_given(self, name: str, prompts: Any, kept: Any = None) -> None:
        """Refuse too many prompts, or a prompt that is too long, by the length of the list alone.

        It comes before the checks of each entry, which would take long for a huge list.

        Args:
            prompts: a prompt's ids, or a list of prompts. The check of types refuses anything else later.
            kept: the number of ids that each prompt is cut to; None or 0: prompts are not cut.
        """
        if not isinstance(prompts, list) or not prompts:
            return
        if not isinstance(prompts[0], int):
            if len(prompts) > MAX_OUTPUTS:
                raise RequestRejected(f"{name}: expected at most {MAX_OUTPUTS} prompts, got {len(prompts)}")
        elif not kept:
            self._check_length(len(prompts), f"{len(prompts)} tokens")

    def check_text(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuse a text with more characters than a context can hold, before it is tokenized."""
        most = tokenizer.most_characters(text, self.context_len)
        if len(text) > most and tokenizer.num_characters(text) > most:
            raise RequestRejected(
                f"the prompt has {len(text)} characters: expected at most {most}, for a context of "
                f"{self.context_len} tokens"
            )

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise RequestRejected(f"{name}: {bad} is not in the vocabulary of {self.vocab_size} ids")

    def room(self, num_prompt_tokens: int) -> int:
        """How many output tokens fit after a prompt."""
        # The last token is never fed back, so the pool need not hold its KV.
        in_pool = self.max_total_num_tokens - num_prompt_tokens + 1
        return min(self.context_len - num_prompt_tokens, in_pool)

    def _check_length(self, num_tokens: int, shown: str) -> None:
        if num_tokens >= self.context_len:
            raise RequestRejected(
                f"the prompt has {shown}: it must be shorter than the context of {self.context_len} tokens"
            )
        if num_tokens > self.max_total_num_tokens:
            raise RequestRejected(
                f"the prompt has {shown}: the KV pool holds {self.max_total_num_tokens} (max_total_tokens)"
            )
