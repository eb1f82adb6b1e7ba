"""Routed experts, as frameworks read them from an answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def extract_routed_experts_from_meta_info(data: Mapping[str, Any]) -> NDArray[np.int32]:
    """The numbers of an answer's `meta_info`, flat: callers know the layers and the experts per token."""
    return np.frombuffer(base64.b64decode(data["meta_info"]["routed_experts"]), dtype=np.int32)
