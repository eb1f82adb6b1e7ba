"""The table of control endpoints, and fields in queries."""

from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.application import ask
from starlette.datastructures import QueryParams

from ebbtide.srt.entrypoints.routes import (
    CONTROL_ROUTES,
    NOT_IMPLEMENTED,
    binary_fields,
    query_fields,
)
from ebbtide.srt.entrypoints.service import ControlAnswer
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.control_client import build_request
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.server_args import ServerArgs


def fields_of(path: str, query: str) -> dict[str, Any]:
    return query_fields(CONTROL_ROUTES[path], QueryParams(query))


def test_no_path_is_there_and_not_there() -> None:
    assert not set(CONTROL_ROUTES) & set(NOT_IMPLEMENTED)


def test_fields_in_a_query_take_the_types_of_the_request() -> None:
    assert fields_of("/flush_cache", "timeout=2.5") == {"timeout_s": 2.5}
    assert fields_of("/flush_cache", "timeout_s=3") == {"timeout_s": 3.0}
    name = "model.norm.weight"
    assert fields_of("/get_weights_by_name", f"name={name}&truncate_size=3") == {
        "name": name,
        "truncate_size": 3,
    }
    assert fields_of("/get_weights_by_name", "name=7") == {"name": "7"}
    assert fields_of("/abort_request", "rid=a&abort_all=true") == {"rid": "a", "abort_all": True}


def test_what_a_bare_list_has_no_room_for_is_a_header() -> None:
    class Reading:
        is_down, tracing = False, None
        config = SimpleNamespace(server_args=ServerArgs(model_path="none"))

        async def answer(self, kind: type, fields: dict[str, str]) -> ControlAnswer:
            return ControlAnswer([1.0, 2.0], "dequantized" if fields["name"] == "quantized" else "")

    for name, remark in (("quantized", "dequantized"), ("plain", None)):
        response = ask(Reading(), "GET", f"/get_weights_by_name?name={name}")
        assert response.json() == [1.0, 2.0]
        assert response.headers.get("Ebbtide-Message") == remark


def test_a_list_is_a_field_that_is_repeated() -> None:
    path = "/release_memory_occupation"
    assert fields_of(path, "tags=weights") == {"tags": (MemoryTag.WEIGHTS,)}
    assert fields_of(path, "tags=weights&tags=kv_cache") == {"tags": (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)}


@pytest.mark.parametrize(
    ("path", "query", "expected"),
    [
        ("/flush_cache", "timeout=soon", "Expected `float`, got `str`"),
        ("/release_memory_occupation", "tags=wieghts", "expected one of weights, kv_cache, cuda_graph"),
        ("/get_weights_by_name", "name=a&truncate_size=all", "Expected `int`, got `str`"),
    ],
)
def test_a_bad_value_in_a_query_is_refused_as_one_in_a_body_is(path: str, query: str, expected: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        build_request(CONTROL_ROUTES[path], fields_of(path, query))
    assert expected in raised.value.message
    assert raised.value.status == 400


def test_only_weights_travel_as_base64() -> None:
    binary = {path: binary_fields(kind) for path, kind in CONTROL_ROUTES.items() if binary_fields(kind)}
    paths = ("/update_weights_from_tensor", "/load_lora_adapter_from_tensors")
    assert binary == {path: {"serialized_named_tensors"} for path in paths}
