"""Answers on the wire: server-sent events and whole replies, byte for byte in vLLM's shape.

Chunks are put together from prepared bytes, because formatting is most of the work of a server with thousands of
streams.
"""

import time
import uuid
from typing import Any

import msgspec

from runner.simulator.asked import Asked
from runner.simulator.engine import Chunk
from runner.simulator.faults import Faults
from runner.simulator.scheduler import Request
from runner.simulator.text import Answers
from runner.simulator.wire import Exchange

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "simulated"
ENGINE_DEAD = {
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


class Part:
    """One prompt's share of an answer.

    Attributes:
        produced: Tokens that left so far.
    """

    def __init__(self, index: int, asked: Asked, request: Request, answers: Answers, reason: str) -> None:
        self.index = index
        self.asked = asked
        self.request = request
        self.produced = 0
        self.chunks = 0
        self.reason = reason
        self._answers = answers
        self._start = answers.start(asked.prompt)

    def next(self, count: int) -> tuple[str, list[int]]:
        """Text and ids of the next tokens."""
        at = self._start + self.produced
        self.produced += count
        self.chunks += 1
        return self._answers.text(at, count), self._answers.tokens(at, count) if self.asked.token_ids else []

    def all(self) -> tuple[str, list[int]]:
        """Text and ids of everything produced."""
        return self._answers.text(self._start, self.produced), self._answers.tokens(self._start, self.produced)


class Answer:
    """The answer to one HTTP request; ``take`` each chunk of its parts until ``done``."""

    def __init__(self, exchange: Exchange, parts: list[Part], faults: Faults) -> None:
        self.exchange = exchange
        self.parts = parts
        self.done = False
        self._faults = faults
        self._asked = parts[0].asked
        self._left = len(parts)
        self._created = int(time.time())
        self._id = ("chatcmpl-" if self._asked.chat else "cmpl-") + uuid.uuid4().hex[:16]
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        model = msgspec.json.encode(self._asked.model).decode()
        self._front = (
            f'data: {{"id":"{self._id}","object":"{kind}","created":{self._created},"model":{model},"choices":['
        )
        if self._asked.stream:
            exchange.open()

    def take(self, part: Part, chunk: Chunk) -> None:
        """Tokens of a part have left the engine."""
        if self.done:
            return
        first = part.produced == 0
        text, ids = part.next(chunk.tokens)
        if self._asked.stream:
            self._stream(part, text, ids, first, chunk.finished)
        if chunk.finished and not self.done:
            self._left -= 1
            if not self._left:
                self._finish()

    def fail(self) -> None:
        """The engine died."""
        if self.done:
            return
        self.done = True
        body = msgspec.json.encode({"error": ENGINE_DEAD})
        if self._asked.stream:
            self.exchange.send(b"data: " + body + b"\n\n" + DONE)
            self.exchange.close()
        else:
            self.exchange.reply(500, body)

    def _stream(self, part: Part, text: str, ids: list[int], first: bool, finished: bool) -> None:
        reason = f'"{part.reason}"' if finished else "null"
        usage = self._usage(part) if self._asked.usage_each and not self._faults.no_usage else ""
        listed = str(ids).replace(" ", "") if ids and not self._faults.no_usage else "null"
        if self._asked.chat:
            if first:
                role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
                self._send(f'{self._front}{{"index":{part.index},{role}{usage and self._usage(part, 0)}}}\n\n')
            middle = f'"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":{reason},"token_ids":{listed}}}]'
        else:
            prompt = str(list(part.asked.prompt)).replace(" ", "") if first and self._asked.token_ids else "null"
            middle = (
                f'"text":"{text}","logprobs":null,"finish_reason":{reason},"stop_reason":null,'
                f'"prompt_token_ids":{prompt},"token_ids":{listed}}}]'
            )
        self._send(f'{self._front}{{"index":{part.index},{middle}{usage}}}\n\n')
        self._break(part)

    def _break(self, part: Part) -> None:
        """The faults of a running stream."""
        if self._faults.stream_error_after is not None and part.produced >= self._faults.stream_error_after:
            self.fail()
        elif self._faults.truncate_after is not None and part.chunks >= self._faults.truncate_after:
            self.done = True
            self.exchange.cut()

    def _send(self, event: str) -> None:
        self.exchange.send(event.encode("ascii"))

    def _usage(self, part: Part, produced: int | None = None) -> str:
        prompt, made = len(part.asked.prompt), part.produced if produced is None else produced
        return f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + made},"completion_tokens":{made}}}'

    def _totals(self) -> dict[str, Any]:
        prompt = sum(len(part.asked.prompt) for part in self.parts)
        made = sum(part.produced for part in self.parts)
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def _finish(self) -> None:
        self.done = True
        if not self._asked.stream:
            self.exchange.reply(200, self._whole())
            return
        if self._asked.usage_last and not self._faults.no_usage:
            usage = msgspec.json.encode(self._totals()).decode()
            self._send(f'{self._front}],"usage":{usage},"system_fingerprint":"{FINGERPRINT}"}}\n\n')
        self.exchange.send(DONE)
        self.exchange.close()

    def _whole(self) -> bytes:
        choices = []
        for part in self.parts:
            text, ids = part.all()
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
            )
            shown = ids if self._asked.token_ids else None
            choices.append(
                {"index": part.index, **said, "logprobs": None, "finish_reason": part.reason, "token_ids": shown}
            )
        return msgspec.json.encode(
            {
                "id": self._id,
                "object": "chat.completion" if self._asked.chat else "text_completion",
                "created": self._created,
                "model": self._asked.model,
                "choices": choices,
                "system_fingerprint": FINGERPRINT,
                "usage": self._totals(),
            }
        )
