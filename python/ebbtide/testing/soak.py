"""A server under a storm of control requests, beside streams whose every token is checked.

    python -m ebbtide.testing.soak --minutes 30

A tiny model of random weights is served. Before the storm it answers every prompt greedily, undisturbed: the
twin. Then clients stream those prompts again and again, and some of them hang up in the middle, while memory
is released and resumed, generation paused, weights updated (to the same values, under new versions), sessions
given up, wrong updates refused, and senders killed in the middle of an update. In the end there is a table:
requests, those that were lost or answered wrongly, and what the server's processes hold before and after.
The exit status is 1 if a request was lost or wrong, a reply was a failure of the server, or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

NUM_PROMPTS: Final = 48
MAX_OUTPUT: Final = 96
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
START_TIMEOUT_S: Final = 300.0
# Longer than any operation of the storm may take: a reply that has not come by then is a hang.
REPLY_TIMEOUT_S: Final = 120.0
# Descriptors that caches and pools of libraries may open once, in the first minutes.
ALLOWED_DESCRIPTORS: Final = 16
KILLED_SENDER: Final = """
import base64, json, sys, time
from safetensors.torch import load_file
from ebbtide.trainer.payload_encoding import serialize_tensors
shared = serialize_tensors(sorted(load_file(sys.argv[1]).items()))
print(json.dumps([base64.b64encode(entry).decode() for entry in shared.entries]), flush=True)
time.sleep(600)
"""


def make_model(folder: Path, seed: int) -> Path:
    """A checkpoint of random weights, whose logits lie far enough apart that rounding decides nothing."""
    folder.mkdir()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(architectures=["Qwen3ForCausalLM"], **SHAPE))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass
class Tally:
    """What was seen. `problems` holds the first few, in words."""

    requests: int = 0
    hung_up: int = 0
    aborted: int = 0
    lost: int = 0
    wrong: int = 0
    failures: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(problem[:500])


def shared_objects(pids: Sequence[int]) -> list[Path]:
    """The shared memory that torch made in these processes, as far as it is still there."""
    return [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


@dataclass(frozen=True)
class Holdings:
    """What a server's processes hold, and the shared memory that their senders left behind."""

    rss_bytes: int
    descriptors: int
    threads: int
    processes: int
    shared_memory: int

    @staticmethod
    def of(process: psutil.Process, senders: Sequence[int] = ()) -> Holdings:
        family = [process, *process.children(recursive=True)]
        return Holdings(
            rss_bytes=sum(one.memory_info().rss for one in family),
            descriptors=sum(one.num_fds() for one in family),
            threads=sum(one.num_threads() for one in family),
            processes=len(family),
            shared_memory=len(shared_objects(senders)),
        )


class Soak:
    """One server, its clients and its storm."""

    def __init__(self, args: argparse.Namespace, url: str, folder: Path, tally: Tally) -> None:
        self._args = args
        self._url = url
        self._model = folder / "model"
        self._other = folder / "other"
        self._tally = tally
        self._rng = random.Random(args.seed)
        self._until_s = 0.0
        # Requests that were under way between the sending of an abort and its reply may come back as aborted.
        self._num_aborts_sent = 0
        self._num_aborts_answered = 0
        # Process ids of all that have lent tensors to the server.
        self.senders = [os.getpid()]
        self._version = 0
        self._prompts = [
            [self._rng.randrange(SHAPE["vocab_size"]) for _ in range(self._rng.randrange(4, 200))]
            for _ in range(NUM_PROMPTS)
        ]
        self._expected: list[list[int]] = []
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(REPLY_TIMEOUT_S), limits=limits)

    async def run(self) -> None:
        async with self._client:
            self._expected = await asyncio.gather(*(self._alone(prompt) for prompt in self._prompts))
            await self._post("flush_cache", "/flush_cache")
            self._until_s = time.monotonic() + 60 * self._args.minutes
            streams = [asyncio.create_task(self._streams(number)) for number in range(self._args.streams)]
            await self._storm()
            await asyncio.wait_for(asyncio.gather(*streams), REPLY_TIMEOUT_S)

    async def settle(self) -> None:
        """Forget what was cached, so that holdings can be compared.

        What a killed sender had lent is unlinked by torch's manager of shared memory, some time later.
        """
        async with httpx.AsyncClient(base_url=self._url, timeout=REPLY_TIMEOUT_S) as client:
            await client.post("/flush_cache", json={"timeout_s": 30.0})
        until_s = time.monotonic() + 30
        while shared_objects(self.senders) and time.monotonic() < until_s:
            await asyncio.sleep(0.1)

    # ----------------------------------------------------------------------------------------- the clients

    async def _alone(self, prompt: list[int]) -> list[int]:
        body = self._body(prompt, MAX_OUTPUT)
        reply = (await self._client.post("/generate", json=body)).json()
        tokens: list[int] = reply["output_ids"]
        return tokens

    def _body(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": params}

    async def _streams(self, number: int) -> None:
        rng = random.Random(self._args.seed * 1000 + number)
        while time.monotonic() < self._until_s:
            index = rng.randrange(NUM_PROMPTS)
            length = rng.randrange(1, MAX_OUTPUT + 1)
            hangs_up_after = rng.randrange(1, length + 1) if rng.random() < 0.05 else None
            self._tally.requests += 1
            try:
                await asyncio.wait_for(self._stream(index, length, hangs_up_after), 5 * REPLY_TIMEOUT_S)
            except (TimeoutError, httpx.HTTPError, ValueError, KeyError) as error:
                self._tally.lost += 1
                self._tally.note(f"a request was lost: {type(error).__name__}: {error}")

    async def _stream(self, index: int, length: int, hangs_up_after: int | None) -> None:
        body = self._body(self._prompts[index], length) | {"stream": True}
        num_aborts = self._num_aborts_answered
        last: dict[str, Any] | None = None
        timeout = httpx.Timeout(None)
        async with self._client.stream("POST", "/generate", json=body, timeout=timeout) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line[len("data: ") :])
                if "error" in last:
                    raise ValueError(line)
                if hangs_up_after is not None and len(last["output_ids"]) >= hangs_up_after:
                    self._tally.hung_up += 1
                    return
        if last is None:
            raise ValueError("the stream ended without a chunk")
        self._check(last, index, length, may_be_aborted=self._num_aborts_sent > num_aborts)

    def _check(self, last: dict[str, Any], index: int, length: int, *, may_be_aborted: bool) -> None:
        tokens, meta = last["output_ids"], last["meta_info"]
        if tokens != self._expected[index][: len(tokens)]:
            self._tally.wrong += 1
            self._tally.note(f"prompt {index}: {tokens} instead of {self._expected[index][:length]}")
            return
        spans = meta["weight_versions"]
        covered = [span["start"] for span in spans[1:]] == [span["end"] for span in spans[:-1]]
        if tokens and not (covered and spans[0]["start"] == 0 and spans[-1]["end"] == len(tokens)):
            self._tally.wrong += 1
            self._tally.note(f"spans {spans} do not cover {len(tokens)} tokens")
        reason = meta["finish_reason"]["type"] if meta["finish_reason"] else None
        if reason == "abort" and may_be_aborted:
            self._tally.aborted += 1
        elif reason != "length" or len(tokens) != length:
            self._tally.lost += 1
            self._tally.note(f"a request ended with {meta['finish_reason']} after {len(tokens)} of {length}")

    # ------------------------------------------------------------------------------------------- the storm

    async def _storm(self) -> None:
        storms: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "pause": (4, self._pause),
            "release": (4, self._release),
            "park": (2 if self._args.park else 0, self._park),
            "resize": (2 if self._args.resize else 0, self._resize),
            "update from disk": (3, self._update_from_disk),
            "session": (3, self._session),
            "session given up": (2, self._session_given_up),
            "refused update": (2, self._refused_update),
            "killed sender": (1, self._killed_sender),
            "flush": (1, self._flush),
            "abort": (1, self._abort),
        }
        names = list(storms)
        weights = [storms[name][0] for name in names]
        while time.monotonic() < self._until_s:
            (name,) = self._rng.choices(names, weights)
            self._tally.operations[name] += 1
            await storms[name][1]()
            await self._run_again()
            await asyncio.sleep(self._rng.random() * self._args.calm_s)

    async def _post(self, name: str, path: str, **body: Any) -> dict[str, Any]:
        """A reply. A refusal counts; a failure of the server, or none at all, is a failure."""
        try:
            response = await self._client.post(path, json=body)
        except httpx.HTTPError as error:
            self._tally.failures += 1
            self._tally.note(f"{name}: {type(error).__name__}: {error}")
            return {"success": False}
        if response.status_code >= 500:
            self._tally.failures += 1
            self._tally.note(f"{name}: {response.status_code} {response.text}")
        elif response.status_code != 200:
            self._tally.refusals[f"{name} {response.status_code}"] += 1
        try:
            reply: dict[str, Any] = response.json()
        except ValueError:
            return {"success": response.status_code == 200}
        return reply

    async def _must(self, name: str, path: str, **body: Any) -> dict[str, Any]:
        reply = await self._post(name, path, **body)
        if not reply.get("success", True):
            self._tally.failures += 1
            self._tally.note(f"{name} was refused: {reply}")
        return reply

    async def _run_again(self) -> None:
        await self._must("resume", "/resume_memory_occupation")
        await self._must("continue", "/continue_generation")

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.random() * self._args.calm_s)

    def _next_version(self) -> str:
        self._version += 1
        return f"v{self._version}"

    async def _pause(self) -> None:
        await self._must("pause", "/pause_generation", mode=self._rng.choice(["in_place", "retract"]))
        await self._wait()

    async def _release(self, **fields: Any) -> None:
        """Any of the tags; weights come back stale, and are written again."""
        tags = self._rng.choice([["kv_cache"], ["weights"], ["kv_cache", "weights"], []])
        tags = fields.pop("tags", tags)
        await self._must("release", "/release_memory_occupation", tags=tags, **fields)
        await self._wait()
        if self._rng.random() < 0.3:
            await self._post("release", "/release_memory_occupation", tags=tags)
        if tags != ["kv_cache"]:
            await self._must("resume", "/resume_memory_occupation", tags=["weights"])
            await self._must(
                "update_weights_from_disk",
                "/update_weights_from_disk",
                model_path=str(self._model),
                flush_cache=False,
                pause_mode="in_place",
                weight_version=self._next_version(),
            )
        await self._must("resume", "/resume_memory_occupation", tags=tags)

    async def _park(self) -> None:
        await self._release(tags=["kv_cache"], preserve=self._rng.choice(["live", "all"]))

    async def _resize(self) -> None:
        report = (await self._client.get("/memory_occupation")).json()
        num_bytes = report["tags"]["kv_cache"]["virtual_bytes"]
        smaller = int(num_bytes * self._rng.uniform(0.3, 0.9))
        await self._post("resize", "/resize_memory_occupation", num_bytes=smaller)
        await self._wait()
        await self._must("resize", "/resize_memory_occupation", num_bytes=num_bytes)

    async def _update_from_disk(self) -> None:
        mode = self._rng.choice(["in_place", "retract"])
        await self._must(
            "update_weights_from_disk",
            "/update_weights_from_disk",
            model_path=str(self._model),
            pause_mode=mode,
            flush_cache=mode == "retract",
            weight_version=self._next_version(),
        )

    async def _session(self) -> None:
        """As a trainer sends it, in buckets."""
        from ebbtide.trainer import WeightSender

        def send() -> None:
            mode = self._rng.choice(["in_place", "retract"])
            with WeightSender(self._url, bucket_bytes=1 << 20, pause_mode=mode) as sender:
                sender.send(
                    sorted(load_file(self._model / "model.safetensors").items()), self._next_version()
                )

        try:
            await asyncio.to_thread(send)
        except Exception as error:
            self._tally.failures += 1
            self._tally.note(f"session: {type(error).__name__}: {error}")

    async def _session_given_up(self) -> None:
        """Other weights, which must never be seen."""
        await self._must("begin", "/begin_weight_update")
        await self._must(
            "update_weights_from_disk",
            "/update_weights_from_disk",
            model_path=str(self._other),
            pause_mode="in_place",
            flush_cache=False,
        )
        await self._wait()
        await self._must("abort_weight_update", "/abort_weight_update")

    async def _refused_update(self) -> None:
        reply = await self._post(
            "refused update",
            "/update_weights_from_disk",
            model_path=str(self._other.parent / "wrong"),
            pause_mode="in_place",
            flush_cache=False,
        )
        if reply.get("success", True):
            self._tally.failures += 1
            self._tally.note(f"an update of a wrong shape was taken: {reply}")

    async def _killed_sender(self) -> None:
        """The sender goes, with or without its memory, while the update is under way."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            KILLED_SENDER,
            str(self._model / "model.safetensors"),
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        assert process.stdout is not None
        self.senders.append(process.pid)
        entries = json.loads(await process.stdout.readline())
        update = asyncio.create_task(
            self._post(
                "killed sender",
                "/update_weights_from_tensor",
                serialized_named_tensors=entries,
                pause_mode="in_place",
                flush_cache=False,
                weight_version=self._next_version(),
            )
        )
        await asyncio.sleep(self._rng.random() * 0.02)
        process.kill()
        await process.wait()
        await update

    async def _flush(self) -> None:
        await self._post("flush_cache", "/flush_cache")

    async def _abort(self) -> None:
        """Every request comes back with what it has."""
        self._num_aborts_sent += 1
        await self._must("abort_request", "/abort_request", abort_all=True, report=True)
        self._num_aborts_answered += 1


def serve(args: argparse.Namespace, folder: Path, log_file: Path) -> tuple[subprocess.Popen[bytes], str]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "ebbtide.launch_server", "--model-path", str(folder / "model")]
    command += ["--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", "--device", args.device]
    command += ["--max-total-tokens", "16384", "--log-level", "warning", *args.server_flags]
    with log_file.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log), f"http://127.0.0.1:{port}"


def wait_ready(process: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit(f"the server did not start: {log_file.read_text(errors='replace')[-2000:]}")


def report(tally: Tally, before: Holdings, after: Holdings) -> bool:
    """Print the table; whether all is well."""
    leaked = (
        after.descriptors > before.descriptors + ALLOWED_DESCRIPTORS
        or after.processes != before.processes
        or after.shared_memory > before.shared_memory
    )
    console = Console()
    for problem in tally.problems:
        console.print(problem, markup=False)
    table = Table("", "before", "after", title="soak")
    table.add_row("requests", "", f"{tally.requests:,}")
    table.add_row("  hung up by the client", "", f"{tally.hung_up:,}")
    table.add_row("  aborted on request", "", f"{tally.aborted:,}")
    table.add_row("  lost", "", str(tally.lost))
    table.add_row("  wrong", "", str(tally.wrong))
    for name, count in sorted(tally.operations.items()):
        table.add_row(name, "", f"{count:,}")
    for name, count in sorted(tally.refusals.items()):
        table.add_row(f"refused: {name}", "", f"{count:,}")
    table.add_row("failures", "", str(tally.failures))
    table.add_row("memory, MB", f"{before.rss_bytes / 1e6:,.0f}", f"{after.rss_bytes / 1e6:,.0f}")
    for name in ("descriptors", "threads", "processes", "shared_memory"):
        table.add_row(name.replace("_", " "), str(getattr(before, name)), str(getattr(after, name)))
    console.print(table)
    return not (tally.lost or tally.wrong or tally.failures or leaked)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--calm-s", type=float, default=0.3, help="longest pause between two operations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--park", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--resize", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("server_flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        folder = Path(name)
        make_model(folder / "model", args.seed)
        make_model(folder / "other", args.seed + 1)
        wrong = load_file(make_model(folder / "wrong", args.seed + 2) / "model.safetensors")
        wrong["model.norm.weight"] = torch.ones(3)
        save_file(wrong, folder / "wrong" / "model.safetensors", {"format": "pt"})
        log_file = folder / "log"
        process, url = serve(args, folder, log_file)
        tally = Tally()
        try:
            wait_ready(process, url, log_file)
            soak = Soak(args, url, folder, tally)
            before = Holdings.of(psutil.Process(process.pid))
            asyncio.run(soak.run())
            asyncio.run(soak.settle())
            after = Holdings.of(psutil.Process(process.pid), soak.senders)
        finally:
            process.terminate()
            process.wait(60)
            log = log_file.read_text(errors="replace")
        if not report(tally, before, after):
            print(f"the server's log ends so:\n{log[-4000:]}")
            raise SystemExit(1)


if __name__ == "__main__":
    main()
