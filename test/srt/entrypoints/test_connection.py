"""Requests whose URL and headers have no end, or do not come, through the server's own parser."""

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from ebbtide.srt.entrypoints import connection
from ebbtide.srt.entrypoints.connection import MAX_HEAD_BYTES, BoundedConnection

GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"


class Transport(asyncio.Transport):
    """What a client would see of its connection."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def conversation(*pieces: bytes, wait_s: float = 0.0) -> Transport:
    """What becomes of a connection on which these pieces come, until it is closed or all have come."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        await PlainTextResponse(scope["path"] + body.decode())(scope, receive, send)

    config = uvicorn.Config(application, lifespan="off", log_config=None, http=BoundedConnection)
    config.load()
    one = BoundedConnection(config, ServerState(), {})
    transport = Transport()
    one.connection_made(transport)
    for piece in pieces:
        one.data_received(piece)
        await asyncio.sleep(wait_s)
        if transport.is_closed:
            break
    for _ in range(20):  # turns of the loop, in which whatever is ready goes on
        await asyncio.sleep(0)
    was_closed = transport.is_closed
    one.connection_lost(None)
    transport.is_closed = was_closed
    return transport


def refusal(transport: Transport) -> tuple[bytes, Any]:
    head, _, body = transport.written.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /" + b"a" * 1000, *[b"a" * 1000] * 1000],
        [GET + b"x: ", *[b"a" * 1000] * 1000],
        [GET, *[b"x: " + b"a" * 995 + b"\r\n"] * 1000],
        [GET + b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"],
        [b"GET /?" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n"],
        [b"GET / HTTP/1.1\r\n\r\n", GET + b"x: ", *[b"a" * 1000] * 1000],
    ],
    ids=["url", "header", "headers", "header_at_once", "url_at_once", "second_request"],
)
def test_a_head_without_an_end_is_refused_while_it_comes(pieces: list[bytes]) -> None:
    transport = asyncio.run(conversation(*pieces))
    transport.written = transport.written.removeprefix(transport.written.partition(b"HTTP/1.1 431")[0])
    status, error = refusal(transport)
    assert status.startswith(b"HTTP/1.1 431 ")
    assert f"at most {MAX_HEAD_BYTES} bytes" in error["message"]
    assert transport.is_closed


def test_trailers_without_an_end_close_the_connection() -> None:
    pieces = [CHUNKED + b"0\r\nx: ", *[b"a" * 1000] * 1000]
    assert asyncio.run(conversation(*pieces)).is_closed


def test_what_is_long_in_its_body_alone_is_answered() -> None:
    many = [b"8000\r\n" + b"a" * 0x8000 + b"\r\n"] * 8
    transport = asyncio.run(
        conversation(CHUNKED, *many, b"0\r\n\r\n", GET + b"x: " + b"a" * 1000 + b"\r\n\r\n")
    )
    assert transport.written.count(b"HTTP/1.1 200") == 2
    assert not transport.is_closed


def test_a_head_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_PATIENCE_S", 0.01)
    transport = asyncio.run(conversation(GET, b"x: a", wait_s=0.05))
    status, error = refusal(transport)
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert "the URL and the headers" in error["message"]


def test_what_is_no_http_is_refused_in_the_one_shape() -> None:
    status, error = refusal(asyncio.run(conversation(b"\x16\x03\x01 hello\r\n")))
    assert (status, error["code"]) == (b"HTTP/1.1 400 Bad Request", 400)
