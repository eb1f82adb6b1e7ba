"""By which address other hosts reach this one, and ports."""

from __future__ import annotations

import os
import socket


def get_ip() -> str:
    """Return `VLLM_HOST_IP`, or else the address of the interface that leads outside, or loopback."""
    configured = os.environ.get("VLLM_HOST_IP")
    if configured:
        return configured
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Nothing is sent: the system only says from which address it would be.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 80))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def get_open_port() -> int:
    """Return `VLLM_PORT`, or else a port that was free just now."""
    configured = os.environ.get("VLLM_PORT")
    if configured:
        return int(configured)
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
