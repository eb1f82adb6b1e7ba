"""Refuses the calls of launchers to a scheduler of their own, which does not run here."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import zmq

from sglang.srt.managers.io_struct import RpcReqOutput
from sglang.srt.utils.network import get_zmq_socket


def refuse_rpc(endpoint: str, reason: str) -> None:
    """Answer all requests from a ZeroMQ endpoint with a refusal, in a thread, while this process lives.

    Requests are not read, since they are pickles. Without an answer their senders would wait for ever.
    """
    answer = pickle.dumps(RpcReqOutput(success=False, message=reason))
    threading.Thread(target=_answer_all, args=(endpoint, answer), name="sglang-rpc", daemon=True).start()


def _answer_all(endpoint: str, answer: bytes) -> None:
    context: zmq.Context[Any] = zmq.Context()
    channel = get_zmq_socket(context, zmq.DEALER, endpoint, bind=False)
    while True:
        channel.recv()
        channel.send(answer)
