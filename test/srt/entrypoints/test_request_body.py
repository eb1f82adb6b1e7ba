"""Bodies: small, large, malformed, and base64 in every shape."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fixtures.deadlines import HANG_S
from hypothesis import given, strategies as st

from ebbtide.srt.entrypoints import request_body
from ebbtide.srt.entrypoints.request_body import (
    LARGE_BODY_BYTES,
    BodyReader,
    decode_fields,
    decode_in_pieces,
)
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.control_client import build_request
from ebbtide.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

FIELD = "serialized_named_tensors"


async def chunks(body: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def read(body: bytes) -> dict[str, Any]:
    return await BodyReader().read(chunks(body), {FIELD})


def test_an_empty_body_has_no_fields() -> None:
    assert asyncio.run(read(b"")) == asyncio.run(read(b" \n" * LARGE_BODY_BYTES)) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b"null",
        b'"a"',
        b"{1:2}",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": [[1], [2}',
        b'{"a": [[1], ["\xff"]]}',
        b'{"a": [[1], [NaN]]}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
@pytest.mark.parametrize("decode", [decode_fields, lambda body: decode_in_pieces(body, {FIELD})])
def test_what_is_no_json_object_is_refused(body: bytes, decode: Callable[[bytearray], Any]) -> None:
    with pytest.raises(RequestRejected, match="expected a JSON object") as raised:
        decode(bytearray(body))
    assert raised.value.status == 400


def outcome(fields: dict[str, Any]) -> Any:
    """The request that the fields make, or why they make none."""
    try:
        return build_request(UpdateWeightsFromTensorReqInput, fields)
    except RequestRejected as error:
        return error.message


@given(
    entries=st.lists(st.binary(max_size=40)),
    others=st.dictionaries(
        st.text(), st.integers() | st.text() | st.none() | st.lists(st.floats(0, 1) | st.lists(st.integers()))
    ),
)
def test_large_and_small_bodies_make_the_same_request(entries: list[bytes], others: dict[str, Any]) -> None:
    texts = [base64.b64encode(entry).decode() for entry in entries]
    body = bytearray(json.dumps({**others, FIELD: texts}).encode())
    assert decode_in_pieces(body, {FIELD}) == {**decode_fields(body), FIELD: entries}
    assert outcome(decode_in_pieces(body, {FIELD})) == outcome(decode_fields(body))


@given(text=st.text(alphabet="Ag+/=-\\ \n", max_size=24))
def test_base64_in_pieces_takes_and_refuses_what_base64_at_once_does(text: str) -> None:
    body = bytearray(json.dumps({FIELD: [text]}).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "PIECE_CHARACTERS", 8)
        fields = decode_in_pieces(body, {FIELD})
    assert outcome(fields) == outcome(decode_fields(body))


@pytest.mark.parametrize("entries", [5, "AAAA", {"a": 1}, [1], [None], [["AAAA"]], None])
def test_entries_of_a_wrong_type_reach_the_check_of_types(entries: Any) -> None:
    assert decode_in_pieces(bytearray(json.dumps({FIELD: entries}).encode()), {FIELD}) == {FIELD: entries}


def test_a_large_body_arrives_whole() -> None:
    entry = bytes(range(256)) * (LARGE_BODY_BYTES // 128)
    body = json.dumps({FIELD: [base64.b64encode(entry).decode()], "weight_version": "7"}).encode()
    fields = asyncio.run(read(body))
    assert fields == {FIELD: [entry], "weight_version": "7"}


def test_a_body_that_is_too_long_is_not_read_to_its_end() -> None:
    read_bytes = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read_bytes
        while True:
            read_bytes += 1 << 10
            yield b" " * (1 << 10)

    with pytest.raises(RequestRejected, match="at most 10000 bytes") as raised:
        asyncio.run(BodyReader().read(endless(), max_bytes=10_000))
    assert raised.value.status == 413
    assert read_bytes < 12_000
    assert asyncio.run(BodyReader().read(chunks(b" " * 10_000), max_bytes=10_000)) == {}


def test_all_bodies_together_hold_no_more_than_that() -> None:
    async def script() -> None:
        reader, others_go_on = BodyReader(max_held_bytes=1000), asyncio.Event()

        async def half() -> AsyncIterator[bytes]:
            yield b" " * 600
            await others_go_on.wait()

        first = asyncio.create_task(reader.read(half(), max_bytes=1000))
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected, match="may have 1000 bytes together") as raised:
            await reader.read(chunks(b" " * 600), max_bytes=1000)
        assert raised.value.status == 503
        assert await reader.read(chunks(b" " * 400), max_bytes=1000) == {}
        others_go_on.set()
        assert await first == {}
        assert await reader.read(chunks(b" " * 1000), max_bytes=1000) == {}

    asyncio.run(script())


async def stops(num_bytes: int) -> AsyncIterator[bytes]:
    yield b" " * num_bytes
    await asyncio.Event().wait()


async def drips() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("half", [stops(0), stops(6), stops(1 << 26), drips()])
def test_the_rest_of_a_body_is_not_awaited_for_ever(half: AsyncIterator[bytes]) -> None:
    async def script() -> None:
        limit = 1 << 26
        reader = BodyReader(max_held_bytes=limit, patience_s=0.05)
        with pytest.raises(RequestRejected, match="bytes have arrived: expected more") as raised:
            await asyncio.wait_for(reader.read(half, max_bytes=limit), HANG_S)
        assert raised.value.status == 408
        assert await reader.read(chunks(b"{}" + b" " * (limit - 2)), max_bytes=limit) == {}

    asyncio.run(script())


@given(text=st.text(alphabet='1-0.,[] "{}a:', max_size=30).map("[1,{}".format))
def test_lists_in_pieces_are_what_they_are_at_once(text: str) -> None:
    body = bytearray(f'{{"ids": {text}}}'.encode())

    def fields_of(decode: Callable[[], Any]) -> Any:
        try:
            return decode()
        except RequestRejected:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "PIECE_BYTES", 2)
        pieces = fields_of(lambda: decode_in_pieces(body, ()))
    assert pieces == fields_of(lambda: decode_fields(body))
