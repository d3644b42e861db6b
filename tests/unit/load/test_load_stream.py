"""One stream fed with recorded bytes: tokens, stamps and verdicts."""

import asyncio
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.load.stream import Chunks, Stream
from runner.load.wire import RequestRow

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Owner:
    """What a stream tells its process."""

    def __init__(self) -> None:
        self.chunks = Chunks()
        self.over = 0

    def ended(self, stream: Stream) -> None:
        self.over += 1


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Nobody reads on."""


def event(text: str, tokens: int, seen: int | None, *, ids: bool = True, finish: str = "null") -> bytes:
    """One chunk as vLLM sends it."""
    usage = "" if seen is None else f',"usage":{{"prompt_tokens":9,"completion_tokens":{seen}}}'
    carried = f',"token_ids":{[7] * tokens}' if ids else ""
    return f'data: {{"choices":[{{"text":"{text}"{carried},"finish_reason":{finish}}}]{usage}}}\n\n'.encode()


def final(tokens: int) -> bytes:
    return f'data: {{"choices":[],"usage":{{"prompt_tokens":9,"completion_tokens":{tokens}}}}}\n\n'.encode()


DONE = b"data: [DONE]\n\n"


def d6(*, usage: int | None = 14, ids: bool = True) -> bytes:
    """Chunks of 1, 4, 3, 0 characters with one id, 5 tokens; a comment; then usage and DONE."""
    parts = [
        event("a", 1, None, ids=ids),
        b": keep-alive\n\n",
        event("é\N{SLIGHTLY SMILING FACE}bc", 4, None, ids=ids),
        event("def", 3, None, ids=ids),
        event("", 1, None, ids=ids),
        event("ghijk", 5, None, ids=ids, finish='"length"'),
    ]
    return b"".join(parts) + (b"" if usage is None else final(usage)) + DONE


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def run(*pieces: bytes, asked: int = 14, lost: bool = False) -> tuple[RequestRow, Chunks]:
    """Feed one answer; returns the request's row and the chunks."""
    owner = Owner()
    stream = Stream(0, owner)
    stream.connection_made(Wire())
    row = RequestRow(0, False, asked, 0)
    stream.send(row, 0, b"POST")
    for piece in pieces:
        stream.data_received(piece)
    if lost:
        stream.connection_lost(None)
    assert owner.over == 1
    return row, owner.chunks


def test_tokens_are_counted_and_chunks_are_not() -> None:
    """D-6: 14 tokens in 5 chunks, the empty-text one included."""
    row, chunks = run(HEAD, chunked(d6()), END)
    assert (row.tokens, row.counted, row.error) == (14, "chunk", None)
    assert list(chunks.tokens) == [1, 4, 3, 1, 5]
    assert row.prompt_tokens == 9


@given(st.lists(st.integers(0, 2_000), max_size=8))
def test_the_cuts_of_the_network_change_nothing(cuts: list[int]) -> None:
    """The same answer cut anywhere, inside JSON, a character or an HTTP chunk header: the same tokens."""
    data = HEAD + chunked(d6()[:40]) + chunked(d6()[40:]) + END
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    row, chunks = run(*(data[start:end] for start, end in itertools.pairwise(edges)))
    assert (row.tokens, row.error) == (14, None)
    assert list(chunks.tokens) == [1, 4, 3, 1, 5]


def test_usage_against_token_ids_is_flagged() -> None:
    """D-6, usage 13 for 14 ids: an error that names both."""
    row, _ = run(HEAD, chunked(d6(usage=13)), END)
    assert row.error == "final usage says 13 tokens, the chunks carried 14"


def test_without_usage_and_ids_nothing_is_counted() -> None:
    """D-6 without a count: unknown, never the number of chunks."""
    row, chunks = run(HEAD, chunked(d6(usage=None, ids=False)), END)
    assert (row.tokens, row.counted) == (None, None)
    assert chunks.total == 0


def test_final_usage_only_counts_the_whole_and_stamps_the_text() -> None:
    """The count is known at the end; text chunks still mark first and last arrival."""
    row, chunks = run(HEAD, chunked(d6(ids=False)), END)
    assert (row.tokens, row.counted, row.error) == (14, "final", None)
    assert list(chunks.tokens) == [0, 0, 0, 0]


CONTINUOUS = event("a", 1, 1, ids=False) + event("b", 1, 2, ids=False, finish='"length"')


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (CONTINUOUS + final(2) + DONE, None),
        (CONTINUOUS + DONE, None),
        (CONTINUOUS + final(3) + DONE, "final usage says 3 tokens, the chunks carried 2"),
        (CONTINUOUS + final(2), "the stream ended without [DONE]"),
        (event("a", 1, 1, ids=False) + DONE, "the stream ended without a finish_reason"),
        (event("a", 1, 1, ids=False, finish='"stop"') + DONE, "finish_reason 'stop' after 1 of 2 tokens"),
        (event("a", 1, 1, ids=False, finish='"length"') + DONE, "1 tokens came, 2 were asked for"),
        (event("a", 3, 3, ids=False) + event("b", 1, 2, ids=False), "usage went backwards, from 3 to 2 tokens"),
        (b"data: nonsense\n\n" + DONE, "an event that is no chunk"),
        (event("a", 1, 1, ids=False) + b'data: {"error":{"message":"boom"}}\n\n' + DONE, "inside the stream: boom"),
        (b'data: {"error":{"message":"boom","type":"E","code":500}}\n\n' + DONE, "inside the stream: boom (E, 500)"),
        (b'data: {"error":"boom"}\n\n' + DONE, 'inside the stream: {"error":"boom"}'),
        (b'data: {"object":"error","message":"old form"}\n\n' + DONE, "old form"),
    ],
)
def test_verdicts(answer: bytes, error: str | None) -> None:
    """Good is: no error, DONE, finish reason length, and exactly the tokens asked for."""
    row, _ = run(HEAD, chunked(answer), END, asked=2)
    assert (row.error is None) if error is None else (error in (row.error or ""))


def test_a_refusal_is_quoted() -> None:
    """Any status but 200 fails the request with the server's own words."""
    row, _ = run(b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\nno such x")
    assert row.error == "HTTP 400: no such x"


def test_a_broken_connection_fails_the_request() -> None:
    """In the middle of a chunked body, DONE or not, the answer is not whole."""
    row, _ = run(HEAD, chunked(CONTINUOUS), lost=True)
    assert "broke in the middle" in (row.error or "")


def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    """Without length or chunking (HTTP/1.0 style) the close is the end, if DONE came before it."""
    row, _ = run(b"HTTP/1.1 200 OK\r\n\r\n" + CONTINUOUS + DONE, asked=2, lost=True)
    assert row.error is None


def test_one_connection_serves_request_after_request() -> None:
    """Nothing of the first answer is left in the second."""
    owner = Owner()
    stream = Stream(0, owner)
    stream.connection_made(Wire())
    rows = [RequestRow(0, False, 2, 0) for _ in range(2)]
    for index, row in enumerate(rows):
        stream.send(row, index, b"POST")
        stream.data_received(HEAD + chunked(CONTINUOUS + final(2) + DONE) + END)
    assert [row.error for row in rows] == [None, None]
    assert list(owner.chunks.request) == [0, 0, 1, 1]


def test_a_failed_request_closes_its_connection() -> None:
    """What is still on its way must not be read as the next answer."""
    owner, wire = Owner(), Wire()
    stream = Stream(0, owner)
    stream.connection_made(cast(asyncio.BaseTransport, wire))
    stream.send(RequestRow(0, False, 2, 0), 0, b"POST")
    stream.fail("too late")
    assert wire.aborted
    assert stream.transport is None
