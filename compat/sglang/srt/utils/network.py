"""Sockets of ZeroMQ, as SGLang opens them."""

from __future__ import annotations

from typing import Any

import zmq


def get_zmq_socket(
    context: zmq.Context[Any], socket_type: int, endpoint: str | None = None, bind: bool = True
) -> Any:
    """A socket without limits on what it holds, bound or connected.

    Args:
        endpoint: None: bound to a free port of this machine alone.

    Returns:
        The socket; without an endpoint, its port and the socket.
    """
    made = context.socket(socket_type)
    made.set_hwm(0)
    if endpoint is None:
        return made.bind_to_random_port("tcp://127.0.0.1"), made
    if endpoint.startswith("tcp://["):
        made.setsockopt(zmq.IPV6, 1)
    if bind:
        made.bind(endpoint)
    else:
        made.connect(endpoint)
    return made
