"""The most likely tokens as two arrays, which readers take as they are. Source: SGLang's `/generate`.

Shapes: T output tokens, K listed for each.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

# "numbers": lists of them; "base64": their bytes.
FlatForm: TypeAlias = Literal["numbers", "base64"]


class _Request(Protocol):
    return_flat_raw_output_top_logprobs: bool | None
    return_flat_raw_top_logprobs_b64: bool | None


def flat_form(request: _Request) -> FlatForm | None:
    """The form that a request asks for; None: the usual lists of triples."""
    if not request.return_flat_raw_output_top_logprobs:
        return None
    return "base64" if request.return_flat_raw_top_logprobs_b64 else "numbers"


def flat_top_logprobs(positions_TK: Sequence[Sequence[Any]], form: FlatForm) -> dict[str, Any]:
    """What stands in the place of `output_top_logprobs`, row by row; every token has its row."""
    shape = [len(positions_TK), len(positions_TK[0]) if positions_TK else 0]
    fields: dict[str, Any] = {"output_top_logprobs_shape": shape, "output_top_logprobs_null_prefix": 0}
    for name, place, dtype in (("val", 0, np.float32), ("idx", 1, np.int32)):
        values = np.array([entry[place] for position in positions_TK for entry in position], dtype=dtype)
        key = f"output_top_logprobs_{name}_flat"
        if form == "base64":
            fields[f"{key}_b64"] = base64.b64encode(values.data).decode("ascii")
            fields[f"{key}_b64_dtype"] = values.dtype.name
        else:
            fields[key] = values.tolist()
    return fields
