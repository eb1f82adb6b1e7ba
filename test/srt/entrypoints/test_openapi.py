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
from fixtures.servers import Server, running_server, url_of
from jsonschema_rs import validator_for

from ebbtide.srt.entrypoints.control_routes import NOT_IMPLEMENTED
from ebbtide.srt.entrypoints.http_server import create_app
from ebbtide.srt.entrypoints.openapi import openapi_document

DOCUMENT = openapi_document()


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
    for_people = ("/openapi.json", "/docs", "/dashboard", "/dashboard/events")
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
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text


def assert_described(server: Server, method: str, path: str, body: Any = None) -> None:
    """What the server answers is what the document says, with nothing left out."""
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
        ("GET", "/v1/models", None),
        *(("GET", path, None) for path in ("/", "/health", "/ready", "/model_info", "/server_info")),
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


# The weights were released above: without new ones nothing would run.
def test_a_refusal_is_described_too(server: Server, checkpoints: Any) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(checkpoints.a)}).is_success
    schema = {"$ref": "#/components/schemas/Error", "components": DOCUMENT["components"]}
    for response in (server.post("/generate", {}), server.get("/nowhere"), server.post("/health")):
        validator_for(schema).validate(response.json())


# By its command: the cases of a parametrized test would be made by every worker that collects it.
@pytest.mark.timeout(900)
def test_nothing_makes_the_server_fail(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url_of(server)}/openapi.json"]
    # The boundary cases of every field, thousands of them, and three random cases of each operation.
    command += ["--phases=coverage,fuzzing", "--max-examples=3", "--generation-deterministic"]
    command += ["--suppress-health-check=all", "--request-timeout=30"]
    # To put is to post. A drain ends the server, as it should.
    command += ["--exclude-method=PUT", "--exclude-path=/drain"]
    command += ["--checks=never_500,response_schema_conformance,content_type_conformance"]
    # And what is in that module.
    hooks = {"PYTHONPATH": str(Path(__file__).parents[1]), "SCHEMATHESIS_HOOKS": "fixtures.openapi_cases"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | hooks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) generated", done.stdout)[0]) > 1000
