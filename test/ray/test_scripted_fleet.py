"""What a fleet does when replicas refuse, fail and die: engines by script, without a cluster."""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, PropertyMock, patch

import pytest
from fixtures.deadlines import HANG_S
from fixtures.scripted_engine import updated
from fixtures.servers import wait_until

from ebbtide.ray import ActorDied, RayEngine, RayFleet, supervisor
from ebbtide.ray.continuation import OutputSoFar
from ebbtide.ray.joint_engine import TENSORS, Answered, FleetCall
from ebbtide.srt.errors import ConfigurationError, EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortReqOutput,
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    GivenUp,
    LoadLoRAAdapterReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    Prepared,
    Refusal,
    WeightSessionReqOutput,
)

PROMPT = [1, 2, 3]
PARAMS = {"max_new_tokens": 6, "sampling_seed": 7}
REPLIES: dict[type, Any] = {
    AbortReq: AbortReqOutput(changed=False, num_aborted=0),
    AbortWeightUpdateReqInput: WeightSessionReqOutput(changed=True),
    BeginWeightUpdateReqInput: WeightSessionReqOutput(changed=True),
    ContinueGenerationReqInput: ContinueGenerationReqOutput(changed=True),
    PauseGenerationReqInput: PauseGenerationReqOutput(
        changed=True, mode=PauseMode.WAIT, num_running=0, num_retracted=0, num_aborted=0, num_queued=0
    ),
}


class ScriptedEngine:
    """Counts upwards from the last token of its prompt, one token per chunk.

    Attributes:
        dies_after: chunks of its first request; None: it lives.
        asked: every request and every call, in order.
        faults: what a method raises, by its name; "commit": what comes of one.
        refusals: what is refused, by the method.
        then: what is done behind a method's first call.
        adapters: those that it has, as its state says.
        folders: the checksum of what lies in a folder.
    """

    num_ranks = 1

    def __init__(self, slot: int, life: int, version: str) -> None:
        self.slot, self.life, self.version = slot, life, version
        self.dies_after: int | None = None
        self.asked: list[tuple[str, Any]] = []
        self.faults: dict[str, Exception] = {}
        self.refusals: dict[str, Refusal] = {}
        # The first replicas are paused and asleep, and new ones begin otherwise.
        self.paused, self.kv_cache = life == 0, "resident" if life else "released"
        self.then: dict[str, Callable[[], None]] = {}
        self.session_open = False
        self.adapters: list[dict[str, Any]] = []
        self.folders: dict[str, str] = {}
        self.actor = self
        self.dead = asyncio.Event()
        self.verdicts: dict[str, asyncio.Future[str | None]] = {}

    async def async_ended(self) -> str:
        await self.dead.wait()
        return "it was killed"

    def die(self) -> ActorDied:
        self.dead.set()
        return ActorDied("the actor has died: it was killed")

    async def stream(
        self, so_far: OutputSoFar | None, fields: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        self.asked.append(("generate", {**fields, "so_far": so_far}))
        if so_far is None:
            ids, limit = fields["input_ids"], fields["sampling_params"].max_new_tokens
        else:
            ids = so_far.prompt_ids + so_far.output_ids
            limit = so_far.params.max_new_tokens - len(so_far.output_ids)
        for number in range(limit):
            if number == self.dies_after:
                raise self.die()
            await asyncio.sleep(0)
            is_last = number == limit - 1
            yield {
                "output_ids": [ids[-1] + number + 1],
                "prompt_token_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": "length", "length": limit} if is_last else None,
                    "prompt_tokens": len(ids),
                    "completion_tokens": number + 1,
                    "num_retractions": 0,
                    "weight_versions": [{"version": self.version, "start": 0, "end": number + 1}],
                    "kv_weight_versions": [self.version],
                    "lora_versions": [{"version": self.version, "start": 0, "end": number + 1}],
                    "output_token_logprobs": [(-0.5, ids[-1] + number + 1, None)],
                    "output_top_logprobs": [[(-0.5, ids[-1] + number + 1, None)]],
                },
            }
        if limit == self.dies_after:
            raise self.die()

    async def answer(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(("generate", fields))
        return await self._whole(fields)

    async def _whole(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self.dies_after is not None:
            raise self.die()
        return {"output_ids": [0], "meta_info": {}}

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((method, args))
        self._fail_at(method)
        if method == "decide":
            self.verdicts[args[0]].set_result(args[1])
        if method == "take_weights":
            self.version = args[1]
        self._note_state(method)
        if method == "load_lora_adapter":
            return self._load(args[0], kwargs["lora_version"], args[1])
        if method == "unload_lora_adapter":
            only = kwargs.get("lora_version")
            self.adapters = [
                one for one in self.adapters if one["name"] != args[0] or only not in (None, one["version"])
            ]
        return {
            "weight_version": self.version,
            "per_engine_checksum": self.version,
            "weight_update": {"session_open": self.session_open},
            "state": {
                "generation": {"state": "paused", "mode": "retract"} if self.paused else {"state": "running"},
                "adapters": list(self.adapters),
                "tags": {"weights": {"state": "resident"}, "kv_cache": {"state": self.kv_cache}},
            },
        }

    async def propose(self, call: FleetCall) -> AsyncGenerator[Prepared | Answered, None]:
        fields = call.fields
        self.asked.append((call.kind.__name__, fields))
        self._fail_at("propose")
        reply: Any = REPLIES.get(call.kind)
        if "propose" in self.refusals:
            reply = self.refusals.pop("propose")
        elif call.is_joint:
            verdict = self.verdicts[call.id] = asyncio.get_running_loop().create_future()
            yield Prepared()
            refusal = await verdict
            self._fail_at("commit")
            if refusal is not None:
                reply = GivenUp(status=400, message=refusal)
            elif "lora_name" in fields:
                self._load(fields["lora_name"], fields["lora_version"], fields.get("lora_path", ""))
                reply = loaded(fields["lora_name"], fields["lora_version"])
            else:
                self.version = fields["weight_version"]
                reply = updated(self.version)
        yield Answered(reply, {"weight_version": self.version}, self.session_open)

    def _load(self, name: str, version: str, path: str) -> dict[str, Any]:
        checksum = self.folders.get(path, "of tensors")
        self.adapters.append(
            {"name": name, "version": version, "path": path, "pinned": False, "checksum": checksum}
        )
        return {"checksum": checksum}

    @property
    def labels(self) -> list[str]:
        return [f"{one['name']}@{one['version']}" for one in self.adapters]

    def _note_state(self, method: str) -> None:
        match method:
            case "pause_generation" | "continue_generation":
                self.paused = method == "pause_generation"
            case "release_memory_occupation":
                self.kv_cache = "released"
            case "resume_memory_occupation":
                self.kv_cache = "resident"
        if method in self.then:
            self.then.pop(method)()

    def _fail_at(self, step: str) -> None:
        if step in self.faults:
            raise self.faults.pop(step)

    def kill(self) -> None:
        self.asked.append(("kill", ()))


def loaded(name: str, version: str) -> LoadLoRAAdapterReqOutput:
    return LoadLoRAAdapterReqOutput(
        changed=True,
        lora_name=name,
        lora_version=version,
        checksum="",
        num_tensors=1,
        num_bytes=1,
        num_moved=0,
        stall_ms=0.0,
        loaded_adapters={name: version},
    )


class ScriptedFleet(RayFleet):
    """A fleet of two.

    Attributes:
        started: all engines there ever were, and the changes to their arguments.
        start_faults: what the next starts raise.
    """

    def __init__(self, *start_faults: Exception) -> None:
        self.started: list[tuple[ScriptedEngine, dict[str, Any]]] = []
        self.start_faults = list(start_faults)
        super().__init__(2)
        # They start at the same time, in any order.
        self.started.sort(key=lambda start: start[0].slot)

    def _start_engine(self, slot: int, changes: Any) -> Any:
        if self.start_faults:
            raise self.start_faults.pop(0)
        engine = ScriptedEngine(slot, len(self.started) // 2, "first")
        self.started.append((engine, dict(changes)))
        return engine

    def requests(self) -> list[dict[str, Any]]:
        """Those of all replicas, one replica after the other."""
        return [
            fields for engine, _ in self.started for method, fields in engine.asked if method == "generate"
        ]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda: None)


@pytest.fixture
def no_death_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """News of a death that there was not is not waited for as long as usual."""
    monkeypatch.setattr("ebbtide.ray.controller.DEATH_NEWS_S", 0.2)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedFleet]:
    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)
    monkeypatch.setattr("ebbtide.ray.fleet.shut_down", lambda engines: None)
    with ScriptedFleet() as fleet:
        yield fleet


def generate(fleet: ScriptedFleet, **fields: Any) -> Any:
    params = {**PARAMS, **fields.pop("params", {})}
    return fleet.generate(input_ids=PROMPT, sampling_params=params, **fields)


def first_engine(fleet: ScriptedFleet) -> ScriptedEngine:
    """The one that the first request goes to."""
    return fleet.started[0][0]


@pytest.mark.parametrize("stream", [False, True])
def test_another_replica_goes_on_behind_what_was_given(fleet: ScriptedFleet, stream: bool) -> None:
    first_engine(fleet).dies_after = 2
    fleet.started[1][0].version = "second"
    answer = generate(fleet, stream=stream, timeout_s=60, return_flat_raw_output_top_logprobs=True)
    answer = list(answer)[-1] if stream else answer
    assert answer["output_ids"] == [4, 5, 6, 7, 8, 9]
    meta = answer["meta_info"]
    spans = [{"version": "first", "start": 0, "end": 2}, {"version": "second", "start": 2, "end": 6}]
    assert (meta["weight_versions"], meta["lora_versions"]) == (spans, spans)
    assert meta["kv_weight_versions"] == ["first", "second"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_moves"]) == (3, 6, 1)
    assert (meta["finish_reason"]["length"], meta["replica"]) == (6, "replica 1")
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["output_top_logprobs_shape"] == [6, 1]
    assert meta["output_top_logprobs_idx_flat"] == answer["output_ids"]
    assert "output_top_logprobs" not in meta
    first, second = fleet.requests()
    so_far = second["so_far"]
    assert (so_far.rid, so_far.prompt_ids, so_far.output_ids) == (first["rid"], [1, 2, 3], [4, 5])
    assert (so_far.params.max_new_tokens, so_far.params.sampling_seed) == (6, 7)
    assert not {"input_ids", "sampling_params"} & second.keys()
    assert 0 < second["timeout_s"] < 60


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_dies_behind_the_end_of_an_answer_takes_nothing_of_it_along(
    fleet: ScriptedFleet, stream: bool
) -> None:
    first_engine(fleet).dies_after = PARAMS["max_new_tokens"]
    answer = generate(fleet, stream=stream)
    answer = list(answer)[-1] if stream else answer
    assert (answer["output_ids"], answer["meta_info"]["num_moves"]) == ([4, 5, 6, 7, 8, 9], 0)
    assert len(fleet.requests()) == 1


def test_a_request_that_moves_waits_where_new_ones_are_turned_away(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.ray.fleet.TURNED_AWAY_S", 0.01)
    stream, refusals = ScriptedEngine.stream, [RequestRejected("the queue is full", 503)] * 3

    async def full(engine: ScriptedEngine, *request: Any) -> AsyncGenerator[dict[str, Any], None]:
        if engine is not first_engine(fleet) and refusals:
            raise refusals.pop()
        async for chunk in stream(engine, *request):
            yield chunk

    monkeypatch.setattr(ScriptedEngine, "stream", full)
    first_engine(fleet).dies_after = 2
    answer = generate(fleet)
    assert (answer["output_ids"], answer["meta_info"]["num_moves"]) == ([4, 5, 6, 7, 8, 9], 1)
    refusals.append(RequestRejected("the queue is full", 503))
    with pytest.raises(RequestRejected, match="the queue is full"):
        fleet.generate(input_ids=[[1], [2]])


@pytest.mark.parametrize(
    "fields",
    [
        {"params": {"stop": ["x"]}},
        {"params": {"n": 2}},
        {"params": {"custom_params": {"return_top_p_token_ids": True}}},
        {"return_sampling_mask": True},
    ],
    ids=str,
)
def test_what_cannot_go_on_begins_anew(fleet: ScriptedFleet, fields: dict[str, Any]) -> None:
    first_engine(fleet).dies_after = 2
    # By the other replica, or by the one in place of the first: whichever is quicker.
    answer = generate(fleet, **fields)
    assert (answer["output_ids"], answer["meta_info"]["num_moves"]) == ([0], 1)
    first, second = fleet.requests()
    assert first == second


def test_a_stream_that_cannot_go_on_ends_with_the_reason(fleet: ScriptedFleet) -> None:
    first_engine(fleet).dies_after = 2
    stream = generate(fleet, stream=True, params={"stop": ["x"]})
    assert next(stream)["output_ids"] == [4]
    with pytest.raises(EngineError, match=r"replica 0 has died after 2 tokens.*with stop.*killed"):
        list(stream)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"params": {"n": 2}}, "of one output: ask for each by itself"),
        ({"return_sampling_mask": True}, "not in a stream whose chunks repeat"),
        (
            {"params": {"custom_params": {"return_top_p_token_ids": True}}},
            "not in a stream whose chunks repeat",
        ),
    ],
    ids=str,
)
def test_a_stream_that_would_mix_or_drop_what_its_chunks_bring_is_refused(
    fleet: ScriptedFleet, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestRejected, match=told):
        generate(fleet, stream=True, **fields)
    assert fleet.requests() == []


def test_whoever_asks_for_an_error_gets_one(fleet: ScriptedFleet) -> None:
    first_engine(fleet).dies_after = 2
    with pytest.raises(EngineError, match=r"replica 0 has died after 2 tokens of this request: .*killed"):
        generate(fleet, on_death="error")
    with pytest.raises(RequestRejected, match="continue or error"):
        generate(fleet, on_death="ignore")


@pytest.mark.usefixtures("no_death_to_wait_for")
def test_an_error_of_a_replica_that_lives_is_the_request_s(fleet: ScriptedFleet) -> None:
    async def fail(*request: Any) -> AsyncGenerator[dict[str, Any], None]:
        raise EngineError("no token came")
        yield {}

    first_engine(fleet).stream = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no token came"):
        generate(fleet)
    assert len(fleet.started) == 2


def test_equal_prompts_of_a_batch_stay_together(fleet: ScriptedFleet) -> None:
    answers = fleet.generate(
        input_ids=[[1], [1], [5], [5]], sampling_params=[{"max_new_tokens": n} for n in (1, 2, 3, 4)]
    )
    assert [one["meta_info"]["replica"] for one in answers] == ["replica 0"] * 2 + ["replica 1"] * 2
    assert [len(one["output_ids"]) for one in answers] == [1, 2, 3, 4]
    fleet.generate(input_ids=[[1], [2]], replay_routed_experts=["a", "b"])
    assert {one.get("replay_routed_experts") for one in fleet.requests()} == {None, "a", "b"}
    with pytest.raises(RequestRejected, match="rid: a list must have one entry per prompt, got 1 for 2"):
        fleet.generate(input_ids=[[1], [2]], rid=["a"])


def test_the_rid_of_a_batch_aborts_each_of_its_requests_wherever_it_is(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    answer = ScriptedEngine.stream

    async def hold(engine: ScriptedEngine, *request: Any) -> AsyncGenerator[dict[str, Any], None]:
        has_begun.set()
        await asyncio.to_thread(may_go_on.wait)
        async for chunk in answer(engine, *request):
            yield chunk

    monkeypatch.setattr(ScriptedEngine, "stream", hold)
    batch = threading.Thread(target=lambda: fleet.generate(input_ids=[[1], [2]], rid="b"))
    batch.start()
    has_begun.wait()
    fleet.abort_request("b")
    may_go_on.set()
    batch.join()
    fleet.abort_request(["b", "c"])
    for engine, _ in fleet.started:
        aborted = [fields["rid"] for method, fields in engine.asked if method == "AbortReq"]
        assert aborted == [["b_0", "b_1"], ["b", "c"]]


@pytest.mark.parametrize("params", [{}, {"stop": ["x"]}], ids=["goes on", "begins anew"])
def test_an_abort_that_no_replica_hears_ends_the_request_where_it_moves(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    has_begun, may_die = threading.Event(), threading.Event()
    stream, whole = ScriptedEngine.stream, ScriptedEngine._whole

    async def hold(engine: ScriptedEngine) -> None:
        if engine is first_engine(fleet):
            has_begun.set()
            await asyncio.to_thread(may_die.wait)
            raise engine.die()
        num_asked = len(engine.asked)
        async with asyncio.timeout(HANG_S):
            while not any(method == "abort_request" for method, _ in engine.asked[num_asked:]):
                await asyncio.sleep(0.01)

    async def held_stream(engine: ScriptedEngine, *request: Any) -> AsyncGenerator[dict[str, Any], None]:
        await hold(engine)
        async for chunk in stream(engine, *request):
            yield chunk

    async def held_whole(engine: ScriptedEngine, fields: dict[str, Any]) -> dict[str, Any]:
        await hold(engine)
        return await whole(engine, fields)

    monkeypatch.setattr(ScriptedEngine, "stream", held_stream)
    monkeypatch.setattr(ScriptedEngine, "_whole", held_whole)
    answers: list[Any] = []
    request = threading.Thread(target=lambda: answers.append(generate(fleet, rid="r", params=params)))
    request.start()
    has_begun.wait()
    fleet.abort_request("r")
    may_die.set()
    request.join()
    assert len(answers) == 1


class TestUpdates:
    def update(self, fleet: ScriptedFleet) -> Any:
        return fleet.update_weights_from_disk("folder", weight_version="new")

    def serving(self, fleet: ScriptedFleet) -> list[str]:
        return [engine.version for engine in fleet.engines]  # type: ignore[attr-defined]

    def test_all_commit(self, fleet: ScriptedFleet) -> None:
        reply = self.update(fleet)
        assert reply["replicas"].keys() == {"replica 0", "replica 1"}
        assert self.serving(fleet) == ["new", "new"]

    def test_entries_for_all_ranks_are_dealt(self, fleet: ScriptedFleet) -> None:
        fleet.update_weights_from_tensor([b"a", b"b"], weight_version="new")
        sent = [
            fields[TENSORS] for engine, _ in fleet.started for _, fields in engine.asked if TENSORS in fields
        ]
        assert sent == [[b"a"], [b"b"]]

    def test_one_that_refuses_is_named_and_none_commits(self, fleet: ScriptedFleet) -> None:
        fleet.started[1][0].refusals["propose"] = Refusal(status=400, message="wrong shape")
        with pytest.raises(
            RequestRejected, match=r"^replica 1: wrong shape\. Nothing was committed$"
        ) as caught:
            self.update(fleet)
        assert caught.value.fields["replicas"][0] == {"replica": "replica 0", "success": True}
        assert self.serving(fleet) == ["first", "first"]
        self.update(fleet)

    @pytest.mark.parametrize("step", ["propose", "decide", "commit"])
    def test_one_that_dies_does_not_count_and_is_replaced(self, fleet: ScriptedFleet, step: str) -> None:
        fleet.started[1][0].faults[step] = ActorDied("replica 1 has died")
        reply = self.update(fleet)
        assert reply["replicas"].keys() == {"replica 0"}
        fleet.wait_for_all()
        assert self.serving(fleet) == ["new", "new"]
        successor, changes = fleet.started[2]
        assert changes == {"load_format": "dummy"}, "weights come from a replica, not from disk"
        methods = [method for method, _ in successor.asked]
        assert methods.index("take_weights") < methods.index("pause_generation")
        assert ("release_memory_occupation", (["kv_cache"],)) in successor.asked
        assert fleet.status()[1]["num_deaths"] == 1

    @pytest.mark.parametrize("method", ["pause_generation", "server_info"])
    def test_what_is_asked_while_a_new_one_joins_reaches_it(
        self, fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """The others go on, with their KV cache, while it is being paused, or has just been looked at."""
        survivor = first_engine(fleet)

        def go_on() -> None:
            survivor.paused, survivor.kv_cache = False, "resident"

        start = fleet._start_engine

        def prepared(slot: int, changes: Any) -> Any:
            engine = start(slot, changes)
            engine.then[method] = go_on
            return engine

        monkeypatch.setattr(fleet._supervisor, "_start", prepared)
        fleet._runner.call(fleet.started[1][0].dead.set)
        fleet.wait_for_all()
        successor, _ = fleet.started[2]
        wait_until(lambda: (successor.paused, successor.kv_cache) == (False, "resident"), "it goes on too")

    @pytest.mark.usefixtures("no_death_to_wait_for")
    def test_one_that_did_not_commit_what_the_other_did_is_replaced(self, fleet: ScriptedFleet) -> None:
        fleet.started[1][0].faults["commit"] = EngineError("it failed")
        self.update(fleet)
        fleet.wait_for_all()
        assert ("kill", ()) in fleet.started[1][0].asked
        assert self.serving(fleet) == ["new", "new"]
        assert fleet.status()[1]["last_death"] == "it failed"

    @pytest.mark.parametrize(
        ("call", "taken_back_by"),
        [
            (lambda fleet: fleet.begin_weight_update(), "AbortWeightUpdateReqInput"),
            (lambda fleet: fleet.pause_generation("wait", timeout_s=1), "ContinueGenerationReqInput"),
        ],
        ids=["session", "pause"],
    )
    def test_what_one_refuses_the_others_take_back(
        self, fleet: ScriptedFleet, call: Callable[[RayFleet], Any], taken_back_by: str
    ) -> None:
        fleet.started[1][0].refusals["propose"] = Refusal(status=409, message="not now")
        with pytest.raises(RequestRejected, match=r"^replica 1: not now$"):
            call(fleet)
        asked = [[method for method, _ in engine.asked] for engine, _ in fleet.started]
        assert [taken_back_by in methods for methods in asked] == [True, False]

    def test_a_new_replica_waits_for_the_end_of_a_session(
        self, fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
        first_engine(fleet).session_open = True
        fleet._runner.call(fleet.started[1][0].dead.set)
        wait_until(lambda: len(fleet.started) == 3, "there is another one")
        wait_until(lambda: len(first_engine(fleet).asked) > 3, "it asks again and again")
        assert not fleet.status()[1]["serves"]
        with pytest.raises(
            EngineError, match="replica 1: it has started, and waits: a weight update session is"
        ):
            fleet.wait_for_all(0.1)
        first_engine(fleet).session_open = False
        fleet.wait_for_all()


class TestAdapters:
    FOLDERS: ClassVar = {"/same": "1", "/kept": "2", "/other": "3"}

    def replaced(self, fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
        """The engine that stands in the place of replica 1; one folder holds something else by now."""
        start = fleet._start_engine

        def prepared(slot: int, changes: Any) -> Any:
            engine: Any = start(slot, changes)
            engine.folders = {**self.FOLDERS, "/other": "by others"}
            engine._load("from-arguments", "1", "/same")
            return engine

        monkeypatch.setattr(fleet._supervisor, "_start", prepared)
        fleet._runner.call(fleet.started[1][0].dead.set)
        fleet.wait_for_all()
        return fleet.started[2][0]

    def load(self, fleet: ScriptedFleet, name: str, path: str, version: str | None = None) -> None:
        for engine, _ in fleet.started[:2]:
            engine.folders = self.FOLDERS
        fleet.load_lora_adapter(name, path, lora_version=version)

    def test_a_new_replica_has_those_of_the_others_or_gets_no_requests_for_them(
        self, fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.load(fleet, "same", "/same", "a")
        self.load(fleet, "same", "/kept", "b")
        self.load(fleet, "sent", "/kept", "early")
        self.load(fleet, "sent", "", "late")
        self.load(fleet, "changed", "/other")
        new = self.replaced(fleet, monkeypatch)
        assert new.labels == ["same@a", "same@b"], "no name means an earlier version than elsewhere"
        lacking = ["changed", "changed@fleet-1", "sent", "sent@early", "sent@late"]
        assert [one["lacks"] for one in fleet.status()] == [[], lacking]
        for name in (*lacking, "same"):
            answers = fleet.generate(
                input_ids=[[1], [2]], sampling_params={"max_new_tokens": 1}, lora_path=name
            )
            replicas = {one["meta_info"]["replica"] for one in answers}
            assert replicas == ({"replica 0", "replica 1"} if name == "same" else {"replica 0"}), name
        self.load(fleet, "sent", "")
        assert fleet.started[0][0].labels[-1] == new.labels[-1] == "sent@fleet-2"
        assert "sent" not in fleet.status()[1]["lacks"]

    def test_a_load_waits_until_a_new_replica_can_take_part(
        self, fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.load(fleet, "same", "/same", "a")
        threads: list[threading.Thread] = []

        def load() -> None:
            threads.append(threading.Thread(target=lambda: self.load(fleet, "same", "/kept", "b")))
            threads[0].start()

        first_engine(fleet).then["server_info"] = load
        new = self.replaced(fleet, monkeypatch)
        threads[0].join()
        assert new.labels == first_engine(fleet).labels == ["same@a", "same@b"]


def test_a_cluster_that_a_fleet_begins_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's ends with the thread that has begun it: the caller goes on with it behind its fleet."""
    beginners: list[threading.Thread] = []
    monkeypatch.setattr("ray.init", lambda: beginners.append(threading.current_thread()))
    with pytest.raises(EngineError, match="no answer"):
        ScriptedFleet(*[EngineError("no answer")] * 2)
    assert beginners == [threading.current_thread()]


def test_a_fleet_that_cannot_start_tells_what_all_say_and_the_cause_first() -> None:
    with pytest.raises(ConfigurationError, match="no room for it") as caught:
        ScriptedFleet(EngineError("no answer"), ConfigurationError("no room for it"))
    assert sorted(re.findall(r"replica (\d): no (?:answer|room for it)", str(caught.value))) == ["0", "1"]


def test_a_start_that_is_interrupted_leaves_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [ScriptedEngine(slot, 0, "first") for slot in range(2)]
    has_started, may_start = threading.Event(), threading.Event()

    def start(fleet: ScriptedFleet, slot: int, changes: Any) -> ScriptedEngine:
        if slot == 0:
            has_started.set()
        else:
            may_start.wait(HANG_S)
        return engines[slot]

    def interrupted(future: Future[Any]) -> None:
        monkeypatch.undo()
        assert has_started.wait(HANG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(ScriptedFleet, "_start_engine", start)
    monkeypatch.setattr(Future, "exception", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ScriptedFleet()
    may_start.set()
    wait_until(lambda: all(("kill", ()) in engine.asked for engine in engines), "both have ended")


def test_an_engine_whose_start_is_interrupted_gives_its_actors_and_bundles_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room, nodes, killed = Mock(), [Mock()], Mock()
    made = {"make_room": room, "take_seats": nodes, "start_engine": None}
    for name, result in made.items():
        monkeypatch.setattr(f"ebbtide.ray.engine.{name}", Mock(return_value=result))
    monkeypatch.setattr("ebbtide.ray.engine.LoopThread", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("ebbtide.ray.engine.kill_engine", killed)
    with pytest.raises(KeyboardInterrupt):
        RayEngine(device="cpu", model_path="m")
    killed.assert_called_once_with(nodes)
    room.give_back.assert_called_once()


def test_a_batch_whose_caller_goes_away_while_no_replica_lives_leaves_nothing(fleet: ScriptedFleet) -> None:
    async def script() -> None:
        controller, living, before = fleet._controller, fleet._controller.living, asyncio.all_tasks()
        asking = fleet._generate_all([{"rid": "b_0"}, {"rid": "b_1"}], "continue", "b")
        with patch.object(type(controller), "living", PropertyMock(side_effect=[living] * 4 + [[]] * 9)):
            batch = asyncio.create_task(asking)
            await asyncio.sleep(0)
            batch.cancel()
            await asyncio.wait([batch])
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert fleet._batches == {}

    fleet._runner.wait(script())


def test_a_whole_answer_that_nobody_waits_for_is_aborted() -> None:
    async def script() -> list[Any]:
        asked: list[Any] = []
        answer = asyncio.get_running_loop().create_future()
        actor = SimpleNamespace(
            answer=SimpleNamespace(remote=lambda fields: answer),
            abort_request=SimpleNamespace(remote=asked.append),
        )
        engine = RayEngine.__new__(RayEngine)
        engine._nodes = [SimpleNamespace(seats=[SimpleNamespace(actor=actor)])]  # type: ignore[list-item]
        generating = asyncio.create_task(engine.async_generate(input_ids=PROMPT, rid="a"))
        await asyncio.sleep(0)
        generating.cancel()
        await asyncio.wait([generating])
        return asked

    assert asyncio.run(script()) == ["a"]


def test_weights_that_nobody_has_any_more_end_the_fleet(fleet: ScriptedFleet) -> None:
    fleet.update_weights_from_disk("folder", weight_version="new")
    for engine, _ in fleet.started[:2]:
        engine.dies_after = 0
    with pytest.raises(EngineError, match=r"no replica of the fleet is left.*replica 0: .*replica 1: "):
        generate(fleet)
    with pytest.raises(EngineError, match="no replica"):
        fleet.pause_generation()


def test_a_fleet_that_ends_while_no_replica_lives_ends_the_requests_that_wait_for_one(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start, start = threading.Event(), fleet._start_engine

    def held(slot: int, changes: Any) -> Any:
        may_start.wait(HANG_S)
        return start(slot, changes)

    monkeypatch.setattr(fleet._supervisor, "_start", held)
    for engine, _ in fleet.started:
        engine.dies_after = 1
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(generate, fleet)
        wait_until(lambda: not any(one["serves"] for one in fleet.status()), "both have died")
        ending = threading.Thread(target=fleet.shutdown)
        ending.start()
        with pytest.raises(EngineError, match="shut down"):
            request.result(HANG_S)
        may_start.set()
        ending.join()


def test_a_fleet_that_ends_ends_the_requests_that_its_replicas_hold(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As paused replicas do: their engines end first, and nothing is asked for again."""
    is_held, is_stopped, num_asked = threading.Event(), threading.Event(), 0

    async def hold(*_: Any) -> AsyncGenerator[dict[str, Any], None]:
        nonlocal num_asked
        num_asked += 1
        is_held.set()
        await asyncio.to_thread(is_stopped.wait, HANG_S)
        raise EngineError("the engine has been shut down")
        yield {}

    for engine, _ in fleet.started:
        monkeypatch.setattr(engine, "stream", hold)
    monkeypatch.setattr("ebbtide.ray.fleet.shut_down", lambda engines: is_stopped.set())
    with ThreadPoolExecutor(1) as thread:
        request = thread.submit(generate, fleet)
        is_held.wait(HANG_S)
        fleet.shutdown()
        with pytest.raises(EngineError, match="the fleet has been shut down"):
            request.result(HANG_S)
    assert (is_stopped.is_set(), num_asked) == (True, 1)


def test_a_replica_that_does_not_come_back_stays_out(fleet: ScriptedFleet) -> None:
    fleet.start_faults = [EngineError("the node is gone")] * supervisor.MAX_ATTEMPTS
    first_engine(fleet).dies_after = 1
    assert generate(fleet)["output_ids"] == [4, 5, 6, 7, 8, 9]
    with pytest.raises(EngineError, match="not all replicas serve: replica 0: the node is gone"):
        fleet.wait_for_all()
    assert generate(fleet)["meta_info"]["replica"] == "replica 1"
