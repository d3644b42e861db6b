"""Bytes of a streamed answer -> server-sent events -> what a chunk says about tokens.

Knows the event-stream format and the few fields of an OpenAI chunk that count; nothing about sockets or clocks.
"""

from typing import Any

import msgspec

DONE = b"[DONE]"


class Choice(msgspec.Struct):
    """``token_ids`` are those of this chunk alone (vLLM's ``return_token_ids``)."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct):
    """Cumulative over the request, in every chunk when continuous usage is on."""

    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed completion; ``error`` inside a 200 answer is how an engine's death shows."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


def error_words(error: object) -> str:
    """``message (type, code)`` of an OpenAI error object; empty for anything else."""
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return ""
    facts = ", ".join(str(error[name]) for name in ("type", "code") if error.get(name) is not None)
    return f"{error['message']} ({facts})" if facts else str(error["message"])


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _TextChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _TextChunk(msgspec.Struct):
    choices: list[_TextChoice] = []


decode_chunk = msgspec.json.Decoder(Chunk).decode
_decode_text = msgspec.json.Decoder(_TextChunk).decode


def has_text(payload: bytes) -> bool:
    """Whether a chunk carries text: the sign of a token only where the server tells no count with each chunk."""
    for choice in _decode_text(payload).choices:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)):
            return True
    return False


class EventSplitter:
    """Cuts an event stream into the payloads of its events, wherever the network cut the bytes.

    Lines end in LF, CRLF or CR; comments and fields other than ``data`` are passed over; several ``data`` lines of
    one event are joined by LF. Splitting on bytes is safe inside a multi-byte character: UTF-8 has no LF or CR there.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """

    __slots__ = ("_after_cr", "_lines", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that ``data`` completes, in order."""
        whole_event = data.startswith(b"data: ") and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n")
        if whole_event and not self._rest and not self._lines and b"\r" not in data:
            return [data[6:-2]]
        return self._feed_slowly(data)

    def _feed_slowly(self, data: bytes) -> list[bytes]:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        text = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines.clear()
        return events
