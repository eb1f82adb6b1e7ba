"""What one request may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.array_forms import ExpertSlots
from ebbtide.srt.managers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig

# Each is a message and a state of its own: a number that was mistyped must not take all memory.
MAX_OUTPUTS = 1 << 16


@dataclass(frozen=True)
class RequestLimits:
    """What one request may hold.

    Attributes:
        context_len: tokens of prompt and output together.
        max_total_num_tokens: tokens in the KV pool.
        stream_interval: tokens between chunks where the request does not say.
        records_routes: whether it is recorded which experts tokens go through.
        experts: None where the model has none.
        num_replicas: data-parallel replicas that a request may be pinned to.
        default_priority: of requests that bring none.
        low_priority_first: whether low ones are more urgent.
        has_adapters: whether there is memory for any.
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
        """The limits of an engine, once its scheduler has sized the pool."""
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
        """The priority of a request: higher ones are admitted first."""
        value = self.default_priority if given is None else given
        return -value if self.low_priority_first else value

    @property
    def max_req_input_len(self) -> int:
        """The longest prompt that is taken."""
        return min(self.context_len - 1, self.max_total_num_tokens)

    def check_prompt(self, input_ids: Sequence[int]) -> None:
        """Refuse a prompt that is empty, too long, or has ids that the model does not know."""
        num_tokens = len(input_ids)
        if num_tokens == 0:
            raise RequestRejected("the prompt is empty: at least one token is needed")
        self._check_length(num_tokens, f"{num_tokens} tokens")
        self.check_ids("input_ids", input_ids)

    def check_given(self, name: str, prompts: Any, kept: Any = None) -> None:
        """Refuse what is too much by its length, before anything is done with each of its entries.

        Args:
            prompts: a prompt's ids, or a list of prompts; the check of types refuses anything else.
            kept: to how many ids each prompt is cut; None or 0: to none.
        """
        if not isinstance(prompts, list) or not prompts:
            return
        if not isinstance(prompts[0], int):
            if len(prompts) > MAX_OUTPUTS:
                raise RequestRejected(f"{name}: expected at most {MAX_OUTPUTS} prompts, got {len(prompts)}")
        elif not kept:
            self._check_length(len(prompts), f"{len(prompts)} tokens")

    def check_text(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuse a text, before it is tokenized, that has more characters than a whole context."""
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
        """How many output tokens fit behind a prompt."""
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
