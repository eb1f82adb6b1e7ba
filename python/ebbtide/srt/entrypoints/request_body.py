"""Reading and decoding JSON bodies, also those of gigabytes, without holding up the event loop for long."""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ebbtide.srt.errors import RequestRejected

# A body without weights may hold this much: a batch of prompts of tens of millions of tokens fits.
MAX_BODY_BYTES = 1 << 28
# Bodies of this size and larger ones are decoded in a thread.
LARGE_BODY_BYTES = 1 << 20
# Decoding holds the interpreter's lock: base64 goes in pieces, between which the loop has its turn, and a
# list of lists, such as the token ids of a batch, list by list.
PIECE_CHARACTERS = 1 << 22
LIST_OF_LISTS = re.compile(rb"\s*\[\s*\[")


async def read_fields(
    chunks: AsyncIterator[bytes],
    binary_fields: Collection[str] = frozenset(),
    max_bytes: int = MAX_BODY_BYTES,
) -> dict[str, Any]:
    """The fields of a JSON object; an empty body has none.

    Args:
        binary_fields: fields that are lists of base64; they come out as bytes.
        max_bytes: how long the body may be; it is not read any further.

    Raises:
        RequestRejected: 400, the body is no JSON object; 413, it is too long.
    """
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > max_bytes:
            raise RequestRejected(f"the body: expected at most {max_bytes} bytes", 413)
        body += chunk
    if not body or body.isspace():
        return {}
    if len(body) < LARGE_BODY_BYTES:
        return decode_fields(body)
    return await asyncio.to_thread(decode_in_pieces, body, binary_fields)


def decode_fields(body: bytearray) -> dict[str, Any]:
    """The fields of a whole body, decoded at once. Raises as `read_fields`."""
    with _refused():
        return msgspec.json.decode(body, type=dict[str, Any])


def decode_in_pieces(body: bytearray, binary_fields: Collection[str]) -> dict[str, Any]:
    """The fields of a large body, decoded in a thread; see `read_fields`."""
    with _refused():
        # `Raw` marks where a value lies without decoding it.
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {
            name: _binaries(value) if name in binary_fields else _plain(value)
            for name, value in values.items()
        }


@contextmanager
def _refused() -> Iterator[None]:
    """What cannot be decoded is the caller's fault."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(f"the body: expected a JSON object: {error}") from None


def _plain(value: msgspec.Raw) -> Any:
    if LIST_OF_LISTS.match(value) is None:
        return msgspec.json.decode(value)
    return [msgspec.json.decode(item) for item in msgspec.json.decode(value, type=list[msgspec.Raw])]


def _binaries(value: msgspec.Raw) -> Any:
    try:
        items = msgspec.json.decode(value, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return msgspec.json.decode(value)
    return [_binary(item) for item in items]


def _binary(item: msgspec.Raw) -> Any:
    """The bytes of a base64 string. What is not plain base64 is left to the check of types that follows."""
    whole = memoryview(item)
    opening, characters, ending = bytes(whole[:1]), whole[1:-1], bytes(whole[-3:-1])
    if opening != b'"' or len(characters) % 4:
        return msgspec.json.decode(item)
    decoded = bytearray(len(characters) // 4 * 3 - ending.count(b"="))
    end = 0
    for start in range(0, len(characters), PIECE_CHARACTERS):
        try:
            piece = binascii.a2b_base64(characters[start : start + PIECE_CHARACTERS], strict_mode=True)
        except binascii.Error:
            return msgspec.json.decode(item)
        decoded[end : end + len(piece)] = piece
        end += len(piece)
    # Padding in the middle makes a piece shorter than it should be.
    return decoded if end == len(decoded) else msgspec.json.decode(item)
