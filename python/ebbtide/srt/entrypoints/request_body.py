"""Reads and decodes JSON bodies, even of gigabytes, without blocking the event loop for long."""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, get_args, get_origin

import msgspec
from starlette.datastructures import QueryParams

from ebbtide.srt.errors import RequestRejected

# Limit of a body without weights. A batch with tens of millions of prompt tokens fits.
MAX_BODY_BYTES = 1 << 28
# Limit of all bodies that are being read, together.
MAX_HELD_BYTES = 2 * MAX_BODY_BYTES
# Slower than any trainer's network: a client that sends less only takes up memory.
PATIENCE_S = 30.0
LEAST_BYTES_PER_S = 1 << 16
# Bodies of this size and larger ones are decoded in a thread.
LARGE_BODY_BYTES = 1 << 20
# Decoding holds the GIL. So base64 and lists of numbers are decoded in pieces, and a list of lists, such as
# the token ids of a batch, list by list: the event loop runs in between.
PIECE_CHARACTERS = 1 << 22
LIST_OF_LISTS = re.compile(rb"\s*\[\s*\[")
LIST_OF_NUMBERS = re.compile(rb"\s*\[\s*[-0-9]")
PIECE_BYTES = 1 << 18


class BodyReader:
    """Reads bodies of requests, with a limit on their memory together and on the time of each.

    Args:
        max_held_bytes: limit of all bodies that are being read or decoded, together; or the limit of a single
            body, if that is larger.
        patience_s: how long a client may send nothing; also how long a whole body may take, plus a second
            for each `LEAST_BYTES_PER_S`.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES, patience_s: float = PATIENCE_S) -> None:
        self._max_held_bytes = max_held_bytes
        self._patience_s = patience_s
        self._held_bytes = 0

    async def read(
        self,
        chunks: AsyncIterator[bytes],
        binary_fields: Collection[str] = frozenset(),
        max_bytes: int = MAX_BODY_BYTES,
    ) -> dict[str, Any]:
        """Read the fields of a JSON object. An empty body has no fields.

        Args:
            chunks: the body as it arrives.
            binary_fields: fields with lists of base64 strings, which are decoded to bytes.
            max_bytes: limit of the body's length; the rest is not read.

        Raises RequestRejected: 400, the body is not a JSON object; 408, it does not arrive in time; 413, it
        is too long; 503, all bodies together are too large at the moment.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self._patience_s) as deadline:
                loop = asyncio.get_running_loop()
                began_s = loop.time()
                async for chunk in chunks:
                    self._take(body, chunk, max_bytes)
                    # Require the least rate over the whole body, and allow no pause longer than the patience.
                    allowed_s = min(loop.time() - began_s, len(body) / LEAST_BYTES_PER_S) + self._patience_s
                    deadline.reschedule(began_s + allowed_s)
            if not body or body.isspace():
                return {}
            if len(body) < LARGE_BODY_BYTES:
                return decode_fields(body)
            return await asyncio.to_thread(decode_in_pieces, body, binary_fields)
        except TimeoutError:
            raise RequestRejected(
                f"the body: only {len(body)} bytes have arrived: expected more every "
                f"{self._patience_s:g} s, and on average {LEAST_BYTES_PER_S} per second",
                408,
            ) from None
        finally:
            self._held_bytes -= len(body)

    def _take(self, body: bytearray, chunk: bytes, max_bytes: int) -> None:
        if len(body) + len(chunk) > max_bytes:
            raise RequestRejected(f"the body: expected at most {max_bytes} bytes", 413)
        limit = max(self._max_held_bytes, max_bytes)
        if self._held_bytes + len(chunk) > limit:
            raise RequestRejected(
                f"the body: all bodies being read may have {limit} bytes together: try again later", 503
            )
        body += chunk
        self._held_bytes += len(chunk)


def decode_fields(body: bytearray) -> dict[str, Any]:
    """Decode a whole body at once. Raises as `BodyReader.read`."""
    with _refused():
        return msgspec.json.decode(body, type=dict[str, Any])


def decode_in_pieces(body: bytearray, binary_fields: Collection[str]) -> dict[str, Any]:
    """Decode a large body. Call it in a thread; see `BodyReader.read`."""
    with _refused():
        # `Raw` finds the bytes of a value without decoding it.
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {
            name: _binaries(value) if name in binary_fields else _plain(value)
            for name, value in values.items()
        }


@contextmanager
def _refused() -> Iterator[None]:
    """Turn errors of decoding into RequestRejected: 400."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(f"the body: expected a JSON object: {error}") from None


def _plain(value: msgspec.Raw) -> Any:
    if LIST_OF_NUMBERS.match(value) is not None and len(value) > PIECE_BYTES:
        return _numbers(bytes(value).strip()[1:-1])
    if LIST_OF_LISTS.match(value) is None:
        return msgspec.json.decode(value)
    return [msgspec.json.decode(item) for item in msgspec.json.decode(value, type=list[msgspec.Raw])]


def _numbers(listed: bytes) -> list[Any]:
    """Decode a list of numbers, given without its brackets, in pieces. Other items are decoded too.

    Raises msgspec.DecodeError: a piece is not JSON.
    """
    numbers: list[Any] = []
    start = 0
    while start < len(listed):
        end = listed.find(b",", start + PIECE_BYTES)
        piece = listed[start : end if end >= 0 else len(listed)]
        if any(mark in piece for mark in b'"[{'):
            # Commas may belong to a string or an inner list: decode the rest at once.
            piece, end = listed[start:], -1
        numbers += msgspec.json.decode(b"[" + piece + b"]")
        if end < 0:
            break
        start = end + 1
    return numbers


def _binaries(value: msgspec.Raw) -> Any:
    try:
        items = msgspec.json.decode(value, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return msgspec.json.decode(value)
    return [_binary(item) for item in items]


def _binary(item: msgspec.Raw) -> Any:
    """Decode a base64 string. Anything else is decoded as JSON, and a later check of types rejects it."""
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


def of_query(query: QueryParams, name: str, annotation: Any) -> Any:
    """The value of a query parameter; a list of its values if the field's type takes lists."""
    members = (annotation, *get_args(annotation))
    takes_list = str not in members and any(get_origin(member) in (list, tuple) for member in members)
    return query.getlist(name) if takes_list else query[name]


# Header → field with the same meaning.
_NUMBERS: Final = {"X-data-parallel-rank": "routed_dp_rank", "X-Request-Priority": "priority"}


def with_headers(fields: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Add the fields that headers give. Numbers in the body take precedence; the header's request id does.

    `headers`: names in lower case, or case-insensitive.
    Raises RequestRejected: 400; a header is not a number.
    """
    merged = dict(fields)
    for header, name in _NUMBERS.items():
        given = headers.get(header.lower())
        if given is None or merged.get(name) is not None:
            continue
        if re.fullmatch(r"-?\d{1,19}", given) is None:
            raise RequestRejected(f"{header}: expected a number, got {given[:100]!r}")
        merged[name] = int(given)
    request_id = headers.get("x-request-id")
    return merged if not request_id else {**merged, "request_id": request_id}
