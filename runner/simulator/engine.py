"""The server as a discrete-event model: one API-server process in front, the scheduler, and pipeline stages behind.

The same object runs in virtual time (``expected``) and, driven by a clock, in the live server, so that the two agree by
construction. Time is seconds since the model's start; ``run_until`` does all that happens up to a time.

Three things it models besides the steps themselves:

* async scheduling hides the host's time behind the GPU as long as a batch slot is free. With pipeline parallelism and
  all slots taken, the host's time stands between one batch's end and the next one's start;
* the API server is one process: each request, token and chunk costs it time. Requests that wait together are taken in
  together (asyncio interleaves their handlers, so they reach the engine at about the same time). Output messages of up
  to 128 requests that wait for it are merged, so that several tokens of a request leave in one chunk (larger messages
  are handled in slices, between which the streams get to run: vllm/v1/engine/async_llm.py);
* requests of one step's batch are not in another's (no run-ahead within a request).
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp
from typing import Any

from runner.schema.node import Acceptance, SimulatedModel, SimulatedNode
from runner.simulator.costs import Batch, StepTime, step_time
from runner.simulator.launch import Launch
from runner.simulator.scheduler import Request, Scheduler, Work

MERGED_UP_TO = 128
"""VLLM_V1_OUTPUT_PROC_CHUNK_SIZE: the output handler lets the streams run between slices of this many outputs."""
WORKER_SHARE = 0.5
"""Share of a step's host time that falls to the worker, which cannot launch meanwhile; the rest is the engine process's
and overlaps with launching under async scheduling. An estimate: it makes both eager rows at C=64 and C=256 fit."""
SLICE = 32
"""Chunks of one message that leave together; a message's chunks leave one after another while it is worked on."""
FULL_BACKLOG = 100
"""Waiting output messages at which ``Host.api_backlog`` counts in full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a request that leave the API server together.

    Attributes:
        at_s: When they leave.
        finished: Whether they are its last.
    """

    request: Request
    tokens: int
    at_s: float
    finished: bool


@dataclass
class Counters:
    """Sums since the start; what ``/metrics`` shows."""

    steps: int = 0
    step_tokens: int = 0
    busy_s: float = 0.0
    all_reduce_s: float = 0.0
    api_busy_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    graphs: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Output:
    request: Request
    tokens: int
    last: bool


@dataclass(slots=True)
class _Flight:
    works: list[Work]
    step: StepTime


class Engine:
    """Requests in, chunks out, in model time.

    Args:
        launch: What was resolved.
        seed: For acceptance draws and noise.
        noisy: Whether step times vary (per start, per step) and drift as the node's YAML says.
        age_h: The node's age in hours at the start, for the drift.
    """

    def __init__(
        self,
        launch: Launch,
        node: SimulatedNode,
        model: SimulatedModel,
        *,
        seed: int = 0,
        noisy: bool = False,
        age_h: float = 0.0,
    ) -> None:
        self.launch = launch
        self.scheduler = Scheduler(launch)
        self.counters = Counters(accepted_at=[0] * launch.draft_tokens)
        self.now_s = 0.0
        self.on_step: Callable[[list[Work]], None] = lambda works: None
        self._node = node
        self._model = model
        self._random = random.Random(seed)
        self._noise = node.noise if noisy else None
        self._speed, self._api_speed = self._start_noise(age_h)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._stage_free_s = [0.0] * launch.pipeline_parallel
        self._in_flight = 0
        self._done: deque[_Flight] = deque()
        self._host_busy = False
        self._api_queue: deque[Request | list[_Output]] = deque()
        self._api_busy = False
        self._chunks: list[Chunk] = []

    def submit(self, request: Request, at_s: float) -> None:
        """A request reaches the API server at ``at_s``."""
        request.arrived_s = at_s
        self._at(at_s, self._to_api, request)

    def abort(self, request: Request) -> None:
        """Nobody wants the rest of a request."""
        if request.finished:
            return
        request.aborted = True
        if not request.in_flight:
            self.scheduler.retire(request)

    def next_s(self) -> float | None:
        """When something happens next; None when nothing is left to do."""
        return self._events[0][0] if self._events else None

    def run_until(self, until_s: float) -> list[Chunk]:
        """Let time pass; the chunks that left the API server meanwhile, in order."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, happen, subject = heapq.heappop(self._events)
            happen(subject)
        self.now_s = max(self.now_s, until_s)
        chunks, self._chunks = self._chunks, []
        return chunks

    def _at(self, at_s: float, happen: Callable[[Any], None], subject: Any = None) -> None:
        heapq.heappush(self._events, (max(at_s, self.now_s), self._sequence, happen, subject))
        self._sequence += 1

    def _start_noise(self, age_h: float) -> tuple[float, float]:
        if self._noise is None:
            return 1.0, 1.0
        drift = 1.0 + self._noise.drift_per_hour * age_h
        return (
            drift * exp(self._random.gauss(0.0, self._noise.start)),
            exp(self._random.gauss(0.0, self._noise.api_start)),
        )

    # The API server: one queue for requests coming in and messages going out.

    def _to_api(self, job: Request | list[_Output]) -> None:
        self._api_queue.append(job)
        if not self._api_busy:
            self._serve_api()

    def _serve_api(self) -> None:
        job = self._api_queue.popleft()
        self._api_busy = True
        if isinstance(job, Request):
            together = [job, *(other for other in self._api_queue if isinstance(other, Request))]
            self._api_queue = deque(other for other in self._api_queue if not isinstance(other, Request))
            cost_s = self._api_cost_s(len(together) * self._node.host.api_request_ms * 1e-3)
            self._at(self.now_s + cost_s, self._taken_in, together)
            return
        backlog = min(len(self._api_queue), FULL_BACKLOG) / FULL_BACKLOG
        message = self._merged(job)
        for output in message:
            output.request.unsent += output.tokens
        leaving = [output for output in message if self._leaves(output)]
        host = self._node.host
        cost_us = host.api_token_us * sum(output.tokens for output in message) + host.api_chunk_us * len(leaving)
        cost_s = self._api_cost_s(cost_us * 1e-6 * (1.0 + host.api_backlog * backlog))
        for begin in range(0, len(leaving), SLICE):
            part = leaving[begin : begin + SLICE]
            self._at(self.now_s + cost_s * (begin + len(part)) / len(leaving), self._sent, part)
        self._at(self.now_s + cost_s, self._api_next)

    def _api_cost_s(self, cost_s: float) -> float:
        cost_s *= self._api_speed / self.launch.api_servers
        self.counters.api_busy_s += cost_s
        return cost_s

    def _merged(self, outputs: list[_Output]) -> list[_Output]:
        if len(outputs) > MERGED_UP_TO:
            return outputs
        message = {output.request: output for output in outputs}
        while self._api_queue:
            following = self._api_queue[0]
            if isinstance(following, Request) or len(following) > MERGED_UP_TO:
                break
            self._api_queue.popleft()
            for output in following:
                earlier = message.get(output.request)
                tokens = output.tokens + (earlier.tokens if earlier else 0)
                message[output.request] = _Output(output.request, tokens, output.last)
        return list(message.values())

    def _leaves(self, output: _Output) -> bool:
        """Whether tokens are sent now: a request's first, its last, or ``stream_interval`` of them."""
        request = output.request
        due = request.sent == 0 or request.unsent >= self.launch.stream_interval
        return output.last or (request.streamed and due)

    def _taken_in(self, requests: list[Request]) -> None:
        self._at(self.now_s + self._node.host.first_step_ms * 1e-3, self._enter, requests)
        self._api_next()

    def _sent(self, leaving: list[_Output]) -> None:
        for output in leaving:
            request = output.request
            self._chunks.append(Chunk(request, request.unsent, self.now_s, output.last))
            request.sent += request.unsent
            request.unsent = 0

    def _api_next(self, _: object = None) -> None:
        self._api_busy = False
        if self._api_queue:
            self._serve_api()

    # The engine: schedule, run through the stages, retire.

    def _enter(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.add(request)
        self._schedule()

    def _schedule(self) -> None:
        while not self._host_busy and self._in_flight < self.launch.pipeline_parallel:
            works = self.scheduler.schedule(self.now_s)
            if not works:
                return
            self._launch_step(works)

    def _launch_step(self, works: list[Work]) -> None:
        batch = Batch(
            requests=len(works),
            tokens=sum(work.tokens for work in works),
            decode_only=all(work.decoding for work in works),
            context_tokens=sum(work.request.computed for work in works),
            drafted=sum(1 for work in works if work.drafts),
        )
        step = step_time(self.launch, self._node, self._model, batch)
        stages_s = step.stages_s
        if self.launch.async_scheduling and self.launch.pipeline_parallel == 1:
            stages_s = (max(stages_s[0], step.launch_s + WORKER_SHARE * step.host_s),)
        speed = self._speed
        if self._noise is not None:
            speed *= exp(self._random.gauss(0.0, self._noise.step))
        leave_s = self.now_s
        for stage, stage_s in enumerate(stages_s):
            leave_s = max(leave_s, self._stage_free_s[stage]) + stage_s * speed
            self._stage_free_s[stage] = leave_s
        self._in_flight += 1
        self._count(batch, step, speed * sum(stages_s))
        self._at(leave_s, self._step_done, _Flight(works, step))

    def _count(self, batch: Batch, step: StepTime, busy_s: float) -> None:
        self.counters.steps += 1
        self.counters.step_tokens += batch.tokens
        self.counters.busy_s += busy_s
        self.counters.all_reduce_s += step.all_reduce_s
        self.counters.graphs[step.graph] = self.counters.graphs.get(step.graph, 0) + 1

    def _step_done(self, flight: _Flight) -> None:
        self._done.append(flight)
        if not self._host_busy:
            self._take_back()

    def _take_back(self) -> None:
        """The engine process takes the oldest finished step back and goes on; later ones wait for it."""
        flight = self._done.popleft()
        self._in_flight -= 1
        outputs = [
            _Output(work.request, tokens, work.request.finished)
            for work in flight.works
            if (tokens := self._progress(work))
        ]
        self.on_step(flight.works)
        if outputs:
            self._to_api(outputs)
        slot_was_free = self.launch.pipeline_parallel == 1 or self._in_flight == 0
        if self.launch.async_scheduling and slot_was_free:
            self._schedule()
            return
        self._host_busy = True
        self._at(self.now_s + flight.step.host_s * self._speed, self._host_done)

    def _host_done(self, _: object) -> None:
        self._host_busy = False
        self._schedule()
        if self._done:
            self._take_back()

    def _progress(self, work: Work) -> int:
        """Book a request's part of a step; the tokens it made."""
        request = work.request
        request.in_flight = False
        if request.aborted:
            self.scheduler.retire(request)
            return 0
        known = request.prompt_tokens + request.generated
        if not work.decoding and request.computed + work.tokens < known:
            request.computed += work.tokens
            return 0
        if request.generated == 0:
            self.scheduler.pool.publish(request)
            self.counters.prompt_tokens += request.prompt_tokens
            request.first_token_s = self.now_s
        tokens = 1
        if work.drafts:
            tokens = min(1 + self._accepted(work), request.output_tokens - request.generated)
        request.computed = known + tokens - 1
        request.generated += tokens
        request.last_token_s = self.now_s
        self.counters.generation_tokens += tokens
        if request.generated >= request.output_tokens:
            self.scheduler.retire(request)
        return tokens

    def _accepted(self, work: Work) -> int:
        self.counters.drafts += 1
        self.counters.draft_tokens += work.drafts
        accepted = 0
        while accepted < work.drafts and self._random.random() < self._chance(work.request, accepted):
            self.counters.accepted_at[accepted] += 1
            accepted += 1
        self.counters.accepted_tokens += accepted
        return accepted

    def _chance(self, request: Request, position: int) -> float:
        """Chance that a draft is accepted given all before it were."""
        synthetic = self.launch.synthetic_acceptance
        if synthetic is not None:
            before = synthetic[position - 1] if position else 1.0
            return synthetic[position] / before if before else 0.0
        found: Acceptance | None = self._model.mtp if self.launch.draft_method == "mtp" else self._model.ngram
        if found is None:
            return 0.0
        first = min(found.first + found.repetitive * request.repetitiveness, 0.95)
        return first * found.decay**position
