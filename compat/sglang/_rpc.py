"""What answers a launcher that asks a scheduler of its own, which does not run here."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import zmq

from sglang.srt.managers.io_struct import RpcReqOutput
from sglang.srt.utils.network import get_zmq_socket


def refuse_rpc(endpoint: str, reason: str) -> None:
    """Answer every request that comes from `endpoint` with a refusal, for as long as this process lives.

    Nothing of a request is read: it is a pickle. Without an answer its sender would wait for ever.
    """
    answer = pickle.dumps(RpcReqOutput(success=False, message=reason))
    threading.Thread(target=_answer_all, args=(endpoint, answer), name="sglang-rpc", daemon=True).start()


def _answer_all(endpoint: str, answer: bytes) -> None:
    context: zmq.Context[Any] = zmq.Context()
    channel = get_zmq_socket(context, zmq.DEALER, endpoint, bind=False)
    while True:
        channel.recv()
        channel.send(answer)
