"""The HTTP API: what each path answers. Source: a running vLLM 0.32 (paths, bodies, statuses, error objects)."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from runner.simulator.answer import ENGINE_DEAD, Answer, Part
from runner.simulator.asked import Asked, BadRequest, read_request
from runner.simulator.engine import Chunk, Engine
from runner.simulator.faults import Faults
from runner.simulator.live import Live
from runner.simulator.metrics import Metrics
from runner.simulator.scheduler import Request
from runner.simulator.text import Answers, Tokenizer, block_hashes, repetitiveness
from runner.simulator.wire import Exchange

VERSION = "0.33.0+simulated"
"""The version whose surface this server speaks; never without the word."""


class Api:
    """Answers requests.

    Args:
        names: Served model names.
        root: MODEL as given on the command line.
        vocabulary: Ids below it are valid.
        info: What ``/server_info`` tells.
        force_usage: Usage in streams whether asked for or not.
    """

    def __init__(
        self,
        engine: Engine,
        faults: Faults,
        *,
        names: Sequence[str],
        root: str,
        vocabulary: int,
        info: dict[str, Any],
        force_usage: bool = False,
    ) -> None:
        self.live = Live(engine, self._deliver)
        self.metrics = Metrics(engine, names[0], faults)
        self.dead = False
        self._engine = engine
        self._faults = faults
        self._names = tuple(names)
        self._root = root
        self._vocabulary = vocabulary
        self._info = info
        self._force_usage = force_usage
        self._created = int(time.time())
        self._tokenizer = Tokenizer(vocabulary)
        self._answers = Answers(self._tokenizer)
        self._open: dict[Request, tuple[Answer, Part]] = {}
        self._random = random.Random(0)
        self._routes: dict[tuple[str, str], Callable[[Exchange], None]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/version"): lambda exchange: _json(exchange, {"version": VERSION, "simulated": True}),
            ("GET", "/load"): lambda exchange: _json(exchange, {"server_load": len(self._open)}),
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/v1/completions"): lambda exchange: self._generate(exchange, chat=False),
            ("POST", "/v1/chat/completions"): lambda exchange: self._generate(exchange, chat=True),
        }

    def add_dev_endpoints(self) -> None:
        """vLLM's development endpoints, as with ``VLLM_SERVER_DEV_MODE=1``."""
        self._routes[("GET", "/server_info")] = self._server_info
        self._routes[("POST", "/reset_prefix_cache")] = self._reset_prefix_cache
        self._routes[("POST", "/reset_mm_cache")] = lambda exchange: exchange.reply(200, b"")

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        route = self._routes.get((exchange.method, exchange.path))
        if route is None:
            known = any(path == exchange.path for _, path in self._routes)
            _json(exchange, {"detail": "Method Not Allowed" if known else "Not Found"}, 405 if known else 404)
            return
        try:
            route(exchange)
        except BadRequest as error:
            exchange.reply(error.status, error.body)

    def engine_died(self) -> None:
        """The engine is gone: open requests end with an error, new ones are refused."""
        self.dead = True
        self.live.freeze()
        for answer, _ in list(self._open.values()):
            answer.fail()
        self._open.clear()

    def _health(self, exchange: Exchange) -> None:
        exchange.reply(503 if self.dead and not self._faults.green_health else 200, b"")

    def _models(self, exchange: Exchange) -> None:
        names = (self._faults.wrong_model,) if self._faults.wrong_model else self._names
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self._root,
                "parent": None,
                "max_model_len": self._engine.launch.max_model_len,
                "permission": [],
            }
            for name in names
        ]
        _json(exchange, {"object": "list", "data": cards})

    def _metrics(self, exchange: Exchange) -> None:
        text = self.metrics.render(self.live.lateness_s)
        exchange.reply(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _server_info(self, exchange: Exchange) -> None:
        as_json = parse_qs(exchange.query).get("config_format") == ["json"]
        info = self._info if as_json else {**self._info, "vllm_config": str(self._info["vllm_config"])}
        _json(exchange, info)

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        done = not self._faults.no_cache_reset and self._engine.scheduler.pool.reset()
        _json(exchange, {"success": done})

    def _tokenize(self, exchange: Exchange) -> None:
        fields = _object(exchange.body)
        text = fields.get("prompt")
        if text is None:
            text = "".join(f"\n{each.get('role')}\n{each.get('content')}" for each in fields.get("messages") or [])
        ids = self._tokenizer.encode(str(text))
        limit = self._engine.launch.max_model_len
        _json(exchange, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    def _detokenize(self, exchange: Exchange) -> None:
        _json(exchange, {"prompt": self._tokenizer.decode(_object(exchange.body).get("tokens") or [])})

    def _generate(self, exchange: Exchange, *, chat: bool) -> None:
        if self.dead:
            exchange.reply(500, msgspec.json.encode({"error": ENGINE_DEAD}))
            return
        asked = read_request(
            exchange.body,
            chat=chat,
            names=self._names,
            tokenizer=self._tokenizer,
            vocabulary=self._vocabulary,
            max_model_len=self._engine.launch.max_model_len,
            force_usage=self._force_usage,
        )
        parts = [self._part(index, one) for index, one in enumerate(asked)]
        answer = Answer(exchange, parts, self._faults)
        exchange.on_gone = lambda: self._gone(answer)
        for part in parts:
            self._open[part.request] = (answer, part)
            self.live.submit(part.request)

    def _part(self, index: int, asked: Asked) -> Part:
        length, reason = asked.max_tokens, "length"
        if asked.stops_early and length > 1:
            # A model that may stop does so somewhere; a third of the way at the least keeps answers usable.
            length = self._random.randint(max(1, length // 3), length)
            reason = "stop" if length < asked.max_tokens else "length"
        if self._faults.short_output:
            length, reason = max(1, length - self._faults.short_output), "stop"
        request = Request(
            prompt_tokens=len(asked.prompt),
            output_tokens=length,
            prefix=block_hashes(asked.prompt, self._engine.launch.block_size),
            repetitiveness=repetitiveness(asked.prompt),
            streamed=asked.stream,
        )
        return Part(index, asked, request, self._answers, reason)

    def _deliver(self, chunk: Chunk) -> None:
        found = self._open.get(chunk.request)
        if found is None:
            return
        answer, part = found
        answer.take(part, chunk)
        if answer.done and not chunk.finished:
            self._gone(answer)
        elif chunk.finished:
            del self._open[chunk.request]
            self.metrics.finish(chunk.request, part.reason, chunk.at_s)

    def _gone(self, answer: Answer) -> None:
        for part in answer.parts:
            if self._open.pop(part.request, None) is not None:
                self.live.abort(part.request)
                self.metrics.finish(part.request, "abort", self.live.now_s())


def _json(exchange: Exchange, value: object, status: int = 200) -> None:
    exchange.reply(status, msgspec.json.encode(value))


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise BadRequest("JSON decode error", kind="Bad Request") from None
    if not isinstance(fields, dict):
        raise BadRequest("a JSON object is expected", kind="Bad Request")
    return fields
