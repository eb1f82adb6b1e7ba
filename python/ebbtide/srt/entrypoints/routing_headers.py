"""What headers say of a request where its body does not: clients of vLLM use them. wire_vllm section 1.6."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ebbtide.srt.errors import RequestRejected

# Header → the field that it stands for.
_NUMBERS: Final = {"X-data-parallel-rank": "routed_dp_rank", "X-Request-Priority": "priority"}


def with_headers(fields: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """A request's fields, and what its headers say. Of numbers the body's win, of ids the header's does.

    Args:
        headers: by their names in lower case, or in any.

    Raises:
        RequestRejected: 400, a header that is no number.
    """
    merged = dict(fields)
    for header, name in _NUMBERS.items():
        given = headers.get(header.lower())
        if given is None or merged.get(name) is not None:
            continue
        if re.fullmatch(r"-?\d{1,19}", given) is None:
            raise RequestRejected(f"{header}: expected a number, got {given[:100]!r}")
        merged[name] = int(given)
    request_id = headers.get("x-request-id")
    return merged if not request_id else {**merged, "request_id": request_id}
