"""What a `WeightSender` sends again, and what it must not."""

import json
from typing import Any

import pytest
import torch
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
