"""HTTP/1.1 on raw asyncio transports: parses with httptools, writes whole replies and chunked streams.

Light on purpose: one process must carry two thousand streams. Knows nothing of the API it carries.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast

import httptools


class Exchange:
    """One request and the way to answer it: either ``reply`` once, or ``open``, ``send`` ... and ``close``.

    Attributes:
        on_gone: Called when the client closes the connection while a stream is open.
    """

    def __init__(self, connection: "Connection", method: str, target: str, body: bytes, keep_alive: bool) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.body = body
        self.gone = False
        self.on_gone: Callable[[], None] = lambda: None
        self._connection = connection
        self._keep_alive = keep_alive

    def reply(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """Send a whole reply."""
        self._connection.log(self.method, self.path, status)
        length = f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n"
        self._connection.write(_head(status, length, self._keep_alive) + body)
        self._connection.finished(self._keep_alive)

    def open(self) -> None:
        """Begin a stream of server-sent events."""
        self._connection.log(self.method, self.path, 200)
        headers = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
        self._connection.write(_head(200, headers, self._keep_alive))

    def send(self, event: bytes) -> None:
        """Send one piece of a stream."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(event), event))

    def close(self) -> None:
        """End a stream."""
        self._connection.write(b"0\r\n\r\n")
        self._connection.finished(self._keep_alive)

    def cut(self) -> None:
        """Break the connection in the middle of a stream."""
        self._connection.abort()


def _head(status: int, headers: str, keep_alive: bool) -> bytes:
    connection = "" if keep_alive else "connection: close\r\n"
    phrase = HTTPStatus(status).phrase
    return (
        f"HTTP/1.1 {status} {phrase}\r\ndate: {formatdate(usegmt=True)}\r\nserver: uvicorn\r\n{headers}{connection}\r\n"
    ).encode("ascii")


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after another.

    Args:
        handle: Called with each request.
        log: Called with method, path and status of each reply, and the client's address.
    """

    def __init__(self, handle: Callable[[Exchange], None], log: Callable[[str, str, str, int], None]) -> None:
        self._handle = handle
        self._log = log
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = b""
        self._body: list[bytes] = []
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: a client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if peer else "?"

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is over."""
        self._transport = None
        self._waiting.clear()
        if self._current is not None:
            self._current.gone = True
            self._current.on_gone()
            self._current = None

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.abort()
        except httptools.HttpParserError:
            self.write(_head(400, "content-length: 0\r\n", False))
            self.abort()

    def on_url(self, url: bytes) -> None:
        """httptools: (a part of) the request's target."""
        self._target += url

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """httptools: a whole request is here."""
        exchange = Exchange(
            self,
            self._parser.get_method().decode("ascii"),
            self._target.decode("latin-1"),
            b"".join(self._body),
            bool(self._parser.should_keep_alive()),
        )
        self._target, self._body = b"", []
        self._waiting.append(exchange)
        if self._current is None:
            self._next()

    def write(self, data: bytes) -> None:
        """Send bytes, if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self, keep_alive: bool) -> None:
        """The current reply is complete."""
        self._current = None
        if not keep_alive and self._transport is not None:
            self._transport.close()
        self._next()

    def abort(self) -> None:
        """Break the connection."""
        if self._transport is not None:
            self._transport.abort()

    def log(self, method: str, path: str, status: int) -> None:
        """Write an access-log line."""
        self._log(self._peer, method, path, status)

    def _next(self) -> None:
        if self._waiting and self._transport is not None:
            self._current = self._waiting.popleft()
            self._handle(self._current)
