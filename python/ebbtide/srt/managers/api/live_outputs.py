"""The outputs that are on their way: whose each one is, by its rid."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.ended_outputs import NOBODY, Caller, EndedOutputs
from ebbtide.srt.managers.api.live_generation import LiveGeneration, OutputState
from ebbtide.srt.managers.io_struct import RequestOutput, StreamedTokens
from ebbtide.srt.managers.wire.token_columns import LogprobRows


@dataclass(slots=True)
class _Entry:
    """One output.

    Attributes:
        group: the rid that was posted for it and others.
        client: who asked for it.
        output: what has arrived of it; None before it is about to be sent.
        generation: whose it is; None before that too, and once its reader has gone, when only its last output
            is awaited.
        is_sent: whether the scheduler knows it.
        abort_message: set of an output that is to be aborted as soon as it has been sent.
    """

    index: int
    group: str | None
    client: Caller
    output: OutputState | None = None
    generation: LiveGeneration | None = None
    is_sent: bool = False
    abort_message: str | None = None


class LiveOutputs:
    """The outputs that have not ended yet, from when their request comes in.

    A rid stays taken until its last output arrives, read or not: so what is still on its way for a request
    that was abandoned never reaches a new one of the same name.

    Attributes:
        none_left: set while there are none.
        ended: those that have, for a while.
    """

    def __init__(self) -> None:
        self.ended = EndedOutputs(lambda rid: rid in self._entries or rid in self._groups)
        self.none_left = asyncio.Event()
        self.none_left.set()
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def claim(
        self, rids: Sequence[str], groups: Mapping[str, Iterable[str]], client: Caller = NOBODY
    ) -> None:
        """Take the rids of a request that has come in.

        `groups`: a rid that was posted for several outputs → theirs. Raises RequestRejected: 400, one of them
        is taken.
        """
        claimed = [*rids, *groups]
        for rid in claimed:
            if rid in self._entries or rid in self._groups:
                raise RequestRejected(f"rid: {rid!r} belongs to a request that is still running")
        if len(set(claimed)) < len(claimed):
            raise RequestRejected("rid: the ids of the outputs are not distinct")
        group_of = {rid: group for group, members in groups.items() for rid in members}
        for index, rid in enumerate(rids):
            self._entries[rid] = _Entry(index, group_of.get(rid), client)
        for group, members in groups.items():
            self._groups[group] = set(members)
        self.none_left.clear()

    def release(self, rids: Iterable[str]) -> None:
        """Give back what was claimed for outputs that will not be sent."""
        for rid in rids:
            if (entry := self._entries.get(rid)) is not None:
                self._remove(rid, entry)

    def attach(self, generation: LiveGeneration) -> None:
        """Have this request wait for its outputs, which are about to be sent."""
        for output in generation.outputs:
            entry = self._entries[output.request.rid]
            entry.output, entry.generation = output, generation

    def note_sent(self, rid: str) -> str | None:
        """The scheduler knows an output from now on. Returns why it is to be aborted, if it is."""
        entry = self._entries[rid]
        entry.is_sent = True
        return entry.abort_message

    @property
    def unsent(self) -> list[str]:
        """The rids of outputs that the scheduler does not know yet."""
        return [rid for rid, entry in self._entries.items() if not entry.is_sent]

    def abort(self, rids: Iterable[str], message: str) -> list[str]:
        """End these outputs. Returns those of them that the scheduler has to be asked for now."""
        sent: list[str] = []
        for rid in rids:
            entry = self._entries.get(rid)
            if entry is not None and not entry.is_sent:
                entry.abort_message = message
            elif entry is not None:
                sent.append(rid)
        return sent

    def deliver(self, output: RequestOutput, text: str | None, weight_version: str) -> OutputState | None:
        """Hand an output to whoever waits for it. Returns it if it has ended."""
        entry = self._entries.get(output.rid)
        if entry is None:
            return None
        if output.finish is not None:
            self._remove(output.rid, entry)
        state = entry.output
        if state is None:
            return None
        state.apply(output, text, weight_version)
        if output.finish is not None and output.finish.status_code is None:
            self.ended.keep(state.request, state.all_ids, entry.client, state.adapter)
        if entry.generation is None:
            return None
        entry.generation.note(entry.index)
        return state if output.finish is not None else None

    def deliver_tokens(
        self, streamed: StreamedTokens, texts: Sequence[str] | None, weight_version: str
    ) -> None:
        """Hand one more token of each stream to whoever reads it."""
        rows = None if streamed.logprobs is None else LogprobRows(streamed.logprobs)
        # This runs for each token of each stream.
        entries, token_ids = self._entries, streamed.token_ids
        for place, rid in enumerate(streamed.rids):
            entry = entries.get(rid)
            if entry is None or (state := entry.output) is None:
                continue
            text = None if texts is None else texts[place]
            state.apply_token(token_ids[place], rows, place, text, weight_version)
            if entry.generation is not None:
                entry.generation.note_token(entry.index)

    def rids_of(self, generation: LiveGeneration) -> list[str]:
        """Outputs of a request that are still to come."""
        rids = (output.request.rid for output in generation.outputs)
        return [rid for rid in rids if (entry := self._entries.get(rid)) and entry.generation is generation]

    def abandon(self, generation: LiveGeneration) -> list[str]:
        """Nobody reads this request any more. Returns what is still to come of it."""
        rids = self.rids_of(generation)
        for rid in rids:
            self._entries[rid].generation = None
        return rids

    def expand(self, rid: str) -> list[str]:
        """The outputs that a posted rid stands for: the one of that id, or every one of its batch."""
        return sorted(self._groups.get(rid, (rid,)))

    def clear(self) -> list[LiveGeneration]:
        """Forget everything. Returns the requests that were still read."""
        generations = {id(entry.generation): entry.generation for entry in self._entries.values()}
        self._entries.clear()
        self._groups.clear()
        self.none_left.set()
        return [generation for generation in generations.values() if generation is not None]

    def _remove(self, rid: str, entry: _Entry) -> None:
        del self._entries[rid]
        if entry.group is not None:
            members = self._groups[entry.group]
            members.discard(rid)
            if not members:
                del self._groups[entry.group]
        if not self._entries:
            self.none_left.set()
