"""An RL loop over HTTP that goes on when answers are lost on their way.

    python examples/rl_step_with_retries.py [--steps 6] [--lose-every 3]
    python examples/rl_step_with_retries.py --url http://127.0.0.1:30000 --model-path FOLDER

Without `--model-path` a tiny Qwen3 of random weights is made; without `--url` a server is started.

What makes every call safe to repeat:
- A rollout carries its sampling seed, so the same weights answer it with the same tokens.
- Going to sleep and waking up are one `POST /transition` each, under an `op_id`: asked again, the server
  tells what became of it, or waits for it, and does nothing twice.
- A refusal is recorded too, so another attempt is made under another `op_id`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny_rl

ANSWER_TIMEOUT_S = 60.0
GIVE_UP_S = 300.0
RETRY_PAUSE_S = 0.5
MAX_ATTEMPTS = 10


class Refused(Exception):
    """The server said no: repeating the same request would not help."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(body["message"])
        self.status = status


class Client:
    """Calls a server until an answer comes back.

    Args:
        lose_every: every so many answers one is thrown away after it arrived, as a bad network does; 0: none.
    """

    def __init__(self, url: str, lose_every: int = 0) -> None:
        self._url = url
        self._lose_every = lose_every
        self._num_answers = 0
        # Names of transitions are the server's for as long as it runs: another run must not repeat them.
        self._run_id = uuid.uuid4().hex[:8]

    def call(self, path: str, body: Any = None) -> Any:
        """Send the same request until there is an answer.

        Raises:
            Refused: the answer is a refusal.
            OSError, HTTPException: there was no answer for GIVE_UP_S.
        """
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return self._send(path, body)
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline_s:
                    raise
                print(f"  no answer from {path} ({error}), asking again", flush=True)
                time.sleep(RETRY_PAUSE_S)

    def transition(self, name: str, *steps: dict[str, Any]) -> None:
        """Carry control requests out, in order and once.

        Raises:
            Refused: for a reason that will not go away.
        """
        for attempt in range(MAX_ATTEMPTS):
            op_id = f"{self._run_id}/{name}/{attempt}"
            try:
                outcome = self.call("/transition", {"op_id": op_id, "steps": list(steps)})
            except Refused as refused:
                # 409: the state forbids it now, as when the trainer's memory is not free yet. Every step may
                # be repeated, so the whole list is.
                if refused.status != 409 or attempt + 1 == MAX_ATTEMPTS:
                    raise
                print(f"  {name} refused ({refused}), trying again", flush=True)
                time.sleep(1.0)
            else:
                print(f"  {name}: {outcome['message']}{' (replayed)' if outcome['replayed'] else ''}")
                return

    def _send(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            if error.code == 503:  # its queue is full, or it is going down
                raise
            raise Refused(error.code, json.load(error)) from None
        self._num_answers += 1
        if self._lose_every and self._num_answers % self._lose_every == 0:
            raise ConnectionError("the answer was lost")
        return json.loads(answer) if answer else None


def roll_out(client: Client, step: int) -> list[list[int]]:
    """Sampled outputs of the weights of this step."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    body = {
        "input_ids": [tiny_rl.PROMPT] * len(seeds),
        "sampling_params": [{**tiny_rl.SAMPLING, "sampling_seed": seed} for seed in seeds],
    }
    outputs = client.call("/generate", body)
    versions = {span["version"] for output in outputs for span in output["meta_info"]["weight_versions"]}
    assert versions == {str(step)}, f"on-policy rollouts of step {step} came from the weights {versions}"
    return [output["output_ids"] for output in outputs]


def rl_step(client: Client, trainer: tiny_rl.Trainer, step: int, folder: Path) -> float:
    """Roll out with the weights `step`, train, and leave the engine awake with the weights `step + 1`."""
    outputs = roll_out(client, step)
    client.transition(f"sleep-{step}", {"op": "release"})
    reward = trainer.learn(outputs)
    # A folder of its own: a retry may still read the one before.
    path = folder / f"step-{step + 1}"
    trainer.model.save_pretrained(path)
    client.transition(
        f"wake-{step}",
        {"op": "resume", "tags": ["weights"]},
        {"op": "update_from_disk", "model_path": str(path), "weight_version": str(step + 1)},
        {"op": "resume"},
    )
    shutil.rmtree(path)
    return reward


@contextmanager
def started_server(model_path: Path) -> Iterator[str]:
    """A server of its own; yields its address."""
    url = f"http://127.0.0.1:{tiny_rl.free_port()}"
    command = [sys.executable, "-m", "ebbtide.launch_server", "--model-path", str(model_path)]
    command += ["--port", url.rpartition(":")[2], "--skip-tokenizer-init", "--max-total-tokens", "4096"]
    process = subprocess.Popen([*command, "--log-level", "error"])
    try:
        wait_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Return once the server answers."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=ANSWER_TIMEOUT_S).close()
            return
        except OSError:
            time.sleep(RETRY_PAUSE_S)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--url", help="a server of that model; it must see this machine's files")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lose-every", type=int, default=3, help="throw every so many answers away")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        model_path = args.model_path or tiny_rl.make_tiny_model(Path(folder) / "model")
        if args.url:
            run(args.url, model_path, Path(folder), args.steps, args.lose_every)
        else:
            with started_server(model_path) as url:
                run(url, model_path, Path(folder), args.steps, args.lose_every)


def run(url: str, model_path: Path, folder: Path, num_steps: int, lose_every: int) -> None:
    """The loop: the weights that the server starts with are version 0."""
    client = Client(url, lose_every)
    client.call("/update_weight_version", {"new_version": "0"})
    trainer = tiny_rl.Trainer(model_path)
    for step in range(num_steps):
        print(f"step {step}", flush=True)
        print(f"  mean reward {rl_step(client, trainer, step, folder):.3f}", flush=True)


if __name__ == "__main__":
    main()
