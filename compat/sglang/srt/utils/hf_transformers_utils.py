"""Tokenizers as transformers makes them."""

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
    """The tokenizer of a folder or a hub id; `tokenizer_mode` "slow" asks for the one in Python."""
    from transformers import AutoTokenizer  # seconds of imports: only for those who ask

    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    return AutoTokenizer.from_pretrained(
        tokenizer_name, *args, trust_remote_code=trust_remote_code, revision=tokenizer_revision, **kwargs
    )
