"""This host's address, and free ports."""

from __future__ import annotations

import os
import socket


def get_ip() -> str:
    """Return `VLLM_HOST_IP` if set, else the local address of the default route, else 127.0.0.1."""
    configured = os.environ.get("VLLM_HOST_IP")
    if configured:
        return configured
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Nothing is sent: connecting a datagram socket only chooses the local address of the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 80))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def get_open_port() -> int:
    """Return `VLLM_PORT` if set, else a port that is free now."""
    configured = os.environ.get("VLLM_PORT")
    if configured:
        return int(configured)
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
