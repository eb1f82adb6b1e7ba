"""ZeroMQ sockets as SGLang opens them."""

from __future__ import annotations

from typing import Any

import zmq


def get_zmq_socket(
    context: zmq.Context[Any], socket_type: int, endpoint: str | None = None, bind: bool = True
) -> Any:
    """Open a socket without a high-water mark, bound or connected.

    Args:
        endpoint: None: bind to a free port of the loopback address.

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
