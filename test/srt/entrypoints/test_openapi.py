"""The OpenAPI document: whole, true to what a server answers, and no way to make it answer 500."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fixtures.deadlines import HANG_S
from fixtures.servers import Server, running_server, url_of
from jsonschema_rs import validator_for

from ebbtide.srt.entrypoints.http_server import create_app
from ebbtide.srt.entrypoints.openapi import openapi_document
from ebbtide.srt.entrypoints.routes import NOT_IMPLEMENTED

DOCUMENT = openapi_document()
RECORDED = Path(__file__).parents[1] / "fixtures" / "wire"


@pytest.fixture(scope="module")
def server(checkpoints: Any) -> Iterator[Server]:
    # A short context: no example generates for long.
    with running_server(checkpoints.a, "--context-length", "64", "--enable-metrics") as server:
        yield server


def test_the_document_has_every_endpoint() -> None:
    app = create_app(Any)  # type: ignore[arg-type]
    routed = {
        # Some paths are known with a slash at their end too.
        (re.sub(":path", "", route.path).rstrip("/") or "/", method)  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    routed = {(path, method) for path, method in routed if path not in NOT_IMPLEMENTED}
    described = {(path, method.upper()) for path, item in DOCUMENT["paths"].items() for method in item}
    for_people = ("/", "/openapi.json", "/docs", "/docs/{name}", "/dashboard", "/dashboard/events")
    assert described == routed - {(path, "GET") for path in for_people}


def test_references_lead_somewhere_and_ids_are_unique() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named <= set(DOCUMENT["components"]["schemas"])
    ids = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)
    # What only messages between processes have is no part of a body.
    assert "ReqInput" not in {
        value
        for schema in DOCUMENT["components"]["schemas"].values()
        for value in schema.get("properties", {}).get("type", {}).get("enum", ())
    }


def test_the_document_and_its_page_are_served(server: Server) -> None:
    assert server.get("/openapi.json").json() == msgspec.json.decode(msgspec.json.encode(DOCUMENT))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_takes_all_it_shows_from_this_server(server: Server, path: str) -> None:
    page = server.get(path)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert len(links) > 2
    assert [link for link in links if server.get(f"/{link}").status_code != 200] == []


def test_only_the_files_of_the_page_lie_beneath_it(server: Server) -> None:
    for name in ("redoc.standalone.js", "..%2fcore.py", "core.py"):
        assert server.get(f"/docs/{name}").status_code == 404


def request_schema(method: str, path: str) -> Any:
    """Of a body; None: there is none."""
    operation = DOCUMENT["paths"][path][method.lower()]
    if "requestBody" not in operation:
        return None
    content = operation["requestBody"]["content"]["application/json"]
    return {**content["schema"], "components": DOCUMENT["components"]}


def assert_described(server: Server, method: str, path: str, body: Any = None) -> None:
    """What the server takes and answers is what the document says, with nothing left out."""
    if body is not None:
        validator_for(request_schema(method, path)).validate(body)
    response = server.client.request(method, path, json=body)
    assert response.status_code == 200, response.text
    described = DOCUMENT["paths"][path][method.lower()]["responses"]["200"]
    if "content" not in described:
        assert response.content == b""
        return
    schema = {**described["content"]["application/json"]["schema"], "components": DOCUMENT["components"]}
    validator_for(schema).validate(response.json())
    known = properties(schema)
    if isinstance(response.json(), dict) and known and path not in ("/server_info", "/get_server_info"):
        assert response.json().keys() <= known


def properties(schema: Any) -> set[str]:
    """The names of an object's fields, in any of its forms."""
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return set(schema.get("properties", ())).union(*(properties(one) for one in schema.get("anyOf", ())))


PARAMS = {"max_new_tokens": 3, "n": 2}
GENERATE = {"text": "a", "return_logprob": True, "top_logprobs_num": 1, "return_prompt_token_ids": True}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/generate", GENERATE),
        ("POST", "/generate", {**GENERATE, "sampling_params": PARAMS, "logprob_start_len": 0}),
        ("POST", "/generate", {**GENERATE, "return_flat_raw_output_top_logprobs": True}),
        ("POST", "/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True, "return_token_ids": True}),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "return_meta_info": True}),
        ("POST", "/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "max_tokens": 2}),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/v1/models", None),
        *(("GET", path, None) for path in ("/health", "/ready", "/model_info", "/server_info")),
        *(("GET", path, None) for path in ("/memory_occupation", "/get_weight_version")),
        *(("GET", path, None) for path in ("/v1/loads", "/get_load")),
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("POST", "/release_memory_occupation", None),
        ("GET", "/memory_occupation", None),
        ("POST", "/resume_memory_occupation", {"tags": None}),
        ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("POST", "/begin_weight_update", None),
        ("GET", "/server_info", None),
        ("POST", "/abort_weight_update", None),
        ("POST", "/update_weight_version", {"new_version": "7"}),
        ("POST", "/continue_generation", {}),
        ("POST", "/flush_cache", None),
        ("POST", "/destroy_weights_update_group", None),
        ("POST", "/transition", {"steps": [{"op": "pause"}, {"op": "continue"}]}),
    ],
)
def test_the_document_is_true(server: Server, method: str, path: str, body: Any) -> None:
    assert_described(server, method, path, body)


CANARY = {"input_ids": [1, 2]}
INIT = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2, "timeout_s": 0.1}
BROADCASTER = {"host": "a", "port": 5, "rank_offset": 0, "inference_world_size": 1, "timeout": 0.1}
ID = "x" * 8
# By path: bodies that are none.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {},
        {"input_ids": []},
        {"text": ""},
        {"text": ["a", ""]},
        *({"text": "a", name: value} for name, value in (("timeout_s", 0), ("max_version_lag", -1))),
        *({"text": "a", name: value} for name, value in (("routed_dp_rank", -1), ("continue_from", 1))),
        *({"text": "a", "truncate_prompt_tokens": value} for value in (-2, "a")),
        {"text": "a", "sampling_logprobs_mode": "all"},
        *(
            {"text": "a", "sampling_params": {name: value}}
            for name, values in {
                "n": (0,),
                "temperature": (-1, "hot"),
                "top_p": (0, 1.5),
                "stop": ("", [""], ["a"] * 33),
                "allowed_token_ids": ([], [-1]),
                "bad_words": ([" "], ["a"] * 1025),
                "custom_params": ([],),
                "choice": ([""],),
                "watermark": (True,),
                "maximum": (1,),
            }.items()
            for value in values
        ),
    ],
    "/v1/completions": [
        {},
        *({"prompt": prompt} for prompt in ("", [], ["a", 1], [1, [1]])),
        *({"prompt": "a", name: -2} for name in ("max_tokens", "logprobs", "prompt_logprobs", "top_k")),
        *({"prompt": "a", name: 0} for name in ("n", "best_of", "timeout_s", "top_p")),
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "min_tokens": -1},
    ],
    "/v1/chat/completions": [
        {},
        {"messages": []},
        *({"messages": MESSAGES, name: -2} for name in ("top_logprobs", "max_completion_tokens")),
        {"messages": MESSAGES, "temperature": -1},
    ],
    "/inference/v1/generate": [
        {},
        {"token_ids": []},
        {"token_ids": [1], "max_version_lag": -1},
        {"token_ids": [1], "routed_dp_rank": -1},
    ],
    "/tokenize": [{}, {"prompt": "a", "text": "b"}],
    "/detokenize": [{}, {"tokens": [1, [1]]}],
    "/transition": [
        *({"steps": [step]} for step in ({}, {"op": "sleep"}, {"op": "pause", "mode": "nap"})),
        *({"steps": [step]} for step in ({"op": "update_from_disk"}, {"op": "resize"})),
    ],
    "/pause_generation": [{"timeout_s": -1}],
    "/flush_cache": [{"timeout_s": -1}],
    "/resize_memory_occupation": [{}, {"num_tokens": 64, "num_bytes": 1 << 20}],
    "/begin_weight_update": [{"timeout_s": -1}, {"selector": "draft"}],
    "/end_weight_update": [{"timeout_s": -1}],
    "/update_weights_from_disk": [
        {"model_path": "a", name: value}
        for name, value in {
            "timeout_s": -1,
            "selector": "draft",
            "canary": {**CANARY, "atol": None},
            "flush_cache": "no",
        }.items()
    ]
    + [{"model_path": "a", "canary": canary} for canary in ({"input_ids": [1]}, {**CANARY, "atol": -1})],
    "/update_weights_from_tensor": [{"serialized_named_tensors": [], "timeout_s": -1}],
    "/update_weights_from_distributed": [{"names": [], "dtypes": [], "shapes": [], "selector": "draft"}],
    "/update_weights_from_ipc": [{"zmq_handles": {}, "selector": "draft"}],
    "/init_weights_update_group": [
        *({**INIT, name: 0} for name in ("master_port", "rank_offset", "timeout_s")),
        *({**INIT, name: ""} for name in ("master_address", "group_name", "master_port")),
        {**INIT, "world_size": 1},
    ],
    "/get_weights_by_name": [{"name": ""}, {"name": "lm_head.weight", "truncate_size": -1}],
    "/start_weight_update": [{"is_checkpoint_format": False}],
    "/weight_checker": [{}, {"action": "compare"}],
    "/inference/v1/abort_requests": [{}, {"request_ids": []}],
    "/init_weight_transfer_engine": [
        {},
        *({"init_info": info} for info in ({"pack": True}, {"rank_offset": 1}, {"local_checkpoint_dir": ""})),
        {"init_info": {"rank_offset": 0, "world_size": 2, "nccl_unique_id_b64": ID}},
    ],
    "/init_broadcaster": [
        *({**BROADCASTER, name: 0} for name in ("port", "inference_world_size", "timeout")),
        {**BROADCASTER, "host": ""},
        {**BROADCASTER, "rank_offset": -1},
        {**BROADCASTER, "quantize_in_weight_transfer": True},
        {**BROADCASTER, "session_id": "a"},
    ],
    "/pull_weights": [
        {"local_checkpoint_dir": "a", "source_dir": "b", "target_version": 1, "pre_read_hook": "c"}
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_the_document_does_not_allow_is_refused(server: Server, path: str) -> None:
    schema = validator_for(request_schema("POST", path))
    for body in REFUSED[path]:
        assert not schema.is_valid(body), body
        response = server.client.request("POST", path, json=body)
        assert response.status_code == 400, (body, response.text)


@pytest.mark.parametrize("query", [{"dp_rank": -1}, {"include": "core,all,disc"}])
def test_a_query_that_the_document_does_not_allow_is_refused(server: Server, query: dict[str, Any]) -> None:
    parameters = DOCUMENT["paths"]["/v1/loads"]["get"]["parameters"]
    [(name, value)] = query.items()
    [schema] = [known["schema"] for known in parameters if known["name"] == name]
    assert not validator_for(schema).is_valid(value)
    assert server.get("/v1/loads", params=query).status_code == 400


def test_the_document_allows_what_frameworks_send() -> None:
    calls = [call for file in RECORDED.glob("*.json") for call in msgspec.json.decode(file.read_bytes())]
    sent = [call for call in calls if call["status"] == 200 and call.get("body") is not None]
    assert len(sent) > 50
    for call in sent:
        schema = request_schema(call["method"], call["path"])
        if schema is not None:
            validator_for(schema).validate(call["body"])


# The weights were released above: without new ones nothing would run.
def test_a_refusal_is_described_too(server: Server, checkpoints: Any) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(checkpoints.a)}).is_success
    schema = {"$ref": "#/components/schemas/Error", "components": DOCUMENT["components"]}
    for response in (server.post("/generate", {}), server.get("/nowhere"), server.post("/health")):
        validator_for(schema).validate(response.json())


# By its command: the cases of a parametrized test would be made by every worker that collects it.
def test_nothing_makes_the_server_fail(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url_of(server)}/openapi.json"]
    # Cases at the bounds of every field, thousands of them, and three random ones of each operation.
    command += ["--phases=coverage,fuzzing", "--max-examples=3", "--generation-deterministic"]
    command += ["--suppress-health-check=all", f"--request-timeout={HANG_S:g}"]
    # To put is to post. A drain ends the server, as it should.
    command += ["--exclude-method=PUT", "--exclude-path=/drain"]
    command += ["--checks=never_500,response_schema_conformance,content_type_conformance"]
    # And what is in that module.
    hooks = {"PYTHONPATH": str(Path(__file__).parents[1]), "SCHEMATHESIS_HOOKS": "fixtures.openapi_cases"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | hooks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) generated", done.stdout)[0]) > 1000
