"""`/tokenize` and `/detokenize`, as clients of SGLang and of vLLM ask."""

from typing import Any

import pytest
from fixtures.checkpoints import make_tokenizer
from fixtures.scripted_engine import LIMITS

from ebbtide.srt.entrypoints.openai.tokenization import MAX_IDS, ChatTemplate, Tokenization
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.tokenizer import MAX_CHARACTERS, Tokenizer

HF = make_tokenizer()
EOS = HF.eos_token_id
TEMPLATE = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
TOKENIZATION = Tokenization(ChatTemplate(Tokenizer(HF), TEMPLATE), LIMITS)
CONVERSATION = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", ["prompt", "text"])
def test_one_text_or_several(name: str) -> None:
    one = TOKENIZATION.tokenize({"model": "any", name: "ebb"})
    assert (one.tokens, one.count, one.max_model_len, one.token_strs) == ([101, 98, 98], 3, 64, None)
    several = TOKENIZATION.tokenize({name: ["ebb", "é"], "return_token_strs": True})
    assert (several.tokens, several.count) == ([[101, 98, 98], [0xC3, 0xA9]], [3, 2])
    assert several.token_strs == [["e", "b", "b"], ["Ã", "©"]]
    assert TOKENIZATION.tokenize({name: []}).tokens == []


def test_a_conversation() -> None:
    answer = TOKENIZATION.tokenize({"messages": CONVERSATION})
    assert answer.tokens == list(b"user=a;")


def test_a_conversation_of_which_some_tokens_are_known() -> None:
    template = ChatTemplate(Tokenizer(HF), "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    messages = [{"role": "assistant", "content": "b"}, *CONVERSATION]
    fields = {"messages": messages, "required_prefix_token_ids": [1, 2]}
    assert Tokenization(template, LIMITS).tokenize(fields).tokens == [1, 2, EOS, *b"a", EOS]
    with pytest.raises(RequestRejected, match="required_prefix_token_ids: -1 is not in the vocabulary"):
        Tokenization(template, LIMITS).tokenize({**fields, "required_prefix_token_ids": [-1]})


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"messages": CONVERSATION}, False),
        ({"messages": CONVERSATION, "add_special_tokens": True}, True),
    ],
)
def test_special_tokens_are_added_to_texts_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], adds: bool
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, *, add_special_tokens: [add_special_tokens])
    assert TOKENIZATION.tokenize(fields).tokens == [adds]


@pytest.mark.parametrize(
    ("fields", "text", "prompt"),
    [
        ({}, "hi", "hi<|endoftext|>"),
        ({"skip_special_tokens": True}, "hi", "hi"),
        ({"skip_special_tokens": False}, "hi<|endoftext|>", "hi<|endoftext|>"),
    ],
)
def test_text_of_tokens_has_each_servers_name(fields: dict[str, Any], text: str, prompt: str) -> None:
    one = TOKENIZATION.detokenize({"tokens": [104, 105, EOS], **fields})
    assert (one.text, one.prompt) == (text, prompt)
    several = TOKENIZATION.detokenize({"tokens": [[104, 105, EOS], []], **fields})
    assert (several.text, several.prompt) == ([text, ""], [prompt, ""])


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("tokenize", {}, "exactly one of prompt, text and messages"),
        ("tokenize", {"prompt": "a", "text": "b"}, "exactly one of"),
        ("tokenize", {"prompt": 3}, r"\$.prompt"),
        ("tokenize", {"messages": []}, "at least one"),
        ("tokenize", {"messages": CONVERSATION, "chat_template": "x"}, "chat_template: not supported"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [1, [2]]}, "tokens: expected a list"),
        ("detokenize", {"tokens": [500]}, "not in the vocabulary"),
        ("detokenize", {"tokens": [[-1]]}, "not in the vocabulary"),
        ("tokenize", {"text": "a" * (MAX_CHARACTERS + 1)}, "8388609 characters: expected at most 8388608"),
        ("detokenize", {"tokens": [1] * (MAX_IDS + 1)}, "1048577 ids: expected at most 1048576"),
    ],
)
def test_what_is_wrong_is_refused(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as raised:
        getattr(TOKENIZATION, method)(fields)
    assert raised.value.status == 400
