"""Sends a trainer's weights to one or more engines, in a few lines of code.

    sender = WeightSender("http://127.0.0.1:30000")
    for step in range(num_steps):
        train(model)
        sender.send(model.named_parameters(), version=step + 1)

An update is staged bucket by bucket in a session, beside the serving weights, and committed as a whole. If
something fails before the commit, the old weights keep serving. Source: control_semantics section 2.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, get_args

import torch

from ebbtide.srt.errors import EbbtideError, RequestRejected
from ebbtide.trainer.broadcaster import Backend, Broadcaster
from ebbtide.trainer.buckets import Bucket, ServedWeights, gathered_buckets, read_rest
from ebbtide.trainer.targets import (
    Adapter,
    AnswerLost,
    EngineTarget,
    ServerTarget,
    Target,
    Transport,
    UpdatableEngine,
    failures_in,
    outcomes_of,
)
from ebbtide.trainer.update import (
    AT_ONCE,
    ProgressCallback,
    Terms,
    Update,
    UpdateFailed,
    repeated,
    start_threads,
)

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES: Final = 512 << 20

T = TypeVar("T")


class WeightSendError(EbbtideError):
    """An update failed. The message says at which step, what the engines answered, and what they serve now.

    Attributes:
        failures: the errors of engines that failed, by name.
        committed: names of engines that serve the new weights all the same, since only others failed at the
            commit.
    """

    def __init__(
        self, message: str, failures: dict[str, EbbtideError], committed: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.failures = failures
        self.committed = tuple(committed)


@dataclass(frozen=True)
class SentWeights:
    """A completed update, which every engine serves.

    Attributes:
        version: None: the engines kept theirs.
        num_tensors, num_bytes: what was sent, counted once for all engines; 0 on a rank that has no target.
        seconds: duration of `send`.
        staged: whether the old weights served until the commit; False: there was no room for a copy. None:
            there is no target, or a commit's answer was lost and the engine serves the new weights.
        stall_ms: how long forward passes stalled, the longest of all engines; None: as of `staged`.
    """

    version: str | None
    num_tensors: int
    num_bytes: int
    seconds: float
    staged: bool | None
    stall_ms: float | None


class WeightSender:
    """Sends a trainer's weights to one or several engines. Reusable; one update at a time.

    While two buckets are on their way the next one is gathered, so three buckets' worth of tensors exist at
    once. With "broadcast" only one bucket is on its way.

    Args:
        target: an `Engine`; the URL of a server; a list of these, which all get the same update; or None on
            ranks of the trainer that only take part in gathering.
        bucket_bytes: bytes sent at a time (512 MiB); a larger tensor is a bucket of its own.
        pause_mode: what happens to running requests at the commit: "in_place", "retract", "abort", or "wait"
            (also None). Has no effect on a paused engine.
        flush_cache: empty the prefix cache at the commit; None: yes, unless `pause_mode` is "in_place", where
            requests go on with their KV.
        timeout_s: limit of each request to an engine, and of the commit's wait for requests to end.
        session_timeout_s: limit of the whole update; None: the engine's `weight_update_timeout_s`.
        retries: how often a request is repeated that got no answer, or a refusal that may pass.
        retry_pause_s: seconds before each repetition.
        progress: called with (bytes, tensors) sent so far after each bucket, in the thread of `send`; an
            exception from it ends the update.
        transport: how tensors get to a server, see `ServerTarget`. "broadcast" works for engines too: all
            their ranks and this process form one group at the first `send`; `close` ends it.
        backend, master_address, master_port: of that group, see `Broadcaster`.
        api_key: key to send to servers.
        keep_mapped: for tensors on an engine's GPU that keep their addresses between calls of `send`: the
            engine keeps them mapped, which saves most of an update's time. Memory that this process frees
            goes back to the device when the next `send` brings other memory, after `close`, or when the
            process ends.
        delta: keep a copy of what was sent, on the same device as the tensors, and send only what changed: 3
            bytes per changed bfloat16 element. Tensors must have the engine's dtype, and every `send` needs a
            version. Engines that serve another version are sent everything. Not with "broadcast".

    Raises:
        ValueError: an argument out of range, a server given twice, or `delta` with "broadcast".
    """

    def __init__(
        self,
        target: UpdatableEngine | str | Sequence[UpdatableEngine | str] | None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        pause_mode: str | None = "in_place",
        flush_cache: bool | None = None,
        timeout_s: float = 600.0,
        session_timeout_s: float | None = None,
        retries: int = 2,
        retry_pause_s: float = 1.0,
        progress: ProgressCallback | None = None,
        transport: Transport = "auto",
        backend: Backend | None = None,
        master_address: str | None = None,
        master_port: int | None = None,
        api_key: str | None = None,
        keep_mapped: bool = False,
        delta: bool = False,
    ) -> None:
        if transport not in get_args(Transport):
            raise ValueError(f"transport: expected one of {get_args(Transport)}, got {transport!r}")
        if delta and transport == "broadcast":
            raise ValueError("delta: changes are not broadcast; expected another transport")
        if backend not in (None, *get_args(Backend)):
            raise ValueError(f"backend: expected one of {get_args(Backend)}, got {backend!r}")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes: expected a positive number of bytes, got {bucket_bytes}")
        if retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {retries}")
        given = () if target is None else target if isinstance(target, list | tuple) else (target,)
        self._targets: list[Target] = [
            ServerTarget(one, transport, api_key, keep_mapped=keep_mapped)
            if isinstance(one, str)
            else EngineTarget(
                one, f"engine {number}" if len(given) > 1 else "the engine", keep_mapped=keep_mapped
            )
            for number, one in enumerate(given)
        ]
        names = [target.name for target in self._targets]
        if len(set(names)) < len(names):
            raise ValueError(f"target: expected each server once, got {names}")
        self._bucket_bytes = bucket_bytes
        self._progress = progress
        self._served = ServedWeights() if delta else None
        self._broadcaster: Broadcaster | None = None
        if transport == "broadcast" and self._targets:
            self._broadcaster = Broadcaster(self._targets, backend, master_address, master_port)
        self._terms = Terms(
            pause_mode=pause_mode,
            flush_cache=pause_mode != "in_place" if flush_cache is None else flush_cache,
            timeout_s=timeout_s,
            session_timeout_s=session_timeout_s,
            retries=retries,
            retry_pause_s=retry_pause_s,
        )

    def close(self) -> None:
        """Leave the broadcast group, and unmap what was kept mapped. A later `send` sets both up again."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        for target in self._targets:
            target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: str | int | None = None
    ) -> SentWeights:
        """Send all of these weights; returns when every engine serves them.

        Blocks: in an event loop use `asyncio.to_thread`. If the update fails, the remaining tensors are still
        read but not sent, since other ranks of the trainer may be gathering along.

        Args:
            named_tensors: (checkpoint name, whole tensor) pairs, on any device, read one by one in this
                thread. A `DTensor` is gathered here: call `send` on all ranks of its mesh, with the same
                tensors in the same order. Tensors must not change until this returns.
            version: of these weights; None keeps the engines'. With a version, a commit whose answer was lost
                can be told from one that did not happen.

        Raises:
            WeightSendError: an engine refused, failed, or did not answer.
            ValueError, TypeError: not pairs of a name and a dense tensor, a repeated name, or `delta` without
                a version.
        """
        started = time.perf_counter()
        wanted = None if version is None else str(version)
        if self._served is not None and wanted is None:
            raise ValueError(
                "version: expected one with each update, as delta tells by it what engines serve"
            )
        buckets = self._buckets(named_tensors)
        if not self._targets:
            read_rest(buckets)
            return SentWeights(wanted, 0, 0, time.perf_counter() - started, None, None)
        num_threads = AT_ONCE * len(self._targets)
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ebbtide-weights")
        update = Update(self._targets, self._terms, pool, wanted, self._broadcaster)
        try:
            start_threads(pool, num_threads)
            num_tensors, num_bytes = update.stage(buckets, self._progress)
            replies = update.commit()
            if self._served is not None and wanted is not None:
                self._served.commit(wanted)
            pool.shutdown()
            return SentWeights(
                version=wanted,
                num_tensors=num_tensors,
                num_bytes=num_bytes,
                seconds=time.perf_counter() - started,
                staged=_merged(replies, "staged", all),
                stall_ms=_merged(replies, "stall_ms", max),
            )
        except UpdateFailed as failed:
            still_open = update.roll_back()
            self._forget(failed, update.committed)
            read_rest(buckets)
            [first, *_] = failed.failures.values()
            raise _send_error(failed, update.committed, still_open) from first
        except BaseException as error:
            for name, why in update.roll_back().items():
                error.add_note(f"the weight update could not be discarded at {name}: {why}")
            if update.committed:
                error.add_note(f"the new weights are served by {', '.join(update.committed)}")
            if isinstance(error, Exception):
                read_rest(buckets)
            raise

    def send_adapter(
        self,
        name: str,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        config: Mapping[str, Any],
        version: str | int,
        in_flight: str = "stay",
    ) -> SentWeights:
        """Send an adapter as a version of its name; returns when every engine serves it.

        A version never changes, so a lost answer is asked for again, and so may be a whole call that failed:
        engines that have the version keep it.

        Args:
            named_tensors: (PEFT's name, whole tensor) pairs, gathered as `send` does.
            config: what PEFT writes to adapter_config.json.
            in_flight: what becomes of requests that run on the version before, see `load_lora_adapter`.

        Raises:
            WeightSendError: an engine refused, failed, or did not answer.
            ValueError, TypeError: as of `send`.
        """
        started = time.perf_counter()
        tensors = [one for bucket in gathered_buckets(named_tensors, sys.maxsize) for one in bucket.tensors]
        adapter = Adapter(name, str(version), tensors, config, in_flight)
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        if not self._targets:
            return SentWeights(str(version), 0, 0, time.perf_counter() - started, None, None)
        with ThreadPoolExecutor(len(self._targets), thread_name_prefix="ebbtide-adapters") as pool:
            calls = {one.name: pool.submit(self._load_at, one, adapter) for one in self._targets}
            outcomes = outcomes_of(calls)
        if failures := failures_in(outcomes):
            answers = "; ".join(f"{target}: {error}" for target, error in failures.items())
            done = [target for target in outcomes if target not in failures]
            raise WeightSendError(f"{name}@{version} was not loaded everywhere: {answers}", failures, done)
        replies = [one for one in outcomes.values() if isinstance(one, Mapping)]
        seconds, stall_ms = time.perf_counter() - started, _merged(replies, "stall_ms", max)
        return SentWeights(str(version), len(tensors), num_bytes, seconds, True, stall_ms)

    def _load_at(self, target: Target, adapter: Adapter) -> Mapping[str, Any]:
        def attempt() -> Mapping[str, Any]:
            return target.load_adapter(adapter, self._terms.timeout_s)

        what = f"{adapter.name}@{adapter.version} at {target.name}"
        return repeated(attempt, what, self._terms, lambda error: isinstance(error, AnswerLost))

    def _buckets(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        buckets, served = gathered_buckets(named_tensors, self._bucket_bytes), self._served
        if served is not None and self._targets:
            # Runs when the sessions are open, since from then on nobody else can commit. Engines would not
            # notice a wrong base version if nothing has changed, since then nothing is sent.
            if served.version is not None and not self._all_serve(served.version):
                served.forget()
            buckets = served.changes(buckets)
        yield from buckets

    def _all_serve(self, version: str) -> bool:
        """Whether every engine serves this version, with no weights lost by a release."""
        try:
            return all(
                target.serving_version() == version and target.has_all_weights() for target in self._targets
            )
        except EbbtideError:
            return False

    def _forget(self, failed: UpdateFailed, committed: Sequence[str]) -> None:
        """Let the next update be sent whole if an engine refused this one, or only some serve it."""
        is_refused = any(isinstance(error, RequestRejected) for error in failed.failures.values())
        if self._served is not None and (is_refused or committed):
            self._served.forget()


def _send_error(
    failed: UpdateFailed, committed: Sequence[str], still_open: Mapping[str, Exception]
) -> WeightSendError:
    answers = "; ".join(f"{name}: {error}" for name, error in failed.failures.items())
    message = f"the weights were not sent. {failed.what} failed: {answers}"
    if committed:
        message += f". The new weights are served all the same by {', '.join(committed)}"
    for name, why in still_open.items():
        message += f". At {name} the update could not be discarded ({why}): a session ends by itself in time"
    if not committed and not still_open:
        message += ". The update was discarded: no engine serves any of it"
    return WeightSendError(message, failed.failures, committed)


def _merged(replies: Sequence[Mapping[str, Any]], field: str, merge: Callable[[list[Any]], T]) -> T | None:
    values = [reply.get(field) for reply in replies]
    return None if None in values else merge(values)
