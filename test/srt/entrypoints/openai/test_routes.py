"""OpenAI's endpoints of a real server, asked by OpenAI's own client."""

import enum
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fixtures.servers import Server

NAME = "org/tide"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES: Any = [{"role": "user", "content": "ebb?"}]
# What the tokenizer's template makes of them.
RENDERED = "user: ebb?\nassistant: "
NUM_TOKENS = 8
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def server(shared_server: Server) -> Server:
    return shared_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def generate(server: Server, text: str, num_tokens: int = NUM_TOKENS, **fields: Any) -> Any:
    """What `/generate` makes of it, greedily."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return ok(server.post("/generate", {"text": text, "sampling_params": params, **fields}))


def extra(answer: Any) -> dict[str, Any]:
    """The fields that OpenAI does not know."""
    assert answer.model_extra is not None
    return dict(answer.model_extra)


# ------------------------------------------------------------------------------------------------- models


def test_the_model_is_listed_and_found_by_its_name(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (NAME, "model", "ebbtide")
    assert extra(card) == {"root": NAME, "parent": None, "max_model_len": 2048, "permission": []}
    assert client.models.retrieve(NAME) == card
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")


# -------------------------------------------------------------------------------------------- completions


def test_a_completion_is_what_generate_answers_whole_and_in_pieces(
    server: Server, client: openai.OpenAI
) -> None:
    whole = generate(server, "tide")
    answer = client.completions.create(prompt="tide", max_tokens=NUM_TOKENS, **GREEDY)
    [choice] = answer.choices
    assert (answer.object, answer.model) == ("text_completion", NAME)
    assert (choice.index, choice.text, choice.finish_reason) == (0, whole["text"], "length")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4 + NUM_TOKENS)
    # Clients of vLLM's index them whether they asked or not.
    for name in ("token_ids", "prompt_token_ids", "weight_versions", "routed_experts", "prompt_logprobs"):
        assert extra(choice)[name] is None
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    chunks = list(client.completions.create(prompt="tide", max_tokens=NUM_TOKENS, stream=True, **body))
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole["text"]
    assert [id_ for chunk in chunks for id_ in extra(chunk.choices[0])["token_ids"]] == whole["output_ids"]
    prompts = [extra(chunk.choices[0]).get("prompt_token_ids") for chunk in chunks]
    assert prompts == [list(b"tide"), *[None] * (len(chunks) - 1)]
    assert ["metadata" in extra(chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_samples_of_a_seed_are_told_apart_and_come_again(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": NAME, "prompt": ["tide", "ebb"], "n": 2, "seed": 7, "max_tokens": 24}
    first, second = (client.completions.create(**body) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 4
    assert first.usage is not None
    # A prompt counts once, whatever the number of its samples.
    assert first.usage.prompt_tokens == len("tide") + len("ebb")
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(stream=True, **body):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_logprobs_are_those_of_generate(server: Server, client: openai.OpenAI) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = generate(server, "tide", top_logprobs_num=2, **fields)["meta_info"]
    positions = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    answer = client.completions.create(prompt="tide", max_tokens=NUM_TOKENS, logprobs=2, echo=True, **GREEDY)
    [choice] = answer.choices
    assert choice.text.startswith("tide")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == [text for _, _, text in positions]
    assert logprobs.token_logprobs == [
        None,
        *(pytest.approx(logprob, abs=1e-4) for logprob, _, _ in positions[1:]),
    ]
    assert logprobs.top_logprobs is not None
    # The token itself is among them, whether or not it is one of the most likely ones.
    expected = [
        None if top is None else {own[2], *(text for _, _, text in top)}
        for own, top in zip(positions, tops, strict=True)
    ]
    assert [None if top is None else set(top) for top in logprobs.top_logprobs] == expected
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    body: dict[str, Any] = {"prompt": "tide", "max_tokens": NUM_TOKENS, "logprobs": 2, "echo": True}
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **body, **GREEDY)]
    for name in ("tokens", "text_offset"):
        assert [entry for piece in pieces for entry in getattr(piece.logprobs, name)] == getattr(
            logprobs, name
        )


# --------------------------------------------------------------------------------------------------- chat


def test_a_chat_is_what_generate_answers_to_its_template_whole_and_in_pieces(
    server: Server, client: openai.OpenAI
) -> None:
    whole = generate(server, RENDERED)["text"]
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=NUM_TOKENS, **GREEDY)
    [choice] = answer.choices
    assert (answer.object, choice.message.role) == ("chat.completion", "assistant")
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == (whole, "length", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED)
    stream = client.chat.completions.create(messages=MESSAGES, max_tokens=NUM_TOKENS, stream=True, **GREEDY)
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.delta.role for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
    assert "".join(choice.delta.content or "" for choice in choices) == whole
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_other_dialects_of_a_chat_have_its_answer(
    server: Server, client: openai.OpenAI, anthropic: Any
) -> None:
    whole = generate(server, RENDERED)["text"]
    options: Any = {"temperature": 0, "ignore_eos": True}
    answer = client.responses.create(input="ebb?", max_output_tokens=NUM_TOKENS, extra_body=options)
    assert (answer.output_text, answer.status) == (whole, "incomplete")
    deltas = [
        event.delta
        for event in client.responses.create(
            input="ebb?", max_output_tokens=NUM_TOKENS, extra_body=options, stream=True
        )
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == whole
    url = str(server.client.base_url)
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
        body: Any = {"model": NAME, "max_tokens": NUM_TOKENS, "messages": MESSAGES}
        message = other.messages.create(**body, extra_body=options)
        assert [block.text for block in message.content if block.type == "text"] == [whole]
        with other.messages.stream(**body, extra_body=options) as stream:
            assert "".join(stream.text_stream) == whole
        count = other.messages.count_tokens(model=NAME, messages=MESSAGES)
        assert count.input_tokens == len(RENDERED)
        with pytest.raises(anthropic.NotFoundError, match="'type': 'not_found_error'"):
            other.messages.create(**{**body, "model": "other"})


# ------------------------------------------------------------------------------- refusals, aborts, versions


def test_the_client_sees_a_refusal_as_openai_would_have_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=NAME, prompt="a", top_p=2)
    assert "top_p" in raised.value.message
    assert (raised.value.status_code, raised.value.type) == (400, "BadRequestError")


# ------------------------------------------------------------------------------------------ tools and JSON


class Height(enum.Enum):
    """Stands among the definitions of a schema, which refers to it."""

    ONE = "one"
    TWO = "two"


class Tide(pydantic.BaseModel):
    """The model's words are noise: what is checked is that OpenAI's own helpers take them."""

    model_config = pydantic.ConfigDict(extra="forbid")

    high: bool
    height: Height


TOOL: Any = openai.pydantic_function_tool(Tide, name="tide")


def test_openais_helper_for_json(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Tide, temperature=1)
    assert isinstance(answer.choices[0].message.parsed, Tide)
    plain = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=64
    )
    assert (plain.choices[0].message.content or "").startswith("{")


def test_openais_helper_for_tools_that_must_be_called(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
    }
    answer = client.chat.completions.parse(**call)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "")
    [made] = choice.message.tool_calls or []
    assert made.function.name == "tide"
    assert isinstance(made.function.parsed_arguments, Tide)
    with client.chat.completions.stream(**call) as stream:
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert isinstance(streamed.function.parsed_arguments, Tide)
    said = [*MESSAGES, choice.message.model_dump(mode="json", exclude_none=True)]
    said.append({"role": "tool", "tool_call_id": made.id, "content": "high"})
    client.chat.completions.create(model=NAME, messages=said, tools=[TOOL], tool_choice="none", max_tokens=2)


# --------------------------------------------------------------------------- fields of clients of vLLM's


def test_a_teacher_scores_prompts(server: Server) -> None:
    asked = {"prompt": [PROMPT, PROMPT], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
    choices = ok(server.post("/v1/completions", asked))["choices"]
    scored = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    scored |= {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    expected = ok(server.post("/generate", scored))["meta_info"]
    for choice in choices:
        assert choice["logprobs"] is None
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for position, told in enumerate(others, 1):
            own, top = expected["input_token_logprobs"][position], expected["input_top_logprobs"][position]
            assert told[str(PROMPT[position])]["logprob"] == pytest.approx(own[0])
            ranked = sorted(told.items(), key=lambda item: item[1]["rank"])
            assert [int(token_id) for token_id, _ in ranked[:2]] == [token_id for _, token_id, _ in top]
            assert [item["rank"] for _, item in ranked] == list(range(1, len(told) + 1))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
    first, *others = ok(server.post("/inference/v1/generate", body))["prompt_logprobs"]
    assert (first, list(map(list, others))) == (None, list(map(list, choices[0]["prompt_logprobs"][1:])))
    refused = server.post("/v1/completions", {**asked, "stream": True})
    assert (refused.status_code, refused.json()["message"]) == (400, "prompt_logprobs: not in a stream")


def test_ids_that_may_come_and_ids_that_are_told(server: Server) -> None:
    params = {"max_tokens": 8, "allowed_token_ids": [9, 10], "logprob_token_ids": [9, 11], "logprobs": 0}
    body = {"token_ids": PROMPT, "sampling_params": params}
    [choice] = ok(server.post("/inference/v1/generate", body))["choices"]
    assert set(choice["token_ids"]) <= {9, 10}
    for token in choice["logprobs"]["content"]:
        listed = {each["token_id"]: each["logprob"] for each in token["top_logprobs"]}
        assert listed.keys() == {token["token_id"], 9, 11}
        assert listed[11] == -9999.0


def test_another_model_is_not_answered_by_this_one(server: Server, checkpoints: Any) -> None:
    """A name that an adapter might have had: the base weights in its place would be the wrong policy."""
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
        "/v1/tokenize": {"prompt": "a"},
    }
    for path, body in bodies.items():
        for name in (NAME, str(checkpoints.a), f"{checkpoints.a}/", None):
            assert server.post(path, body | {"model": name}).status_code == 200, (path, name)
        refused = server.post(path, body | {"model": "adapter-7"})
        assert (refused.status_code, NAME in refused.json()["message"]) == (404, True), path
