"""The clients, and the storm of control requests around them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil
from fixtures.servers import Server, url_of
from safetensors.torch import load_file
from soak.tally import Holdings, Tally, shared_objects
from torch import Tensor

from ebbtide.srt.errors import EbbtideError
from ebbtide.srt.weight_sync.borrowed_memory import ENDED_LOOK_S

if TYPE_CHECKING:
    from ebbtide.trainer import WeightSender

# Longer than any operation of the storm may take: a reply that has not come by then is a hang.
REPLY_TIMEOUT_S: Final = 120.0
MAX_TOTAL_TOKENS: Final = 16384
NUM_PROMPTS: Final = 48
NUM_REHEARSALS: Final = 2
# The most between two operations.
CALM_S: Final = 0.3
MODES: Final = ("in_place", "retract", "wait", "abort")
MAX_OUTPUT: Final = 96
# Batches of other sizes round otherwise, and so do prefills of what was computed token by token.
LOGPROB_ATOL: Final = 0.02
# So soon a server has noticed that its clients have left.
LEAVE_S: Final = 0.5
KILLED_SENDER: Final = """
import base64, json, sys, time
from safetensors.torch import load_file
from ebbtide.trainer.payload_encoding import serialize_tensors
shared = serialize_tensors(sorted(load_file(sys.argv[1]).items()))
print(json.dumps([base64.b64encode(entry).decode() for entry in shared.entries]), flush=True)
time.sleep(600)
"""


class Soak:
    """One server, its clients and its storm."""

    def __init__(self, args: argparse.Namespace, server: Server, folder: Path, tally: Tally) -> None:
        self._args = args
        self._pid = server.process.pid
        self._url = url_of(server)
        self._client = self._new_client()
        self._model = folder / "model"
        self._other = folder / "other"
        self._tally = tally
        self._rng = random.Random(args.seed)
        self._until_s = 0.0
        self._is_over = False
        # Requests that were under way between the sending of an abort and its reply may come back as aborted.
        self._num_aborts_sent = 0
        self._num_aborts_answered = 0
        # Process ids of all that have lent tensors to the engine.
        self.senders = [os.getpid()]
        # What this process has lent to others.
        self._others = set(shared_objects(self.senders))
        self._version = 0
        self._kept: WeightSender | None = None
        self._weights: list[tuple[str, Tensor]] = []
        self._prompts = [
            [self._rng.randrange(250) for _ in range(self._rng.randrange(4, 200))] for _ in range(NUM_PROMPTS)
        ]
        # Of each prompt the tokens, and their logprobs.
        self._expected: list[tuple[list[int], list[float]]] = []

    async def run(self) -> tuple[Holdings, Holdings]:
        """Weather the storm.

        Returns what was held before and after. Before is when every operation has been seen: what is opened
        once, such as a device's context in the sender, is there then.
        """
        self._expected = await asyncio.gather(*(self._alone(prompt) for prompt in self._prompts))
        await self._post("flush_cache")
        await self._weather(list(self._storms) * NUM_REHEARSALS)
        before = self._holdings()
        self._until_s = time.monotonic() + 60 * self._args.minutes
        await self._weather(self._drawn())
        return before, self._holdings()

    async def _weather(self, names: Iterable[str]) -> None:
        """These operations one after the other, beside streams; both have ended when it returns."""
        self._is_over = False
        streams = [asyncio.create_task(self._streams(number)) for number in range(self._args.streams)]
        try:
            for name in names:
                self._tally.operations[name] += 1
                try:
                    await self._storms[name][1]()
                except Exception as error:
                    self._tally.failures += 1
                    self._tally.note(f"{name}: {type(error).__name__}: {error}")
                await self._run_again()
                await self._wait()
        finally:
            # Streams end by themselves: a request that ends while it is cancelled may miss that.
            self._is_over = True
        await asyncio.wait_for(asyncio.gather(*streams), REPLY_TIMEOUT_S)
        await self._settle()

    def _holdings(self) -> Holdings:
        return Holdings.of(psutil.Process(self._pid), self.senders)

    async def _settle(self) -> None:
        """Forget what was cached, so that holdings can be compared.

        What a killed sender had lent is unlinked by torch's manager of shared memory, some time later.
        """
        await self._post("flush_cache", timeout_s=30.0)
        if self._kept is not None:
            self._kept.close()
            self._kept = None
            await asyncio.sleep(2 * ENDED_LOOK_S)  # until the engine has seen it
        until_s = time.monotonic() + 30
        while set(shared_objects(self.senders)) - self._others and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
        # Connections that wait for the next request are no leak of the server's.
        await self._client.aclose()
        self._client = self._new_client()
        await asyncio.sleep(LEAVE_S)

    # ----------------------------------------------------------------------------------------- the clients

    def _new_client(self) -> httpx.AsyncClient:
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(REPLY_TIMEOUT_S)
        # Proxies that the environment names are for other traffic.
        return httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits, trust_env=False)

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Those of a generation; left early, it is aborted. Raises OSError or ValueError."""
        timeout, body = httpx.Timeout(None), body | {"stream": True}
        try:
            async with self._client.stream("POST", "/generate", json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line[len("data: ") :])
        except httpx.HTTPError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def _alone(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        last: dict[str, Any] = {}
        async with aclosing(self._chunks(self._body(prompt, MAX_OUTPUT, with_logprobs=True))) as chunks:
            async for chunk in chunks:
                last = chunk
        return last["output_ids"], _logprobs(last)

    def _body(self, prompt: list[int], max_new_tokens: int, *, with_logprobs: bool) -> dict[str, Any]:
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": params, "return_logprob": with_logprobs}

    async def _streams(self, number: int) -> None:
        rng = random.Random(self._args.seed * 1000 + number)
        while not self._is_over:
            index = rng.randrange(NUM_PROMPTS)
            length = rng.randrange(1, MAX_OUTPUT + 1)
            hangs_up_after = rng.randrange(1, length + 1) if rng.random() < 0.05 else None
            body = self._body(self._prompts[index], length, with_logprobs=rng.random() < 0.3)
            self._tally.requests += 1
            try:
                await asyncio.wait_for(self._stream(body, index, length, hangs_up_after), 5 * REPLY_TIMEOUT_S)
            except (TimeoutError, OSError, EbbtideError, ValueError, KeyError) as error:
                self._tally.lost += 1
                self._tally.note(f"a request was lost: {type(error).__name__}: {error}")

    async def _stream(
        self, body: dict[str, Any], index: int, length: int, hangs_up_after: int | None
    ) -> None:
        num_aborts = self._num_aborts_answered
        last: dict[str, Any] | None = None
        async with aclosing(self._chunks(body)) as chunks:
            async for last in chunks:
                if "error" in last:
                    raise ValueError(str(last))
                if hangs_up_after is not None and len(last["output_ids"]) >= hangs_up_after:
                    self._tally.hung_up += 1
                    return
        if last is None:
            raise ValueError("the stream ended without a chunk")
        self._check(last, index, length, may_be_aborted=self._num_aborts_sent > num_aborts)

    def _check(self, last: dict[str, Any], index: int, length: int, *, may_be_aborted: bool) -> None:
        tokens, meta = last["output_ids"], last["meta_info"]
        expected, logprobs = self._expected[index]
        if tokens != expected[: len(tokens)]:
            self._tally.wrong += 1
            self._tally.note(f"prompt {index}: {tokens} instead of {expected[:length]}")
            return
        if "output_token_logprobs" in meta:
            found = _logprobs(last)
            if len(found) != len(tokens) or any(
                abs(value - logprob) > LOGPROB_ATOL for value, logprob in zip(found, logprobs, strict=False)
            ):
                self._tally.wrong += 1
                self._tally.note(f"prompt {index}: logprobs {found} instead of {logprobs[:length]}")
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

    @cached_property
    def _storms(self) -> dict[str, tuple[int, Callable[[], Awaitable[None]]]]:
        """How often each operation is drawn, and what it does."""
        return {
            "pause": (4, self._pause),
            "release": (4, self._release),
            "park": (2, self._park),
            "resize": (2, self._resize),
            "update from disk": (3, self._update_from_disk),
            "session": (3, self._session),
            "session given up": (2, self._session_given_up),
            "refused update": (2, self._refused_update),
            "killed sender": (1, self._killed_sender),
            "several at once": (3, self._several_at_once),
            "flush": (1, self._flush),
            "abort": (1, self._abort),
        }

    def _drawn(self) -> Iterator[str]:
        while time.monotonic() < self._until_s:
            yield from self._rng.choices(list(self._storms), [often for often, _ in self._storms.values()])

    async def _post(self, name: str, **body: Any) -> dict[str, Any]:
        """A reply. A refusal counts; a failure of the engine, or none at all, is a failure."""
        try:
            response = await self._client.post(f"/{name}", json=body)
            status, reply = response.status_code, response.json()
        except (httpx.HTTPError, ValueError) as error:
            status, reply = 500, {"success": False, "message": f"{type(error).__name__}: {error}"}
        if status >= 500:
            self._tally.failures += 1
            self._tally.note(f"{name}: {status} {reply}")
        elif status != 200:
            self._tally.refusals[f"{name} {status}"] += 1
        return reply

    async def _must(self, name: str, **body: Any) -> dict[str, Any]:
        reply = await self._post(name, **body)
        if not reply.get("success", True):
            self._tally.failures += 1
            self._tally.note(f"{name} was refused: {reply}")
        return reply

    async def _run_again(self) -> None:
        await self._must("resume_memory_occupation")
        await self._must("continue_generation")

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.random() * CALM_S)

    def _next_version(self) -> str:
        self._version += 1
        return f"v{self._version}"

    async def _stopping(self, name: str, *, aborts: bool, **body: Any) -> None:
        """What may abort all that runs."""
        self._num_aborts_sent += aborts
        await self._must(name, **body)
        self._num_aborts_answered += aborts

    async def _pause(self) -> None:
        mode = self._rng.choice(MODES)
        await self._stopping("pause_generation", aborts=mode == "abort", mode=mode)
        await self._wait()

    async def _release(self, **fields: Any) -> None:
        """Any of the tags; weights come back stale, and are written again."""
        tags = self._rng.choice([["kv_cache"], ["weights"], ["kv_cache", "weights"], []])
        tags = fields.pop("tags", tags)
        await self._must("release_memory_occupation", tags=tags, **fields)
        await self._wait()
        if self._rng.random() < 0.3:
            await self._post("release_memory_occupation", tags=tags)
        if tags != ["kv_cache"]:
            await self._must("resume_memory_occupation", tags=["weights"])
            await self._must(
                "update_weights_from_disk",
                model_path=str(self._model),
                flush_cache=False,
                pause_mode="in_place",
                weight_version=self._next_version(),
            )
        await self._must("resume_memory_occupation", tags=tags, lazy=self._rng.random() < 0.3)

    async def _park(self) -> None:
        await self._release(tags=["kv_cache"], preserve=self._rng.choice(["live", "all"]))

    async def _resize(self) -> None:
        # In tokens: bytes are those of each rank, and there may be several.
        smaller = int(MAX_TOTAL_TOKENS * self._rng.uniform(0.3, 0.9))
        preserve = self._rng.choice(["none", "live"])
        await self._post("resize_memory_occupation", num_tokens=smaller, preserve=preserve)
        await self._wait()
        await self._must("resize_memory_occupation", num_tokens=MAX_TOTAL_TOKENS)

    async def _update_from_disk(self) -> None:
        mode = self._rng.choice(MODES)
        await self._stopping(
            "update_weights_from_disk",
            aborts=mode == "abort",
            model_path=str(self._model),
            pause_mode=mode,
            flush_cache=mode != "in_place",
            weight_version=self._next_version(),
        )

    async def _session(self) -> None:
        """As a trainer sends it, in buckets; on a GPU often from memory that stays mapped, or has moved."""
        from ebbtide.trainer import WeightSender

        def weights() -> list[tuple[str, Tensor]]:
            file = self._model / "model.safetensors"
            return sorted(load_file(file, device=self._args.device).items())

        def send(mode: str, *, stays: bool, moves: bool) -> None:
            if not stays:
                with WeightSender(self._url, bucket_bytes=1 << 20, pause_mode=mode) as sender:
                    sender.send(weights(), self._next_version())
                return
            if self._kept is None or moves:
                self._weights = weights()
            if self._kept is None:
                self._kept = WeightSender(self._url, bucket_bytes=1 << 20, keep_mapped=True)
            self._kept.send(self._weights, self._next_version())

        mode, chance = self._rng.choice(["in_place", "retract"]), self._rng.random()
        await asyncio.to_thread(send, mode, stays=chance < 0.6, moves=chance < 0.2)

    async def _session_given_up(self) -> None:
        """Other weights, which must never be seen."""
        # By its name: without the session, which a begin without an answer may have left, they would serve.
        session_id = self._next_version()
        await self._must("begin_weight_update", session_id=session_id)
        await self._must(
            "update_weights_from_disk",
            model_path=str(self._other),
            pause_mode="in_place",
            flush_cache=False,
            session_id=session_id,
        )
        await self._wait()
        await self._must("abort_weight_update")

    async def _refused_update(self) -> None:
        reply = await self._post(
            "update_weights_from_disk",
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
        line = await process.stdout.readline()
        if not line:
            # On a busy machine torch's manager of shared memory may not come up in time.
            self._tally.operations["sender that could not lend"] += 1
            await process.wait()
            return
        entries = json.loads(line)
        update = asyncio.create_task(
            self._post(
                "update_weights_from_tensor",
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
        await self._post("flush_cache")

    async def _several_at_once(self) -> None:
        """Clients that know nothing of each other; what the state forbids by then is refused."""
        num_tokens = int(MAX_TOTAL_TOKENS * self._rng.uniform(0.3, 1.0))
        fields: dict[str, Any] = {"tags": ["kv_cache"], "preserve": self._rng.choice(["none", "live", "all"])}
        calls = [
            ("release_memory_occupation", fields),
            ("resume_memory_occupation", {"lazy": True}),
            ("resume_memory_occupation", {}),
            ("pause_generation", {"mode": self._rng.choice(["in_place", "retract"])}),
            ("continue_generation", {}),
            ("flush_cache", {"timeout_s": 0.1}),
            ("begin_weight_update", {}),
            ("abort_weight_update", {}),
            ("resize_memory_occupation", {"num_tokens": num_tokens, "preserve": "live"}),
        ]
        drawn = self._rng.sample(calls, self._rng.randrange(2, len(calls) + 1))
        await asyncio.gather(*(self._post(name, **body) for name, body in drawn))
        await self._run_again()
        await self._must("abort_weight_update")
        await self._must("resize_memory_occupation", num_tokens=MAX_TOTAL_TOKENS)

    async def _abort(self) -> None:
        """Every request comes back with what it has."""
        await self._stopping("abort_request", aborts=True, abort_all=True, report=True)


def _logprobs(output: dict[str, Any]) -> list[float]:
    """Those of the tokens of an output."""
    return [logprob for logprob, *_ in output["meta_info"]["output_token_logprobs"]]
