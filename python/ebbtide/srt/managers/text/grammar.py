"""Which tokens may come next in an output: what its grammar allows, and what completes no banned sequence.

Grammars are compiled in a process of their own, and followed token by token on every rank.

The xgrammar library does both. It imports torch, so nothing here does before it is needed: the API process
never is.
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

# Limits on the length of a spec, the depth of a schema (in brackets), and the rules of a grammar. No use of
# more is known, and each of them alone can take minutes and gigabytes to compile.
MAX_SPEC_CHARACTERS: Final = 1 << 18
MAX_DEPTH: Final = 200
MAX_RULES: Final = 2000
# Of one compile, in addition to what the process has in its memory anyway.
MAX_COMPILE_MEMORY_BYTES: Final = 1 << 30
# A compiled grammar takes at most this much: it is sent to every rank.
MAX_COMPILED_BYTES: Final = 64 << 20
# As fast as ranks read one at least.
READ_BYTES_PER_S: Final = 50e6
# Compiled grammars that are kept, in the API process and on the ranks.
MAX_KEPT: Final = 64
MAX_KEPT_BYTES: Final = 256 << 20
# Tokens that one word of a mask stands for, as `batch_plan.TokenMask` has it.
WORD_BITS: Final = 32
# Threads that fill masks during a forward pass, and the fewest masks that are worth waking them.
MAX_FILL_THREADS: Final = 8
MIN_BATCH_FILL: Final = 8
# CPU time that an output may take per token: to fill its mask, which several threads do during the forward
# pass, and to take the token in, while the loop waits; and how many tokens' worth of it at once. With a
# vocabulary of 150k, counted repetitions take up to 6 ms for a mask on average, 20 ms at worst, and 0.1 ms to
# take a token in. Ambiguous grammars take ever more of both, and all other requests of a batch wait for them.
FILL_S_PER_TOKEN: Final = 0.02
ACCEPT_S_PER_TOKEN: Final = 0.0025
MAX_SAVED_TOKENS: Final = 12.0
TOO_SLOW: Final = (
    f"it is too ambiguous: it takes more than {FILL_S_PER_TOKEN * 1e3:g} ms per token to find which may "
    f"follow, or {ACCEPT_S_PER_TOKEN * 1e3:g} ms to follow it"
)


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

    @cached_property
    def info(self) -> xgrammar.TokenizerInfo:
        """The library's view, which takes seconds to make. From one thread."""
        import xgrammar

        return xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.hf, vocab_size=self.size, stop_token_ids=sorted(self._eos_token_ids)
        )


class GrammarCompiler:
    """Compiles grammars, in a process that may be ended meanwhile: see `grammar_compiling`.

    `has_whitespace`, `most_whitespace`: whether JSON of a schema may have it anywhere between its parts, or
    one space behind each comma and colon; and how much in a row, None: any.
    """

    def __init__(
        self, vocabulary: Vocabulary, has_whitespace: bool = True, most_whitespace: int | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._has_whitespace, self._most_whitespace = has_whitespace, most_whitespace

    def compile(self, spec: GrammarSpec, continued_ids: Sequence[int] = ()) -> bytes:
        """What ranks load.

        `continued_ids`: an output that the ranks will go through before they go on with it. Raises
        RequestRejected: 400, it does not compile, is too large, too ambiguous for what is continued, or no
        token can begin it; MemoryError: there is not enough to compile it.
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
            # As text it is at least as long.
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
            # What the grammar does not allow the ranks will say.
            if slow or not mask.accept(token_id):
                break
        if slow:
            raise RequestRejected(f"{name}: {TOO_SLOW}")
        return compiled


def _check_size(name: str, spec: GrammarSpec) -> None:
    """Refuse what is beyond every use. Raises RequestRejected: 400."""
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
    """The library's message, without the place in its source."""
    return str(error).rpartition(".cc:")[2].lstrip("0123456789: ").strip()[:400] or type(error).__name__


class RecentGrammars:
    """The latest compiled grammars, by key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: str) -> bytes | None:
        """One that is kept; None if it is not."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def add(self, key: str, compiled: bytes) -> list[str]:
        """Keep one that is not; the keys of those that had to go."""
        self._kept[key] = compiled
        self._num_bytes += len(compiled)
        dropped = []
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            oldest, gone = self._kept.popitem(last=False)
            self._num_bytes -= len(gone)
            dropped.append(oldest)
        return dropped


class GrammarShelf:
    """The grammars of one rank. A thread deserializes them, not the scheduler's loop."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._grammars: dict[str, Future[xgrammar.CompiledGrammar]] = {}
        self._filler = MaskFiller(min(MAX_FILL_THREADS, (os.cpu_count() or 1) // 2))

    def prepare(self) -> None:
        """Have the library ready before the first grammar comes."""
        self._thread.submit(lambda: self._vocabulary.info)

    def load(self, message: LoadGrammar) -> None:
        """Take in a grammar."""
        for key in message.dropped:
            del self._grammars[key]
        self._grammars[message.key] = self._thread.submit(self._read, message.compiled)

    def mask(self, key: str, note_slow: Callable[[], None]) -> GrammarMask:
        """The state of a request that begins to follow a grammar. `note_slow`: see `GrammarMask`."""
        return GrammarMask(self._grammars[key].result(), self._filler, note_slow)

    def _read(self, compiled: bytes) -> xgrammar.CompiledGrammar:
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._vocabulary.info)


class MaskFiller:
    """Fills the masks of many outputs, by several threads where there is enough for each.

    `num_threads`: one or fewer: the caller's own does it.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._was_slow = False

    @cached_property
    def _batch(self) -> xgrammar.BatchGrammarMatcher:
        import xgrammar

        return xgrammar.BatchGrammarMatcher(max_threads=self._num_threads)

    def fill(self, masks: Sequence[GrammarMask], words_MW: NDArray[np.int32]) -> None:
        # What is all ones already is left untouched by the library; and the row of a request that has ended
        # counts for nothing.
        words_MW.fill(-1)
        live = [row for row, mask in enumerate(masks) if not mask.has_ended]
        # A batch does not show which of its masks was slow: after a slow one each is filled by itself.
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
    """Where one output stands in its grammar. Implements `batch_plan.TokenMask`.

    `note_slow`: called once its tokens have taken longer than they may. `matcher`: the library's state.
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
        """Set the bits of the tokens that may come next in a row."""
        began_s = time.thread_time()
        self.matcher.fill_next_token_bitmask(words_MW, row)
        self._save(-(time.thread_time() - began_s) / FILL_S_PER_TOKEN)

    def accept(self, token_id: int) -> bool:
        """A token was sampled; whether the grammar allows it."""
        if self.has_ended:
            return True
        began_s = time.thread_time()
        is_allowed = bool(self.matcher.accept_token(token_id))
        self._save(1 - (time.thread_time() - began_s) / ACCEPT_S_PER_TOKEN)
        return is_allowed

    @property
    def has_ended(self) -> bool:
        """Whether the token was sampled that ends the output."""
        return bool(self.matcher.is_terminated())

    def _save(self, num_tokens: float) -> None:
        """Add to the time that is saved, in tokens; below 0: take from it."""
        was_left = self._num_saved > 0
        self._num_saved = min(MAX_SAVED_TOKENS, self._num_saved + num_tokens)
        if was_left and self._num_saved <= 0:
            self._note_slow()


class BannedSequences:
    """Sequences of token ids that an output must not have. It follows the output."""

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
        """What must not come next."""
        ends = (one[-1] for one in self._longer if one[:-1] == self._tail[-(len(one) - 1) :])
        return [*self._always, *ends]


class TokenRules:
    """What one output keeps to. Implements `batch_plan.TokenMask`.

    `grammar`, `banned`: one of them, or both.
    """

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
        """Whether the grammar lets nothing follow."""
        return self.grammar is not None and self.grammar.has_ended
