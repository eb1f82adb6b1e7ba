"""One weight update of all targets: sessions, buckets, commit and retries."""

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

# Called with the number of bytes and of tensors that all engines have taken so far.
ProgressCallback = Callable[[int, int], None]
T = TypeVar("T")

# Buckets that are sent before the first is answered. So an engine takes one in each forward pass, not one in
# every second or third.
AT_ONCE: Final = 2
# The longest time that a pool's thread waits until all others are started.
START_S: Final = 0.2


@dataclass(frozen=True)
class Terms:
    """Options of an update; see `WeightSender`."""

    pause_mode: str | None
    flush_cache: bool
    timeout_s: float
    session_timeout_s: float | None
    retries: int
    retry_pause_s: float


class UpdateFailed(Exception):
    """A step of an update failed at some targets. `what`: the step; `failures`: their errors, by name."""

    def __init__(self, what: str, failures: dict[str, EbbtideError]) -> None:
        super().__init__(what)
        self.what = what
        self.failures = failures


@dataclass
class Update:
    """One update of all targets.

    Attributes:
        committed: names of targets that serve the new weights.
    """

    _targets: Sequence[Target]
    _terms: Terms
    _pool: ThreadPoolExecutor
    _version: str | None
    _broadcaster: Broadcaster | None
    _open: dict[str, Target] = field(default_factory=dict, init=False)
    _version_before: dict[str, str] = field(default_factory=dict, init=False)
    committed: list[str] = field(default_factory=list, init=False)
    # Names of targets that were asked to commit, and whose outcome is unknown.
    _unanswered: set[str] = field(default_factory=set, init=False)
    # Functions that wait for the outcomes of the calls under way, oldest first.
    _started: deque[Callable[[], Outcomes]] = field(default_factory=deque, init=False)
    _is_over: threading.Event = field(default_factory=threading.Event, init=False)

    def stage(self, buckets: Iterable[Bucket], progress: ProgressCallback | None) -> tuple[int, int]:
        """Open the sessions and send all buckets; returns the number of tensors and of bytes.

        The next bucket is gathered while others are on their way.

        Raises:
            UpdateFailed: some target failed or refused.
        """
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
        """Let all targets serve what was staged; returns their replies, {} for one that was lost.

        Raises:
            UpdateFailed: some target failed or refused.
        """
        self._start(self._end_at)
        return self._finish("end_weight_update")

    def roll_back(self) -> dict[str, Exception]:
        """End the pool and discard the open sessions; returns the errors of targets where that failed."""
        # The pool ends first, so that no bucket arrives after the abort. It is not enough to wait for the
        # calls in `_started`: an interrupt may have come before a call was added there.
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
        # Chosen in this thread, since it may be this thread's current GPU.
        device = self._broadcaster.device_for(bucket.tensors[0][1])
        self._started.append(self._pool.submit(self._broadcast, self._broadcaster, bucket, device).result)

    def _finish(self, what: str) -> list[Any]:
        """Wait for the outcomes of the oldest call; returns them in the order of the targets.

        Raises:
            UpdateFailed: some target failed or refused.
        """
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
                target.abort()  # The attempt before may have opened a session, and a second one is refused.
                del self._open[target.name]
            self._open[target.name] = target
            try:
                target.begin(self._terms.session_timeout_s)
            except RequestRejected:
                del self._open[target.name]  # If a session is open there, it is not this update's.
                raise

        self._repeat(attempt, f"begin_weight_update at {target.name}")

    def _stage_at(self, target: Target, bucket: Bucket) -> None:
        # A repetition is safe: if the session has ended or the server restarted, the bucket is refused.
        self._repeat(lambda: target.stage(bucket, self._terms.timeout_s), f"{bucket} at {target.name}")

    def _broadcast(self, broadcaster: Broadcaster, bucket: Bucket, device: torch.device) -> Outcomes:
        """Broadcast a bucket to all targets; retry only if no target can have written a part of it."""
        timeout_s = self._terms.timeout_s
        for retries_left in range(self._terms.retries, -1, -1):
            outcomes = broadcaster.connect(device, timeout_s)
            is_connected = not outcomes
            outcomes = outcomes or broadcaster.send(bucket.tensors, timeout_s)
            failures = failures_in(outcomes)
            # With a lost answer, a part of the bucket may have been written.
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
        """Discard a target's session, or note that it was committed and only the answer was lost.

        Raises:
            EngineError: the session has ended, and it is unknown whether it was committed.
        """
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
        """Whether the new version differs from the one before, so that it shows if the commit happened."""
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
    """Call `attempt` until it succeeds, at most `1 + terms.retries` times; returns its result.

    Args:
        what: names the call in the log.
        may_pass: whether to try again after an error.
        pause: sleeps for a number of seconds.

    Raises:
        AnswerLost, RequestRejected: the last attempt's error.
        Exception: any other error, at once.
    """
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
    """Start all threads of a pool before it gets work.

    If an interrupt came while a thread starts, the pool would not know the thread nor wait for its work.
    """
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
    # A refusal with a list of errors is for tensors that do not fit the model.
    return error.status == HTTPStatus.BAD_REQUEST and not error.fields.get("errors")
