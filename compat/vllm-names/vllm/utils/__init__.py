"""Helpers that trainers import."""

from __future__ import annotations

from uuid import uuid4

from vllm.utils.network_utils import get_ip as get_ip, get_open_port as get_open_port


def random_uuid() -> str:
    """Return 32 hexadecimal digits."""
    return uuid4().hex
