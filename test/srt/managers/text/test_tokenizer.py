"""Loading a tokenizer, and failing to; the bound on the tokens of a text, which must hold for every text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fixtures.checkpoints import make_tokenizer
from fixtures.tokenizers import SPECIAL, byte_fallback, byte_level
from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer

from ebbtide.srt.config import ModelConfig
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.managers.text.tokenizer import IncrementalDetokenizer, LengthBound, Tokenizer, load_tokenizer


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


def changed(make: Callable[[], object], **parts: object) -> tokenizers.Tokenizer:
    """The backend of a tokenizer, with other parts."""
    backend = tokenizers.Tokenizer.from_str(make().hf.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def splitting(behavior: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), behavior)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BOUNDED = {
    "byte level": changed(byte_level),
    "byte level, composed": changed(byte_level, normalizer=normalizers.NFC()),
    "byte level, split": changed(byte_level, pre_tokenizer=splitting("isolated")),
    "byte fallback": changed(byte_fallback),
    "metaspace": changed(byte_fallback, normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("backend", BOUNDED.values(), ids=BOUNDED)
@given(text=TEXTS)
@example("the " * 100)
@example("\u03b1\u0313\u0300\u0345" * 100)
def test_no_text_has_fewer_tokens(backend: tokenizers.Tokenizer, text: str) -> None:
    assert LengthBound(backend).least_tokens(text) <= len(backend.encode(text).ids)


@pytest.mark.parametrize("backend", BOUNDED.values(), ids=BOUNDED)
def test_a_long_text_has_many(backend: tokenizers.Tokenizer) -> None:
    longest = max(map(len, backend.get_vocab()))
    assert LengthBound(backend).least_tokens("a" * 1000 * longest) == 1000


def with_added(token: AddedToken) -> tokenizers.Tokenizer:
    backend = changed(byte_level)
    backend.add_tokens([token])
    return backend


UNBOUNDED = {
    "letters fall away": changed(byte_level, normalizer=normalizers.Strip()),
    "blanks fall away": changed(byte_level, pre_tokenizer=splitting("removed")),
    "a token swallows blanks": with_added(AddedToken("<x>", rstrip=True)),
    "long for short": changed(byte_level, normalizer=normalizers.Replace("aaaa", "b")),
    "any pattern": changed(byte_level, normalizer=normalizers.Replace(tokenizers.Regex("a+"), "a")),
    "words": tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    "unknown letters fall away": tokenizers.Tokenizer(models.BPE({"a": 0}, [])),
    "unknown letters fuse": tokenizers.Tokenizer(
        models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)
    ),
}


@pytest.mark.parametrize("backend", UNBOUNDED.values(), ids=UNBOUNDED)
def test_nothing_is_known_where_letters_may_vanish(backend: tokenizers.Tokenizer) -> None:
    assert LengthBound(backend).least_tokens("a" * 10**6) == 0
