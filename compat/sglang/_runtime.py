"""SGLang's `Runtime`: a server in its own process, started from Python."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import time
from typing import Any

from sglang._asking import ask
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import get_open_port, kill_process_tree
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

_POLL_S = 0.1


class Runtime:
    """A server that runs until `shutdown`, or until this process ends.

    Args:
        launch_timeout: seconds within which it must answer.
        **kwargs: fields of `ServerArgs`; `port` is a free one by default.

    Raises:
        RuntimeError: the server ended while it started.
        TimeoutError: it did not answer in time.
    """

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, **kwargs: Any) -> None:
        kwargs.setdefault("port", get_open_port())
        self.server_args = ServerArgs(log_level=log_level, **kwargs)
        self.url = self.server_args.url()
        self.generate_url = f"{self.url}/generate"
        self._process = multiprocessing.get_context("spawn").Process(
            target=launch_server, args=(self.server_args,)
        )
        self._process.start()
        self.pid = self._process.pid
        atexit.register(self.shutdown)
        try:
            self._wait_until_up(launch_timeout)
        except BaseException:
            self.shutdown()
            raise

    def _wait_until_up(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if not self._process.is_alive():
                raise RuntimeError(f"the server ended while it started: exit code {self._process.exitcode}")
            try:
                self._ask("/health_generate", timeout_s=timeout_s)
                return
            except OSError:  # Not ready yet.
                time.sleep(_POLL_S)
        raise TimeoutError(f"the server did not answer within {timeout_s:g} s")

    def generate(
        self,
        prompt: str | list[str],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
    ) -> str:
        """Generate; returns the answer's body as JSON text."""
        fields = {
            "text": prompt,
            "sampling_params": sampling_params,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
        }
        return json.dumps(self._ask("/generate", fields))

    def flush_cache(self) -> None:
        self._ask("/flush_cache", {})

    def get_server_info(self) -> Any:
        return self._ask("/server_info")

    def get_tokenizer(self) -> Any:
        args = self.server_args
        path = args.tokenizer_path if args.tokenizer_path is not None else args.model_path
        return get_tokenizer(
            path, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
        )

    def shutdown(self) -> None:
        """End the server. Idempotent."""
        atexit.unregister(self.shutdown)
        if self.pid is not None:
            kill_process_tree(self.pid)
            self._process.join()
            self.pid = None

    def _ask(self, path: str, fields: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Send a POST request with these fields, or GET if None; returns the reply's JSON, None if empty."""
        body = None if fields is None else json.dumps(fields).encode()
        text = ask(self.url + path, self.server_args.api_key, body, timeout_s)
        return json.loads(text) if text else None
