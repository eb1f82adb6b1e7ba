"""Grammars that outputs keep to: compiled in the API process, followed token by token on every rank.

The xgrammar library does both. It takes seconds to import, so nothing here does before the first request
that asks for a grammar.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.generation import LoadGrammar
from ebbtide.srt.sampling_params import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

# A schema of this length is beyond every use that is known.
MAX_SPEC_CHARACTERS: Final = 1 << 18
# A compiled grammar takes at most this much: it is sent to every rank.
MAX_COMPILED_BYTES: Final = 64 << 20
# Compiled grammars that are kept, here and on the ranks.
MAX_KEPT: Final = 64
# Tokens that one word of a mask stands for, as `batch_plan.TokenMask` has it.
WORD_BITS: Final = 32
# Threads that fill masks beside a forward pass, and the fewest masks that are worth waking them.
MAX_FILL_THREADS: Final = 8
MIN_BATCH_FILL: Final = 8
# How long one may take to compile. A thread cannot be stopped, but nobody waits for it any longer.
COMPILE_LIMIT_S: Final = 20.0


class Vocabulary:
    """What grammars know of the model's tokens.

    Args:
        vocab_size: the model's, which may be more than the tokenizer has tokens.
        eos_token_ids: one of these ends an output, where its grammar lets it end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = Lock()

    @property
    def info(self) -> xgrammar.TokenizerInfo:
        """The library's view; the first call takes seconds. From any thread."""
        with self._lock:
            return self._info

    @cached_property
    def _info(self) -> xgrammar.TokenizerInfo:
        import xgrammar

        return xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.hf, vocab_size=self.size, stop_token_ids=sorted(self._eos_token_ids)
        )


class GrammarCompiler:
    """Compiles grammars, and keeps the latest. `compile` may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def open(self) -> None:
        """Have the library ready."""
        _ = self._vocabulary.info

    def compiled(self, spec: GrammarSpec) -> bytes | None:
        """A grammar that is kept; None if it is not."""
        return self._kept.get(spec.key)

    def keep(self, spec: GrammarSpec, compiled: bytes) -> None:
        """Keep a compiled grammar. In the event loop alone."""
        self._kept[spec.key] = compiled
        self._kept.move_to_end(spec.key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def compile(self, spec: GrammarSpec) -> bytes:
        """What ranks load.

        Raises:
            RequestRejected: 400, it does not compile, is too large, or no token can begin it.
        """
        import xgrammar

        name = f"sampling_params.{spec.kind}"
        if len(spec.text) > MAX_SPEC_CHARACTERS:
            raise RequestRejected(
                f"{name}: expected at most {MAX_SPEC_CHARACTERS} characters, got {len(spec.text)}"
            )
        compiler = xgrammar.GrammarCompiler(self._vocabulary.info, max_threads=1, cache_enabled=False)
        compilers: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json_schema": compiler.compile_json_schema,
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "choice": compiler.compile_grammar,
            "structural_tag": compiler.compile_structural_tag,
        }
        try:
            grammar = compilers[spec.kind](spec.text)
        except Exception as error:  # the library raises RuntimeError, and what pydantic raises
            raise RequestRejected(f"{name}: does not compile: {_told(error)}") from error
        words_W = np.empty(-(-self._vocabulary.size // WORD_BITS), dtype=np.int32)
        GrammarMask(grammar, MaskFiller(1)).fill([], words_W[np.newaxis])
        if not words_W.any():
            raise RequestRejected(f"{name}: no token of the model's vocabulary can begin it")
        compiled: bytes = grammar.serialize_json().encode()
        if len(compiled) > MAX_COMPILED_BYTES:
            raise RequestRejected(
                f"{name}: it compiles to {len(compiled)} bytes, {MAX_COMPILED_BYTES} are most"
            )
        return compiled


def _told(error: Exception) -> str:
    """What the library says, without the place in its source."""
    return str(error).rpartition(".cc:")[2].lstrip("0123456789: ").strip()[:400] or type(error).__name__


class LoadedGrammars:
    """Which grammars the ranks hold, as the API process that has them loaded knows."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def load(self, key: str, compiled: bytes) -> LoadGrammar | None:
        """What ranks have to be told ahead of a request with this grammar; None: nothing."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return None
        self._keys[key] = None
        dropped = self._keys.popitem(last=False)[0] if len(self._keys) > MAX_KEPT else None
        return LoadGrammar(key=key, compiled=compiled, dropped=dropped)


class GrammarShelf:
    """The grammars that one rank holds. They are read by a thread beside the scheduler's loop."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._grammars: dict[str, Future[xgrammar.CompiledGrammar]] = {}
        self._filler = MaskFiller(min(MAX_FILL_THREADS, (os.cpu_count() or 1) // 2))

    def prepare(self) -> None:
        """A grammar is about to come: have the library ready."""
        self._thread.submit(lambda: self._vocabulary.info)

    def load(self, message: LoadGrammar) -> None:
        """Take in a grammar."""
        if message.dropped is not None:
            del self._grammars[message.dropped]
        self._grammars[message.key] = self._thread.submit(self._read, message.compiled)

    def mask(self, key: str) -> GrammarMask:
        """The state of a request that begins to follow a grammar."""
        return GrammarMask(self._grammars[key].result(), self._filler)

    def _read(self, compiled: bytes) -> xgrammar.CompiledGrammar:
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._vocabulary.info)


class MaskFiller:
    """Fills the masks of many outputs, by several threads where there is enough for each.

    Args:
        num_threads: one or fewer: the caller's own does it.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    @cached_property
    def _batch(self) -> xgrammar.BatchGrammarMatcher:
        import xgrammar

        return xgrammar.BatchGrammarMatcher(max_threads=self._num_threads)

    def fill(self, matchers: Sequence[xgrammar.GrammarMatcher], words_MW: NDArray[np.int32]) -> None:
        # What is all ones already is left untouched by the library; and the row of a request that has ended
        # counts for nothing.
        words_MW.fill(-1)
        live = [row for row, matcher in enumerate(matchers) if not matcher.is_terminated()]
        if self._num_threads > 1 and len(live) >= MIN_BATCH_FILL:
            self._batch.batch_fill_next_token_bitmask([matchers[row] for row in live], words_MW, live)
            return
        for row in live:
            matchers[row].fill_next_token_bitmask(words_MW, row)


class GrammarMask:
    """Where one output stands in its grammar. Implements `batch_plan.TokenMask`."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, filler: MaskFiller) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._filler = filler

    def fill(self, others: Sequence[GrammarMask], words_MW: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next: here, and in each of the others."""
        self._filler.fill([self._matcher, *(other._matcher for other in others)], words_MW)

    def accept(self, token_id: int) -> bool:
        """A token was sampled; whether the grammar allows it."""
        return self._matcher.is_terminated() or bool(self._matcher.accept_token(token_id))

    @property
    def has_ended(self) -> bool:
        """Whether the token was sampled that ends the output."""
        return bool(self._matcher.is_terminated())
