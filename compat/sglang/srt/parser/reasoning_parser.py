"""Reasoning, as frameworks find it in what the model has said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ebbtide.srt.managers.text.answer_scanner import REASONING_FORMATS, AnswerScanner


@dataclass(frozen=True)
class Detector:
    """The marks of a family of models."""

    think_start_token: str
    think_end_token: str


class ReasoningParser:
    """Separates reasoning from answer in one text: whole, or as it grows.

    Args:
        stream_reasoning: ignored: reasoning comes as it is written.
        force_reasoning: whether a text begins in the middle of reasoning; None: as its family's do.

    Raises ValueError for a name that is not known, with those that there are.
    """

    DetectorMap: ClassVar[dict[str, Any]] = dict(REASONING_FORMATS)

    def __init__(
        self,
        model_type: str | None = None,
        stream_reasoning: bool = True,
        force_reasoning: bool | None = None,
        **ignored: Any,
    ) -> None:
        self._name = str(model_type).lower()
        self._is_open = force_reasoning
        self._stream = self._scanner()
        form = REASONING_FORMATS[self._name]
        self.detector = Detector(form.begin, form.end)

    def parse_non_stream(self, full_text: str) -> tuple[str, str]:
        """The reasoning of a text, and the answer."""
        parts = self._scanner().push(full_text, is_last=True)
        return parts.reasoning, parts.text

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, str]:
        """What a chunk adds to either."""
        parts = self._stream.push(chunk_text)
        return parts.reasoning, parts.text

    def finish(self) -> tuple[str, str]:
        """What the end of the text adds to either: what could have become a marker."""
        parts = self._stream.push("", is_last=True)
        return parts.reasoning, parts.text

    def _scanner(self) -> AnswerScanner:
        return AnswerScanner(reasoning=self._name, is_open=self._is_open)
