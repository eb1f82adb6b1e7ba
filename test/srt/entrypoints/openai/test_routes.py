"""OpenAI's endpoints of a real server, asked by OpenAI's own client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fixtures.checkpoints import EOS_ID, VOCAB_SIZE, make_checkpoint
from fixtures.servers import Server, running_server

NAME = "org/tide"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES: Any = [{"role": "user", "content": "ebb?"}]
# What the tokenizer's template makes of them.
RENDERED = "user: ebb?\nassistant: "
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    path = make_checkpoint(folder / "tide", "Qwen3ForCausalLM", seed=3, max_position_embeddings=2048)
    # As their authors would have it: greedy; and a value that makes no sense.
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_k": 0, "top_p": 7}))
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with running_server(checkpoint, "--served-model-name", NAME, "--enable-metrics") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def generate(server: Server, text: str, num_tokens: int = NUM_TOKENS, **fields: Any) -> Any:
    """What `/generate` makes of it, greedily."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    response = server.post("/generate", {"text": text, "sampling_params": params, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def extra(answer: Any) -> dict[str, Any]:
    """The fields that OpenAI does not know."""
    assert answer.model_extra is not None
    return dict(answer.model_extra)


def whole_metadata(answer: Any) -> dict[str, Any]:
    """What OpenAI's endpoints call the versions in an answer of `/generate`."""
    names = ("weight_version", "weight_versions", "kv_weight_versions", "prefill_weight_versions")
    return {name: answer["meta_info"][name] for name in names}


# ------------------------------------------------------------------------------------------------- models


def test_the_model_is_listed_and_found_by_its_name(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (NAME, "model", "ebbtide")
    assert extra(card) == {"root": NAME, "parent": None, "max_model_len": 2048}
    assert client.models.retrieve(NAME) == card
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")


# -------------------------------------------------------------------------------------------- completions


def test_a_completion_is_what_generate_answers(server: Server, client: openai.OpenAI) -> None:
    whole = generate(server, "tide")
    answer = client.completions.create(prompt="tide", max_tokens=NUM_TOKENS, **GREEDY)
    [choice] = answer.choices
    assert (answer.object, answer.model) == ("text_completion", NAME)
    assert (choice.index, choice.text, choice.finish_reason) == (0, whole["text"], "length")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.total_tokens == 4 + NUM_TOKENS
    assert extra(answer)["metadata"] == whole_metadata(whole)
    assert "token_ids" not in extra(choice)


def test_a_completion_has_16_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="tide", **GREEDY)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("tide", ["tide"]),
        (["tide", "ebb"], ["tide", "ebb"]),
        (list(b"tide"), ["tide"]),
        ([list(b"tide"), list(b"ebb")], ["tide", "ebb"]),
    ],
)
def test_prompts_are_texts_or_ids_one_or_many(
    server: Server, client: openai.OpenAI, prompt: Any, texts: list[str]
) -> None:
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    answer = client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **body)
    wholes = [generate(server, text) for text in texts]
    assert [choice.text for choice in answer.choices] == [whole["text"] for whole in wholes]
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [extra(choice)["token_ids"] for choice in answer.choices] == [w["output_ids"] for w in wholes]
    prompt_ids = [extra(choice)["prompt_token_ids"] for choice in answer.choices]
    assert prompt_ids == [list(text.encode()) for text in texts]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_a_streamed_completion_adds_up_to_the_whole(server: Server, client: openai.OpenAI) -> None:
    whole = generate(server, "tide", 40)
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    options: Any = {"include_usage": True}
    stream = client.completions.create(
        prompt="tide", max_tokens=40, stream=True, stream_options=options, **body
    )
    *chunks, last = list(stream)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole["text"]
    ids = [token for chunk in chunks for token in extra(chunk.choices[0])["token_ids"]]
    assert ids == whole["output_ids"]
    assert [extra(chunk.choices[0]).get("prompt_token_ids") for chunk in chunks] == [
        list(b"tide"),
        *[None] * (len(chunks) - 1),
    ]
    reasons: list[str | None] = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert ["metadata" in extra(chunk) for chunk in chunks] == [reason is not None for reason in reasons]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 40)


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


def test_a_stop_string_is_cut_off_and_named(server: Server, client: openai.OpenAI) -> None:
    text = generate(server, "tide", 40)["text"]
    stop = text[10:12]
    answer = client.completions.create(prompt="tide", max_tokens=40, stop=[stop], **GREEDY)
    [choice] = answer.choices
    assert (choice.finish_reason, extra(choice)["matched_stop"]) == ("stop", stop)
    assert choice.text == text[: text.index(stop)]
    bias: Any = {str(EOS_ID): 1e4}
    [choice] = client.completions.create(model=NAME, prompt="tide", logit_bias=bias).choices
    assert (choice.finish_reason, extra(choice)["matched_stop"]) == ("stop", EOS_ID)


def test_logprobs_are_those_of_generate(server: Server, client: openai.OpenAI) -> None:
    meta = generate(
        server,
        "tide",
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )["meta_info"]
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
    expected = [None if top is None else {text for _, _, text in top} for top in tops]
    assert [None if top is None else set(top) for top in logprobs.top_logprobs] == expected
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:5] == [0, 1, 2, 3, 4]


def test_a_streamed_completion_with_echo_and_logprobs_adds_up(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"prompt": "tide", "max_tokens": NUM_TOKENS, "logprobs": 1, "echo": True, **GREEDY}
    [whole] = client.completions.create(**body).choices
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **body)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "text_offset"):
        added = [entry for piece in pieces for entry in getattr(piece.logprobs, name)]
        assert added == getattr(whole.logprobs, name)


def test_a_prompt_can_be_scored_without_generating(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="tide", max_tokens=0, logprobs=0, echo=True, **GREEDY)
    [choice] = answer.choices
    assert choice.text == "tide"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["t", "i", "d", "e"]
    assert choice.logprobs.token_logprobs is not None
    assert [logprob is None for logprob in choice.logprobs.token_logprobs] == [True, False, False, False]


# --------------------------------------------------------------------------------------------------- chat


def test_a_chat_is_what_generate_answers_to_its_template(server: Server, client: openai.OpenAI) -> None:
    whole = generate(server, RENDERED)
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=NUM_TOKENS, **GREEDY)
    [choice] = answer.choices
    assert (answer.object, choice.message.role) == ("chat.completion", "assistant")
    assert (choice.message.content, choice.finish_reason) == (whole["text"], "length")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED)
    assert answer.to_dict(warnings=False)["metadata"] == whole_metadata(whole)


@pytest.mark.parametrize(
    ("messages", "fields", "rendered"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "ebb?"}]}], {}, RENDERED),
        ([{"role": "user", "content": None}], {}, "user: \nassistant: "),
        ([*MESSAGES, {"role": "assistant", "content": "fl"}], {"continue_final_message": True},
         "user: ebb?\nassistant: fl"),
        (MESSAGES, {"input_ids": list(b"other")}, "other"),
    ],
)  # fmt: skip
def test_what_the_model_is_shown(
    client: openai.OpenAI, messages: Any, fields: dict[str, Any], rendered: str
) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=1, extra_body={"return_prompt_token_ids": True, **fields}
    )
    assert bytes(extra(answer.choices[0])["prompt_token_ids"]).decode() == rendered
    assert "response_token_ids" not in extra(answer.choices[0])


def test_a_chat_runs_to_the_end_of_the_context_unless_told_otherwise(client: openai.OpenAI) -> None:
    prompt = list(b"x" * 2000)
    answer = client.chat.completions.create(
        model=NAME, messages=[], extra_body={"input_ids": prompt, "ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=3, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_chat_is_sampled_as_the_models_authors_would_have_it(server: Server, client: openai.OpenAI) -> None:
    whole = generate(server, RENDERED, 32)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=32, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == whole["text"]
    hot = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=32, temperature=1.5, extra_body={"ignore_eos": True}
    )
    assert hot.choices[0].message.content != whole["text"]
    # Completions are OpenAI's: they sample.
    plain = client.completions.create(
        model=NAME, prompt=RENDERED, max_tokens=32, extra_body={"ignore_eos": True}
    )
    assert plain.choices[0].text != whole["text"]


def test_a_streamed_chat_adds_up_to_the_whole(server: Server, client: openai.OpenAI) -> None:
    whole = generate(server, RENDERED, 40)
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    stream = client.chat.completions.create(messages=MESSAGES, max_tokens=40, stream=True, **body)
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.delta.role for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]
    assert "".join(choice.delta.content or "" for choice in choices) == whole["text"]
    ids = [token for choice in choices for token in extra(choice)["response_token_ids"]]
    assert ids == whole["output_ids"]
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_logprobs_of_a_chat(server: Server, client: openai.OpenAI) -> None:
    expected = generate(server, RENDERED, return_logprob=True, top_logprobs_num=3)["meta_info"]
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "return_meta_info": True}}
    answer = client.chat.completions.create(
        messages=MESSAGES, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=3, **body
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    logprobs = [logprob for logprob, _, _ in expected["output_token_logprobs"]]
    assert [entry.logprob for entry in content] == pytest.approx(logprobs, abs=1e-4)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    for entry in content:
        assert entry.bytes is None if "\ufffd" in entry.token else entry.bytes == list(entry.token.encode())
    meta = extra(choice)["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == NUM_TOKENS


# ------------------------------------------------------------------------------- refusals, aborts, versions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "empty"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "mixture"),
        (COMPLETIONS, {"prompt": [VOCAB_SIZE], "echo": True}, "not in the vocabulary"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"response_format": {"type": "json"}}, "response_format"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, "role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "only parts with text are supported"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "cannot be set"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_before_it_runs(
    server: Server, path: str, fields: dict[str, Any], message: str, stream: bool
) -> None:
    needed = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    response = server.post(path, {"stream": stream, **needed, **fields})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_the_client_sees_a_refusal_as_openai_would_have_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=NAME, prompt="a", top_p=2)
    assert "top_p" in raised.value.message
    assert (raised.value.status_code, raised.value.type) == (400, "BadRequestError")


def test_unknown_fields_and_null_are_ignored(server: Server) -> None:
    body = {"prompt": "a", "model": "any name", "wish": 1, "n": None, "stop": None, "regex": ""}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200
    assert response.json()["model"] == "any name"


def test_a_request_is_aborted_by_its_id(server: Server, client: openai.OpenAI) -> None:
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "rid": "mine"}}
    stream = client.chat.completions.create(messages=MESSAGES, stream=True, **body)
    first = next(stream)
    assert first.id == "mine"
    server.post("/abort_request", {"rid": first.id})
    *_, last = stream
    assert last.choices[0].finish_reason == "abort"


# ------------------------------------------------------------------------------------------------ metrics


def metric(server: Server, name: str) -> float:
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    [line] = [line for line in response.text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_metrics_count_what_was_answered(server: Server, client: openai.OpenAI) -> None:
    names = ["ebbtide:prompt_tokens_total", "ebbtide:generation_tokens_total"]
    names += [
        'ebbtide:num_requests_total{finish_reason="length"}',
        "ebbtide:e2e_request_latency_seconds_count",
    ]
    generate(server, "tide")
    before = [metric(server, name) for name in names]
    generate(server, "tide")
    list(client.completions.create(prompt="tide", max_tokens=NUM_TOKENS, stream=True, **GREEDY))
    after = [metric(server, name) for name in names]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [8, 2 * NUM_TOKENS, 2, 2]


def test_metrics_tell_the_state(server: Server) -> None:
    resident = 'ebbtide:resident_bytes{tag="kv_cache"}'
    assert metric(server, "ebbtide:can_run") == 1
    assert metric(server, resident) > 0
    assert metric(server, 'ebbtide:num_running_reqs{dp_rank="0"}') == 0
    server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert (metric(server, "ebbtide:can_run"), metric(server, resident)) == (0, 0)
    server.post("/resume_memory_occupation")
    assert metric(server, "ebbtide:can_run") == 1
