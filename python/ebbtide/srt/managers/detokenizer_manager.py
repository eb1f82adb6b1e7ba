"""The detokenizer process: token ids from the scheduler, text on to the API process."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from msgspec import structs

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.managers.io_struct import (
    DetokenizerInput,
    ManagerInput,
    RequestOutput,
    RequestStart,
    TokenOutput,
)
from ebbtide.srt.managers.text.tokenizer import IncrementalDetokenizer, StopTrimmer, Tokenizer, load_tokenizer
from ebbtide.srt.managers.wire.channel import ChannelAddresses, Receiver, Sender
from ebbtide.srt.this_process import freeze_heap, torch_hidden

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig


class OutputText:
    """The text of one request, built up output by output."""

    def __init__(self, tokenizer: Tokenizer, start: RequestStart) -> None:
        self._keep_stop = start.no_stop_trim
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            start.prompt_tail,
            start.skip_special_tokens,
            start.spaces_between_special_tokens,
        )
        # The text of these ids was sent already, except for an incomplete character at the end.
        self._detokenizer.push(start.continued_tail)
        self._trimmer = StopTrimmer(start.stop_strings, keep_match=start.no_stop_trim)

    def push(self, output: RequestOutput) -> str:
        """The text that an output adds, without its stop token or stop string unless it is to keep it."""
        finish = output.finish
        ends_in_stop_token = finish is not None and finish.kind == "stop" and isinstance(finish.matched, int)
        cut = ends_in_stop_token and not self._keep_stop
        text = self._detokenizer.push(output.token_ids[:-1] if cut else output.token_ids)
        if finish is None:
            return self._trimmer.push(text)
        return self._trimmer.push(text + self._detokenizer.finish()) + self._trimmer.finish()

    def push_token(self, token_id: int) -> str:
        """The text that one more token adds to a request that goes on."""
        return self._trimmer.push(self._detokenizer.push((token_id,)))


class DetokenizerManager:
    """Keeps one `OutputText` per request, from its first output to its last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, OutputText] = {}

    def handle(self, message: TokenOutput) -> TokenOutput:
        return structs.replace(
            message,
            texts=[self._text(output) for output in message.outputs],
            streamed_texts=tuple(
                list(map(self._piece, each.rids, each.token_ids)) for each in message.streamed
            ),
        )

    def _piece(self, rid: str, token_id: int) -> str:
        state = self._texts.get(rid)
        return "" if state is None else state.push_token(token_id)

    def _text(self, output: RequestOutput) -> str:
        if output.start is not None:
            self._texts[output.rid] = OutputText(self._tokenizer, output.start)
        state = self._texts.get(output.rid)
        if state is None:
            return ""
        if output.finish is not None:
            del self._texts[output.rid]
        return state.push(output)


def run_detokenizer_process(config: EngineConfig, addresses: ChannelAddresses, ready: Connection) -> None:
    """Run until the process ends. `ready` gets a dict with `status`: whether the start succeeded."""
    try:
        with torch_hidden(config.model.trust_remote_code):
            tokenizer = load_tokenizer(config.model)
    except ConfigurationError as error:
        ready.send({"status": "failed", "message": str(error)})
        return
    manager = DetokenizerManager(tokenizer)
    receiver: Receiver[DetokenizerInput] = Receiver(addresses.detokenizer, DetokenizerInput)
    sender: Sender[ManagerInput] = Sender(addresses.manager)
    freeze_heap()
    ready.send({"status": "ready"})
    while True:
        for message in receiver.receive():
            sender.send(manager.handle(message))
