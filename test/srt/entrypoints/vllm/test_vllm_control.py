"""vLLM's control routes over HTTP, against the real state machines without a model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.application import Client
from fixtures.servers import wait_until
from hypothesis import given, settings, strategies as st

from ebbtide.testing.null_engine import NullEngine

INFO = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
PROMPT = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "seed": 3}}


def start(client: Client, **sampling_params: Any) -> asyncio.Future[Any]:
    """A generation that is not waited for."""
    params = {"max_new_tokens": 3000, "ignore_eos": True, **sampling_params}
    generating = client.engine.async_generate(input_ids=[1, 2, 3], sampling_params=params)
    return client.engine._runner.submit(generating)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def engine() -> Iterator[NullEngine]:
    with NullEngine(max_running_requests=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_client(engine: NullEngine) -> Client:
    return Client(engine)


@pytest.fixture
def client(shared_client: Client) -> Iterator[Client]:
    """The engine is left as it was found."""
    yield shared_client
    shared_client.engine.abort_request(abort_all=True)
    restore(shared_client.engine)


def restore(engine: NullEngine) -> None:
    engine.abort_weight_update()
    engine.resume_memory_occupation()
    engine.update_weights_from_disk("1", weight_version="default", pause_mode="in_place", flush_cache=False)
    engine.continue_generation()


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", "abort"),
        ("?mode=abort&clear_cache=false", "abort"),
        ("?mode=wait", "wait"),
        ("?wait_for_inflight_requests=true", "wait"),
        # Its cache cleared, a frozen request computes everything again.
        ("?mode=keep", "retract"),
        ("?mode=keep&clear_cache=false", "in_place"),
    ],
)
def test_a_pause_is_one_of_ours(client: Client, query: str, mode: str) -> None:
    assert client.get("/is_paused") == {"success": True, "message": "", "is_paused": False}
    paused = client.post(f"/pause{query}")
    assert (paused["status"], paused["mode"], paused["success"]) == ("paused", mode, True)
    assert client.get("/is_paused/")["is_paused"]
    assert client.post(f"/pause{query}")["status"] == "paused"
    for changed in (True, False):
        resumed = client.post("/resume")
        assert (resumed["status"], resumed["changed"]) == ("resumed", changed)
    assert not client.get("/is_paused")["is_paused"]


def test_parameters_come_by_query_or_body_and_the_query_wins(client: Client) -> None:
    assert client.post("/pause?mode=keep", {"mode": "abort", "clear_cache": False})["mode"] == "in_place"
    assert client.post("/reset_prefix_cache", {"reset_external": True, "other": 1})["ignored_fields"] == [
        "other"
    ]


@pytest.mark.parametrize(
    ("path", "body", "param", "expected"),
    [
        ("/pause?mode=freeze", None, "query.mode", "expected one of abort, wait, keep"),
        ("/sleep", {"level": 3}, "body.level", "<= 2"),
        ("/sleep", {"levl": 0}, "body.levl", "did you mean level"),
        ("/wake_up?tags=weights&tags=cache", None, "query.tags", "expected one of weights, kv_cache"),
        ("/abort_requests?request_id=a", None, "body.request_id", "did you mean request_ids"),
        ("/inference/v1/abort_requests", {}, "body.request_ids", "is needed"),
        ("/init_weight_transfer_engine", {"init_info": {"port": 1}}, "body.init_info", "unknown port"),
        ("/weight_checker", {"action": "compare"}, "body.baseline", "is needed"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "body.is_checkpoint_format", "only true"),
        (
            "/collective_rpc",
            {"method": "update_weights_nccl", "kwargs": {"a": 1}},
            "body.kwargs",
            "unknown a; known are update_info",
        ),
    ],
)
def test_a_bad_parameter_is_named(client: Client, path: str, body: Any, param: str, expected: str) -> None:
    refused = client.post(path, body, status=400)
    assert expected in refused["error"]["message"]
    assert refused["error"] | {"message": ""} == {
        "message": "",
        "type": "BadRequestError",
        "code": 400,
        "param": param,
    }
    assert client.engine.memory_occupation()["can_run"]


def test_what_no_message_has_room_for_is_the_callers_fault(client: Client) -> None:
    for path, prompt in (("/v1/completions", {"prompt": [1]}), ("/inference/v1/generate", PROMPT)):
        assert "$.priority" in client.post(path, {**prompt, "priority": 2**64}, status=400)["message"]
    body = {**PROMPT, "sampling_params": {"stop_token_ids": [2**64]}}
    assert "a list of token ids" in client.post("/inference/v1/generate", body, status=400)["message"]


def test_sleep_drops_or_keeps_the_weights_by_its_level(client: Client) -> None:
    before = client.post("/inference/v1/generate", PROMPT)["choices"][0]["token_ids"]
    slept = client.post("/sleep?level=1")
    assert (slept["status"], slept["level"], slept["tags"]) == ("sleeping", 1, ["weights", "kv_cache"])
    assert client.get("/is_sleeping")["is_sleeping"]
    # Asleep already: nothing is done, and the backup stays.
    assert client.post("/sleep?level=2")["changed"] is False
    assert client.post("/wake_up")["weights"]["content"] == "valid"
    assert client.post("/inference/v1/generate", PROMPT)["choices"][0]["token_ids"] == before

    client.post("/sleep", {"level": 2})
    woken = client.post("/wake_up?tags=weights")
    assert (woken["status"], woken["tags"], woken["resumed"]) == ("sleeping", ["weights"], False)
    woken = client.post("/wake_up?tags=kv_cache")
    assert (woken["status"], woken["resumed"]) == ("awake", True)
    # Nothing is computed with weights that nobody has written.
    generation = start(client, max_new_tokens=4)
    assert "stale" in client.engine.memory_occupation()["reason"]
    assert not generation.done()
    client.post("/update_weights", {"weight_dir": "7"})
    assert len(generation.result()["output_ids"]) == 4


def test_requests_survive_a_sleep_that_keeps_them_and_waking_ends_any_pause(client: Client) -> None:
    generation = start(client)
    client.engine.pause_generation("in_place")
    assert client.post("/sleep?level=1&mode=keep")["mode"] == "retract"
    assert client.post("/wake_up?tags=scheduling")["resumed"] is False
    assert client.post("/wake_up")["resumed"] is True
    result = generation.result()
    assert result["meta_info"]["finish_reason"]["type"] == "length"


def test_level_0_only_pauses(client: Client) -> None:
    assert client.post("/sleep?level=0")["mode"] == "abort"
    assert client.engine.memory_occupation()["tags"]["weights"]["state"] == "resident"
    assert client.get("/is_sleeping")["is_sleeping"]
    woken = client.post("/wake_up?tags=scheduling")
    assert (woken["status"], woken["tags"], woken["resumed"]) == ("awake", ["scheduling"], True)


def test_a_server_may_turn_requests_away_while_it_is_paused() -> None:
    with NullEngine(paused_requests="reject") as engine:
        client = Client(engine)
        for mode in ("abort", "wait"):
            client.post(f"/pause?mode={mode}")
            refused = client.post("/inference/v1/generate", PROMPT, status=503)["error"]
            assert (refused["type"], refused["code"]) == ("ServiceUnavailableError", 503)
            client.post("/resume")
        client.post("/pause?mode=keep")
        waiting = start(client, max_new_tokens=2)
        client.post("/resume")
        assert len(waiting.result()["output_ids"]) == 2


def test_requests_are_aborted_by_the_ids_that_they_were_posted_or_answered_with(client: Client) -> None:
    client.post("/pause?mode=keep&clear_cache=false")
    names = ["one", "two", "three", "four"]
    waiting = [
        client.engine._runner.submit(
            client.engine.async_generate(
                input_ids=[1], rid=name, sampling_params={"n": 2 if name == "three" else 1}
            )
        )
        for name in names
    ]
    ids = ["one", "cmpl-two", "generate-tokens-three-1", "nobody"]
    assert client.post("/inference/v1/abort_requests", {"request_ids": ids})["aborted"] == 4
    assert waiting[0].result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert waiting[1].result()["meta_info"]["finish_reason"]["type"] == "abort"
    aborted = client.post("/abort_requests")
    assert (aborted["status"], aborted["aborted"]) == ("aborted", 2)
    kinds = [output["meta_info"]["finish_reason"]["message"] for output in waiting[2].result()]
    assert kinds == ["Aborted by /abort_request"] * 2
    assert waiting[3].result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_the_prefix_cache_is_reset_also_under_running_requests(client: Client) -> None:
    generation = start(client)
    wait_until(lambda: client.engine.loads()["loads"][0]["num_running_reqs"] == 1, "it runs")
    assert client.post("/reset_prefix_cache")["success"] is False
    assert client.post("/reset_prefix_cache", {"reset_running_requests": True})["success"] is True
    assert generation.result()["meta_info"]["num_retractions"] == 1


def test_what_servers_are_asked_for(client: Client) -> None:
    assert client.get("/get_world_size/")["world_size"] == 1
    assert client.get("/weight_info")["weight_version"] == "default"
    assert client.get("/version")["vllm_compat"] == "0.33.0"
    assert client.get("/load")["server_load"] == 0
    assert client.get("/liveness")["status"] == "ok"
    info = client.get("/server_info?config_format=json")
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}
    assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32"
    assert "tp_size" in info
    for path in ("/server_info?config_format=text", "/server_info"):
        assert json.loads(client.get(path)["vllm_config"]) == info["vllm_config"]
    refused = client.ask("GET", "/server_info?config_format=yaml", status=400)["error"]
    assert "config_format`; expected one of json, text" in refused["message"]
    assert refused["param"] == "query.config_format"
    assert client.post("/reset_mm_cache")["success"]
    assert client.post("/start_draft_weight_update", status=409)["error"]["type"] == "ConflictError"
    for path in ("/nemo-rl/refit/prepare", "/nemo-rl/refit/flush"):
        assert client.post(path, {"lora_name": "a"}, status=501)["error"]["code"] == 501
    assert client.post("/nemo-rl/refit/flush", status=501)["ok"] is False
    assert client.get("/v1/models/")["object"] == "list"
    assert "skip_tokenizer_init" in client.post("/v1/tokenize/", {"prompt": "a"}, status=400)["message"]


class TestUpdates:
    def test_calls_in_the_wrong_order_are_refused_by_name(self, client: Client) -> None:
        refused = client.post("/update_weights", {"update_info": INFO}, status=409)
        assert "call /start_weight_update first" in refused["message"]
        assert (
            "call /start_weight_update first" in client.post("/finish_weight_update", status=409)["message"]
        )
        assert client.post("/start_weight_update", {})["message"] == "Weight update started"
        assert client.post("/start_weight_update", status=409)["error"]["code"] == 409
        assert "open" in client.post("/shutdown_weight_transfer_engine", status=409)["message"]
        finished = client.post("/finish_weight_update", {"weight_version": "5"})
        assert (finished["num_tensors"], finished["weight_version"]) == (0, "5")
        assert client.get("/weight_info")["weight_version"] == "5"

    def test_a_failed_update_ends_its_session_and_says_so_at_the_finish(self, client: Client) -> None:
        client.post("/start_weight_update")
        refused = client.post("/update_weights", {"update_info": INFO}, status=409)
        assert "call /init_weight_transfer_engine" in refused["message"]
        refused = client.post("/finish_weight_update", status=409)
        assert "the update failed; nothing was committed: no trainer is connected" in refused["message"]
        assert client.get("/weight_info")["weight_version"] == "default"
        client.post("/start_weight_update")
        assert client.post("/finish_weight_update")["success"]

    def test_a_session_of_the_other_dialect_is_left_alone(self, client: Client) -> None:
        client.post("/begin_weight_update")
        client.post("/update_weights_from_disk", {"model_path": "7"})
        for path, body in (
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": INFO}),
            ("/finish_weight_update", None),
        ):
            assert "end_weight_update" in client.post(path, body, status=409)["message"]
        assert client.post("/end_weight_update", {"weight_version": "7"})["num_tensors"] > 0

    def test_what_the_other_dialect_sends_joins_the_session(self, client: Client) -> None:
        client.post("/start_weight_update")
        assert client.post("/update_weights_from_disk", {"model_path": "7"})["committed"] is False
        finished = client.post("/finish_weight_update", {"weight_version": "8"})
        assert (finished["committed"], finished["weight_version"]) == (True, "8")

    def test_released_weights_take_no_update(self, client: Client) -> None:
        client.post("/sleep?level=2")
        client.post("/start_weight_update")
        refused = client.post("/update_weights", {"update_info": INFO}, status=409)
        assert "/wake_up?tags=weights first" in refused["message"]

    def test_a_folder_is_an_update_of_its_own_with_the_number_of_its_step(self, client: Client) -> None:
        client.post("/pause?mode=keep&clear_cache=false")
        updated = client.post("/update_weights", {"weight_dir": "0012"})
        assert (updated["status"], updated["weight_version"], updated["committed"]) == ("ok", "12", True)
        assert client.post("/update_weights", {"weight_dir": "0" * 300})["committed"], (
            "no file has such a name"
        )
        client.post("/resume")
        client.post("/start_weight_update")
        assert (
            "finish it first" in client.post("/update_weights", {"weight_dir": "13"}, status=409)["message"]
        )

    def test_what_an_engine_cannot_meet_is_refused_before_it_is_met(self, client: Client) -> None:
        address = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
        for init_info, expected in (
            ({**address, "backend": "gloo", "rank_offset": 2}, "do not fit a world of 2"),
            ({**address, "nccl_unique_id_b64": "AA=="}, "or nccl_unique_id_b64"),
            ({"rank_offset": 1, "world_size": 2}, "or nccl_unique_id_b64"),
        ):
            body = {"init_info": init_info}
            assert expected in client.post("/init_weight_transfer_engine", body, status=400)["message"]


class TestCollectiveRpc:
    def test_a_method_that_is_not_listed_is_refused_with_the_list(self, client: Client) -> None:
        refused = client.post("/collective_rpc", {"method": "load_weights"}, status=501)
        assert refused["error"]["type"] == "NotImplementedError"
        assert "known methods: skyrl_start_weight_update, " in refused["error"]["message"]

    def test_skyrls_session(self, client: Client) -> None:
        start = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": "True"}}
        assert client.post("/collective_rpc", start)["results"] == [None]
        assert client.post("/collective_rpc", start, status=409)["error"]["code"] == 409
        assert client.post("/collective_rpc", {"method": "skyrl_finish_weight_update"})["results"] == [None]
        update = {"method": "update_weights_nccl", "kwargs": {"update_info": INFO}}
        assert "there is nothing to update" in client.post("/collective_rpc", update, status=409)["message"]

    @pytest.mark.parametrize(("offload_kv", "num_retractions"), [(True, 0), (False, 1)])
    def test_skyrls_sleep_leaves_the_pause_as_it_is(
        self, client: Client, offload_kv: bool, num_retractions: int
    ) -> None:
        generation = start(client)
        wait_until(lambda: client.engine.loads()["loads"][0]["num_running_reqs"] == 1, "it runs")
        client.post("/pause?mode=keep&clear_cache=false")
        sleep = {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": offload_kv}}
        assert client.post("/collective_rpc", sleep)["results"] == [{"kv_offloaded": offload_kv}]
        wake = {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["weights"]}}
        assert client.post("/collective_rpc", wake)["success"]
        client.post("/update_weights", {"weight_dir": "8"})
        wake["kwargs"] = {"tags": ["kv_cache"]}
        assert client.post("/collective_rpc", wake)["success"]
        assert client.get("/is_paused")["is_paused"]
        client.post("/resume")
        assert generation.result()["meta_info"]["num_retractions"] == num_retractions


CALLS: list[tuple[str, Any]] = [
    *((f"/pause?mode={mode}", None) for mode in ("abort", "keep", "keep&clear_cache=false")),
    *((f"/sleep?level={level}", None) for level in (0, 1, 2)),
    *((f"/wake_up{query}", None) for query in ("", "?tags=weights", "?tags=kv_cache", "?tags=scheduling")),
    *(
        (path, None)
        for path in ("/resume", "/reset_prefix_cache", "/abort_requests", "/finish_weight_update")
    ),
    *((path, None) for path in ("/start_weight_update", "/release_kv_cache_memory", "/is_sleeping")),
    ("/update_weights", {"weight_dir": "3"}),
    ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["int8"], "shapes": [[1]]}}),
    ("/weight_checker", {"action": "reset"}),
    ("/collective_rpc", {"method": "skyrl_sleep_for_weight_sync"}),
    ("/collective_rpc", {"method": "skyrl_wake_for_weight_sync"}),
    # And the other dialect.
    *((f"/{name}_generation", None) for name in ("pause", "continue")),
    *((f"/{name}_memory_occupation", None) for name in ("release", "resume")),
    *((f"/{name}_weight_update", None) for name in ("begin", "end", "abort")),
    ("/update_weights_from_disk", {"model_path": "4", "pause_mode": "retract"}),
    ("/flush_cache", {"retract_running": True}),
]


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(calls=st.lists(st.sampled_from(CALLS), min_size=5, max_size=30))
def test_two_dialects_in_any_order_are_carried_out_or_refused(
    shared_client: Client, calls: list[tuple[str, Any]]
) -> None:
    client = shared_client
    generations = [start(client, max_new_tokens=50) for _ in range(4)]
    for path, body in calls:
        answer = client.send("GET" if path == "/is_sleeping" else "POST", path, body)
        assert answer.status_code in (200, 400, 409), answer.text
        assert not (client.get("/memory_occupation")["can_run"] and client.get("/is_sleeping")["is_sleeping"])
    restore(client.engine)
    for generation in generations:
        result = generation.result()
        assert result["meta_info"]["finish_reason"]["type"] in ("length", "abort")
    assert len(client.post("/inference/v1/generate", PROMPT)["choices"][0]["token_ids"]) == 4
