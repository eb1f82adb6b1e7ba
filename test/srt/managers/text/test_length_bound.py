"""A bound on the tokens of a text must hold for every text, or there must be none."""

from collections.abc import Callable

import pytest
import tokenizers
from fixtures.tokenizers import SPECIAL, byte_fallback, byte_level
from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from ebbtide.srt.managers.text.length_bound import LengthBound

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
