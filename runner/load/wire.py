"""What the parent and its client processes say to each other: msgpack frames over pipes.

Light on purpose (``msgspec`` only): every client process imports it.
"""

import struct
from typing import BinaryIO, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")

Message = TypeVar("Message")


class Lengths(msgspec.Struct, frozen=True):
    """Token counts to draw: ``low == high`` is fixed; with ``stddev`` normal, clipped; else uniform."""

    low: int
    high: int
    mean: float = 0.0
    stddev: float = 0.0


class Passages(msgspec.Struct, frozen=True, tag=True):
    """A long row of units (token ids or words) that prompts are cut from.

    Attributes:
        units: The units, encoded as they stand in a JSON prompt and joined by ``separator``.
        starts: Byte offset of each unit in ``units``, then one past the end; native unsigned 32-bit integers.
        separator: Between units.
        opening: Before the first unit of a prompt; ``closing`` after the last.
        shared: Units at the front of the row that open every prompt.
        units_per_token: 1 when units are token ids.
    """

    units: bytes
    starts: bytes
    separator: bytes
    opening: bytes
    closing: bytes
    shared: int
    units_per_token: float
    input_tokens: Lengths


class Listed(msgspec.Struct, frozen=True, tag=True):
    """Prompts given one by one, each already encoded as JSON."""

    prompts: list[bytes]


class Order(msgspec.Struct, frozen=True, tag=True):
    """One cell, as a client process is told.

    Attributes:
        streams: Global numbers of the streams this process holds open; they seed each stream's own draws.
        requests: This process's share of a naive cell; None runs until told to stop.
        ramp_s: Streams start evenly over it.
        dephase: Whether each stream's first request has a length drawn from 1..N.
        request_line: The request up to the value of its Content-Length.
        head: Request body before the prompt; ``tail`` has ``%d`` twice, for the output length.
    """

    host: str
    port: int
    tls: bool
    request_line: bytes
    head: bytes
    tail: bytes
    prompts: Passages | Listed
    output_tokens: Lengths
    seed: int
    streams: list[int]
    requests: int | None
    ramp_s: float
    dephase: bool
    request_timeout_s: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Start no further request; report when the open ones have ended."""


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Drop the requests still open, as failed, and report."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Where a client process is. ``dephased``: streams whose first request has ended. ``cpu_s``: since it started."""

    t_ns: int
    tokens: int
    in_flight: int
    ok: int
    failed: int
    dephased: int
    request_ns: int
    last_token_ns: int
    cpu_s: float
    errors: list[str]
    drained: bool


class Samples(msgspec.Struct, frozen=True, tag=True):
    """Everything a client process saw in a cell; columns are native arrays (type code behind the name).

    Attributes:
        chunk_request: Row of the request (``I``); ``chunk_ns`` arrival (``q``); ``chunk_tokens`` tokens in it (``I``).
        requests: One row a request, in the order they began.
        lag_ns: Event-loop lag samples as pairs (when, lag) (``q``).
    """

    chunk_request: bytes
    chunk_ns: bytes
    chunk_tokens: bytes
    requests: list["RequestRow"]
    lag_ns: bytes


class RequestRow(msgspec.Struct, array_like=True):
    """One request. Times on the machine-wide monotonic clock, nanoseconds; None: it never came.

    Attributes:
        first: Whether it is its stream's first one, of drawn length.
        sent_ns: Just before its bytes were written.
        end_ns: When the answer was complete, or it failed.
        tokens: Generated tokens as the stream told; None: it did not tell.
        counted: How ``tokens`` is known: ``chunk`` (per chunk) or ``final`` (final usage only).
        error: Why it does not count; None: it does.
    """

    stream: int
    first: bool
    asked: int
    sent_ns: int
    end_ns: int | None = None
    tokens: int | None = None
    counted: str | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    error: str | None = None


def write_frame(pipe: BinaryIO, message: msgspec.Struct) -> None:
    """Write one message and flush it; blocks while the pipe is full."""
    body = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


class Frames(Generic[Message]):
    """Cuts the bytes of a pipe into messages of one union of types."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Message]") -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes, in order."""
        self._rest += data
        messages: list[Message] = []
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, start)
            end = start + _LENGTH.size + length
            if len(self._rest) < end:
                break
            messages.append(self._decoder.decode(self._rest[start + _LENGTH.size : end]))
            start = end
        del self._rest[:start]
        return messages
