"""A fixture that starts a server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import requests
from vllm.utils import get_open_port

from ebbtide.srt.hf_folder import folder_of

MODEL = str(folder_of("tiny"))
START_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = get_open_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--max-total-tokens", "8192"]
    flags += ["--port", str(port), "--log-level", "error"]
    process = subprocess.Popen([sys.executable, "-m", "ebbtide", "serve", MODEL, *flags])
    try:
        until_s = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(url):
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < until_s, "the server does not answer"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_healthy(url: str) -> bool:
    with suppress(requests.ConnectionError):
        return requests.get(f"{url}/health", timeout=60).ok
    return False
