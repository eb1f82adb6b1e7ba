"""Reasoning, as frameworks find it in what the model has said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ebbtide.srt.managers.text.reasoning import REASONING_FORMATS, ReasoningSplitter, split_reasoning


@dataclass(frozen=True)
class Detector:
    """The marks of a family of models."""

    think_start_token: str
    think_end_token: str


class ReasoningParser:
    """Tells reasoning from answer in one text: whole, or as it grows.

    Args:
        stream_reasoning: ignored: reasoning is told as it comes.
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
        self._stream = ReasoningSplitter(self._name, is_open=force_reasoning)
        form = self._stream.format
        self.detector = Detector(form.begin, form.end)

    def parse_non_stream(self, full_text: str) -> tuple[str, str]:
        """The reasoning of a text, and the answer."""
        return split_reasoning(full_text, self._name, is_open=self._is_open)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, str]:
        """What a chunk adds to either."""
        return self._stream.push(chunk_text)
