"""The messages about generation: a request on its way in, its outputs on their way out."""

from __future__ import annotations

from array import array
from base64 import b64encode
from itertools import accumulate, pairwise
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ebbtide.srt.managers.wire.message import Message
from ebbtide.srt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ebbtide.srt.model_executor.batch_plan import LogprobArrays, Supports


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
        """Whether its answer lists which tokens could have been sampled, in whichever form."""
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

    Attributes:
        prompt_tail, continued_tail: the last tokens before the output: of the prompt, and behind it of what
            was generated before.
        input_logprobs: from the first prompt position that was asked for; None when not asked for.
    """

    prompt_tokens: int
    cached_tokens: int
    prompt_tail: list[int]
    continued_tail: list[int]
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
    """The outputs of one step, on their way to the TokenizerManager: through the detokenizer if any.

    Attributes:
        streamed: of other requests than `outputs`, by how many logprobs they ask for.
        texts, streamed_texts: what each adds, which never ends in half a character; empty before the
            detokenizer, and without a tokenizer.
        dp_rank: of the replica.
        abort_number: counts, from 1, the messages of a replica with requests that were ended from outside;
            None for all others. See `ControlReply.aborts_before`.
    """

    weight_version: str
    outputs: list[RequestOutput]
    streamed: tuple[StreamedTokens, ...] = ()
    texts: list[str] = field(default_factory=list)
    streamed_texts: tuple[list[str], ...] = ()
    dp_rank: int = 0
    abort_number: int | None = None


# JSON has neither infinities nor NaN: the lowest float32 stands for them.
LOWEST_LOGPROB: Final = -3.4028234663852886e38
# Lists are made of columns while the request runs, a block of tokens at a time: otherwise requests that end
# together would wait for the lists of all of them.
MASKS_AT_ONCE: Final = 32


class LogprobColumns(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Logprobs at N positions in a row, as numbers of this machine: float32, and ids as int32.

    Attributes:
        tokens: of the tokens there. Not a number: nothing predicts the position, and it has nothing else.
        top, top_ids: of the most likely tokens, best first; equally many at each position.
        chosen: of the ids that the request named, in their order.
    """

    tokens: bytes = b""
    top: bytes = b""
    top_ids: bytes = b""
    chosen: bytes = b""

    @classmethod
    def of(cls, positions: LogprobArrays) -> LogprobColumns:
        return cls(*(b"" if column is None else column.tobytes() for column in positions.columns))


class LogprobRows:
    """One position of each of many requests, all equally wide: a `LogprobList` takes what it asks for."""

    __slots__ = ("chosen", "chosen_bytes", "tokens", "top", "top_bytes", "top_ids")

    def __init__(self, columns: LogprobColumns) -> None:
        self.tokens = array("f", columns.tokens)
        self.top, self.top_ids, self.chosen = columns.top, columns.top_ids, columns.chosen
        num_rows = max(1, len(self.tokens))
        self.top_bytes, self.chosen_bytes = len(self.top) // num_rows, len(self.chosen) // num_rows


class LogprobList:
    """Logprobs at positions in a row, of a request that asks for several at each of them.

    Args:
        num_top: of the most likely tokens.
        num_chosen: of ids that the request named.
    """

    __slots__ = ("_chosen", "_num_chosen", "_num_top", "_tokens", "_top", "_top_ids")

    def __init__(self, num_top: int, num_chosen: int) -> None:
        self._num_top, self._num_chosen = num_top, num_chosen
        self._tokens, self._top, self._chosen = array("f"), array("f"), array("f")
        self._top_ids = array("i")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_values(self) -> int:
        """How many logprobs there are at all positions together."""
        return len(self._tokens) + len(self._top) + len(self._chosen)

    def clear(self) -> None:
        # New arrays would be objects that the collector looks at, four for each chunk of each stream.
        del self._tokens[:], self._top[:], self._top_ids[:], self._chosen[:]

    def append(self, rows: LogprobRows, index: int) -> None:
        """Add one position, with what is in this row."""
        self._tokens.append(rows.tokens[index])
        if self._num_top:
            start = index * rows.top_bytes
            end = start + self._num_top * self._top.itemsize
            self._top.frombytes(rows.top[start:end])
            self._top_ids.frombytes(rows.top_ids[start:end])
        if self._num_chosen:
            start = index * rows.chosen_bytes
            self._chosen.frombytes(rows.chosen[start : start + self._num_chosen * self._chosen.itemsize])

    def append_nothing(self) -> None:
        """A position that nothing predicts."""
        self._tokens.append(nan)
        self._top.extend([nan] * self._num_top)
        self._top_ids.extend([0] * self._num_top)
        self._chosen.extend([nan] * self._num_chosen)

    def extend(self, positions: LogprobArrays, start: int, end: int) -> None:
        """Positions [start, end) of these."""
        self._tokens.frombytes(positions.tokens_N[start:end].tobytes())
        if self._num_top:
            assert positions.top_NK is not None
            assert positions.top_ids_NK is not None
            self._top.frombytes(positions.top_NK[start:end, : self._num_top].tobytes())
            self._top_ids.frombytes(positions.top_ids_NK[start:end, : self._num_top].tobytes())
        if self._num_chosen:
            assert positions.chosen_NC is not None
            self._chosen.frombytes(positions.chosen_NC[start:end, : self._num_chosen].tobytes())

    def add(self, columns: LogprobColumns) -> None:
        """Further positions."""
        self._tokens.frombytes(columns.tokens)
        self._top.frombytes(columns.top)
        self._top_ids.frombytes(columns.top_ids)
        self._chosen.frombytes(columns.chosen)

    def columns(self) -> LogprobColumns:
        return LogprobColumns(
            self._tokens.tobytes(), self._top.tobytes(), self._top_ids.tobytes(), self._chosen.tobytes()
        )

    @property
    def tokens(self) -> list[float | None]:
        """The tokens' own logprobs, as JSON can hold them: None where there is none."""
        return [
            value if value >= LOWEST_LOGPROB else None if isnan(value) else LOWEST_LOGPROB
            for value in self._tokens
        ]

    def tops(self) -> Iterator[list[tuple[float, int]] | None]:
        """(logprob, id) of the most likely tokens, by position."""
        width = self._num_top
        for index, token in enumerate(self._tokens):
            part = slice(index * width, (index + 1) * width)
            yield None if isnan(token) else list(zip(self._top[part], self._top_ids[part], strict=True))

    def chosen(self) -> Iterator[list[float] | None]:
        """Logprobs of the ids that were named, by position."""
        width = self._num_chosen
        for index, token in enumerate(self._tokens):
            yield None if isnan(token) else self._chosen[index * width : (index + 1) * width].tolist()


class SupportColumns(Struct, frozen=True, array_like=True):
    """The sampling masks of N tokens in a row, as numbers of this machine.

    Attributes:
        ids: int32, of the tokens that could have been sampled in the place of the first, then of the next.
        counts: int32, how many those are, per token.
        logprobs: float32, of each token among them.
    """

    ids: bytes
    counts: bytes
    logprobs: bytes


def masks_of(columns: SupportColumns) -> list[list[int]]:
    """The ids of each token's mask, in ascending order."""
    ids, counts = array("i", columns.ids), array("i", columns.counts)
    return [ids[start:end].tolist() for start, end in pairwise(accumulate(counts, initial=0))]


class SupportList:
    """The sampling masks of tokens in a row."""

    __slots__ = ("_counts", "_ids", "_logprobs")

    def __init__(self) -> None:
        self._ids, self._counts, self._logprobs = array("i"), array("i"), array("f")

    def __len__(self) -> int:
        return len(self._counts)

    def clear(self) -> None:
        del self._ids[:], self._counts[:], self._logprobs[:]

    def append(self, supports: Supports, index: int) -> None:
        """Add one token, with the support at this index."""
        start = int(supports.ends_G[index - 1]) if index else 0
        end = int(supports.ends_G[index])
        self._ids.frombytes(supports.ids[start:end].tobytes())
        self._counts.append(end - start)
        self._logprobs.append(supports.logprobs_G[index])

    def add(self, columns: SupportColumns) -> None:
        """Further tokens."""
        self._ids.frombytes(columns.ids)
        self._counts.frombytes(columns.counts)
        self._logprobs.frombytes(columns.logprobs)

    def take(self) -> SupportColumns:
        """All tokens, which are here no more."""
        columns = SupportColumns(self._ids.tobytes(), self._counts.tobytes(), self._logprobs.tobytes())
        self.clear()
        return columns

    @property
    def logprobs(self) -> list[float]:
        return self._logprobs.tolist()

    def encoded(self) -> tuple[str, str]:
        """The ids, and where those of each token begin, and the last ones end; both as int32 in base64."""
        offsets = array("i", accumulate(self._counts, initial=0))
        return b64encode(self._ids).decode(), b64encode(offsets).decode()
