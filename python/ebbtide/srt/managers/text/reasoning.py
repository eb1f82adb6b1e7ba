"""What a model thinks aloud, apart from what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ebbtide.srt.managers.text.tool_calls import num_open


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        is_open: the chat template has written the beginning: a text begins in the middle of reasoning.
    """

    begin: str
    end: str
    is_open: bool = False


_THINK: Final = ReasoningFormat("<think>", "</think>")
_OPEN_THINK: Final = ReasoningFormat("<think>", "</think>", is_open=True)

# The formats by the names that SGLang has for them.
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek-r1": _OPEN_THINK,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": _OPEN_THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _OPEN_THINK,
}


class ReasoningSplitter:
    """Takes the reasoning out of one text, piece by piece. It stands at the text's beginning.

    Raises ValueError for a format that is not known.
    """

    def __init__(self, name: str, *, is_open: bool | None = None) -> None:
        if name not in REASONING_FORMATS:
            raise ValueError(
                f"reasoning_parser: expected one of {', '.join(REASONING_FORMATS)}, got {name!r}"
            )
        self.format = REASONING_FORMATS[name]
        self._held = ""
        self._is_start = True
        self._is_behind = False  # Reasoning has ended, and nothing but line ends has come since.
        self._is_inside = self.format.is_open if is_open is None else is_open

    def push(self, text: str) -> tuple[str, str]:
        """What is new of the reasoning, and of the answer."""
        self._held += text
        if self._is_start and not self._find_begin():
            return "", ""
        if not self._is_inside:
            return "", self._answer()
        reasoning, end, answer = self._held.partition(self.format.end)
        if end:
            self._is_inside, self._is_behind, self._held = False, True, answer
            return reasoning, self._answer()
        num_held = num_open(reasoning, self.format.end)
        self._held = reasoning[len(reasoning) - num_held :]
        return reasoning[: len(reasoning) - num_held], ""

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._is_inside else ("", held)

    def _answer(self) -> str:
        answer, self._held = self._held, ""
        if self._is_behind:
            answer = answer.lstrip("\n")
            self._is_behind = not answer
        return answer

    def _find_begin(self) -> bool:
        """Whether it is known by now if the text begins with reasoning."""
        begin, start = self.format.begin, self._held.lstrip()
        if start.startswith(begin):
            self._held, self._is_inside = start.removeprefix(begin).lstrip("\n"), True
        elif begin.startswith(start):
            return False
        self._is_start = False
        return True


def split_reasoning(text: str, name: str, *, is_open: bool | None = None) -> tuple[str, str]:
    """The reasoning of a whole text, and the answer."""
    splitter = ReasoningSplitter(name, is_open=is_open)
    first, last = splitter.push(text), splitter.finish()
    return first[0] + last[0], first[1] + last[1]
