"""Reads routed experts from an answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def extract_routed_experts_from_meta_info(data: Mapping[str, Any]) -> NDArray[np.int32]:
    """The routed experts in an answer's `meta_info`, int32, 1-D: callers know the other dimensions."""
    return np.frombuffer(base64.b64decode(data["meta_info"]["routed_experts"]), dtype=np.int32)
