"""What the examples over HTTP share: a server in a process of its own, and weights in flattened buckets.

Of `sglang` it takes what slime and miles take: `launch_server`, the serializer, and the bucket.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests
import tiny_rl
import torch
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer, kill_process_tree
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

POLL_S = 0.1
TIMEOUT_S = 120


class Refused(Exception):
    """The server said no.

    Attributes:
        body: what it said.
    """

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body['message']}")
        self.status = status
        self.body = body


class ServedEngine:
    """The requests that are made to a server.

    Attributes:
        num_ranks: of all replicas; an update brings one entry for each.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        info = self.get("/server_info")
        self.num_ranks: int = info["tp_size"] * info["dp_size"]

    def get(self, path: str) -> Any:
        """The reply. Raises `Refused`."""
        return _reply(requests.get(self.url + path, timeout=TIMEOUT_S))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply. Raises `Refused`."""
        return _reply(requests.post(self.url + path, json=body or {}, timeout=TIMEOUT_S))

    def update(self, tensors: Sequence[tuple[str, torch.Tensor]], **fields: Any) -> Any:
        """Send one bucket, with further fields of the request. Raises `Refused`."""
        bucket = FlattenedTensorBucket(named_tensors=tensors)
        data = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        entries = [MultiprocessingSerializer.serialize(data, output_str=True) for _ in range(self.num_ranks)]
        body = {"serialized_named_tensors": entries, "load_format": "flattened_bucket", **fields}
        # `bucket` lives until the answer is there: what was sent refers to its memory.
        return self.post("/update_weights_from_tensor", body)

    def greedy(self) -> list[int]:
        """What the weights that serve say when nothing is left to chance."""
        body = {"input_ids": tiny_rl.PROMPT, "sampling_params": tiny_rl.GREEDY}
        tokens: list[int] = self.post("/generate", body)["output_ids"]
        return tokens


def _reply(response: requests.Response) -> Any:
    body = response.json() if response.content else None
    if not response.ok:
        raise Refused(response.status_code, body)
    return body


@contextmanager
def started_server(model_path: Path, **arguments: Any) -> Iterator[ServedEngine]:
    """A server of its own, with these fields of `ServerArgs`; its weights are version 0 at the start."""
    server_args = ServerArgs(
        model_path=str(model_path),
        port=tiny_rl.free_port(),
        **{**tiny_rl.SERVER_ARGUMENTS, "weight_version": "0", "log_level": "error", **arguments},
    )
    process = multiprocessing.get_context("spawn").Process(target=launch_server, args=(server_args,))
    process.start()
    try:
        while not _is_healthy(server_args.url()):
            if not process.is_alive():
                raise SystemExit("the server did not start")
            time.sleep(POLL_S)
        yield ServedEngine(server_args.url())
    finally:
        kill_process_tree(process.pid)
        process.join()


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health_generate", timeout=TIMEOUT_S).ok
    except requests.ConnectionError:
        return False


def expect(fact: str, is_so: bool) -> None:
    """Print a fact; end the program where it is none."""
    if not is_so:
        raise SystemExit(f"NOT SO: {fact}")
    print(f"  {fact}", flush=True)


def main(description: str | None, run: Callable[[ServedEngine, Path], None], **arguments: Any) -> None:
    """The command line of an example that drives a server: one that runs, or one that it starts itself.

    Args:
        run: gets the server, and the folder of the model that it serves.
        **arguments: fields of `ServerArgs` for the server that is started.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-path", type=Path, help="a folder like that of make_tiny_model (default: made)"
    )
    parser.add_argument(
        "--url", help="a server of that model, which sees this machine's memory (default: started)"
    )
    given = parser.parse_args()
    if given.url and not given.model_path:
        parser.error("--url needs --model-path: the model that is served there")
    with TemporaryDirectory() as folder:
        model_path = given.model_path or tiny_rl.make_tiny_model(Path(folder) / "model")
        if given.url:
            run(ServedEngine(given.url.rstrip("/")), model_path)
        else:
            with started_server(model_path, **arguments) as engine:
                run(engine, model_path)
