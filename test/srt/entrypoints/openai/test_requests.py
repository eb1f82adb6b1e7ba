"""OpenAI's requests and answers without a server: chat templates, streams, engines without a tokenizer."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fixtures.checkpoints import make_tokenizer

from ebbtide.srt.entrypoints.openai.answers import CallWriter, ChatWriter, CompletionWriter
from ebbtide.srt.entrypoints.openai.requests import OpenAICall, chat_call, completion_call, within_limits
from ebbtide.srt.entrypoints.openai.tokenization import (
    ChatTemplate,
    read_chat_template,
    recommended_sampling,
)
from ebbtide.srt.entrypoints.request_body import with_headers
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.managers.text.tokenizer import Tokenizer

TOOL_TEMPLATE = (
    "{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments | tojson }}){% endfor %};{% endfor %}"
)


def template(text: str | None = TOOL_TEMPLATE) -> ChatTemplate:
    return ChatTemplate(Tokenizer(make_tokenizer()), text)


def render(fields: dict[str, Any], text: str | None = TOOL_TEMPLATE) -> str | list[int]:
    render = chat_call(fields, "tide", template(text), {}).render
    assert render is not None
    return render()


USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_the_template_sees_tools_calls_and_options() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    fields = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call]}],
        "tools": [TOOL],
        "chat_template_kwargs": {"mood": "calm"},
    }
    assert render(fields) == '[calm]<f>user=a;assistant=({"x": 1});'


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{x"}}
    assert render({"messages": [{"role": "assistant", "tool_calls": [call]}]}) == 'assistant=("{x");'


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render({"messages": [{"role": "user", "content": parts}]}) == "user=a b;"


@pytest.mark.parametrize(
    "text", ["{{ raise_exception('no') }}", "{{ messages[7].role }}", "{% for %}", "{{ 1 / 0 }}"]
)
def test_what_a_template_does_not_take_is_refused(text: str) -> None:
    with pytest.raises(RequestRejected, match="chat template") as raised:
        render({"messages": [USER]}, text)
    assert raised.value.status == 400


def test_a_tokenizer_without_a_template_needs_one() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    render = chat_call({"messages": [USER]}, "tide", ChatTemplate(Tokenizer(tokenizer), None), {}).render
    assert callable(render)
    with pytest.raises(RequestRejected, match="--chat-template"):
        render()


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "tools", "self"])
def test_a_client_cannot_choose_what_is_rendered(name: str) -> None:
    with pytest.raises(RequestRejected, match=f"{name} cannot be set"):
        render({"messages": [USER], "chat_template_kwargs": {name: "x"}})


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template("{% if x %}") == "{% if x %}"
    assert read_chat_template(str(file)) == "{{ messages }}"
    with pytest.raises(ConfigurationError, match="chat_template: expected a file or a Jinja template"):
        read_chat_template("chatml")


def test_recommended_parameters_are_those_that_make_sense(tmp_path: Path) -> None:
    assert recommended_sampling(str(tmp_path)) == {}
    given = {"temperature": 0.6, "top_k": 0, "top_p": 7, "repetition_penalty": None, "max_length": 20}
    (tmp_path / "generation_config.json").write_bytes(msgspec.json.encode(given))
    assert recommended_sampling(str(tmp_path)) == {"temperature": 0.6}
    fields = {"messages": [USER], "top_p": 0.5}
    call = chat_call(fields, "tide", template(), {"temperature": 0.6, "top_p": 0.9})
    params = call.generate["sampling_params"]
    assert params == {"temperature": 0.6, "top_p": 0.5, "max_new_tokens": None}


def test_without_a_tokenizer_there_is_no_chat_but_completions_of_ids() -> None:
    with pytest.raises(RequestRejected, match="needs a tokenizer"):
        chat_call({"messages": [USER], "input_ids": [1]}, "tide", None, {})
    call = completion_call({"prompt": [1, 2], "logprobs": 1, "echo": True}, "tide", None)
    assert call.generate["return_text_in_logprobs"] is False
    finish = {"type": "stop", "matched": 3}
    output = {"output_ids": [3], "prompt_token_ids": [1, 2], "meta_info": meta([3], finish)}
    output["meta_info"] |= {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None]]}
    output["meta_info"] |= {"input_top_logprobs": [None, [[-0.5, 9, None]]]}
    output["meta_info"] |= {"output_top_logprobs": [[[-0.25, 3, None]]]}
    answer = CompletionWriter(call).whole(output)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.matched_stop) == ("", "stop", 3)
    assert choice.logprobs.tokens == ["token_id:1", "token_id:2", "token_id:3"]
    expected = [None, {"token_id:2": -1.0, "token_id:9": -0.5}, {"token_id:3": -3.0}]
    assert choice.logprobs.top_logprobs == expected


METADATA = {
    "weight_version": "7",
    "weight_versions": [{"version": "7", "start": 0, "end": 1}],
    "kv_weight_versions": ["6", "7"],
    "prefill_weight_versions": [{"version": "6", "start": 0, "end": 2}],
    "precision": {"weights": "fp8", "kv_cache": "bfloat16"},
}

# OpenAI's clients expect texts alone there.
METADATA_TEXTS = {
    "weight_version": "7",
    "weight_versions": '[{"version":"7","start":0,"end":1}]',
    "kv_weight_versions": '["6","7"]',
    "prefill_weight_versions": '[{"version":"6","start":0,"end":2}]',
    "precision": '{"weights":"fp8","kv_cache":"bfloat16"}',
}


def meta(ids: list[int], finish: Any = None) -> dict[str, Any]:
    return {
        "finish_reason": finish,
        "prompt_tokens": 2,
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        **METADATA,
        "output_token_logprobs": [(-float(token), token, None) for token in ids],
    }


def test_metadata_say_which_weights_in_which_precision_once_an_output_has_ended() -> None:
    for kind in ("chat", "completion"):
        for by_choice in (False, True):
            writer = writer_of(call_of(kind, return_weight_versions=by_choice))
            for finish in (None, {"type": "length"}):
                output = {"text": "a", "output_ids": [1], "meta_info": meta([1], finish)}
                chunk = msgspec.to_builtins(writer.event(output))
                assert chunk.get("metadata") == (None if finish is None else METADATA_TEXTS)
            whole = msgspec.to_builtins(writer.whole(output))
            assert whole["metadata"] == METADATA_TEXTS
            spans = METADATA["weight_versions"] if by_choice else None
            assert whole["choices"][0]["weight_versions"] == spans


def writer_of(call: OpenAICall) -> CallWriter:
    return ChatWriter(call) if call.id.startswith("chat") else CompletionWriter(call)


def answer_and_chunk(call: OpenAICall, output: dict[str, Any]) -> list[dict[str, Any]]:
    """What an output becomes as a whole, and as the first chunk of a stream."""
    return [
        msgspec.to_builtins(answer)
        for answer in (writer_of(call).whole(output), writer_of(call).event(output))
    ]


ENDED = {"text": "a", "output_ids": [1], "meta_info": meta([1], {"type": "length"})}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_fields_that_nothing_is_known_of_are_named_in_the_answer(kind: str) -> None:
    known = {"user": "u", "n": None, "guided_choice": [], "lora_path": None, "function_call": "none"}
    for answer in answer_and_chunk(call_of(kind, **known), ENDED):
        assert "ignored_fields" not in answer
    call = call_of(kind, max_token=3, foo=None, **known)
    for answer in answer_and_chunk(call, ENDED):
        assert answer["ignored_fields"] == ["foo", "max_token"]
    writer = ChatWriter(call)
    assert ["ignored_fields" in msgspec.to_builtins(writer.event(ENDED)) for _ in range(2)] == [True, False]


def test_a_chat_has_ids_in_vllms_places_in_streams_too() -> None:
    stopped = meta([1], {"type": "stop", "matched": 7})
    output = {**ENDED, "prompt_token_ids": [5, 6], "meta_info": stopped}
    for ids, reason in (([7], 7), ([8], None)):
        call = call_of("chat", return_token_ids=True, stop_token_ids=ids)
        for answer in answer_and_chunk(call, output):
            [choice] = answer["choices"]
            assert answer["id"] == "chatcmpl-r"
            assert answer["prompt_token_ids"] == choice["prompt_token_ids"] == [5, 6]
            assert choice["token_ids"] == choice["response_token_ids"] == [1]
            assert choice["stop_reason"] == reason


def test_an_echo_has_no_candidates_for_its_first_token_however_few_are_asked_for() -> None:
    top: list[Any]
    for number, top in ((0, []), (1, [None, [(-0.5, 9, None)], [(-3.0, 3, None)]])):
        info = meta([3], {"type": "length"})
        info["input_token_logprobs"] = [(None, 1, None), (-1.0, 2, None)]
        if top:
            info |= {"input_top_logprobs": top[:2], "output_top_logprobs": top[2:]}
        output = {"text": "b", "output_ids": [3], "meta_info": info, "prompt_token_ids": [1, 2]}
        for answer in answer_and_chunk(call_of("completion", echo=True, logprobs=number), output):
            first, second, _ = answer["choices"][0]["logprobs"]["top_logprobs"]
            assert (first, len(second)) == (None, 1 + number)


def test_ids_that_are_named_take_the_place_of_the_most_likely_ones() -> None:
    info = meta([3], {"type": "length"})
    info |= {
        "output_top_logprobs": [[(-0.1, 9, None), (-0.2, 8, None)]],
        "output_token_ids_logprobs": [[(-5.0, 7, None), (-3.0, 3, None)]],
    }
    for kind, fields in {
        "completion": {"logprobs": 2},
        "chat": {"logprobs": True, "top_logprobs": 2},
    }.items():
        call = call_of(kind, logprob_token_ids=[7, 3], prompt_logprobs=1, **fields)
        call = within_limits(call, 20, 500)
        assert call.generate["top_logprobs_num"] == 1
        for answer in answer_and_chunk(replace(call, num_prompt_logprobs=None), {**ENDED, "meta_info": info}):
            logprobs = answer["choices"][0]["logprobs"]
            if kind == "completion":
                assert logprobs["top_logprobs"] == [{"token_id:3": -3.0, "token_id:7": -5.0}]
            else:
                [token] = logprobs["content"]
                assert [other["token"] for other in token["top_logprobs"]] == ["token_id:7", "token_id:3"]


# ------------------------------------------------------------------------- fields of other servers' dialects


def call_of(kind: str, **fields: Any) -> OpenAICall:
    if kind == "chat":
        return chat_call({"messages": [USER], "request_id": "r", **fields}, "tide", template(), {})
    return completion_call({"prompt": "a", "request_id": "r", **fields}, "tide", template())


@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        *(
            (["chat", "completion"], {name: value})
            for name, value in {
                "cache_salt": "",
                "function_call": {"name": "f"},
                "guided_json": {"type": "object"},
                "response_format": {"type": "json_schema"},
                "structured_outputs": ["a"],
                "thinking_token_budget": 0,
                "tool_choice": "required",
            }.items()
        ),
        (["chat", "completion"], {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        *(
            (["chat", "completion"], {"structured_outputs": {name: empty}})
            for name, empty in {
                "choice": [],
                "json": "",
                "structural_tag": {},
                "made_up": "",
            }.items()
        ),
        (["chat"], {"chat_template": "{{ 1 }}"}),
        (["completion"], {"tools": [{"type": "function"}]}),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(kinds: list[str], fields: dict[str, Any]) -> None:
    [name] = fields
    for kind in kinds:
        with pytest.raises(RequestRejected, match=rf"^{name}(\.\w+)?: (not supported|expected)") as raised:
            call_of(kind, **fields)
        assert raised.value.status == 400


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("completion", {"prompt": None}, "missing required field `prompt`"),
        ("completion", {"prompt": ["a", [1]]}, "got a mixture"),
        ("completion", {"suffix": "x"}, "suffix: not supported"),
        ("completion", {"best_of": 2}, "best_of: expected null or n"),
        ("completion", {"logprobs": -2}, "`int` >= -1 - at `..logprobs`"),
        ("chat", {"messages": []}, "messages: at least one is needed"),
        ("chat", {"messages": None}, "messages: at least one is needed"),
        ("chat", {"messages": [{"content": "a"}]}, "missing required field `role`"),
        ("chat", {"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "only parts with text"),
        ("chat", {"logprobs": False, "top_logprobs": 2}, "top_logprobs: needs logprobs"),
        ("chat", {"tool_choice": "required"}, "tool_choice: expected tools to choose from"),
        (
            "chat",
            {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "x"}}},
            r"of the tools \(f\)",
        ),
        ("chat", {"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice: expected null, 'none'"),
        ("chat", {"tools": [{"type": "function"}]}, "a function that has a name"),
        ("chat", {"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "cannot be combined with regex"),
        *(
            (kind, {"stream_options": {"include_usage": True}}, "stream_options: expected null, or stream")
            for kind in ("chat", "completion")
        ),
    ],
)
def test_what_is_wrong_is_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as raised:
        call_of(kind, **fields).render()  # type: ignore[misc]
    assert raised.value.status == 400


BATCH = [[USER], [{"role": "user", "content": "b"}, {"role": "assistant", "content": "<think>c"}]]


def test_each_conversation_of_a_batch_has_its_prompt_and_its_answer() -> None:
    fields = {"messages": BATCH, "n": 2, "continue_final_message": True}
    call = chat_call(fields, "tide", template(), {}, None, "qwen3", is_batch=True)
    assert not callable(call.render)
    assert call.render is not None
    assert [render() for render in call.render] == ["user=a", "user=b;assistant=<think>c"]
    outputs = [{**ENDED, "text": "d</think>e"}] * 4
    choices = ChatWriter(call).whole(outputs).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    # Only the second conversation ends in the middle of reasoning.
    told = [(choice.message.reasoning, choice.message.content) for choice in choices]
    assert told == [(None, "d</think>e")] * 2 + [("d", "e")] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: value}, f"{name}: not supported in a batch")
            for name, value in {"stream": True, "input_ids": [1], "prompt_logprobs": 0}.items()
        ),
        ({"messages": [USER]}, r"Expected `array`, got `object` - at `\$.messages\[0\]`"),
        ({"messages": None}, "missing required field `messages`"),
        ({"messages": [[]]}, "messages: at least one is needed"),
        ({"messages": [[{**USER, "content": [{"type": "image_url"}]}]]}, "only parts with text"),
    ],
)
def test_what_is_wrong_with_a_batch_is_refused(fields: dict[str, Any], message: str) -> None:
    def render() -> None:
        [prompt] = chat_call({"messages": BATCH, **fields}, "tide", template(), {}, is_batch=True).render  # type: ignore[misc]
        prompt()

    with pytest.raises(RequestRejected, match=message):
        render()


def test_lengths_and_prompts_where_nothing_else_is_said() -> None:
    assert call_of("completion").generate["sampling_params"] == {"max_new_tokens": 16}
    assert call_of("chat").generate["sampling_params"] == {"max_new_tokens": None}
    assert call_of("chat", messages=[], input_ids=[7]).generate["input_ids"] == [7]
    assert render({"messages": [{"role": "user", "content": None}]}) == "user=;"


def test_headers_say_what_the_body_does_not() -> None:
    headers = {"x-request-priority": "3", "x-data-parallel-rank": "0", "x-request-id": "a"}
    merged = with_headers({"priority": 2, "request_id": "b", "n": 1}, headers)
    assert merged == {"priority": 2, "routed_dp_rank": 0, "request_id": "a", "n": 1}
    assert with_headers({"n": 1}, {"x-request-priority": "-3"}) == {"n": 1, "priority": -3}
    for given in ("one", "-", "9" * 5000):
        with pytest.raises(RequestRejected, match="X-data-parallel-rank: expected a number, got '"):
            with_headers({}, {"x-data-parallel-rank": given})


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_what_asks_for_nothing_passes(kind: str) -> None:
    names = [
        "logprob_token_ids",
        "guided_choice",
        "structured_outputs",
        "use_beam_search",
        "stop_regex",
        "tools",
    ]
    nothing = [None, [], {}, False, "", []]
    plain = call_of(kind).generate
    fields = dict(zip(names, nothing, strict=True)) | {"prompt_logprobs": None, "echo": False}
    for tool_choice in (None, "none", "auto"):
        assert call_of(kind, tool_choice=tool_choice, **fields).generate == plain
    assert call_of(kind, response_format={"type": "text"}).generate == plain


@pytest.mark.parametrize("innermost", [None, "x"])
def test_a_field_that_is_refused_may_be_nested_however_deep(innermost: str | None) -> None:
    nested: Any = innermost
    for _ in range(2 * sys.getrecursionlimit()):
        nested = [nested]
    if innermost is None:
        assert call_of("chat", stop_regex=nested).generate == call_of("chat").generate
    else:
        with pytest.raises(RequestRejected, match="stop_regex"):
            call_of("chat", stop_regex=nested)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include_stop_str_in_output": True}, {"no_stop_trim": True}),
        ({"include_stop_str_in_output": False, "no_stop_trim": True}, {"no_stop_trim": True}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"structured_outputs": {"json": {}, "regex": None}}, {"json_schema": "{}"}),
        ({"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": False}),
    ],
)
def test_other_names_of_sampling_parameters(kind: str, fields: Any, param: Any) -> None:
    params = call_of(kind, **fields).generate["sampling_params"]
    assert {name: params[name] for name in param} == param


def test_the_prompt_as_other_servers_let_it_be_changed() -> None:
    assert call_of("chat").generate["add_special_tokens"] is False
    assert call_of("chat", add_special_tokens=True).generate["add_special_tokens"] is True
    assert call_of("completion", add_special_tokens=False).generate["add_special_tokens"] is False
    assert call_of("completion", truncate_prompt_tokens=3).generate["truncate_prompt_tokens"] == 3
    opens = "{% if add_generation_prompt %}go{% endif %}"
    assert render({"messages": [USER]}, opens) == "go"
    assert render({"messages": [USER], "add_generation_prompt": False}, opens) == ""
    with pytest.raises(RequestRejected, match="exclude each other"):
        render({"messages": [USER], "add_generation_prompt": True, "continue_final_message": True})


EOS = make_tokenizer().eos_token_id
# Of the answer before the last message it leaves something out, as templates do with reasoning.
ENDED_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={% if loop.last %}(hm){% endif %}{{ m.content }}<|endoftext|>"
    "{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
)
TALK = [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
BEHIND = [*b"user=(hm)c", EOS, *b"assistant="]
LAST_ANSWER = {"role": "assistant", "content": "d", "prompt_token_ids": [5, 6], "generation_token_ids": [7]}


@pytest.mark.parametrize(
    ("messages", "required", "prompt"),
    [
        (TALK, [1, 2, EOS], [1, 2, EOS, *BEHIND]),
        (TALK, [1, 2], [1, 2, EOS, *BEHIND]),
        ([*TALK, LAST_ANSWER], None, [5, 6, 7, EOS, *b"assistant="]),
        ([*TALK, LAST_ANSWER], [1], [1, EOS, *b"assistant="]),
        ([LAST_ANSWER, *TALK], None, [5, 6, 7, EOS, *b"user=a", EOS, *b"assistant=b", EOS, *BEHIND]),
        ([USER], [1], [1, EOS, *b"assistant="]),
    ],
    ids=["ended", "cut_off", "of_the_message", "of_both", "of_an_earlier_message", "no_answer"],
)
def test_a_prompt_begins_with_the_tokens_of_an_earlier_one(
    messages: list[Any], required: list[int] | None, prompt: list[int]
) -> None:
    fields = {"messages": messages, "required_prefix_token_ids": required}
    assert render(fields, ENDED_TEMPLATE) == prompt


@pytest.mark.parametrize("fields", [{"required_prefix_token_ids": []}, {"continue_final_message": True}])
def test_nothing_to_begin_with(fields: dict[str, Any]) -> None:
    assert isinstance(render({"messages": [USER, LAST_ANSWER], **fields}, ENDED_TEMPLATE), str)


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (TOOL_TEMPLATE, {}, "writes no token that"),
        (ENDED_TEMPLATE, {"continue_final_message": True}, "exclude each other"),
    ],
)
def test_tokens_that_a_prompt_cannot_begin_with(text: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        render({"messages": TALK, "required_prefix_token_ids": [1], **fields}, text)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_tokens_may_be_told_by_their_ids(kind: str) -> None:
    for as_ids in (False, True):
        call = call_of(kind, logprobs=1, return_tokens_as_token_ids=as_ids)
        assert call.generate["return_text_in_logprobs"] is not as_ids


def test_an_echo_is_the_prompt_as_it_was_sent_or_cut() -> None:
    ended = {"type": "length", "length": 1}
    for fields, text in (
        ({"prompt": "tide"}, "tide"),
        ({"prompt": list(b"tide")}, "tide"),
        ({"prompt": "tide", "truncate_prompt_tokens": 2}, "de"),
    ):
        call = call_of("completion", echo=True, **fields)
        ids = list(b"de") if "truncate_prompt_tokens" in fields else list(b"tide")
        output = {"text": "!", "output_ids": [3], "meta_info": meta([3], finish=ended)}
        answer = CompletionWriter(call).whole({**output, "prompt_token_ids": ids})
        assert answer.choices[0].text == f"{text}!"
        assert answer.choices[0].prompt_token_ids is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_so_many_logprobs_are_told_at_most(name: str) -> None:
    for count, max_logprobs, told in ((20, 20, 20), (21, -1, 21), (-1, -1, 100)):
        call = within_limits(call_of("completion", **{name: count}), max_logprobs, 100)
        assert call.generate["top_logprobs_num"] == told
        assert told in (call.num_logprobs, call.num_prompt_logprobs)
    for count in (21, -1):
        with pytest.raises(RequestRejected, match=f"^{name}: expected at most 20 .* got {count}$"):
            within_limits(call_of("completion", **{name: count}), 20, 100)


def test_the_meta_info_of_a_chat_may_have_arrays() -> None:
    flat = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    call = call_of("chat", logprobs=True, top_logprobs=1, **flat)
    output = {"text": "b", "output_ids": [3], "meta_info": meta([3], {"type": "length", "length": 1})}
    output["meta_info"] |= {"output_top_logprobs": [[(-0.5, 4, "c")]]}
    writer = ChatWriter(call, return_meta_info=True)
    [choice] = msgspec.to_builtins(writer.whole(output))["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "c"
    assert choice["meta_info"]["output_top_logprobs_shape"] == [1, 1]
    assert "output_top_logprobs" not in choice["meta_info"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_and_calls_are_told_apart_from_the_answer(is_stream: bool) -> None:
    text = '<think>hm</think>So <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    fields = {"messages": [USER], "tools": [TOOL]}
    call = chat_call(fields, "tide", template(), {}, "hermes", "qwen3")
    assert call.generate["sampling_params"]["skip_special_tokens"] is False
    writer = ChatWriter(call)
    finish = {"type": "stop", "matched": 3}
    texts = list(text) if is_stream else [text]
    content = reasoning = ""
    calls: list[Any] = []
    for number, piece in enumerate(texts, 1):
        is_last = number == len(texts)
        output = {"text": piece, "output_ids": [1], "meta_info": meta([1], finish if is_last else None)}
        [choice] = msgspec.to_builtins((writer.event if is_stream else writer.whole)(output))["choices"]
        said = choice["delta" if is_stream else "message"]
        content += said["content"]
        assert said.get("reasoning") == said.get("reasoning_content")
        reasoning += said.get("reasoning", "")
        calls += said.get("tool_calls", [])
    assert (content, reasoning, choice["finish_reason"]) == ("So ", "hm", "tool_calls")
    [made] = calls
    assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}
    plain = chat_call({**fields, "tool_choice": "none"}, "tide", template(), {}, "hermes")
    assert (plain.forms[0].parser, "skip_special_tokens" in plain.generate["sampling_params"]) == (
        None,
        False,
    )


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    "{% if add_generation_prompt and thinking is defined %}"
    "{{ '<think>\n' if thinking else '<think></think>' }}{% endif %}"
)


def continued(text: str) -> dict[str, Any]:
    """A chat in which the assistant has begun to answer."""
    return {"messages": [USER, {"role": "assistant", "content": text}], "continue_final_message": True}


@pytest.mark.parametrize(
    ("parser", "fields", "expected"),
    [
        ("kimi_k2", {}, "answer"),
        ("deepseek-r1", {}, "reasoning"),
        ("kimi_k2", {"chat_template_kwargs": {"thinking": True}}, "reasoning"),
        ("deepseek-r1", {"chat_template_kwargs": {"thinking": False}}, "answer"),
        # This template knows no such option; those that have asked for no reasoning get none.
        ("deepseek-r1", {"chat_template_kwargs": {"enable_thinking": False}}, "answer"),
        ("qwen3", {"input_ids": [3, 4]}, "answer"),
        ("qwen3", {"messages": [USER, {"role": "user", "content": "<think>"}]}, "answer"),
        ("qwen3", continued("<think>so"), "reasoning"),
        ("qwen3-thinking", continued("<think>so</think>and"), "answer"),
    ],
)
def test_the_prompt_says_whether_an_answer_begins_in_reasoning(
    parser: str, fields: dict[str, Any], expected: str
) -> None:
    texts = template(THINKING_TEMPLATE)
    call = chat_call({"messages": [USER], **fields}, "tide", texts, {}, None, parser)
    if call.render is not None:
        call.render()
    output = {"text": "b", "output_ids": [1], "meta_info": meta([1], {"type": "stop", "matched": 3})}
    answer = ChatWriter(call).whole(output)
    message = msgspec.to_builtins(answer)["choices"][0]["message"]
    told = {"reasoning": ("", "b"), "answer": ("b", None)}[expected]
    assert (message["content"], message["reasoning_content"]) == told


def test_a_prompt_of_ids_may_end_in_the_beginning_of_reasoning() -> None:
    texts = template()
    ids = texts.tokenizer.encode("a <think>")
    assert texts.end_of([-1, *ids, 1 << 70]).endswith("<think>")
    call = chat_call({"input_ids": ids}, "tide", texts, {}, None, "qwen3")
    assert call.forms[0].is_open


def test_who_wants_no_calls_gets_no_tools_in_the_prompt_unless_it_reads_the_tokens_itself() -> None:
    fields = {"messages": [USER], "tools": [TOOL]}
    assert render({**fields, "tool_choice": "none"}) == "user=a;"
    assert render({**fields, "tool_choice": "none", "return_token_ids": True}) == "<f>user=a;"
