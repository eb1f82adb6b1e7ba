"""Outputs that have ended. They are kept for a while, so that a later request can continue one."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.wire.generation import TokenizedGenerateReqInput
from ebbtide.srt.sampling_params import SamplingParams

# Limits: the seconds that an output is kept, the number of outputs, and the tokens of all of them.
KEPT_S: Final = 600.0
MAX_KEPT: Final = 4096
MAX_KEPT_TOKENS: Final = 8 << 20


@dataclass(frozen=True)
class Caller:
    """The sender of a request: its host, and the API key that it sends, which may be wrong."""

    host: str = ""
    key: str = field(default="", repr=False)


NOBODY: Final = Caller()


@dataclass(frozen=True)
class EndedOutput:
    """An output that has ended, with all that is needed to continue it.

    Attributes:
        prompt_ids: the prompt of the first request, if requests continued each other.
        output_ids: all tokens generated after the prompt; the last request generated the last `num_new`.
        ended_s: when it ended, by the monotonic clock.
        adapter: the adapter version that it ended with; None: it used no adapter.
    """

    rid: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    num_new: int
    params: SamplingParams
    seed: int
    namespace: tuple[str, ...]
    ended_s: float
    adapter: str | None = None

    def params_for(self, given: SamplingParams | None) -> SamplingParams:
        """The parameters of a request that continues it: the given ones or else its own, with its seed."""
        if given is not None and given.n != 1:
            raise RequestRejected(f"continue_from: it continues one output: expected n = 1, got {given.n}")
        return replace(self.params if given is None else given, n=1, sampling_seed=self.seed)

    @property
    def num_left(self) -> int | None:
        """How many more tokens its own parameters allow, at least one; None: they set no limit.

        Raises:
            RequestRejected: they allow no more.
        """
        if self.params.max_new_tokens is None:
            return None
        left = self.params.max_new_tokens - self.num_new
        if left < 1:
            raise RequestRejected(
                f"continue_from: {self.rid!r} has reached its {self.num_new} tokens: give sampling_params"
            )
        return left

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_entries(self) -> int:
        """The size, in ids and characters, of what it shares with the other outputs of its request."""
        grammar = self.params.grammar
        texts = *self.namespace, "" if grammar is None else grammar.text
        return self.params.num_entries + sum(map(len, texts))


class EndedOutputs:
    """The outputs that ended last, by the API key and the rid of their requests.

    Whoever sends the same key and knows the rid may continue the output, and so can read its prompt.

    Args:
        is_live: whether the output of a rid still runs.
    """

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._kept: dict[tuple[str, str], EndedOutput] = {}
        # Includes `num_entries`, once for all outputs with the same parameters object: `_num_sharing` counts
        # those outputs, by its `id`.
        self._num_tokens = 0
        self._num_sharing: Counter[int] = Counter()

    def keep(
        self,
        request: TokenizedGenerateReqInput,
        output_ids: Sequence[int],
        client: Caller = NOBODY,
        adapter: str | None = None,
    ) -> None:
        """Keep the output of a request that has ended.

        Args:
            client: who sent the request.
            adapter: the adapter version that it ended with; None: the one that the request named, if any.
        """
        name = client.key, request.rid
        self._forget(name)
        ended = self._kept[name] = EndedOutput(
            rid=request.rid,
            prompt_ids=array("i", request.input_ids),
            output_ids=array("i", [*request.continued_ids, *output_ids]),
            num_new=len(output_ids),
            params=request.sampling_params,
            seed=request.seed,
            namespace=request.cache_namespace,
            ended_s=time.monotonic(),
            adapter=request.adapter if adapter is None else adapter,
        )
        sharing = self._num_sharing[id(ended.params)] = self._num_sharing[id(ended.params)] + 1
        self._num_tokens += ended.num_tokens + (ended.num_entries if sharing == 1 else 0)
        while self._has_too_much():
            self._forget(next(iter(self._kept)))

    def get(self, rid: str, client: Caller = NOBODY) -> EndedOutput:
        """The output of this rid.

        Raises:
            RequestRejected: it still runs, or it is not kept (any more) for this client.
        """
        if self._is_live(rid):
            raise RequestRejected(f"continue_from: {rid!r} is still running: abort it first")
        if self.find([rid], client) is not None:
            return self._kept[client.key, rid]
        # The message lists no other rids: whoever knows a rid can read the prompt of its request.
        raise RequestRejected(
            f"continue_from: there is no output {rid[:200]!r} to continue: the last {MAX_KEPT} are kept for "
            f"{KEPT_S:g} s, for clients with the same API key"
        )

    def find(self, rids: Sequence[str], client: Caller = NOBODY) -> str | None:
        """The first of these rids whose output is kept for this client."""
        oldest_s = time.monotonic() - KEPT_S
        kept = ((rid, self._kept.get((client.key, rid))) for rid in rids)
        return next((rid for rid, ended in kept if ended is not None and ended.ended_s > oldest_s), None)

    def _has_too_much(self) -> bool:
        """Whether the oldest output must go: it is too old, or there are too many outputs or tokens."""
        is_full = len(self._kept) > MAX_KEPT or self._num_tokens > MAX_KEPT_TOKENS
        oldest = next(iter(self._kept.values()), None)
        return oldest is not None and (is_full or oldest.ended_s <= time.monotonic() - KEPT_S)

    def _forget(self, name: tuple[str, str]) -> None:
        ended = self._kept.pop(name, None)
        if ended is None:
            return
        self._num_tokens -= ended.num_tokens
        self._num_sharing[id(ended.params)] -= 1
        if not self._num_sharing[id(ended.params)]:
            del self._num_sharing[id(ended.params)]
            self._num_tokens -= ended.num_entries
