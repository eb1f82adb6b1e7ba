"""Requests in the API process: checks, tokenizes, sends and answers them; aborts those that are abandoned."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from ebbtide.srt.errors import EngineDown, RequestRejected
from ebbtide.srt.managers.api.array_forms import RoutedForm, flat_form
from ebbtide.srt.managers.api.control_client import ControlClient
from ebbtide.srt.managers.api.data_parallel_controller import OrderedInbox
from ebbtide.srt.managers.api.ended_outputs import NOBODY, Caller
from ebbtide.srt.managers.api.generate_fields import GenerateReqInput
from ebbtide.srt.managers.api.generate_request import (
    GenerationDraft,
    Prompt,
    Render,
    RequestNormalizer,
)
from ebbtide.srt.managers.api.grammar_compiling import CompilerStart, GrammarCompiling
from ebbtide.srt.managers.api.live_generation import LiveGeneration, LiveOutputs, StreamWaker
from ebbtide.srt.managers.api.log import PauseWatch, RequestLog
from ebbtide.srt.managers.api.output_state import OutputState, ResponseStyle
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.io_struct import (
    ControlReply,
    LoadGrammar,
    ManagerInput,
    PauseMode,
    RequestOutput,
    SchedulerInput,
    StateReport,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from ebbtide.srt.managers.text.grammar import READ_BYTES_PER_S, RecentGrammars
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.wire.channel import AsyncReceiveEnd, SendEnd
from ebbtide.srt.managers.wire.merging import merge_reports

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Threads that tokenize. A long batch is cut into pieces, so that short prompts get a thread in between.
NUM_TOKENIZING_THREADS: Final = 4
# Characters of a batch that are tokenized in one go; what a prompt that is no text counts as.
PIECE_CHARACTERS: Final = 1 << 16
PROMPT_CHARACTERS: Final = 1 << 11
# Tokens of a batch that are checked or sent before the event loop gets its turn. Each prompt and each message
# counts as `OVERHEAD_TOKENS` more than it has.
PIECE_TOKENS: Final = 1 << 16
OVERHEAD_TOKENS: Final = 1 << 8

# Chooses the replica of each output of a request.
ChooseReplicas: TypeAlias = Callable[[Sequence[TokenizedGenerateReqInput]], list[TokenizedGenerateReqInput]]


@dataclass(eq=False)
class TokenizerManager:
    """Runs the requests of HTTP and `Engine`. Build, `start` and `close` it in one event loop.

    Args:
        scheduler, received: the ends of the channels to and from the engine; `close` closes them.
        limits: what one request may hold; known once the scheduler has sized its pool.
        tokenizer: None with `skip_tokenizer_init`.
        place: chooses the replica of each output; None: there is one replica.

    Attributes:
        reports: what each replica last reported of its state machines, by dp_rank.
        ended: the outputs that may be continued.
        control: sends control requests.
        on_taken: called for each request, with its outputs per prompt and its largest max_new_tokens.
    """

    _config: EngineConfig
    _scheduler: SendEnd[SchedulerInput]
    _received: AsyncReceiveEnd[ManagerInput]
    limits: RequestLimits
    tokenizer: Tokenizer | None
    _place: ChooseReplicas | None = None

    def __post_init__(self) -> None:
        args = self._config.server_args
        self.reports: dict[int, StateReport] = {}
        self._state: StateReport | None = None
        self._has_reported = asyncio.Event()
        self._inbox = OrderedInbox(self._received)
        self._live = LiveOutputs()
        self.ended = self._live.ended
        self.on_taken: Callable[[int, int], None] = lambda num_samples, max_new_tokens: None
        rng = random.Random(self._config.runtime.random_seed)
        self._normalizer = RequestNormalizer(self.limits, self.tokenizer, rng, self.ended)
        self._request_log = RequestLog(args.log_requests_level) if args.log_requests else None
        self.control = ControlClient(self._scheduler, self._live)
        self._waker = StreamWaker()
        # The tokenizers library releases the GIL while it works.
        self._threads = ThreadPoolExecutor(NUM_TOKENIZING_THREADS, thread_name_prefix="tokenize")
        self._compiling = GrammarCompiling(CompilerStart.of(self._config))
        self._grammars_of_ranks = RecentGrammars()
        self._reader: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._refusal: str | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._token_texts: dict[int, str] = {}
        self.pause = PauseWatch(
            args.pause_warning_s,
            lambda: self.state,
            lambda: self.num_live,
            asyncio.get_running_loop().call_later,
        )

    def start(self) -> None:
        """Begin to read what the engine sends. Needs a running event loop."""
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Close the channels; everything that waits raises `EngineDown`. Idempotent."""
        self.fail("the engine has been shut down")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compiling.close()
        self._scheduler.close()
        self._inbox.close()

    def fail(self, message: str) -> None:
        """The engine is gone: fail all requests and control calls, later ones too, with this message."""
        if self._failure is not None:
            return
        self._failure = message
        self._failed.set_result(None)
        self.pause.cancel()
        self._has_reported.set()
        self.control.fail(message)
        for generation in self._live.clear():
            generation.fail(EngineDown(message))

    # ------------------------------------------------------------------------------------------ generation

    async def prepare(
        self,
        given: GenerateReqInput | Mapping[str, Any],
        render: Render | Sequence[Render] | None = None,
        *,
        is_incremental: bool | None = None,
        routed_form: RoutedForm = "int32",
        client: Caller = NOBODY,
    ) -> LiveGeneration:
        """Check a request and start it. Read the returned `LiveGeneration` to its end, or `close()` it.

        Texts are tokenized in a thread, and the event loop runs between the pieces of a long batch. If this
        is cancelled, the request does not run: outputs that were already sent are aborted.

        Args:
            render: makes the prompts; see `RequestNormalizer.draft`.
            routed_form: how routed experts are encoded.
            is_incremental: whether the chunks of a stream hold only what is new; None: the server's default.
            client: who asks. Grammars of different hosts are compiled in turns, and an output can be
                continued only with the key that it was made with.

        Raises:
            RequestRejected: nothing runs. 400: the request is malformed. 503: the engine drains, or refuses
                requests while it is paused.
            EngineDown: the engine is gone.
        """
        self._check_alive()
        if self._refusal is not None:
            raise RequestRejected(self._refusal, 503)
        paused = None if self.state is None else self.state.paused
        args = self._config.server_args
        if args.paused_requests == "reject" and paused in (PauseMode.ABORT, PauseMode.WAIT):
            raise RequestRejected("Generation is paused. Please retry after it resumes.", 503)
        is_incremental = args.incremental_streaming_output if is_incremental is None else is_incremental
        fields = msgspec.structs.asdict(given) if isinstance(given, GenerateReqInput) else given
        self.limits.check_given("input_ids", fields.get("input_ids"), fields.get("truncate_prompt_tokens"))
        held = {**fields, "render": render}
        draft = await self.worked_on(held, lambda: self._normalizer.draft(fields, render, client))
        if draft.request.return_sampling_mask and draft.request.stream and not is_incremental:
            # Each chunk would repeat all masks so far.
            raise RequestRejected("return_sampling_mask: not in a stream whose chunks repeat those before")
        self._live.claim(draft.all_rids, draft.groups, client)
        try:
            grammars = await self._grammars(draft, client.host)
            prompts = await self._tokenize(draft)
            outputs = await self.worked_on(held, lambda: self._normalizer.plan(draft, prompts))
            if self._place is not None:
                outputs = self._place(outputs)
            style = self._style(draft, is_incremental, routed_form)
            generation = await self.worked_on(held, lambda: self._generation(draft, outputs, style))
        except BaseException:
            self._live.release(draft.all_rids)
            raise
        self._live.attach(generation)
        self.on_taken(draft.params[0].n, max(output.max_new_tokens for output in outputs))
        if draft.request.timeout_s is not None:
            generation.timer = self._abort_after(draft.request.timeout_s, generation, draft.arrival_s)
        if self._request_log is not None:
            self._request_log.came(outputs)
        await self._send(generation, grammars)
        self.pause.note()
        return generation

    @property
    def num_live(self) -> int:
        """Outputs that have not ended yet."""
        return len(self._live)

    async def drain(self, message: str) -> None:
        """Refuse new requests with this message from now on, and return once the others have ended."""
        self._refusal = message
        await self._live.none_left.wait()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work that would block the event loop in one of the tokenizing threads.

        Raises EngineDown: the engine is gone. The result of the work is dropped.
        """
        self._check_alive()
        return await self._unless_down(asyncio.get_running_loop().run_in_executor(self._threads, work))

    async def worked_on(self, fields: Mapping[str, Any], work: Callable[[], T]) -> T:
        """Do work on a request's fields, in a thread if the fields are large.

        Raises EngineDown: the engine is gone.
        """
        return await self.in_thread(work) if _cost_of_fields(fields) > PIECE_TOKENS else work()

    async def _unless_down(self, running: asyncio.Future[T]) -> T:
        try:
            await asyncio.wait((running, self._failed), return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            return running.result()
        finally:
            # In a thread, only work that has not started can be cancelled.
            running.cancel()

    async def _tokenize(self, draft: GenerationDraft) -> list[list[int]]:
        prompts: list[list[int]] = []
        if not all(isinstance(prompt, list) for prompt in draft.prompts):
            for piece in _pieces(draft.prompts, _num_characters, PIECE_CHARACTERS):
                prompts += await self.in_thread(partial(self._normalizer.tokenize, draft, piece))
            return prompts
        # Token ids are checked in Python: a thread would hold the GIL all the time.
        for piece in _pieces(draft.prompts, _cost_of_ids, PIECE_TOKENS):
            if prompts:
                await self._next_turn()
            prompts += self._normalizer.tokenize(draft, piece)
        return prompts

    async def _grammars(self, draft: GenerationDraft, client: str) -> dict[str, bytes]:
        """The compiled grammars of a request's outputs, by key.

        Raises RequestRejected: 400, a grammar does not compile, or takes too long.
        """
        specs = {params.grammar for params in draft.params if params.grammar is not None}
        continued_ids = () if draft.continued is None else draft.continued.output_ids
        compiled: dict[str, bytes] = {}
        for spec in specs:
            compiling = self._compiling.compiled(spec, continued_ids, client)
            compiled[spec.key] = await self._unless_down(asyncio.ensure_future(compiling))
        return compiled

    async def _load_grammar(self, key: str, compiled: bytes) -> None:
        """Send the ranks a grammar that they do not have, and wait as long as they take to read it."""
        while self._grammars_of_ranks.get(key) is None:
            dropped = self._grammars_of_ranks.add(key, compiled)
            self._scheduler.send(LoadGrammar(key=key, compiled=compiled, dropped=tuple(dropped)))
            # A request that came right behind it would block the ranks' loops until the grammar is read.
            await self._next_turn(len(compiled) / READ_BYTES_PER_S)

    async def _send(self, generation: LiveGeneration, grammars: Mapping[str, bytes]) -> None:
        """Send the outputs of a request, in their order."""
        outputs = [output.request for output in generation.outputs]
        num_sent = 0
        try:
            for piece in _pieces(outputs, lambda one: OVERHEAD_TOKENS + len(one.input_ids), PIECE_TOKENS):
                if num_sent:
                    await self._next_turn()
                for output in piece:
                    if output.grammar is not None:
                        await self._load_grammar(output.grammar, grammars[output.grammar])
                    self._scheduler.send(output)
                    num_sent += 1
                    abort_message = self._live.note_sent(output.rid)
                    if abort_message is not None:
                        self.control.abort([output.rid], abort_message)
        except BaseException:
            self._live.release(output.rid for output in outputs[num_sent:])
            generation.close()
            raise

    async def _next_turn(self, wait_s: float = 0.0) -> None:
        """Let the event loop run for `wait_s` seconds. Raises EngineDown: the engine has gone meanwhile."""
        await asyncio.sleep(wait_s)
        self._check_alive()

    def _style(self, draft: GenerationDraft, is_incremental: bool, routed_form: RoutedForm) -> ResponseStyle:
        request = draft.request
        return ResponseStyle(
            is_incremental=bool(request.stream) and is_incremental,
            return_prompt_token_ids=bool(request.return_prompt_token_ids),
            token_text=self._token_text if request.return_text_in_logprobs else None,
            flat_top=flat_form(
                request.return_flat_raw_output_top_logprobs, request.return_flat_raw_top_logprobs_b64
            ),
            routed_form=routed_form,
            precision=self._config.precision,
            ignored_fields=draft.ignored_fields,
        )

    def _generation(
        self, draft: GenerationDraft, outputs: Sequence[TokenizedGenerateReqInput], style: ResponseStyle
    ) -> LiveGeneration:
        return LiveGeneration(
            [OutputState(output, style) for output in outputs],
            is_list=draft.is_list,
            is_stream=bool(draft.request.stream),
            abandon=self._abandon,
            waker=self._waker,
        )

    def _abandon(self, generation: LiveGeneration) -> None:
        rids = self._live.abandon(generation)
        self.control.abort(rids, "Aborted: the client disconnected")
        if self._request_log is not None:
            for rid in rids:
                self._request_log.left(rid)

    def _abort_after(
        self, timeout_s: float, generation: LiveGeneration, arrival_s: float
    ) -> asyncio.TimerHandle:
        message = f"Aborted: timeout_s of {timeout_s:g} s has passed"
        delay_s = arrival_s + timeout_s - time.monotonic()
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, lambda: self.control.abort(self._live.rids_of(generation), message))

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            assert self.tokenizer is not None  # or the request would have been refused
            text = self._token_texts[token_id] = self.tokenizer.decode([token_id])
        return text

    # --------------------------------------------------------------------------------- control and messages

    @property
    def state(self) -> StateReport | None:
        """The engine's state machines as last reported; None until every replica has spoken."""
        if self._state is None and len(self.reports) == self.limits.num_replicas:
            self._state = merge_reports([self.reports[rank] for rank in range(len(self.reports))])
        return self._state

    async def next_report(self) -> None:
        """Return when a replica has reported its state. Raises EngineDown: none will."""
        self._check_alive()
        self._has_reported.clear()
        await self._has_reported.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDown(self._failure)

    async def _read(self) -> None:
        try:
            while True:
                for message in await self._inbox.receive_async():
                    self._handle(message)
                # Messages may come without a pause: let the readers of outputs run too.
                await asyncio.sleep(0)
        except Exception as error:
            logger.exception("reading the engine's messages failed")
            self.fail(f"reading the engine's messages failed: {error}")

    def _handle(self, message: ManagerInput) -> None:
        match message:
            case TokenOutput():
                all_texts: Sequence[str | None] = message.texts or [None] * len(message.outputs)
                with self._waker.lock:
                    for output, text in zip(message.outputs, all_texts, strict=True):
                        self._deliver(output, text, message.weight_version)
                    for place, streamed in enumerate(message.streamed):
                        texts = message.streamed_texts[place] if message.streamed_texts else None
                        self._live.deliver_tokens(streamed, texts, message.weight_version)
            case ControlReply():
                self.control.resolve(message)
            case StateReport():
                self.reports[message.dp_rank] = message
                self._state = None  # put together when it is asked for
                self._has_reported.set()
                self.pause.note()

    def _deliver(self, output: RequestOutput, text: str | None, weight_version: str) -> None:
        ended = self._live.deliver(output, text, weight_version)
        if ended is not None and self._request_log is not None:
            self._request_log.ended(ended)


def _pieces(items: Sequence[T], cost: Callable[[T], int], piece_cost: int) -> Iterator[Sequence[T]]:
    """The items in order, in pieces. A piece ends with the item that brings its cost to `piece_cost`."""
    start = total = 0
    for end, item in enumerate(items, 1):
        total += cost(item)
        if total >= piece_cost or end == len(items):
            yield items[start:end]
            start, total = end, 0


def _cost_of_fields(fields: Mapping[str, Any]) -> int:
    """The cost of reading a request, in tokens: of its outputs, and of its lists and mappings."""
    params = fields.get("sampling_params")
    params = params if isinstance(params, dict) else {}
    num_samples = params.get("n") or fields.get("n")
    cost = OVERHEAD_TOKENS * num_samples if isinstance(num_samples, int) else 0
    words = params.get("bad_words") or fields.get("bad_words")
    if isinstance(words, list):
        cost += OVERHEAD_TOKENS * sum(len(word) for word in words if isinstance(word, str))
    for value in (*fields.values(), *params.values()):
        if isinstance(value, list | dict):
            has_numbers = isinstance(value, list) and value and isinstance(value[0], int)
            cost += len(value) * (1 if has_numbers else OVERHEAD_TOKENS)
    return cost


def _num_characters(prompt: Prompt) -> int:
    # A prompt that is yet to be rendered, or ids: about as cheap as a short text.
    return len(prompt) if isinstance(prompt, str) else PROMPT_CHARACTERS


def _cost_of_ids(prompt: Prompt) -> int:
    return OVERHEAD_TOKENS + (len(prompt) if isinstance(prompt, list) else 0)
