"""What the simulated server delivers at one concurrency, without HTTP: the same engine, run in virtual time.

For benchmarks of search strategies and for the calibration test. With ``noisy`` the figures spread as the node's YAML
says: one draw of speed per server start (that is, per seed), small ones per step, and drift with the node's age.
"""

import random
from dataclasses import dataclass
from statistics import fmean

from runner.schema.launch import LaunchConfig
from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator.arguments import parse
from runner.simulator.engine import Chunk, Engine
from runner.simulator.launch import Launch
from runner.simulator.resolve import resolve
from runner.simulator.scheduler import Request
from runner.space.command import argv

CLIENT_S = 0.0005
"""From the last chunk of a request to the next request's arrival, at the client and on the wire."""


@dataclass(frozen=True)
class Load:
    """What the closed-loop client asks for.

    Attributes:
        input_tokens: Tokens of every prompt; prompts share nothing.
        output_tokens: Tokens of every answer.
        repetitiveness: How much prompts repeat themselves (0 random, about 0.3 prose); n-gram drafts live from it.
        requests: Run this many and take the whole wall time (naive). None: a steady window.
        warmup_s: Steady: left out at the front, at least one request length in addition.
        window_s: Steady: length of the window.
    """

    input_tokens: int = 128
    output_tokens: int = 128
    repetitiveness: float = 0.0
    requests: int | None = None
    warmup_s: float = 2.0
    window_s: float = 10.0


@dataclass(frozen=True)
class Figures:
    """What came out, in model time.

    Attributes:
        all_reduce_share: Share of the busy step time spent in all-reduces.
        api_busy: Share of the wall time the API-server process was busy.
        acceptance_length: 1 + accepted tokens per draft; None without drafts.
    """

    output_tok_s: float
    ttft_ms: float
    tpot_ms: float | None
    tokens_per_chunk: float
    all_reduce_share: float
    api_busy: float
    acceptance_length: float | None
    preemptions: int


def resolved(config: LaunchConfig, node: SimulatedNode, model: SimulatedModel) -> Launch:
    """What a server started with ``config`` would run.

    Raises:
        Refused: When it would not start.
    """
    words = argv(config, model=config.model, host="127.0.0.1", port=0, served_name="model")
    return resolve(parse(words[1:]), config.env, node, model).launch


def expected(
    config: LaunchConfig,
    node: SimulatedNode,
    model: SimulatedModel,
    concurrency: int,
    load: Load = Load(),
    *,
    seed: int | None = None,
    age_h: float = 0.0,
) -> Figures:
    """Figures of ``config`` at one concurrency.

    Args:
        config: As the search resolved it.
        node: Where it would run.
        model: What it would serve.
        concurrency: Closed-loop streams in flight.
        load: What they ask for.
        seed: Of the noise, one server start each; None: no noise.
        age_h: The node's age in hours at the measurement, for the drift.

    Raises:
        Refused: When the server would not start.
    """
    launch = resolved(config, node, model)
    engine = Engine(launch, node, model, seed=seed or 0, noisy=seed is not None, age_h=age_h)
    client = _Client(engine, concurrency, load, random.Random(seed or 0))
    client.run()
    return client.figures()


class _Client:
    """A closed loop of ``concurrency`` streams around an engine in virtual time."""

    def __init__(self, engine: Engine, concurrency: int, load: Load, draws: random.Random) -> None:
        self._engine = engine
        self._concurrency = concurrency
        self._load = load
        self._random = draws
        self._left = load.requests if load.requests is not None else None
        self._chunks: list[Chunk] = []
        self._first_s: dict[Request, float] = {}
        self._window_s = (0.0, 0.0)

    def run(self) -> None:
        """Drive the loop until the requests are done or the window is over."""
        for index in range(self._concurrency):
            self._send(index * CLIENT_S / 10, first=self._load.requests is None)
        end_s = None
        while (next_s := self._engine.next_s()) is not None and (end_s is None or next_s <= end_s):
            for chunk in self._engine.run_until(next_s):
                self._take(chunk)
            if end_s is None and self._load.requests is None and len(self._first_s) >= 2 * self._concurrency:
                start_s = self._engine.now_s + self._load.warmup_s
                end_s = start_s + self._load.window_s
                self._window_s = (start_s, end_s)
        if end_s is None:
            self._window_s = (0.0, self._chunks[-1].at_s if self._chunks else 0.0)

    def figures(self) -> Figures:
        """What was seen in the window."""
        start_s, end_s = self._window_s
        inside = [chunk for chunk in self._chunks if start_s <= chunk.at_s <= end_s]
        tokens = sum(chunk.tokens for chunk in inside)
        done = [chunk for chunk in inside if chunk.finished and chunk.request.output_tokens == self._load.output_tokens]
        gaps = [
            (chunk.at_s - self._first_s[chunk.request]) / (chunk.request.output_tokens - 1)
            for chunk in done
            if chunk.request.output_tokens > 1
        ]
        waits = [self._first_s[chunk.request] - chunk.request.arrived_s for chunk in done] or [0.0]
        counters = self._engine.counters
        return Figures(
            output_tok_s=tokens / (end_s - start_s) if end_s > start_s else 0.0,
            ttft_ms=1e3 * fmean(waits),
            tpot_ms=1e3 * fmean(gaps) if gaps else None,
            tokens_per_chunk=tokens / len(inside) if inside else 0.0,
            all_reduce_share=counters.all_reduce_s / counters.busy_s if counters.busy_s else 0.0,
            api_busy=counters.api_busy_s / self._engine.now_s if self._engine.now_s else 0.0,
            acceptance_length=1 + counters.accepted_tokens / counters.drafts if counters.drafts else None,
            preemptions=self._engine.scheduler.preemptions,
        )

    def _send(self, at_s: float, *, first: bool) -> None:
        if self._left is not None:
            if self._left == 0:
                return
            self._left -= 1
        # Equal lengths would run in lock-step; the first request of each stream has a length of its own.
        length = self._random.randint(1, self._load.output_tokens) if first else self._load.output_tokens
        request = Request(self._load.input_tokens, length, repetitiveness=self._load.repetitiveness)
        self._engine.submit(request, at_s)

    def _take(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._first_s.setdefault(chunk.request, chunk.at_s)
        if chunk.finished:
            self._send(chunk.at_s + CLIENT_S, first=False)
