"""A function that only raises, and the reader of routed experts."""

from __future__ import annotations

from typing import Any, NoReturn


def initialize_moe_config(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("sglang.srt.layers.moe.initialize_moe_config is not in Ebbtide")
