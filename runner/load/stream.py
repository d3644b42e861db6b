"""One closed-loop stream: requests out on one connection, chunks in, each stamped as it arrives.

Every nanosecond here is paid once a chunk, a hundred thousand times a cell: the path of a chunk is one parser call,
one split, one decode and three appends. Knows nothing about windows or figures.
"""

import asyncio
import time
from array import array
from typing import Protocol, cast

import httptools
import msgspec

from runner.load.sse import DONE, Choice, EventSplitter, Usage, decode_chunk, error_words, has_text
from runner.load.wire import RequestRow

_ERROR_TEXT = 300
"""Characters of a server's error text that are kept."""


class Chunks:
    """Columns of the chunks that carried tokens, in the order they came. Rows of ``Samples``."""

    __slots__ = ("ns", "request", "tokens", "total")

    def __init__(self) -> None:
        self.request = array("I")
        self.ns = array("q")
        self.tokens = array("I")
        self.total = 0


class Owner(Protocol):
    """What a stream needs from the process it lives in."""

    chunks: Chunks

    def ended(self, stream: "Stream") -> None:
        """Take note that ``stream.row`` is complete or failed."""


class Stream(asyncio.Protocol):
    """One connection, used for one request after another; httptools calls the ``on_*`` methods."""

    def __init__(self, number: int, owner: Owner) -> None:
        self.number = number
        self.row: RequestRow | None = None
        self.transport: asyncio.Transport | None = None
        self._owner = owner
        self._chunks = owner.chunks
        self.index = -1
        self._now_ns = 0
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._splitter = EventSplitter()
        self._seen = 0
        self._ids = 0
        self._final: int | None = None
        self._uncounted = False
        self._done = False
        self._framed = False
        self._status = 0
        self._refusal = b""

    def send(self, row: RequestRow, index: int, request: bytes) -> None:
        """Send one request; ``row.sent_ns`` is stamped just before its bytes are handed over."""
        assert self.transport is not None
        self._reset_answer()
        self.row, self.index = row, index
        row.sent_ns = time.perf_counter_ns()
        self.transport.write(request)

    def fail(self, reason: str) -> None:
        """Give the open request up."""
        if self.row is not None:
            self._now_ns = time.perf_counter_ns()
            self._end(reason)

    def close(self) -> None:
        """Close the connection, whatever is still open on it; what it still has to say is not heard."""
        if self.transport is not None:
            self.transport.set_protocol(asyncio.Protocol())
            self.transport.abort()
            self.transport = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class does not say so
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.perf_counter_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            self.fail(f"not an HTTP answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.row is None:
            return
        self._now_ns = time.perf_counter_ns()
        if self._done and not self._framed:
            self._complete()
        else:
            self.fail(f"the connection broke in the middle of the answer ({exc or 'closed by the server'})")

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._refusal = (self._refusal + body)[:_ERROR_TEXT]
            return
        for payload in self._splitter.feed(body):
            self._on_event(payload)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self.row is not None:
            self._complete()

    # what the answer says

    def _on_event(self, payload: bytes) -> None:
        row = self.row
        if row is None:
            return
        if payload == DONE:
            self._done = True
            return
        try:
            chunk = decode_chunk(payload)
        except msgspec.DecodeError as error:
            row.error = row.error or f"an event that is no chunk ({error}): {_quote(payload)}"
            return
        usage = chunk.usage
        if chunk.error is not None:
            row.error = (
                row.error or f"error inside the stream: {error_words(chunk.error)[:_ERROR_TEXT] or _quote(payload)}"
            )
        elif chunk.choices:
            self._on_choice(row, chunk.choices[0], usage, payload)
        elif usage is None:
            row.error = row.error or f"an event that is no chunk: {_quote(payload)}"
        if usage is not None:
            self._final = usage.completion_tokens
            row.prompt_tokens = usage.prompt_tokens

    def _on_choice(self, row: RequestRow, choice: Choice, usage: Usage | None, payload: bytes) -> None:
        if choice.finish_reason is not None:
            row.finish = choice.finish_reason
        if choice.token_ids is not None:
            self._ids += len(choice.token_ids)
        if usage is not None and usage.completion_tokens is not None:
            self._count(row, usage.completion_tokens)
        elif choice.token_ids is not None:
            self._count(row, self._seen + len(choice.token_ids))
        else:
            self._uncounted = True
            if has_text(payload):
                self._record(0)

    def _count(self, row: RequestRow, seen: int) -> None:
        new = seen - self._seen
        self._seen = seen
        if new > 0:
            self._record(new)
        elif new < 0:
            row.error = row.error or f"usage went backwards, from {seen - new} to {seen} tokens"

    def _record(self, tokens: int) -> None:
        chunks = self._chunks
        chunks.request.append(self.index)
        chunks.ns.append(self._now_ns)
        chunks.tokens.append(tokens)
        chunks.total += tokens

    def _complete(self) -> None:
        row = self.row
        assert row is not None
        if self._uncounted:
            row.tokens, row.counted = self._final, "final" if self._final is not None else None
        else:
            row.tokens, row.counted = self._seen, "chunk"
        self._end(row.error or self._verdict(row))

    def _verdict(self, row: RequestRow) -> str | None:
        """Why the answer does not count; None when it is exactly what was asked for."""
        if self._status != 200:
            return f"HTTP {self._status}: {_quote(self._refusal)}"
        if not self._done:
            return "the stream ended without [DONE]"
        if row.finish is None:
            return "the stream ended without a finish_reason"
        if row.finish != "length":
            return f"finish_reason {row.finish!r} after {row.tokens} of {row.asked} tokens"
        if row.tokens is None:
            return None
        if self._final is not None and self._final != row.tokens:
            return f"final usage says {self._final} tokens, the chunks carried {row.tokens}"
        if self._ids and self._ids != row.tokens:
            return f"usage says {row.tokens} tokens, the chunks carried {self._ids} token ids"
        return None if row.tokens == row.asked else f"{row.tokens} tokens came, {row.asked} were asked for"

    def _end(self, error: str | None) -> None:
        row = self.row
        assert row is not None
        if row.tokens is None and not self._uncounted:
            row.tokens, row.counted = self._seen, "chunk"
        row.error = error
        row.end_ns = self._now_ns
        self.row = None
        if error is not None:
            self.close()
        self._owner.ended(self)


def _quote(text: bytes) -> str:
    return text[:_ERROR_TEXT].decode(errors="replace").strip()
