"""Loading a tokenizer, and failing to; how long a text of some tokens can be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fixtures.checkpoints import make_tokenizer
from fixtures.tokenizers import SPECIAL, byte_fallback, byte_level
from hypothesis import example, given, strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizer

from ebbtide.srt.config import ModelConfig
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.managers.text.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer


def config(path: Path) -> ModelConfig:
    fields = dict.fromkeys(ModelConfig.__dataclass_fields__)
    return replace(
        ModelConfig(**fields),  # type: ignore[arg-type]
        tokenizer_path=str(path),
        tokenizer_mode="auto",
        trust_remote_code=False,
        model_type="qwen3",
    )


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(config(tmp_path))
    assert tokenizer.encode("aé") == list("aé".encode())
    eos = make_tokenizer().eos_token_id
    assert tokenizer.decode([104, 105, eos], skip_special_tokens=True) == "hi"
    assert tokenizer.eos_token_ids == {eos}


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_missing_or_broken_tokenizer_is_a_configuration_error(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        load_tokenizer(config(tmp_path))


class Characters(PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer written in Python, one token per lower-case letter."""

    vocab_size = 26

    def get_vocab(self) -> dict[str, int]:
        return {chr(ord("a") + index): index for index in range(26)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) - ord("a")

    def _convert_id_to_token(self, index: int) -> str:
        return chr(ord("a") + index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_tokenizer_written_in_python_will_do() -> None:
    tokenizer = Tokenizer(Characters(eos_token="</s>"))
    eos = tokenizer.hf.eos_token_id
    assert tokenizer.encode("abc") == [0, 1, 2]
    assert tokenizer.decode([0, 1, eos, 2, 999]) == "ab</s>c"
    assert tokenizer.decode([0, eos, 2, 999], skip_special_tokens=True) == "ac"
    detokenizer = IncrementalDetokenizer(tokenizer, [0])
    assert [detokenizer.push([1]), detokenizer.push([eos, 2]), detokenizer.finish()] == ["b", "c", ""]


def test_spaces_before_punctuation_stay() -> None:
    tokenizer = byte_level()
    tokenizer.hf.clean_up_tokenization_spaces = True
    assert tokenizer.decode(tokenizer.encode("x = .5 , y")) == "x = .5 , y"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        assert tokenizer.visible([5, 10**6], skip_special_tokens=True) == [5]
        assert tokenizer.decode([10**6]) == ""


def test_byte_tokens_are_recognised_by_what_they_decode_to() -> None:
    assert sorted(byte_fallback().byte_values.values()) == list(range(256))
    assert byte_level().byte_values == {}


# Letters with marks that NFC takes into them, syllables of three letters, blanks, words of the vocabulary.
PARTS = [
    "a\u0301",
    "\u03b1\u0313\u0300\u0345",
    "\u1112\u1161\u11ab",
    "    ",
    "the",
    *SPECIAL,
    "🦆",
    "\u0301" * 5,
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=30).map("".join)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@given(text=TEXTS)
@example("the " * 100)
@example("\u03b1\u0313\u0300\u0345" * 100)
def test_no_text_has_fewer_tokens(make: Callable[[], Tokenizer], normalizer: Any, text: str) -> None:
    tokenizer = make()
    backend = tokenizers.Tokenizer.from_str(tokenizer.hf.backend_tokenizer.to_str())
    backend.normalizer = normalizer or backend.normalizer
    assert len(text) <= tokenizer.most_characters(text, len(backend.encode(text).ids))
