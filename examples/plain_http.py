"""New weights under a running stream, then sleep and wake, with nothing but the standard library.

    ebbtide serve --model-path FOLDER --port 30000
    python examples/plain_http.py http://127.0.0.1:30000 [FOLDER_WITH_NEW_WEIGHTS]

The folder must be visible to the server; without one, the server's own checkpoint is loaded again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

# Every vocabulary has these, also the demo's of a few signs.
PROMPT: dict[str, Any] = {"input_ids": [3, 4, 5, 6]}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}


def call(url: str, body: Any = None) -> Any:
    """One request, GET without a body and POST with one; the answer's JSON, also where the server refuses."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data)) as response:
            return json.load(response)
    except HTTPError as error:
        return json.load(error)


def stream(url: str, body: Any) -> Iterator[Any]:
    """The chunks of a streamed generation; each holds everything so far."""
    with urlopen(Request(url, json.dumps({**body, "stream": True}).encode())) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def update_under_a_stream(server: str, folder: str) -> None:
    """The stream goes on with its KV; its tokens fall into spans by the weights that sampled them."""
    chunks = stream(f"{server}/generate", {**PROMPT, "sampling_params": GREEDY})
    next(chunks)
    update = {"model_path": folder, "weight_version": "1", "pause_mode": "in_place", "flush_cache": False}
    reply = call(f"{server}/update_weights_from_disk", update)
    if not reply["success"]:
        sys.exit(reply["message"])
    print(f"update: {reply['message']} Forward passes stood still for {reply['stall_ms']:.1f} ms.")
    *_, last = chunks
    print("stream:", last["meta_info"]["finish_reason"], last["meta_info"]["weight_versions"])


def sleep_and_wake(server: str, folder: str) -> None:
    """A request that comes while the engine sleeps is answered by the weights with which it wakes."""
    freed = call(f"{server}/release_memory_occupation", {})["freed_bytes"]
    print("released:", freed)
    with ThreadPoolExecutor() as pool:
        short = {**PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 8}}
        waiting = pool.submit(call, f"{server}/generate", short)
        call(f"{server}/resume_memory_occupation", {"tags": ["weights"]})
        print("why it waits:", call(f"{server}/ready")["message"])
        call(f"{server}/update_weights_from_disk", {"model_path": folder, "weight_version": "2"})
        call(f"{server}/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        print("answered with:", waiting.result()["meta_info"]["weight_versions"])


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    server = sys.argv[1].rstrip("/")
    folder = sys.argv[2] if len(sys.argv) > 2 else call(f"{server}/model_info")["model_path"]
    update_under_a_stream(server, folder)
    sleep_and_wake(server, folder)


if __name__ == "__main__":
    main()
