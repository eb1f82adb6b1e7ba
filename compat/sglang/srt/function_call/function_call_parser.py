"""A name only: Ebbtide renders tools into the prompt, and leaves the output as it is."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class FunctionCallParser:
    """Knows no parser, and cannot be built."""

    ToolCallParserEnum: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("sglang.srt.function_call.function_call_parser is not in Ebbtide")
