"""What a `WeightSender` sends again, and what it must not."""

import itertools
import json
import threading
import time
from typing import Any

import pytest
import torch
from fixtures.line_faults import raised_at_line
from fixtures.servers import Server, url_of
from fixtures.weight_sending import (
    FakeEngine,
    Weights,
    failing_times,
    lossy_proxy,
    sender_to,
    serves,
)

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.trainer import WeightSender, WeightSendError
from ebbtide.trainer.targets import AnswerLost


@pytest.mark.parametrize(
    "error", [RequestRejected("the update failed, the old weights serve"), RequestRejected("busy", 503)]
)
def test_a_refusal_that_may_pass_is_retried(error: Exception) -> None:
    engine = FakeEngine()
    engine.on_update = failing_times(2, error)
    sender = WeightSender(engine, retries=2, retry_pause_s=0.01)
    assert sender.send([("a", torch.zeros(2))], version="1").num_tensors == 1
    assert engine.log == ["begin", "update", "update", "update", "end"]


@pytest.mark.parametrize(
    "error",
    [
        RequestRejected("1 of 1 tensors do not fit", errors=[{"name": "a"}]),
        RequestRejected("no session", 409),
        EngineError("rank 0 died"),
    ],
)
def test_a_failure_that_will_not_pass_is_not_retried(error: Exception) -> None:
    engine = FakeEngine()
    engine.on_update = failing_times(1, error)
    with pytest.raises(WeightSendError, match=str(error)):
        WeightSender(engine, retries=2, retry_pause_s=0.01).send([("a", torch.zeros(2))], version="1")
    assert engine.log == ["begin", "update", "abort"]


@pytest.mark.parametrize(
    ("path", "when"),
    [
        ("/memory_occupation", "request"),
        ("/begin_weight_update", "answer"),
        ("/update_weights_from_tensor", "answer"),
        ("/end_weight_update", "request"),
        ("/end_weight_update", "answer"),
    ],
)
def test_what_is_lost_on_its_way_is_made_good(server: Server, new: Weights, path: str, when: str) -> None:
    with lossy_proxy(url_of(server), path, when) as (url, lost, _):
        sent = sender_to(url, retries=1).send(new.items(), version="new")
    assert lost == [path]
    assert serves(server, new, "new")
    is_unknown = path == "/end_weight_update" and when == "answer"
    assert (sent.stall_ms is None) == is_unknown


def test_a_server_that_stays_away_is_discarded_where_it_can_be(
    server: Server, old: Weights, new: Weights
) -> None:
    with (
        lossy_proxy(url_of(server), "/update_weights_from_tensor", "answer", times=99) as (url, _, _),
        pytest.raises(WeightSendError, match=r"bucket 0 .* no answer"),
    ):
        sender_to(url, retries=1).send(new.items(), "new")
    assert serves(server, old, "old")


def test_a_session_whose_beginning_failed_is_discarded() -> None:
    engine = FakeEngine()
    begin = engine.begin_weight_update

    def fail_once_open(**fields: Any) -> Any:
        begin(**fields)
        raise EngineError("HTTP status 504")

    engine.begin_weight_update = fail_once_open  # type: ignore[method-assign]
    with pytest.raises(WeightSendError, match=r"begin_weight_update failed: .* 504"):
        sender_to(engine).send([("a", torch.zeros(1))], "new")
    assert not engine.is_open


@pytest.mark.parametrize(
    ("version", "is_committed", "committed", "message"),
    [
        ("new", True, ("the engine",), "served all the same by the engine"),
        ("new", False, (), "no engine serves any of it"),
        (None, True, (), "without a new version there is no telling"),
        (None, False, (), "no engine serves any of it"),
    ],
)
def test_a_commit_that_nobody_answers_is_looked_into(
    version: str | None, is_committed: bool, committed: tuple[str, ...], message: str
) -> None:
    engine = FakeEngine()

    def lose() -> None:
        if is_committed:
            engine.is_open, engine.weight_version = False, version or engine.weight_version
        raise AnswerLost("the line went dead")

    engine.on_end = lose
    with pytest.raises(WeightSendError, match=message) as caught:
        sender_to(engine).send([("a", torch.zeros(1))], version)
    assert caught.value.committed == committed
    assert not engine.is_open


def test_an_interrupt_at_any_line_leaves_no_session_open_and_says_who_serves_what() -> None:
    engines = [FakeEngine(), FakeEngine()]
    sender = WeightSender(engines, bucket_bytes=4)
    for number in itertools.count():
        named = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
        try:
            with raised_at_line(number, KeyboardInterrupt(), "trainer/update.py", "trainer/targets.py"):
                sender.send(named, version=number)
        except KeyboardInterrupt as interrupt:
            notes = " ".join(getattr(interrupt, "__notes__", []))
            serving = [engine.weight_version == str(number) for engine in engines]
            assert [f"engine {one}" in notes for one in range(2)] == serving, f"at line {number}"
            assert not any(engine.is_open for engine in engines), f"at line {number}"
            continue
        break
    assert number > 100


def test_an_interrupt_while_a_thread_starts_leaves_nothing_that_opens_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, start = FakeEngine(), threading.Thread.start
    begin, is_interrupted = engine.begin_weight_update, iter([True, False, True, False, False])

    def begin_slowly(**fields: Any) -> Any:
        time.sleep(0.05)
        return begin(**fields)

    def start_interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("ebbtide-weights") and next(is_interrupted):
            raise KeyboardInterrupt

    engine.begin_weight_update = begin_slowly  # type: ignore[method-assign]
    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sender_to(engine).send([("a", torch.zeros(1))], "new")
    assert sender_to(engine).send([("a", torch.zeros(1))], "new").num_tensors == 1


def test_whatever_is_sent_names_its_session(server: Server) -> None:
    """So that a bucket that comes too late is refused, rather than served by itself."""
    paths = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    named = [("model.norm.weight", torch.ones(64))]
    with lossy_proxy(url_of(server), "/nothing", "request") as (url, _, passed):
        for _ in range(2):
            WeightSender(url, transport="body").send(named)
    sessions = [(path, json.loads(body)["session_id"]) for path, body in passed if path in paths]
    assert [path for path, _ in sessions] == paths * 2
    assert [len({session for _, session in sessions[start : start + 3]}) for start in (0, 3)] == [1, 1]
    assert sessions[0][1] != sessions[3][1]


def test_an_adapter_whose_answer_was_lost_is_sent_again() -> None:
    engine, asked = FakeEngine(), []
    lose = failing_times(1, AnswerLost("the line went dead"))

    def load(**fields: Any) -> dict[str, Any]:
        asked.append((fields["lora_name"], fields["lora_version"]))
        lose()
        return {"stall_ms": 0.5}

    engine.load_lora_adapter_from_tensors = load  # type: ignore[attr-defined]
    tensors = {"q_proj.lora_A.weight": torch.zeros(2, 3)}
    sent = sender_to(engine, retries=1).send_adapter("policy", tensors.items(), {"r": 2}, version=3)
    assert asked == [("policy", "3")] * 2
    assert (sent.version, sent.num_tensors, sent.stall_ms) == ("3", 1, 0.5)
    lose = failing_times(1, RequestRejected("other contents", 409))
    with pytest.raises(WeightSendError, match="other contents"):
        sender_to(engine, retries=1).send_adapter("policy", tensors.items(), {"r": 2}, version=3)
