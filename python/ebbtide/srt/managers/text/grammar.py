"""Which tokens may come next in an output: its grammar allows them, and they complete no banned sequence.

Grammars are compiled in a process of their own, and followed token by token on every rank. The xgrammar
library does both. It imports torch, so it is imported only when it is needed, and never in the API process.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.generation import LoadGrammar
from ebbtide.srt.sampling_params import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

# Limits on the length of a spec, on the depth of a schema's brackets, and on the rules of a grammar. No use
# needs more, and a spec beyond any one of them can take minutes and gigabytes to compile.
MAX_SPEC_CHARACTERS: Final = 1 << 18
MAX_DEPTH: Final = 200
MAX_RULES: Final = 2000
# The most memory to compile one grammar, besides that which the process has anyway.
MAX_COMPILE_MEMORY_BYTES: Final = 1 << 30
# The largest compiled grammar. It is sent to every rank.
MAX_COMPILED_BYTES: Final = 64 << 20
# A lower bound of the speed at which ranks read a compiled grammar.
READ_BYTES_PER_S: Final = 50e6
# The most compiled grammars that are kept, in the API process and on each rank.
MAX_KEPT: Final = 64
MAX_KEPT_BYTES: Final = 256 << 20
# Tokens in one word of a mask, see `batch_plan.TokenMask`.
WORD_BITS: Final = 32
# The most threads that fill masks during a forward pass, and the fewest masks for which they are used.
MAX_FILL_THREADS: Final = 8
MIN_BATCH_FILL: Final = 8
# The CPU time per token that an output may take on average: to fill its mask, which several threads do during
# the forward pass, and to accept the token, for which the scheduler's loop waits. An output may save up this
# time for `MAX_SAVED_TOKENS` tokens. With a vocabulary of 150k, counted repetitions take up to 6 ms for a
# mask on average, 20 ms at worst, and 0.1 ms to accept a token. Ambiguous grammars take more and more of
# both, and all other requests of the batch wait for them.
FILL_S_PER_TOKEN: Final = 0.02
ACCEPT_S_PER_TOKEN: Final = 0.0025
MAX_SAVED_TOKENS: Final = 12.0
TOO_SLOW: Final = (
    f"it is too ambiguous: it takes more than {FILL_S_PER_TOKEN * 1e3:g} ms per token to find which may "
    f"follow, or {ACCEPT_S_PER_TOKEN * 1e3:g} ms to follow it"
)


class Vocabulary:
    """The model's tokens, as grammars need to know them.

    Args:
        vocab_size: the model's vocabulary size. The tokenizer may have fewer tokens.
        eos_token_ids: the tokens that end an output, where its grammar allows the end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.size = vocab_size
        self._eos_token_ids = eos_token_ids

    @cached_property
    def info(self) -> xgrammar.TokenizerInfo:
        """The library's view of the tokens. It takes seconds to make. For use by one thread."""
        import xgrammar

        return xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.hf, vocab_size=self.size, stop_token_ids=sorted(self._eos_token_ids)
        )


class GrammarCompiler:
    """Compiles grammars, in a process that may be killed while it does: see `grammar_compiling`.

    Args:
        has_whitespace: whether JSON may have whitespace anywhere between its parts; otherwise it has one
            space after each comma and colon.
        most_whitespace: the most characters of whitespace in a row; None: no limit.
    """

    def __init__(
        self, vocabulary: Vocabulary, has_whitespace: bool = True, most_whitespace: int | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._has_whitespace, self._most_whitespace = has_whitespace, most_whitespace

    def compile(self, spec: GrammarSpec, continued_ids: Sequence[int] = ()) -> bytes:
        """Compile a grammar into the bytes that ranks load.

        Args:
            continued_ids: the output so far, which the ranks will advance the grammar through.

        Raises:
            RequestRejected: it does not compile, is too large, is too ambiguous to follow `continued_ids`, or
                no token can begin it.
            MemoryError: it takes too much memory to compile.
        """
        import xgrammar

        name = f"sampling_params.{spec.kind}"
        _check_size(name, spec)
        compiler = xgrammar.GrammarCompiler(self._vocabulary.info, max_threads=1, cache_enabled=False)
        compilers: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json_schema": partial(
                compiler.compile_json_schema,
                any_whitespace=self._has_whitespace,
                max_whitespace_cnt=self._most_whitespace,
            ),
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "choice": compiler.compile_grammar,
            "structural_tag": compiler.compile_structural_tag,
        }
        try:
            grammar = compilers[spec.kind](spec.text)
            # Checked before it becomes text, which is at least as long.
            _check_compiled(name, grammar.memory_size_bytes)
            compiled: bytes = grammar.serialize_json().encode()
        except (RequestRejected, MemoryError):
            raise
        except Exception as error:  # the library raises RuntimeError, and what pydantic raises
            if "bad_alloc" in str(error):
                raise MemoryError from None
            raise RequestRejected(f"{name}: does not compile: {_message(error)}") from error
        _check_compiled(name, len(compiled))
        slow: list[str] = []
        mask = GrammarMask(grammar, MaskFiller(1), lambda: slow.append(name))
        words_W = np.empty(-(-self._vocabulary.size // WORD_BITS), dtype=np.int32)
        mask.fill([], words_W[np.newaxis])
        if not words_W.any():
            raise RequestRejected(f"{name}: no token of the model's vocabulary can begin it")
        for token_id in continued_ids:
            # If the grammar does not allow a token, the ranks will report that.
            if slow or not mask.accept(token_id):
                break
        if slow:
            raise RequestRejected(f"{name}: {TOO_SLOW}")
        return compiled


def _check_size(name: str, spec: GrammarSpec) -> None:
    """Refuse a spec that is larger than any use needs."""
    if len(spec.text) > MAX_SPEC_CHARACTERS:
        raise RequestRejected(
            f"{name}: expected at most {MAX_SPEC_CHARACTERS} characters, got {len(spec.text)}"
        )
    if (num_rules := spec.text.count("::=")) > MAX_RULES and spec.kind == "ebnf":
        raise RequestRejected(f"{name}: expected at most {MAX_RULES} rules, got {num_rules}")
    if spec.kind in ("json_schema", "structural_tag"):
        depth = deepest = 0
        for sign in re.sub(r'"(?:[^"\\]|\\.)*"|[^][{}]', "", spec.text):
            depth += 1 if sign in "[{" else -1
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            raise RequestRejected(f"{name}: expected at most {MAX_DEPTH} levels of JSON, got {deepest}")


def _check_compiled(name: str, num_bytes: int) -> None:
    if num_bytes > MAX_COMPILED_BYTES:
        raise RequestRejected(f"{name}: it compiles to {num_bytes} bytes, {MAX_COMPILED_BYTES} are most")


def _message(error: Exception) -> str:
    """The library's message, without the file and line of its source."""
    return str(error).rpartition(".cc:")[2].lstrip("0123456789: ").strip()[:400] or type(error).__name__


class RecentGrammars:
    """The latest compiled grammars, by key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: str) -> bytes | None:
        """The compiled grammar; None: it is not kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def add(self, key: str, compiled: bytes) -> list[str]:
        """Keep a grammar that is not kept yet. Returns the keys of those dropped for it."""
        self._kept[key] = compiled
        self._num_bytes += len(compiled)
        dropped = []
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            oldest, gone = self._kept.popitem(last=False)
            self._num_bytes -= len(gone)
            dropped.append(oldest)
        return dropped


class GrammarShelf:
    """The grammars of one rank. A thread deserializes them, so that the scheduler's loop goes on."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._grammars: dict[str, Future[xgrammar.CompiledGrammar]] = {}
        self._filler = MaskFiller(min(MAX_FILL_THREADS, (os.cpu_count() or 1) // 2))

    def prepare(self) -> None:
        """Begin to import the library and make its view of the tokens, before a grammar needs them."""
        self._thread.submit(lambda: self._vocabulary.info)

    def load(self, message: LoadGrammar) -> None:
        """Begin to deserialize a grammar, and forget those that the sender has dropped."""
        for key in message.dropped:
            del self._grammars[key]
        self._grammars[message.key] = self._thread.submit(self._read, message.compiled)

    def mask(self, key: str, note_slow: Callable[[], None]) -> GrammarMask:
        """The state of an output at the start of a grammar. `note_slow`: see `GrammarMask`."""
        return GrammarMask(self._grammars[key].result(), self._filler, note_slow)

    def _read(self, compiled: bytes) -> xgrammar.CompiledGrammar:
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._vocabulary.info)


class MaskFiller:
    """Fills the masks of many outputs, with several threads if there are enough masks.

    Args:
        num_threads: up to 1: the calling thread alone fills them.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._was_slow = False

    @cached_property
    def _batch(self) -> xgrammar.BatchGrammarMatcher:
        import xgrammar

        return xgrammar.BatchGrammarMatcher(max_threads=self._num_threads)

    def fill(self, masks: Sequence[GrammarMask], words_MW: NDArray[np.int32]) -> None:
        # The library does not write rows that are to be all ones. Rows of ended outputs are not used.
        words_MW.fill(-1)
        live = [row for row, mask in enumerate(masks) if not mask.has_ended]
        # The time of a batch does not tell which mask was slow: after a slow batch each mask is filled alone.
        is_batch = self._num_threads > 1 and len(live) >= MIN_BATCH_FILL and not self._was_slow
        began_s = time.monotonic()
        if is_batch:
            matchers = [masks[row].matcher for row in live]
            self._batch.batch_fill_next_token_bitmask(matchers, words_MW, live)
        else:
            for row in live:
                masks[row].fill_row(words_MW, row)
        self._was_slow = is_batch and time.monotonic() - began_s > FILL_S_PER_TOKEN


class GrammarMask:
    """The state of one output in its grammar. Implements `batch_plan.TokenMask`.

    Args:
        note_slow: called when its tokens have taken more time than they may.

    Attributes:
        matcher: the library's state.
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        filler: MaskFiller,
        note_slow: Callable[[], None] = lambda: None,
    ) -> None:
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(grammar)
        self._filler = filler
        self._note_slow = note_slow
        self._num_saved = MAX_SAVED_TOKENS

    def fill(self, others: Sequence[GrammarMask], words_MW: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next: here, and in each of the others."""
        self._filler.fill([self, *others], words_MW)

    def fill_row(self, words_MW: NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens that may come next, in this row."""
        began_s = time.thread_time()
        self.matcher.fill_next_token_bitmask(words_MW, row)
        self._save(-(time.thread_time() - began_s) / FILL_S_PER_TOKEN)

    def accept(self, token_id: int) -> bool:
        """Advance by a sampled token. Returns whether the grammar allows it."""
        if self.has_ended:
            return True
        began_s = time.thread_time()
        is_allowed = bool(self.matcher.accept_token(token_id))
        self._save(1 - (time.thread_time() - began_s) / ACCEPT_S_PER_TOKEN)
        return is_allowed

    @property
    def has_ended(self) -> bool:
        """Whether a token that ends the output was accepted."""
        return bool(self.matcher.is_terminated())

    def _save(self, num_tokens: float) -> None:
        """Add time to what is saved, or take some from it, in tokens' worth of time."""
        was_left = self._num_saved > 0
        self._num_saved = min(MAX_SAVED_TOKENS, self._num_saved + num_tokens)
        if was_left and self._num_saved <= 0:
            self._note_slow()


class BannedSequences:
    """Sequences of token ids that an output must not contain, and the end of the output so far."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._longer = [list(sequence) for sequence in sequences if len(sequence) > 1]
        self._tail_len = max((len(sequence) - 1 for sequence in self._longer), default=0)
        self._tail: list[int] = []

    def accept(self, token_id: int) -> None:
        """Append a token to the output."""
        if self._tail_len:
            self._tail = [*self._tail, token_id][-self._tail_len :]

    def next_ids(self) -> list[int]:
        """The ids that must not come next, because they would complete a sequence."""
        ends = (one[-1] for one in self._longer if one[:-1] == self._tail[-(len(one) - 1) :])
        return [*self._always, *ends]


class TokenRules:
    """The grammar of one output, its banned sequences, or both. Implements `batch_plan.TokenMask`."""

    def __init__(self, grammar: GrammarMask | None, banned: BannedSequences | None) -> None:
        self.grammar = grammar
        self.banned = banned

    def fill(self, others: Sequence[TokenRules], words_MW: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next: here, and in each of the others."""
        rules = [self, *others]
        masks = {row: one.grammar for row, one in enumerate(rules) if one.grammar is not None}
        if len(masks) < len(rules):
            words_MW.fill(-1)
        if masks:
            first, *rest = masks.values()
            rows = list(masks)
            words_GW = words_MW if len(rows) == len(rules) else words_MW[rows]
            first.fill(rest, words_GW)
            if words_GW is not words_MW:
                words_MW[rows] = words_GW
        for one, bits_W in zip(rules, words_MW.view(np.uint32), strict=True):
            for token_id in one.banned.next_ids() if one.banned is not None else ():
                bits_W[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)

    def accept(self, token_id: int) -> bool:
        """A token was sampled; whether it may come."""
        if self.banned is not None:
            if token_id in self.banned.next_ids():
                return False
            self.banned.accept(token_id)
        return self.grammar is None or self.grammar.accept(token_id)

    @property
    def has_ended(self) -> bool:
        """Whether the grammar has ended, so that nothing may follow."""
        return self.grammar is not None and self.grammar.has_ended
