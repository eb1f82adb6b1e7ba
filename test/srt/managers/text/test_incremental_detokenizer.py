"""Text as it comes: equal to decoding everything at once, never half a character, and bounded work."""

from collections.abc import Callable, Sequence

import pytest
from fixtures.tokenizers import byte_fallback, byte_level
from hypothesis import given, strategies as st

from ebbtide.srt.managers.text.tokenizer import IncrementalDetokenizer, StopTrimmer, Tokenizer

TOKENIZERS = pytest.mark.parametrize("make", [byte_level, byte_fallback])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd▁"), max_size=40)
CHUNKS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    chunks, start = [], 0
    while start < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], chunks: Sequence[Sequence[int]], **options: bool
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt[-8:], **options)
    return [*map(detokenizer.push, chunks), detokenizer.finish()]


def added_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool) -> str:
    return tokenizer.decode([*prompt, *output], skip)[len(tokenizer.decode(prompt, skip)) :]


@TOKENIZERS
@given(prompt=TEXTS, output=TEXTS, sizes=CHUNKS)
def test_pieces_join_to_the_text_of_all_ids(
    make: Callable[[], Tokenizer], prompt: str, output: str, sizes: list[int]
) -> None:
    tokenizer = make()
    prompt_ids = tokenizer.encode("the" + prompt)
    ids = tokenizer.encode(output)
    pieces = stream(tokenizer, prompt_ids, split(ids, sizes))
    assert "".join(pieces) == added_text(tokenizer, prompt_ids, ids, True)
    assert "\ufffd" not in "".join(pieces)


@given(data=st.data(), skip=st.booleans(), sizes=CHUNKS)
def test_any_ids_at_all_byte_level(data: st.DataObject, skip: bool, sizes: list[int]) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, 430), max_size=60))
    prompt = tokenizer.encode("the end")
    pieces = stream(tokenizer, prompt, split(ids, sizes), skip_special_tokens=skip)
    assert "".join(pieces) == added_text(tokenizer, prompt, ids, skip)


@given(data=st.data(), skip=st.booleans(), sizes=CHUNKS)
def test_any_ids_at_all_byte_fallback(data: st.DataObject, skip: bool, sizes: list[int]) -> None:
    # Bytes that are not UTF-8 are U+FFFD either way; how many of them is a matter of taste.
    tokenizer = byte_fallback()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.hf) + 5), max_size=60))
    prompt = tokenizer.encode("the end")
    text = "".join(stream(tokenizer, prompt, split(ids, sizes), skip_special_tokens=skip))
    expected = added_text(tokenizer, prompt, ids, skip)
    if "\ufffd" not in text:
        assert text == expected
    assert text == "".join(stream(tokenizer, prompt, [ids], skip_special_tokens=skip))


@TOKENIZERS
def test_an_unfinished_character_comes_out_at_the_end(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = tokenizer.encode("🦆")
    *pieces, last = stream(tokenizer, tokenizer.encode("the"), [[token_id] for token_id in ids[:-1]])
    assert "".join(pieces).strip() == ""
    assert last == "\ufffd"


@TOKENIZERS
def test_a_character_begun_by_the_prompt_is_finished_by_the_output(make: Callable[[], Tokenizer]) -> None:
    # An aborted rollout goes on from its token ids, which may end anywhere.
    tokenizer = make()
    ids = tokenizer.encode("the 🦆")
    assert stream(tokenizer, ids[:-1], [ids[-1:]]) == ["🦆", ""]


def test_complete_characters_in_a_run_of_bytes_do_not_wait_for_its_end() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("水火")[1:]
    assert len(ids) == 6
    assert stream(tokenizer, [], [[token_id] for token_id in ids]) == ["", "", "水", "", "", "火", ""]


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    tokenizer = byte_fallback()
    word = tokenizer.hf.convert_tokens_to_ids(["▁the"])
    assert stream(tokenizer, tokenizer.encode("a"), [word]) == [" the", ""]
    assert stream(tokenizer, [], [word]) == ["the", ""]


def test_many_special_tokens_do_not_cost_the_next_word_its_space() -> None:
    tokenizer = byte_fallback()
    word, eos = tokenizer.hf.convert_tokens_to_ids(["▁the", "</s>"])
    assert stream(tokenizer, tokenizer.encode("a"), [[eos]] * 40 + [[word]])[-2] == " the"


@TOKENIZERS
def test_a_push_decodes_a_bounded_number_of_ids(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make()
    sizes: list[int] = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, *rest: sizes.append(len(ids)) or decode(self, ids, *rest)
    )
    garbage = tokenizer.encode("🦆")[-1]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the end of it all"))
    for token_id in [*tokenizer.encode("the end") * 40, *[garbage] * 200]:
        detokenizer.push([token_id])
    assert max(sizes) <= 17


# What they are made of means something in a pattern.
STOPS = st.lists(st.text("^]", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=st.text("^]", max_size=20), stops=STOPS, sizes=CHUNKS, keep=st.booleans())
def test_text_ends_at_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], sizes: list[int], keep: bool
) -> None:
    trimmer = StopTrimmer(stops, keep_match=keep)
    pieces = [trimmer.push("".join(chunk)) for chunk in split(list(text), sizes)]
    shown = "".join(pieces) + trimmer.finish()
    prefix = next((text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))), None)
    if prefix is None:
        assert trimmer.matched is None
        assert shown == text
    else:
        matched = max((stop for stop in stops if prefix.endswith(stop)), key=len)
        assert trimmer.matched == matched
        assert shown == (prefix if keep else prefix.removesuffix(matched))


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    trimmer = StopTrimmer(["\n\nUser:"])
    assert [trimmer.push(piece) for piece in ["one\n", "two\n\nU", "nited"]] == ["one", "\ntwo", "\n\nUnited"]
