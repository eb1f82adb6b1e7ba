"""One update of all targets: its session at each, its buckets, its commit, and what is tried again."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeVar

import torch

from ebbtide.srt.errors import EbbtideError, EngineError, RequestRejected
from ebbtide.trainer.broadcaster import Broadcaster
from ebbtide.trainer.buckets import Bucket
from ebbtide.trainer.targets import AnswerLost, Outcomes, Target, failures_in, outcomes_of

logger = logging.getLogger(__name__)

# Called with the bytes and the tensors that all engines have taken so far.
ProgressCallback = Callable[[int, int], None]
T = TypeVar("T")

# Buckets that an engine is given before it has answered the first of them: it takes one with each forward
# pass then, and not one with every second or third.
AT_ONCE: Final = 2
# How long a thread waits for the others of its pool to be started, should nobody say that they are.
START_S: Final = 0.2


@dataclass(frozen=True)
class Terms:
    """How an update is sent; see `WeightSender`."""

    pause_mode: str | None
    flush_cache: bool
    timeout_s: float
    session_timeout_s: float | None
    retries: int
    retry_pause_s: float


class UpdateFailed(Exception):
    def __init__(self, what: str, failures: dict[str, EbbtideError]) -> None:
        super().__init__(what)
        self.what = what
        self.failures = failures


@dataclass
class Update:
    """One update of all targets.

    Attributes:
        committed: names of targets that serve it.
    """

    _targets: Sequence[Target]
    _terms: Terms
    _pool: ThreadPoolExecutor
    _version: str | None
    _broadcaster: Broadcaster | None
    _open: dict[str, Target] = field(default_factory=dict, init=False)
    _version_before: dict[str, str] = field(default_factory=dict, init=False)
    committed: list[str] = field(default_factory=list, init=False)
    # Targets that were asked to commit, and did not say what came of it.
    _unanswered: set[str] = field(default_factory=set, init=False)

    # Each waits for what a call came to.
    _started: deque[Callable[[], Outcomes]] = field(default_factory=deque, init=False)
    _is_over: threading.Event = field(default_factory=threading.Event, init=False)

    def stage(self, buckets: Iterable[Bucket], progress: ProgressCallback | None) -> tuple[int, int]:
        """Open the sessions and hand over all buckets, each while the next is gathered; tensors and bytes."""
        self._start(self._begin_at)
        self._finish("begin_weight_update")
        num_tensors = num_bytes = 0
        at_once = AT_ONCE if self._broadcaster is None else 1
        on_the_way: deque[Bucket] = deque()
        for bucket in itertools.chain(buckets, (None,)):
            while on_the_way and (bucket is None or len(on_the_way) == at_once):
                first = on_the_way.popleft()
                self._finish(str(first))
                num_tensors += len(first.names)
                num_bytes += first.num_bytes
                if progress is not None:
                    progress(num_bytes, num_tensors)
            if bucket is not None:
                self._start_bucket(bucket)
                on_the_way.append(bucket)
        return num_tensors, num_bytes

    def commit(self) -> list[Mapping[str, Any]]:
        """Make all targets serve what was staged; their replies, an empty one where it was lost."""
        self._start(self._end_at)
        return self._finish("end_weight_update")

    def roll_back(self) -> dict[str, Exception]:
        """End the pool, and discard what is open; returns why, where that failed."""
        # A bucket that arrived behind the abort would find no session, and be served by itself. Waited for is
        # what any thread still does: an interrupt may have come before a call was noted down.
        self._is_over.set()
        self._pool.shutdown(cancel_futures=True)
        with ThreadPoolExecutor(len(self._targets), thread_name_prefix="ebbtide-weights") as pool:
            aborts = {name: pool.submit(self._abort_at, target) for name, target in [*self._open.items()]}
        outcomes = {name: abort.exception() for name, abort in aborts.items()}
        return {name: error for name, error in outcomes.items() if isinstance(error, Exception)}

    def _start(self, call: Callable[[Target], Any]) -> None:
        calls = {target.name: self._pool.submit(call, target) for target in self._targets}
        self._started.append(functools.partial(outcomes_of, calls))

    def _start_bucket(self, bucket: Bucket) -> None:
        if self._broadcaster is None:
            self._start(functools.partial(self._stage_at, bucket=bucket))
            return
        # It is done in this thread, whose current GPU it may be about.
        device = self._broadcaster.device_for(bucket.tensors[0][1])
        self._started.append(self._pool.submit(self._broadcast, self._broadcaster, bucket, device).result)

    def _finish(self, what: str) -> list[Any]:
        """Wait for all targets' answers to the oldest call. Raises `UpdateFailed` unless all have one."""
        outcomes = self._started.popleft()()
        failures = failures_in(outcomes)
        if failures:
            raise UpdateFailed(what, failures)
        return [outcomes[target.name] for target in self._targets]

    def _begin_at(self, target: Target) -> None:
        def attempt() -> None:
            if self._version is not None:
                self._version_before[target.name] = target.serving_version()
            if target.name in self._open:
                target.abort()  # It may have been opened, and then refuses to be opened again.
                del self._open[target.name]
            self._open[target.name] = target
            try:
                target.begin(self._terms.session_timeout_s)
            except RequestRejected:
                del self._open[target.name]  # What is open there is another's.
                raise

        self._repeat(attempt, f"begin_weight_update at {target.name}")

    def _stage_at(self, target: Target, bucket: Bucket) -> None:
        # Where its session has ended meanwhile, or the server is another one, the bucket is refused.
        self._repeat(lambda: target.stage(bucket, self._terms.timeout_s), f"{bucket} at {target.name}")

    def _broadcast(self, broadcaster: Broadcaster, bucket: Bucket, device: torch.device) -> Outcomes:
        """Send a bucket to all targets at once; again, as long as none may have written a part of it."""
        timeout_s = self._terms.timeout_s
        for retries_left in range(self._terms.retries, -1, -1):
            outcomes = broadcaster.connect(device, timeout_s)
            is_connected = not outcomes
            outcomes = outcomes or broadcaster.send(bucket.tensors, timeout_s)
            failures = failures_in(outcomes)
            # An answer that was lost may have said that a part was written.
            again = RequestRejected if is_connected else (RequestRejected, AnswerLost)
            may_pass = all(isinstance(error, again) and _may_pass(error) for error in failures.values())
            if not failures or retries_left == 0 or not may_pass or self._is_over.is_set():
                break
            logger.warning("%s failed, and is broadcast again: %s", bucket, failures)
            self._is_over.wait(self._terms.retry_pause_s)
        return outcomes

    def _end_at(self, target: Target) -> Mapping[str, Any]:
        def attempt() -> Mapping[str, Any]:
            terms = self._terms
            try:
                return target.end(self._version, terms.flush_cache, terms.pause_mode, terms.timeout_s)
            except RequestRejected as error:
                is_unknown = target.name in self._unanswered and error.status == HTTPStatus.CONFLICT
                if is_unknown and self._is_new_at(target) and target.serving_version() == self._version:
                    return {}
                raise
            except Exception:
                self._unanswered.add(target.name)
                raise

        reply = self._repeat(attempt, f"end_weight_update at {target.name}")
        self._note_committed(target)
        return reply

    def _abort_at(self, target: Target) -> None:
        """Discard its session, or find that it was committed and only the answer was lost."""
        if target.abort() or target.name not in self._unanswered:
            return
        if not self._is_new_at(target):
            raise EngineError("its session has ended, and without a new version there is no telling how")
        if target.serving_version() == self._version:
            self._note_committed(target)

    def _note_committed(self, target: Target) -> None:
        del self._open[target.name]
        self.committed.append(target.name)

    def _is_new_at(self, target: Target) -> bool:
        """Whether the version tells the new weights from those before them."""
        return self._version is not None and self._version != self._version_before[target.name]

    def _repeat(self, attempt: Callable[[], T], what: str) -> T:
        def may_pass(error: EbbtideError) -> bool:
            return _may_pass(error) and not self._is_over.is_set()

        return repeated(attempt, what, self._terms, may_pass, self._is_over.wait)


def repeated(
    attempt: Callable[[], T],
    what: str,
    terms: Terms,
    may_pass: Callable[[EbbtideError], bool],
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Try until it succeeds, fails for good or too often."""
    for retries_left in range(terms.retries, -1, -1):
        try:
            return attempt()
        except (AnswerLost, RequestRejected) as error:
            if retries_left == 0 or not may_pass(error):
                raise
            logger.warning("%s failed, and is tried again: %s", what, error)
        pause(terms.retry_pause_s)
    raise AssertionError("the last attempt returns or raises")


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Start the threads of a pool ahead of their work: one whose start is interrupted is not known to the
    pool, and nobody waits for what it does."""
    are_all = threading.Event()
    try:
        for _ in range(count):
            pool.submit(are_all.wait, START_S)
    finally:
        are_all.set()


def _may_pass(error: EbbtideError) -> bool:
    """Whether the same request may succeed later."""
    if not isinstance(error, RequestRejected):
        return True
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return True
    # A refusal that lists tensors is of a payload that does not fit the model.
    return error.status == HTTPStatus.BAD_REQUEST and not error.fields.get("errors")
