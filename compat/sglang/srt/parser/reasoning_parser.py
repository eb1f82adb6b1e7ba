"""SGLang's parser that separates a model's reasoning from its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ebbtide.srt.managers.text.answer_scanner import REASONING_FORMATS, AnswerScanner


@dataclass(frozen=True)
class Detector:
    """The markers of reasoning of a family of models."""

    think_start_token: str
    think_end_token: str


class ReasoningParser:
    """Separates reasoning from the answer, in a whole text or in a stream.

    Args:
        model_type: a key of `DetectorMap`.
        stream_reasoning: ignored; reasoning is always streamed.
        force_reasoning: whether texts begin within reasoning; None: as usual for the family of models.

    Raises:
        ValueError: `model_type` is unknown. The message lists the known ones.
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
        """The reasoning and the answer of a whole text."""
        parts = self._scanner().push(full_text, is_last=True)
        return parts.reasoning, parts.text

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, str]:
        """What a chunk of the stream adds to the reasoning and to the answer."""
        parts = self._stream.push(chunk_text)
        return parts.reasoning, parts.text

    def finish(self) -> tuple[str, str]:
        """What the end of the stream adds: text that was held back since a marker could begin there."""
        parts = self._stream.push("", is_last=True)
        return parts.reasoning, parts.text

    def _scanner(self) -> AnswerScanner:
        return AnswerScanner(reasoning=self._name, is_open=self._is_open)
