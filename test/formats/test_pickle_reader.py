"""The part of the pickle language that payloads use is read as pickle reads it; the rest is refused."""

import contextlib
import pickle
import pickletools

import pytest
from hypothesis import given, strategies as st

from ebbtide.formats.pickle_reader import (
    SLICE_OPCODES,
    Budget,
    Global,
    Record,
    read_by_slices,
    read_pickle,
)
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
    | st.binary(max_size=300)
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def no_globals(module: str, name: str) -> object:
    raise RequestRejected(f"global {module}.{name}")


def one_call(module: str, name: str) -> object:
    return Global(f"{module}.{name}", call=lambda arguments: ["called", *arguments])


@given(values, st.sampled_from([3, 4, 5]))
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), no_globals) == value


def test_long_strings_and_many_items_are_read() -> None:
    value = ["x" * 100_000, b"y" * 100_000, list(range(3000)), {str(i): (i,) for i in range(3000)}]
    for protocol in (3, 4, 5):
        assert read_pickle(pickle.dumps(value, protocol), no_globals) == value


# Of 3 opcodes, of just a slice, and of some slices; a weight for each rank is a short pickle of its own.
@pytest.mark.parametrize("num_opcodes", [3, SLICE_OPCODES, 3 * SLICE_OPCODES + 5])
def test_pickles_of_one_budget_are_read_by_slices_however_short_they_are(num_opcodes: int) -> None:
    data = b"(" + b"N" * (num_opcodes - 3) + b"t."
    budget = Budget(8 * SLICE_OPCODES)
    num_slices = 0
    while budget.num_opcodes >= num_opcodes:
        num_slices += sum(1 for _ in read_by_slices(data, no_globals, budget))
        num_read = 8 * SLICE_OPCODES - budget.num_opcodes
        assert (num_slices, num_read % num_opcodes) == (num_read // SLICE_OPCODES, 0)
    with pytest.raises(RequestRejected, match="opcodes"):
        finish(read_by_slices(data + b".", no_globals, Budget(num_opcodes - 1)))


@given(values, st.data())
def test_every_cut_is_refused(value: object, data: st.DataObject) -> None:
    pickled = pickle.dumps(value)
    cut = data.draw(st.integers(0, len(pickled) - 1))
    with pytest.raises(RequestRejected):
        read_pickle(pickled[:cut], no_globals)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_refusal(noise: bytes) -> None:
    with contextlib.suppress(RequestRejected):
        read_pickle(b"\x80\x04" + noise, one_call)


# fmt: off
ACCEPTED = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
}
# fmt: on
OTHER_OPCODES = [opcode for opcode in pickletools.opcodes if opcode.name not in ACCEPTED]


@pytest.mark.parametrize("opcode", OTHER_OPCODES, ids=lambda opcode: opcode.name)
def test_other_opcodes_are_refused_by_name(opcode: pickletools.OpcodeInfo) -> None:
    pickled = b"\x80\x04]K\x01" + opcode.code.encode("latin-1") + bytes(16) + b"\n\n."
    with pytest.raises(RequestRejected, match=rf"opcode {opcode.name} "):
        read_pickle(pickled, one_call)


def unicode(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


CALLABLE = unicode("module") + unicode("name") + b"\x93"

BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "broken pickle"),
    "no value": (b"\x80\x04.", "exactly one value"),
    "open mark": (b"\x80\x04N(.", "exactly one value"),
    "tuple from nothing": (b"\x80\x04\x87.", "broken pickle"),
    "appends without mark": (b"\x80\x04]e.", "broken pickle"),
    "unknown memo": (b"\x80\x04h\x07.", "broken pickle"),
    "not utf-8": (b"\x80\x04\x8c\x02\xff\xff.", "broken pickle"),
    "no opcode": (b"\x80\x04\xff.", "0xff"),
    "protocol": (b"\x80\x09N.", "protocol 9"),
    "append to a tuple": (b"\x80\x04)Na.", "appends to a tuple"),
    "items of a list": (b"\x80\x04]NNs.", "sets items of a list"),
    "half a pair": (b"\x80\x04}(" + unicode("k") + b"u.", "pairs"),
    "key that is no string": (b"\x80\x04}K\x01Ns.", "key of type int"),
    "key that takes for ever to hash": (
        b"\x80\x04}" + b")" + b"\x94h\x00\x86" * 60 + b"Ns.",
        "key of type tuple",
    ),
    "call of a string": (b"\x80\x04" + unicode("eval") + b")R.", "calls a str"),
    "call with a list": (b"\x80\x04" + CALLABLE + b"]R.", "expected a tuple"),
    "instance of what is no record": (b"\x80\x04" + CALLABLE + b")\x81.", "'module.name', which may not"),
    "instance of a string": (b"\x80\x04" + unicode("str") + b")\x81.", "instance of a str"),
    "state of a list": (b"\x80\x04]}b.", "state of a list"),
    "state of a global": (b"\x80\x04" + CALLABLE + b"}b.", "state of a 'module.name'"),
    "global by a number": (b"\x80\x04K\x01" + unicode("x") + b"\x93.", "by int"),
    "bytes beyond the end": (b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x.", "broken pickle"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pickles_are_refused(case: str) -> None:
    pickled, message = BROKEN[case]
    with pytest.raises(RequestRejected, match=message):
        read_pickle(pickled, one_call)


def test_a_memo_index_sizes_nothing() -> None:
    assert read_pickle(b"\x80\x04Nr\xff\xff\xff\xff.", no_globals) is None


def test_deep_and_cyclic_values_are_read_without_recursion() -> None:
    depth = 100_000
    deep = read_pickle(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".", no_globals)
    assert isinstance(deep, list)
    [inner] = read_pickle(b"\x80\x04]\x94h\x00a.", no_globals)  # type: ignore[misc]
    assert inner[0] is inner


@pytest.mark.parametrize("twist", ["positional", "twice", "list state"])
def test_records_take_one_dictionary_of_fields(twist: str) -> None:
    def records(module: str, name: str) -> object:
        return Global(f"{module}.{name}", is_record=True)

    good = b"\x80\x04" + CALLABLE + b")\x81}" + unicode("a") + b"K\x01sb."
    record = read_pickle(good, records)
    assert isinstance(record, Record)
    assert (record.name, record.fields) == ("module.name", {"a": 1})
    bad = {
        "positional": b"\x80\x04" + CALLABLE + b"N\x85\x81.",
        "twice": good[:-1] + b"}b.",
        "list state": b"\x80\x04" + CALLABLE + b")\x81]b.",
    }
    with pytest.raises(RequestRejected, match=r"'?module\.name'?"):
        read_pickle(bad[twist], records)
