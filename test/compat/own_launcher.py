"""A framework's own launcher: it starts an engine in parts, adds a route of its own, and serves `app`.

It does so as AReaL's inference service does, which asks a scheduler of its own over a socket.
"""

import os
import sys
from typing import Any

import zmq
from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
from sglang.srt.entrypoints.http_server import _execute_server_warmup, _setup_and_run_http_server, app
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.io_struct import RpcReqInput, RpcReqOutput
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import get_zmq_socket, kill_process_tree


def run_own_scheduler_process(*arguments: Any) -> None:
    """What the framework would run in the place of the engine's scheduler."""


def main() -> None:
    server_args = prepare_server_args(sys.argv[1:])
    manager, templates, ports, started, watchdog = Engine._launch_subprocesses(
        server_args=server_args,
        init_tokenizer_manager_func=init_tokenizer_manager,
        run_scheduler_process_func=run_own_scheduler_process,
        run_detokenizer_process_func=run_detokenizer_process,
    )
    context = zmq.Context()
    channel = get_zmq_socket(context, zmq.DEALER, ports.rpc_ipc_name, True)

    async def call_scheduler(method: str) -> dict[str, Any]:
        channel.send_pyobj(RpcReqInput(method=method, parameters={"version": 1}))
        answer = channel.recv_pyobj()
        assert isinstance(answer, RpcReqOutput)
        return {"success": answer.success, "message": answer.message}

    app.add_api_route("/call_scheduler", call_scheduler, methods=["GET"])
    try:
        _setup_and_run_http_server(
            server_args,
            manager,
            templates,
            ports,
            started.scheduler_infos,
            watchdog,
            execute_warmup_func=_execute_server_warmup,
        )
    finally:
        channel.close(linger=0)
        context.term()


if __name__ == "__main__":
    try:
        main()
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
