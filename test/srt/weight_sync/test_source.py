"""What is kept of earlier updates, so that the same names, shapes and dtypes are worked out once."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st

from ebbtide.formats.pickle_reader import Global, Record, read_by_slices
from ebbtide.formats.tensor_list import Listing
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.source import ENTRY_BYTES, Fit, KnownList, PlanCache, Recent


def test_what_was_used_last_is_kept_as_far_as_it_takes_little_memory() -> None:
    kept: Recent[str, int] = Recent(3 * ENTRY_BYTES + 20)
    for number, name in enumerate("abc"):
        kept.put(name, number, 5)
    assert kept.get("a") == 0
    kept.put("d", 3, 5)
    assert [kept.get(name) for name in "abcd"] == [0, None, 2, 3]
    kept.put("long", 4, 4 * ENTRY_BYTES)
    assert [kept.get(name) for name in ("a", "c", "d", "long")] == [None] * 4


def test_names_and_shapes_that_came_before_are_not_read_again() -> None:
    cache, listed = PlanCache(), Listing([("a", torch.empty(2, 3))]).form
    assert finish(cache.form(listed)) is finish(cache.form(listed))


def test_what_tensors_come_to_is_worked_out_once_unless_the_model_refuses_them() -> None:
    cache = PlanCache()
    good, bad = Fit(num_tensors=1), Fit(num_tensors=1, problems=[{"name": "a", "reason": "unknown"}])

    def fit(digest: bytes | None, made: Fit) -> Fit:
        def make():  # type: ignore[no-untyped-def]
            yield 1
            return made

        return finish(cache.fit(digest, make))

    assert fit(b"1", good) is fit(b"1", Fit()) is good
    assert fit(None, good) is not fit(None, bad)
    assert fit(b"2", bad) is bad
    assert fit(b"2", good) is good


@dataclass
class Entry:
    name: str
    place: object


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return self._reduced


def pure(*arguments: object) -> None:
    """What a pickle calls that nobody has to hear of."""


def heard(*arguments: object) -> None:
    """The other kind."""


GLOBALS = {
    "Entry": Global("Entry", is_record=True),
    "pure": Global("pure", lambda arguments: ("pure", *arguments), is_pure=True),
    "heard": Global("heard", lambda arguments: ("heard", *arguments)),
}


def read(data: bytes, cache: PlanCache | None) -> object:
    return finish(read_by_slices(data, lambda module, name: GLOBALS[name], None, cache))


def told(data: bytes, cache: PlanCache | None) -> object:
    """What a pickle says, or why it is refused."""
    try:
        return plain(read(data, cache))
    except RequestRejected as refusal:
        return refusal.message
    except RecursionError:
        return "a value that holds itself"


def plain(value: object) -> object:
    """A value in which those are equal that say the same."""
    match value:
        case KnownList(items=items):
            return plain(items)
        case Record():
            return value.name, plain(value.fields)
        case list() | tuple():
            return [type(value), *map(plain, value)]
        case dict():
            return {key: plain(one) for key, one in value.items()}
    return value


def bucket(head: object, *entries: object, protocol: int = 4) -> bytes:
    return pickle.dumps({"head": head, "entries": list(entries)}, protocol)


def last(data: bytes, cache: PlanCache) -> object:
    value = read(data, cache)
    assert isinstance(value, dict)
    return value["entries"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_last_list_that_came_before_is_the_same_one(protocol: int) -> None:
    cache = PlanCache()
    entries = [Entry("a", Call(pure, (2, 3))), Entry("b", "x" * 300)]
    first = last(bucket(Call(heard, b"1", pure), *entries, protocol=protocol), cache)
    assert isinstance(first, KnownList)
    assert last(bucket(Call(heard, b"2", pure), *entries, protocol=protocol), cache) is first
    entries[1].name = "c"
    assert last(bucket(Call(heard, b"2", pure), *entries, protocol=protocol), cache) is not first


def test_a_last_list_is_read_each_time_where_it_says_something_else_or_somebody_has_to_hear_of_it() -> None:
    cache = PlanCache()
    # Its bytes refer to what comes first.
    for head in ("x", "y", ("x",), Call(heard, "x")):
        data = bucket(head, head, head)
        assert told(data, cache) == told(data, None)
    calls = bucket(0, Call(heard, 1), 2)
    assert last(calls, cache) is not last(calls, cache)
    assert not isinstance(last(calls, cache), KnownList)


shared = st.sampled_from(["x", "y", "xx", b"x", ("x",), ("x", "y"), pure, heard])
parts = st.recursive(
    shared | st.integers(0, 300),
    lambda inner: (
        st.builds(Call, st.sampled_from([pure, heard]), inner)
        | st.builds(Entry, st.sampled_from(["x", "n"]), inner)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(st.tuples(parts, st.sampled_from([0, 1])), min_size=2, max_size=4), st.data())
def test_kept_or_not_pickles_say_the_same(given_heads: list[tuple[object, int]], data: st.DataObject) -> None:
    entries = [data.draw(st.lists(parts, min_size=2, max_size=4)) for _ in range(2)]
    cache = PlanCache()
    for head, number in given_heads:
        whole = bucket(head, *entries[number])
        at = data.draw(st.integers(0, len(whole) - 1))
        edited = whole[:at] + data.draw(st.binary(max_size=2)) + whole[at + 1 :]
        for one in (whole, edited, whole):
            assert told(one, cache) == told(one, None)
