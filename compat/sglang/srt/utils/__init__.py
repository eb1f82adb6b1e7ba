"""Helpers that frameworks import from here; they are defined in `common` and `network`."""

from sglang.srt.utils.common import *  # noqa: F403
from sglang.srt.utils.network import get_zmq_socket as get_zmq_socket
