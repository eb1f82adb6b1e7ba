"""The messages about generation: a request on its way in, its outputs on their way out."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ebbtide.srt.managers.wire.message import Message
from ebbtide.srt.managers.wire.token_columns import LogprobColumns, SupportColumns
from ebbtide.srt.sampling_params import SamplingParams


class VersionContract(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a request asks of the weights that serve it; the defaults ask for nothing.

    Attributes:
        max_lag: how many updates may be committed while it runs; with one more it ends as "stale".
        min_version, exact_version: it waits until this version serves, or a later one; until this one does.
        on_update: what becomes of its KV at a commit that leaves that open.
    """

    max_lag: int | None = None
    min_version: str | None = None
    exact_version: str | None = None
    on_update: Literal["continue", "recompute", "abort"] = "continue"


class RoutedExperts(Struct, frozen=True, array_like=True):
    """The experts of tokens: numbers of type `dtype` (uint8, uint16) in C order, [tokens, layers, top k]."""

    data: bytes
    shape: tuple[int, int, int]
    dtype: str

    @property
    def rows(self) -> NDArray[Any]:
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class TokenizedGenerateReqInput(Message, frozen=True, kw_only=True):
    """One output to generate. Everything in it has been checked by the TokenizerManager.

    Attributes:
        logprob_start: first prompt position whose logprob is wanted; None for none of the prompt.
        cache_namespace: prefixes are shared only between requests with equal namespaces.
        max_new_tokens: how many tokens the context leaves room for, at most what was asked for.
        priority: higher ones are admitted first, where the schedule policy is `priority`.
        arrival_s: when the request arrived, on the clock of `time.monotonic`.
        routed_experts_start: first token whose experts are wanted; None: nobody asks.
        given_routes: the experts that the first tokens of the prompt take in place of the router's choice.
        grammar: the key of the one that its output keeps to; it has been loaded.
        banned: sequences of token ids that its output must not have.
        continued_ids: what was generated behind the prompt before: the output goes on there. `max_new_tokens`
            counts them, and they are not sent again.
        adapter: `name`, or `name@version`; None: the base model alone.
        dp_rank: the replica that it is for; None as long as none has been chosen, or if there is only one.
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    max_new_tokens: int
    seed: int
    continued_ids: list[int] = field(default_factory=list)
    stream: bool = False
    stream_interval: int = 1
    return_logprob: bool = False
    logprob_start: int | None = None
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    cache_namespace: tuple[str, ...] = ()
    arrival_s: float = 0.0
    priority: int = 0
    dp_rank: int | None = None
    contract: VersionContract = VersionContract()
    grammar: str | None = None
    banned: list[list[int]] = field(default_factory=list)
    routed_experts_start: int | None = None
    given_routes: RoutedExperts | None = None
    return_sampling_mask: bool = False
    adapter: str | None = None

    @property
    def wants_supports(self) -> bool:
        """Whether its answer tells which tokens could have been sampled, in whichever form."""
        return self.return_sampling_mask or self.sampling_params.returns_top_p_ids


class LoadGrammar(Message, frozen=True, kw_only=True):
    """A compiled grammar, ahead of the first request that keeps to it.

    Attributes:
        key: stands for it in requests.
        dropped: no request to come has one of these any more.
    """

    key: str
    compiled: bytes
    dropped: tuple[str, ...] = ()


class AbortGeneration(Message, frozen=True, kw_only=True):
    """End one request from the API process itself: its client went away, or its time is up."""

    rid: str
    message: str


class FinishReason(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Why a request ended. `matched` is the stop token or string, `length` the tokens allowed.

    `stale`: the weights have moved further than the request would have it.
    """

    kind: Literal["stop", "length", "abort", "stale"]
    matched: int | str | None = None
    length: int = 0
    message: str = ""
    status_code: int | None = None

    def to_dict(self) -> dict[str, Any]:
        match self.kind:
            case "stop":
                return {"type": "stop", "matched": self.matched}
            case "length":
                return {"type": "length", "length": self.length}
            case "abort":
                return {
                    "type": "abort",
                    "message": self.message,
                    "status_code": self.status_code,
                    "err_type": None,
                }
            case "stale":
                return {"type": "stale", "message": self.message}


class RequestStart(Struct, frozen=True, array_like=True):
    """Goes out once per request, with its first output: what does not change afterwards.

    `input_logprobs`: from the first prompt position that was asked for; None when not asked for.
    """

    prompt_tokens: int
    cached_tokens: int
    prompt_tail: list[int]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    stop_strings: tuple[str, ...]
    input_logprobs: LogprobColumns | None
    queue_time_s: float
    first_token_latency_s: float | None = None


class RequestOutput(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What is new about one request since its last output.

    Attributes:
        token_ids: new output tokens; all of them at once for a request that does not stream.
        finish: None while the request goes on.
        start: with the first output only.
        version_starts: (weight version, first output index) per span, when it changed since the last output.
        kv_versions: versions of the weights that computed the KV used, oldest first, when it changed.
        prefill_starts: (weight version, first token) per span of the prompt, by the weights that computed
            its KV, when a prefill has been completed since the last output.
        num_retractions: times the request gave up its KV so far.
        logprobs: per new token; None when not asked for.
        routed_experts: with the last output, where they were asked for.
        supports: per new token, which could have been sampled; None: not asked.
        num_nonfinite: rows of the request's logits so far that held NaN or +∞.
        adapter_starts: as `version_starts`, of versions of the request's adapter, by their labels.
    """

    rid: str
    token_ids: list[int]
    finish: FinishReason | None = None
    start: RequestStart | None = None
    version_starts: list[tuple[str, int]] | None = None
    kv_versions: list[str] | None = None
    num_retractions: int = 0
    logprobs: LogprobColumns | None = None
    prefill_starts: list[tuple[str, int]] | None = None
    routed_experts: RoutedExperts | None = None
    supports: SupportColumns | None = None
    num_nonfinite: int = 0
    adapter_starts: list[tuple[str, int]] | None = None


class StreamedTokens(Struct, frozen=True, array_like=True):
    """One more token of each of many streams, of which nothing else is new.

    `logprobs`: a position of each, and all of them ask for as much; of streams that asked for none it says
    nothing. None: none did.
    """

    rids: list[str]
    token_ids: list[int]
    logprobs: LogprobColumns | None = None


class TokenOutput(Message, frozen=True, kw_only=True):
    """The outputs of one step, for the detokenizer (or, without a tokenizer, for the TokenizerManager).

    Attributes:
        streamed: of other requests than `outputs`, by how many logprobs they ask for.
        dp_rank: of the replica.
        abort_number: counts, from 1, the messages of a replica with requests that were ended from outside;
            None for all others. See `ControlReply.aborts_before`.
    """

    weight_version: str
    outputs: list[RequestOutput]
    streamed: tuple[StreamedTokens, ...] = ()
    dp_rank: int = 0
    abort_number: int | None = None


class TextOutput(Message, frozen=True, kw_only=True):
    """`outputs` and `streamed` with the text that each adds, which never ends in half a character."""

    weight_version: str
    outputs: list[RequestOutput]
    texts: list[str]
    streamed: tuple[StreamedTokens, ...] = ()
    streamed_texts: tuple[list[str], ...] = ()
    dp_rank: int = 0
    abort_number: int | None = None
