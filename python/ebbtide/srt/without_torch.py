"""Processes that read configurations and text compute nothing, and need no torch.

transformers imports it wherever it finds it: that is most of the start of such a process, and of its memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextmanager
def torch_hidden(trust_remote_code: bool) -> Iterator[None]:
    """Within, torch counts as not installed; transformers, if it is imported here, does without for good.

    To be used in processes of the engine's own. Nothing is hidden where either is imported already, nor from
    code that comes with a model.
    """
    if trust_remote_code or not sys.modules.keys().isdisjoint({"torch", "transformers"}):
        yield
        return
    advice = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
        del os.environ[_ADVICE]
        if advice is not None:
            os.environ[_ADVICE] = advice
