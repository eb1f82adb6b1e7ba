"""Loads tokenizers by transformers."""

from __future__ import annotations

from typing import Any


def get_tokenizer(
    tokenizer_name: str,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    tokenizer_revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Load the tokenizer of a folder or hub id. `tokenizer_mode` "slow": the one in Python."""
    from transformers import AutoTokenizer  # Here, since importing it takes seconds.

    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    return AutoTokenizer.from_pretrained(
        tokenizer_name, *args, trust_remote_code=trust_remote_code, revision=tokenizer_revision, **kwargs
    )
