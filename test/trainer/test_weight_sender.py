"""A trainer's `WeightSender` against a real engine and a real server: all of an update serves, or nothing."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.deadlines import HANG_S
from fixtures.servers import ENVIRONMENT, Server, free_port, is_alive, running_server, url_of, wait_until
from fixtures.sharding_trainer import send_from_two_processes
from fixtures.weight_sending import (
    BUCKET_BYTES,
    FakeEngine,
    Weights,
    failing_times,
    sender_to,
    serves,
)
from safetensors.torch import load_file

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.trainer import WeightSender, WeightSendError


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    def objects() -> set[Path]:
        return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))

    before = objects()
    yield
    assert objects() == before


# ------------------------------------------------------------------------------------------- what goes well


@pytest.mark.parametrize("transport", ["auto", "body"])
def test_a_server_takes_all_weights_in_many_buckets(
    server: Server, old: Weights, new: Weights, transport: Any
) -> None:
    told: list[tuple[int, int]] = []
    sender = sender_to(server, progress=lambda *sent: told.append(sent), transport=transport)
    num_bytes = sum(tensor.nbytes for tensor in new.values())
    for weights, version in ((new, 7), (old, "8")):
        told.clear()
        sent = sender.send(weights.items(), version=version)
        assert (sent.version, sent.num_tensors, sent.num_bytes) == (str(version), len(new), num_bytes)
        assert sent.staged is True
        assert sent.stall_ms is not None
        assert serves(server, weights, str(version))
        assert told == sorted(told)
        assert len(told) > 5
        assert told[-1] == (num_bytes, len(new))


def test_an_engine_in_this_process_serves_the_old_weights_until_all_are_there(
    engine: Any, old: Weights, new: Weights
) -> None:
    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new.items():
            meta = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1, "temperature": 0})[
                "meta_info"
            ]
            assert meta["weight_version"] == "old"
            yield name, tensor
        assert engine.get_weights_by_name("model.norm.weight") == old["model.norm.weight"].tolist()

    assert sender_to(engine).send(gather(), version="new").num_tensors == len(new)
    assert serves(engine, new, "new")


def test_parameters_views_types_and_a_kept_version(engine: Any, new: Weights) -> None:
    odd: Weights = {name: torch.nn.Parameter(tensor) for name, tensor in new.items()}
    odd["lm_head.weight"] = new["lm_head.weight"].t().contiguous().t()
    odd["model.norm.weight"] = torch.arange(128, dtype=torch.float64)[::2]
    sent = sender_to(engine, bucket_bytes=1).send(odd.items())  # each a bucket of its own
    assert sent.version is None
    assert serves(engine, {name: tensor.detach().float() for name, tensor in odd.items()}, "old")


def test_an_engine_that_has_slept_serves_once_all_weights_are_there(engine: Any, new: Weights) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    with pytest.raises(WeightSendError, match="no engine serves any of it"):
        sender_to(engine, bucket_bytes=1).send(
            [*new.items(), ("model.nothing", torch.zeros(1))], version="bad"
        )
    engine.resume_memory_occupation()
    assert not engine.memory_occupation()["can_run"]
    assert sender_to(engine).send(new.items(), version="new").staged is False
    assert engine.generate(input_ids=[5], sampling_params=params)["meta_info"]["weight_version"] == "new"
    assert serves(engine, new, "new")


def test_the_next_bucket_is_gathered_while_two_are_on_their_way_and_no_more() -> None:
    engine, gathered = FakeEngine(), []
    third_is_gathered = threading.Event()

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcdef":
            gathered.append(name)
            if name == "d":  # "c" is a whole bucket now
                third_is_gathered.set()
            yield name, torch.zeros(8)

    def take(names: list[str]) -> None:
        if names == ["a"]:
            assert third_is_gathered.wait(HANG_S), "the generator waits for the first bucket"
            assert gathered == ["a", "b", "c", "d"]

    engine.on_update = take
    WeightSender(engine, bucket_bytes=32).send(gather())
    assert sorted(engine.updates) == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]


@pytest.fixture(scope="module")
def many_ranks(checkpoint: Path) -> Iterator[Server]:
    """Two replicas of two ranks."""
    flags = ("--device", "cpu", "--skip-tokenizer-init", "--tp-size", "2", "--dp-size", "2")
    with running_server(checkpoint, *flags) as server:
        yield server


def test_sharded_parameters_of_two_processes_reach_every_rank(
    many_ranks: Server, checkpoint: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "sent.safetensors"
    send_from_two_processes(url_of(many_ranks), checkpoint / "model.safetensors", saved)
    assert serves(many_ranks, load_file(saved), "sharded")
    assert replicas_agree(many_ranks)


def replicas_agree(server: Server) -> bool:
    """Whether all replicas say the same, by weights that one version has."""
    params = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": [5, 6], "sampling_params": params}
    replies = [server.post("/generate", {**body, "routed_dp_rank": rank}).json() for rank in range(2)]
    return replies[0]["output_ids"] == replies[1]["output_ids"]


SENDING = """
import sys, psutil
from safetensors.torch import load_file
from ebbtide.trainer import WeightSender

WeightSender(sys.argv[1], bucket_bytes=32 << 10).send(load_file(sys.argv[2]).items(), "x")
[manager] = [child.pid for child in psutil.Process().children() if child.name().startswith("torch_shm")]
print(manager, flush=True)
"""


def test_a_trainer_that_has_ended_leaves_no_process_behind(server: Server, checkpoint: Path) -> None:
    command = [sys.executable, "-c", SENDING, url_of(server), str(checkpoint / "model.safetensors")]
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    manager = int(finished.stdout)
    wait_until(lambda: not is_alive(manager), "torch's manager of shared memory has ended with its trainer")


def test_a_trainer_rank_without_a_target_reads_all(new: Weights) -> None:
    reading = iter(new.items())
    sent = WeightSender(None).send(reading, version=3)
    assert next(reading, None) is None
    assert (sent.version, sent.num_tensors, sent.num_bytes) == ("3", 0, 0)


# -------------------------------------------------------------------------------------------- what does not


@pytest.mark.parametrize("kind", ["engine", "server"])
def test_a_refused_bucket_leaves_the_old_weights_and_is_named(
    request: pytest.FixtureRequest, old: Weights, new: Weights, kind: str
) -> None:
    target = request.getfixturevalue(kind)
    names = list(new)
    bad = {**new, names[9]: torch.zeros(3)}
    reading = iter(bad.items())
    sender = sender_to(target, retries=3, bucket_bytes=1)
    with pytest.raises(WeightSendError, match="bucket 9 ") as caught:
        sender.send(reading, version="bad")
    assert f"{names[9]}: " in str(caught.value)
    assert "no engine serves any of it" in str(caught.value)
    [(name, answer)] = caught.value.failures.items()
    assert name == (url_of(target) if isinstance(target, Server) else "the engine")
    assert isinstance(answer, RequestRejected)
    assert caught.value.committed == ()
    # Other ranks of a trainer would wait in a gather.
    assert next(reading, None) is None
    assert serves(target, old, "old")
    assert sender.send(new.items(), version="new").num_tensors == len(new)
    assert serves(target, new, "new")


@pytest.mark.parametrize(
    ("where", "kind"), [("generator", KeyboardInterrupt), ("progress", ZeroDivisionError)]
)
def test_what_the_caller_raises_ends_the_update(
    engine: Any, old: Weights, new: Weights, where: str, kind: type[BaseException]
) -> None:
    def fail(*sent: object) -> None:
        raise kind("mine")

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new.items())[:15]
        if where == "generator":
            fail()

    with pytest.raises(kind, match="mine"):
        sender_to(engine, progress=fail if where == "progress" else None).send(gather(), version="bad")
    assert serves(engine, old, "old")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("model.norm.weight", torch.zeros(64)), "given twice"),
        (("sparse", torch.zeros(3).to_sparse()), "sparse: expected a dense tensor"),
        (("number", 3), "number: expected a Tensor, got int"),
        ("word", r"pairs \(name, Tensor\)"),
    ],
)
def test_what_is_no_set_of_named_tensors_is_refused(
    engine: Any, old: Weights, new: Weights, pair: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sender_to(engine).send([*new.items(), pair], version="bad")
    assert serves(engine, old, "old")


def test_the_session_of_another_client_stays_as_it_is(engine: Any, new: Weights) -> None:
    engine.begin_weight_update()
    with pytest.raises(WeightSendError, match=r"begin_weight_update failed: .* session is open"):
        sender_to(engine).send(new.items(), version="new")
    assert engine.server_info()["weight_update"]["session_open"]


@pytest.mark.parametrize("next_session", [None, "another"])
def test_a_bucket_whose_session_has_ended_is_refused_and_the_old_weights_serve(
    engine: Any, old: Weights, new: Weights, next_session: str | None
) -> None:
    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(new.items()):
            if index == 10:
                engine.abort_weight_update()
                if next_session is not None:
                    engine.begin_weight_update(session_id=next_session)
            yield item

    # The bucket before it may have been on its way still.
    ended = r"the session '\w+' is not open|the weight update session was discarded: aborted"
    with pytest.raises(WeightSendError, match=ended):
        sender_to(engine, bucket_bytes=1).send(gather(), version="new")
    assert serves(engine, old, "old")


def test_several_targets_serve_the_same_or_where_one_fails_none_of_it(
    engine: Any, server: Server, old: Weights, new: Weights
) -> None:
    other = FakeEngine()
    other.on_update = failing_times(99, RequestRejected("no room", 400))
    sender = WeightSender([engine, other, url_of(server)], bucket_bytes=BUCKET_BYTES, retry_pause_s=0.01)
    with pytest.raises(WeightSendError, match=r"bucket 0 .* engine 1: no room"):
        sender.send(new.items(), version="new")
    assert other.log[-1] == "abort"
    assert serves(engine, old, "old")
    assert serves(server, old, "old")
    other.on_update = lambda _: None
    assert sender.send(new.items(), version="new").num_tensors == len(new)
    assert serves(engine, new, "new")
    assert serves(server, new, "new")


def test_a_commit_that_fails_at_one_of_several_says_who_serves_what(engine: Any, new: Weights) -> None:
    failing = FakeEngine()
    failing.on_end = failing_times(1, EngineError("rank 1 died"))
    with pytest.raises(WeightSendError, match="rank 1 died") as caught:
        WeightSender([engine, failing], bucket_bytes=BUCKET_BYTES).send(new.items(), version="new")
    assert caught.value.committed == ("engine 0",)
    assert "served all the same by engine 0" in str(caught.value)
    assert serves(engine, new, "new")


def test_nobody_answers() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(WeightSendError, match=f"no answer from {url}"):
        WeightSender(url, retries=1, retry_pause_s=0.01).send([("a", torch.zeros(1))], version="1")


URL = "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (URL, {"bucket_bytes": 0}, "bucket_bytes: expected a positive number"),
        (URL, {"retries": -1}, "retries: expected 0 or more"),
        (URL, {"transport": "pigeon"}, "transport: expected one of"),
        (URL, {"transport": "broadcast", "backend": "mpi"}, "backend: expected one of"),
        ("localhost:30000", {}, "http://HOST:PORT"),
        ("ftp://host", {}, "http://HOST:PORT"),
        ([URL, f"{URL}/"], {}, "each server once"),
    ],
)
def test_arguments_that_make_no_sense(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightSender(target, **options)
