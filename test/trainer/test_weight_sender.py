"""A trainer's `WeightSender` against a real engine and a real server: all of an update serves, or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fixtures.servers import ENVIRONMENT, Server, free_port, is_alive, running_server, url_of, wait_until
from fixtures.sharding_trainer import send_from_two_processes
from safetensors.torch import load_file

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.trainer import WeightSender, WeightSendError

Weights = dict[str, torch.Tensor]
ALL_ROWS = 10**6
# Of a model of 380 kB: a dozen buckets.
BUCKET_BYTES = 32 << 10


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    def objects() -> set[Path]:
        return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))

    before = objects()
    yield
    assert objects() == before


def serves(target: Any, weights: Weights, version: str) -> bool:
    """Whether these weights serve, bit for bit, and no session is open."""
    if isinstance(target, Server):
        info = target.get("/server_info").json()
        found = target.get("/model_info").json()["weight_version"]

        def read(name: str) -> Any:
            return target.post("/get_weights_by_name", {"name": name, "truncate_size": ALL_ROWS}).json()
    else:
        info, found = target.server_info(), target.weight_version

        def read(name: str) -> Any:
            return target.get_weights_by_name(name, ALL_ROWS)

    is_equal = all(torch.equal(torch.tensor(read(name)), tensor) for name, tensor in weights.items())
    return is_equal and found == version and not info["weight_update"]["session_open"]


def sender_to(target: Any, **options: Any) -> WeightSender:
    options = {"bucket_bytes": BUCKET_BYTES, "retries": 0, "retry_pause_s": 0.01, **options}
    return WeightSender(url_of(target) if isinstance(target, Server) else target, **options)


@pytest.fixture(params=["engine", "server"])
def target(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------------------------------- what goes well


@pytest.mark.parametrize("transport", ["auto", "memory", "body"])
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


def test_the_next_bucket_is_gathered_while_one_is_on_its_way_and_no_more() -> None:
    engine, gathered = FakeEngine(), []
    second_is_gathered = threading.Event()

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            gathered.append(name)
            if name == "c":  # "b" is a whole bucket now
                second_is_gathered.set()
            yield name, torch.zeros(8)

    def take(names: list[str]) -> None:
        if names == ["a"]:
            assert second_is_gathered.wait(30), "the generator waits for the first bucket"
            assert gathered == ["a", "b", "c"]

    engine.on_update = take
    WeightSender(engine, bucket_bytes=32).send(gather())
    assert engine.updates == [["a"], ["b"], ["c"], ["d"]]


@pytest.fixture(scope="module")
def many_ranks(checkpoint: Path) -> Iterator[Server]:
    """Two replicas of two ranks."""
    flags = ("--device", "cpu", "--skip-tokenizer-init", "--tp-size", "2", "--dp-size", "2")
    with running_server(checkpoint, *flags) as server:
        yield server


@pytest.mark.parametrize("transport", ["memory", "body"])
def test_every_rank_of_every_replica_gets_the_weights(
    many_ranks: Server, new: Weights, old: Weights, transport: Any
) -> None:
    sender = sender_to(many_ranks, transport=transport)
    for weights, version in ((old, "old"), (new, f"by {transport}")):
        sent = sender.send(weights.items(), version=version)
        assert (sent.num_tensors, sent.staged) == (len(weights), True)
        assert serves(many_ranks, weights, version)
        assert replicas_agree(many_ranks)


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
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    manager = int(finished.stdout)
    wait_until(lambda: not is_alive(manager), "torch's manager of shared memory has ended with its trainer")


def test_a_trainer_rank_without_a_target_reads_all(new: Weights) -> None:
    reading = iter(new.items())
    sent = WeightSender(None).send(reading, version=3)
    assert next(reading, None) is None
    assert (sent.version, sent.num_tensors, sent.num_bytes) == ("3", 0, 0)


# -------------------------------------------------------------------------------------------- what does not


@pytest.mark.parametrize("transport", ["memory", "body"])
def test_a_refused_bucket_leaves_the_old_weights_and_is_named(
    target: Any, old: Weights, new: Weights, transport: Any
) -> None:
    names = list(new)
    bad = {**new, names[9]: torch.zeros(3)}
    reading = iter(bad.items())
    sender = sender_to(target, transport=transport, retries=3, bucket_bytes=1)
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


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["generator", "progress"])
def test_what_the_caller_raises_ends_the_update(
    target: Any, old: Weights, new: Weights, kind: type[BaseException], where: str
) -> None:
    def fail(*sent: object) -> None:
        raise kind("mine")

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new.items())[:15]
        if where == "generator":
            fail()

    with pytest.raises(kind, match="mine"):
        sender_to(target, progress=fail if where == "progress" else None).send(gather(), version="bad")
    assert serves(target, old, "old")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("model.norm.weight", torch.zeros(64)), "given twice"),
        (("sparse", torch.zeros(3).to_sparse()), "sparse: expected a dense tensor"),
        (("number", 3), r"pairs \(name, Tensor\)"),
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


def test_a_bucket_that_finds_no_session_is_told_of_as_a_mixture() -> None:
    engine = FakeEngine()

    def end_session(names: list[str]) -> None:
        engine.is_open = False

    engine.on_update = end_session
    with pytest.raises(WeightSendError, match="mixture") as caught:
        sender_to(engine).send([("a", torch.zeros(2))], version="new")
    assert "no engine serves" not in str(caught.value)


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


@pytest.mark.parametrize("options", [{"bucket_bytes": 0}, {"retries": -1}, {"transport": "pigeon"}])
def test_arguments_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        WeightSender("http://127.0.0.1:30000", **options)


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://host", "http://"])
def test_a_url_must_be_one(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        WeightSender(url)


# -------------------------------------------------------------------------------------------------- retries


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


def test_a_bucket_is_not_sent_again_to_an_engine_without_the_session() -> None:
    engine = FakeEngine()

    def lose(names: list[str]) -> None:
        engine.is_open = False
        raise RequestRejected("busy", 503)

    engine.on_update = lose
    with pytest.raises(WeightSendError, match="ended in between"):
        WeightSender(engine, retry_pause_s=0.01).send([("a", torch.zeros(2))], version="1")
    assert engine.log.count("update") == 1


@pytest.mark.parametrize(
    "path",
    ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/memory_occupation"],
)
@pytest.mark.parametrize("when", ["request", "answer"])
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


# ------------------------------------------------------------------------------------------------ stand-ins


def failing_times(times: int, error: Exception) -> Callable[..., None]:
    left = [error] * times

    def fail(*_: object) -> None:
        if left:
            raise left.pop()

    return fail


class FakeEngine:
    """Keeps a session, and does as it is told where it matters."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.updates: list[list[str]] = []
        self.is_open = False
        self.weight_version = "old"
        self.on_update: Callable[[list[str]], None] = lambda _: None
        self.on_end: Callable[[], None] = lambda: None

    def begin_weight_update(self, **fields: Any) -> dict[str, Any]:
        self.log.append("begin")
        self.is_open = True
        return {}

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], **fields: Any
    ) -> dict[str, Any]:
        self.log.append("update")
        names = [name for name, _ in named_tensors]
        self.on_update(names)
        self.updates.append(names)
        return {"committed": not self.is_open}

    def end_weight_update(self, **fields: Any) -> dict[str, Any]:
        self.log.append("end")
        self.on_end()
        self.is_open = False
        return {"staged": True, "stall_ms": 1.0}

    def abort_weight_update(self) -> dict[str, Any]:
        self.log.append("abort")
        self.is_open = False
        return {}

    def server_info(self) -> dict[str, Any]:
        return {"weight_update": {"session_open": self.is_open}}


@contextmanager
def lossy_proxy(
    upstream: str, path: str, when: str, times: int = 1
) -> Iterator[tuple[str, list[str], list[tuple[str, bytes]]]]:
    """Hands requests on, but for the first ones of a path: the request or the answer is lost there.

    Its address, the paths of what was lost, and paths and bodies of what was not.
    """
    lost: list[str] = []
    passed: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_lost = self.path == path and len(lost) < times
            if is_lost:
                lost.append(path)
            else:
                passed.append((self.path, body))
            if not (is_lost and when == "request"):
                answer = httpx.request(self.command, upstream + self.path, content=body, timeout=60)
            if not is_lost:
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", lost, passed
        finally:
            server.shutdown()
            thread.join()
