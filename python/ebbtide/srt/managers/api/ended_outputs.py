"""Outputs that have ended, kept for a while: a request may continue one, also one that nobody has read."""

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

# How long an output is kept, how many are, and how many tokens of them all.
KEPT_S: Final = 600.0
MAX_KEPT: Final = 4096
MAX_KEPT_TOKENS: Final = 8 << 20


@dataclass(frozen=True)
class Caller:
    """Who asks: the host that requests come from, and the key that they bring, right or not."""

    host: str = ""
    key: str = field(default="", repr=False)


NOBODY: Final = Caller()


@dataclass(frozen=True)
class EndedOutput:
    """What a request needs to know that continues an output.

    Attributes:
        prompt_ids: of the first request, if that continued another one.
        output_ids: all that was generated behind these; `num_new` of them by the last request.
        adapter: the version of an adapter that it ended with; None: without any.
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
        """Those of a request that continues it: with its seed, and where none are given, its own."""
        if given is not None and given.n != 1:
            raise RequestRejected(f"continue_from: one output goes on, expected n = 1, got {given.n}")
        return replace(self.params if given is None else given, n=1, sampling_seed=self.seed)

    @property
    def num_left(self) -> int | None:
        """How many more tokens its own parameters allow, at least one; None: as many as there is room for."""
        if self.params.max_new_tokens is None:
            return None
        left = self.params.max_new_tokens - self.num_new
        if left < 1:
            raise RequestRejected(
                f"continue_from: {self.rid!r} has all of its {self.num_new} tokens: give sampling_params"
            )
        return left

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_entries(self) -> int:
        """Ids and characters of what it has in common with the other outputs of its request."""
        grammar = self.params.grammar
        texts = *self.namespace, "" if grammar is None else grammar.text
        return self.params.num_entries + sum(map(len, texts))


class EndedOutputs:
    """The last outputs that have ended, by the key and the rid of their requests.

    Who has made a request under the same key, and knows its rid, may continue it, and read its prompt.
    """

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._kept: dict[tuple[str, str], EndedOutput] = {}
        # Those of parameters included, of which the outputs of a request have the same.
        self._num_tokens = 0
        self._num_sharing: Counter[int] = Counter()

    def keep(
        self,
        request: TokenizedGenerateReqInput,
        output_ids: Sequence[int],
        client: Caller = NOBODY,
        adapter: str | None = None,
    ) -> None:
        """An output has ended, of a request that this client made, on this version of an adapter."""
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
        """The output of this rid; refused (400) if it still runs, or nothing is known of it any more."""
        if self._is_live(rid):
            raise RequestRejected(f"continue_from: {rid!r} is still running: abort it first")
        if self.find([rid], client) is not None:
            return self._kept[client.key, rid]
        # Other rids are not listed: whoever knows one reads the prompt of its request.
        raise RequestRejected(
            f"continue_from: nothing is known of {rid[:200]!r}: the last {MAX_KEPT} outputs are kept for "
            f"{KEPT_S:g} s, for those who send the key of their requests"
        )

    def find(self, rids: Sequence[str], client: Caller = NOBODY) -> str | None:
        """The first of these rids that an output is kept under."""
        oldest_s = time.monotonic() - KEPT_S
        kept = ((rid, self._kept.get((client.key, rid))) for rid in rids)
        return next((rid for rid, ended in kept if ended is not None and ended.ended_s > oldest_s), None)

    def _has_too_much(self) -> bool:
        """Whether the oldest is too old, or one too many."""
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
