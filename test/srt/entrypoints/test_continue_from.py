"""Requests that continue an output that has ended, over HTTP: the tokens are those of one that never did."""

import json
from typing import Any

import pytest
from fixtures.servers import Server, wait_until

PROMPT = [5, 6, 7, 8]
PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "sampling_seed": 7,
    "ignore_eos": True,
    "max_new_tokens": 40,
    # What these count is the whole output.
    "presence_penalty": 0.7,
    "repetition_penalty": 1.2,
}


def generate(server: Server, status: int = 200, **fields: Any) -> Any:
    response = server.post("/generate", fields)
    assert response.status_code == status, response.text
    return response.json()


@pytest.fixture
def whole(server: Server) -> list[int]:
    """The output ids of a request that nothing interrupts."""
    ids: list[int] = generate(server, input_ids=PROMPT, sampling_params=PARAMS)["output_ids"]
    assert len(ids) == 40
    return ids


def test_an_output_goes_on_in_several_requests_and_both_dialects(server: Server, whole: list[int]) -> None:
    first = generate(server, input_ids=PROMPT, rid="first", sampling_params={**PARAMS, "max_new_tokens": 15})
    assert first["output_ids"] == whole[:15]
    assert "has reached its 15 tokens" in generate(server, 400, continue_from="first")["message"]

    params = {"temperature": 1.0, "ignore_eos": True, "presence_penalty": 0.7, "repetition_penalty": 1.2}
    body = {"continue_from": "first", "request_id": "second", "return_token_ids": True}
    body |= {"sampling_params": {**params, "max_tokens": 10, "logprobs": 0}}
    second = server.post("/inference/v1/generate", body).json()
    [choice] = second["choices"]
    assert choice["token_ids"] == whole[15:25]
    assert second["prompt_token_ids"] == PROMPT + whole[:15]
    assert len(choice["logprobs"]["content"]) == 10
    assert (choice["finish_reason"], second["usage"]["prompt_tokens"]) == ("length", 4 + 15)

    # The same rid may be used again: it stands for the last output then.
    third = generate(
        server, continue_from="second", rid="first", sampling_params={**PARAMS, "max_new_tokens": 15}
    )
    assert third["output_ids"] == whole[25:]
    meta = third["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4 + 25, 15)
    assert meta["finish_reason"] == {"type": "length", "length": 15}
    assert [(span["start"], span["end"]) for span in meta["weight_versions"]] == [(0, 15)]


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_output_goes_on_after_an_abort_or_a_lost_connection(server: Server, is_stream: bool) -> None:
    params = {**PARAMS, "max_new_tokens": 200}
    whole = generate(server, input_ids=PROMPT, sampling_params=params)["output_ids"]
    body = {"input_ids": PROMPT, "rid": "lost", "sampling_params": params, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        told = json.loads(next(lines).removeprefix("data: "))
        assert told["output_ids"] == whole[: len(told["output_ids"])]
        running = generate(server, 400, continue_from="lost")
        assert "'lost' is still running" in running["message"]
        if not is_stream:
            assert server.post("/abort_request", {"rid": "lost"}).is_success
    wait_until(lambda: server.get("/load").json()["server_load"] == 0, "nothing runs")
    # Nothing is said but which: it goes on as it was asked to.
    body = {"continue_from": "generate-tokens-lost", "return_token_ids": True}
    found = server.post("/inference/v1/generate", body).json()
    ids = found["prompt_token_ids"] + found["choices"][0]["token_ids"]
    assert ids == PROMPT + whole


def test_a_stop_string_may_begin_before_the_cut(server: Server) -> None:
    params = {**PARAMS, "max_new_tokens": 30}
    text = generate(server, input_ids=PROMPT, sampling_params=params)["text"]
    cut = generate(server, input_ids=PROMPT, rid="cut", sampling_params={**params, "max_new_tokens": 12})
    start = len(cut["text"]) - 1
    stop = text[start : start + 3]
    if stop not in cut["text"]:
        rest = generate(server, continue_from="cut", sampling_params={**params, "stop": [stop]})
        assert rest["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    generate(server, continue_from="cut", rid="on", sampling_params={**params, "stop": [cut["text"][:2]]})


@pytest.mark.parametrize("key", ["Bearer other", None])
def test_an_output_is_nothing_to_those_who_do_not_bring_the_key_of_its_request(
    server: Server, key: str | None
) -> None:
    own, other = {"Authorization": "Bearer own"}, {} if key is None else {"Authorization": key}
    body = {"input_ids": PROMPT, "rid": "secret", "sampling_params": {**PARAMS, "max_new_tokens": 3}}
    assert server.post("/generate", body, headers=own).is_success
    for path, more in (("/generate", {}), ("/inference/v1/generate", {"return_token_ids": True})):
        asked = {"continue_from": "secret", "sampling_params": {}, **more}
        refused = server.post(path, asked, headers=other)
        assert refused.status_code == 400
        assert "there is no output 'secret'" in refused.json()["message"]
    # Nor are rids told, or taken by others.
    unknown = server.post("/generate", {"continue_from": "x"}, headers=own).json()["message"]
    assert "secret" not in unknown
    assert server.post("/generate", body, headers=other).is_success
    found = server.post("/inference/v1/generate", asked, headers=own).json()
    assert found["prompt_token_ids"][: len(PROMPT)] == PROMPT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"continue_from": "nobody"}, "there is no output 'nobody'"),
        ({"continue_from": "known", "input_ids": [1]}, "expected no prompt"),
        ({"continue_from": "known", "text": "a"}, "expected no prompt"),
        ({"continue_from": "known", "sampling_params": {"n": 2}}, "expected n = 1, got 2"),
        ({"continue_from": ["known"]}, "Expected `str | null`"),
    ],
)
def test_what_cannot_be_continued_is_refused(server: Server, fields: dict[str, Any], message: str) -> None:
    generate(server, input_ids=PROMPT, rid="known", sampling_params={"max_new_tokens": 1})
    assert message in generate(server, 400, **fields)["message"]
