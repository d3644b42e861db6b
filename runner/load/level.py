"""The course of one level, from cache reset to drain: when to begin, go on, stop and give up.

Reads the clients' progress and the server's counters; computes no figure that is reported.
"""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import psutil

from runner.errors import EngineDead, Hang, LoadFailed
from runner.load.checks import reached
from runner.load.clients import Clients
from runner.load.samples import Facts
from runner.load.server import Counters, Server
from runner.load.steady import History, cpu_cores, interval_reached, is_steady, slice_s, windows_wanted
from runner.load.wire import Order, Progress, Samples
from runner.schema.experiment import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

POLL_S = 0.1
CHECK_S = 1.0

SERVER_POLLS = 10
"""Polls of the server's gauges over a long span; few, because a scrape costs the server's event loop too."""

FEWEST_POLLS = 5
"""Over a span too short for one a second."""

UNPROVEN_POLL_NS = NS_PER_S // 4
"""Between two polls until the server has shown that the concurrency reached it."""

EARLY_TURNS = 10
"""Turns (a second) of a naive cell in which each one polls until then: the whole cell may be over in two."""

COUNTER_SETTLE_S = 2.0
"""Longest wait for the server's counters to take in the last stream's tokens."""

DEATH_S = 10.0
"""Longest wait for a dead server's process to be seen as dead, before its broken connections are called load errors."""

LEAST_REQUESTS = 100
"""With an error rate allowed, it is judged over at least so many requests while the level runs."""

QUOTED_ERRORS = 5

_ENGINE_DEATH = ("EngineDeadError", "EngineCore encountered an issue")

_Course = tuple[tuple[int, int] | None, int, float | None]
"""Span on the clock (None: naive), windows in it, CPU of the server's front end."""


class Level:
    """One level under way.

    Args:
        server: The target's other endpoints.
        clients: The processes that carry the load.
        on_phase: Told where the level is.
        check: Called about once a second; raises when the server is gone.
    """

    def __init__(
        self,
        server: Server,
        clients: Clients,
        protocol: Protocol,
        concurrency: int,
        *,
        on_phase: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        self._server = server
        self._clients = clients
        self._protocol = protocol
        self._concurrency = concurrency
        self._on_phase = on_phase
        self._check = check
        self._checked_s = 0.0
        self._began_ns = 0
        self._polled_ns = 0
        self._histories: list[History] = []
        self._in_flight: list[tuple[int, float]] = []

    def run(self, orders: list[Order], *, seed: int, fresh_prompts: bool, template_tokens: int) -> Facts:
        """Run the level to the end of its drain; the clients then hold the samples.

        Raises:
            TrialFailure: See ``Bench.measure``.
        """
        protocol = self._protocol
        reset = self._server.reset_prefix_cache() if protocol.reset_prefix_cache else None
        before = self._server.counters()
        self._clients.begin(orders)
        self._began_ns = time.perf_counter_ns()
        self._histories = [History() for _ in orders]
        run = self._steady if protocol.requests is None else self._naive
        span, windows, server_cpu = run(before)
        after = self._settled(before)
        self._judge_errors(final=True)
        used = span or (self._began_ns, time.perf_counter_ns())
        polled = span or self._under_way_ns()
        lag_mean, lag_p99 = lag_ms(self._clients.samples(), used)
        return Facts(
            concurrency=self._concurrency,
            protocol="requests" if span is None else "steady",
            seed=seed,
            processes=len(orders),
            span_ns=span,
            windows=windows,
            before=before,
            after=after,
            in_flight=tuple(value for t_ns, value in self._in_flight if polled[0] <= t_ns < polled[1]),
            reset_asked=protocol.reset_prefix_cache,
            cache_reset=reset,
            fresh_prompts=fresh_prompts,
            template_tokens=template_tokens,
            client_cpu=cpu_cores(self._histories, used),
            lag_mean_ms=lag_mean,
            lag_p99_ms=lag_p99,
            server_cpu=server_cpu,
            slo=protocol.slo,
        )

    def _steady(self, before: Counters | None) -> _Course:
        self._warm_up()
        window_ns = int(self._protocol.window_s) * NS_PER_S
        # Whole seconds of the common clock, so that every bin lies fully inside.
        start_ns = (time.perf_counter_ns() // NS_PER_S + 1) * NS_PER_S
        self._until(start_ns)
        front_end = FrontEnd(self._server.target.api_server_pids)
        poll_ns = poll_interval_ns(window_ns * self._protocol.windows) if before is not None else None
        measured, reached = 0, False
        while windows_wanted(self._protocol, measured, reached):
            self._phase(f"window {measured + 1}/{self._protocol.windows}")
            self._until(start_ns + window_ns * (measured + 1), poll_ns)
            measured += 1
            wanted = self._protocol.interval
            if wanted is not None:
                reached = interval_reached(self._histories, start_ns, window_ns, measured, wanted)
        end_ns = start_ns + window_ns * measured
        server_cpu = front_end.busiest_cores()
        self._drain()
        return (start_ns, end_ns), measured, server_cpu

    def _naive(self, before: Counters | None) -> _Course:
        self._phase("requests")
        front_end = FrontEnd(self._server.target.api_server_pids)
        turns = 0
        while not self._clients.finished:
            turns += bool(self._watch())  # from the first one in which every client was at work
            if before is not None:
                self._poll_when_due(NS_PER_S, UNPROVEN_POLL_NS if turns > EARLY_TURNS else 0)
        return None, 0, front_end.busiest_cores()

    def _under_way_ns(self) -> tuple[int, int]:
        """From the first request out to the last one's end; what the server shows before and after says nothing."""
        rows = [row for part in self._clients.samples() for row in part.requests]
        ends = (row.end_ns for row in rows if row.end_ns is not None)
        return min((row.sent_ns for row in rows), default=0), max(ends, default=0)

    def _warm_up(self) -> None:
        self._phase("warm-up")
        protocol = self._protocol
        while (elapsed_s := (time.perf_counter_ns() - self._began_ns) / NS_PER_S) < protocol.warmup_max_s:
            progress = self._watch()
            if elapsed_s < protocol.warmup_min_s or sum(p.dephased for p in progress) < self._concurrency:
                continue
            done = sum(p.ok for p in progress)
            request_s = sum(p.request_ns for p in progress) / NS_PER_S / done if done else 0.0
            length_s = slice_s(request_s, self._concurrency)
            if is_steady(self._histories, self._began_ns, length_s, protocol.steady_tolerance):
                return

    def _drain(self) -> None:
        self._phase("drain")
        self._clients.stop()
        deadline = time.monotonic() + self._protocol.drain_s
        while not self._clients.finished and time.monotonic() < deadline:
            self._watch()
        if not self._clients.finished:
            self._clients.drop()
        while not self._clients.finished:
            self._clients.poll(POLL_S)

    def _until(self, t_ns: int, poll_ns: int | None = None) -> None:
        """Watch until ``t_ns`` has passed and every client has told of it."""
        while min((h.t_ns[-1] if h.t_ns else 0 for h in self._histories), default=0) < t_ns:
            self._watch()
            if poll_ns is not None and time.perf_counter_ns() < t_ns:
                self._poll_when_due(poll_ns)

    def _watch(self) -> list[Progress]:
        """Take in progress for a moment, and give up where there is a reason to."""
        self._clients.poll(POLL_S)
        progress = self._clients.progress
        for history, told in zip(self._histories, progress, strict=False):
            if not history.t_ns or told.t_ns > history.t_ns[-1]:
                history.t_ns.append(told.t_ns)
                history.tokens.append(told.tokens)
                history.cpu_s.append(told.cpu_s)
        if time.monotonic() - self._checked_s >= CHECK_S:
            self._check()
            self._checked_s = time.monotonic()
        if any(told.failed for told in progress):
            self._judge_errors(final=False)
        self._judge_stall(progress)
        return progress

    def _judge_stall(self, progress: list[Progress]) -> None:
        latest_ns = max((told.last_token_ns for told in progress), default=0)
        silent_s = (time.perf_counter_ns() - max(latest_ns, self._began_ns)) / NS_PER_S
        if silent_s < self._protocol.stall_s:
            return
        self._check()
        open_streams = sum(told.in_flight for told in progress)
        raise Hang(
            f"no token for {silent_s:.0f} s on {open_streams} open streams",
            phase=f"C={self._concurrency}",
            waited_s=silent_s,
            evidence={"health": self._server.health()},
        )

    def _judge_errors(self, *, final: bool) -> None:
        progress = self._clients.progress
        failed, ok = sum(told.failed for told in progress), sum(told.ok for told in progress)
        if not failed:
            return
        judged_over = failed + ok if final else max(failed + ok, LEAST_REQUESTS)
        dead = any(sign in error for error in self._clients.errors for sign in _ENGINE_DEATH)
        if dead or failed > self._protocol.max_error_rate * judged_over:
            self._fail(failed, ok, dead)

    def _fail(self, failed: int, ok: int, dead: bool) -> NoReturn:
        first = list(dict.fromkeys(self._clients.errors))[:QUOTED_ERRORS]
        evidence = {"errors": first, "failed": failed, "ok": ok}
        phase = f"C={self._concurrency}"
        self._check()
        health = self._server.health()
        if dead or health == 503:
            raise EngineDead(f"the engine died under load: {first[0]}", phase=phase, evidence=evidence)
        deadline = time.monotonic() + DEATH_S
        while health is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._check()
        raise LoadFailed(
            f"{failed} of {failed + ok} requests failed, first: {first[0]}", phase=phase, evidence=evidence
        )

    def _poll_when_due(self, planned_ns: int, unproven_ns: int = UNPROVEN_POLL_NS) -> None:
        shown = [value for _, value in self._in_flight]
        pause_ns = until_next_poll_ns(planned_ns, shown, self._concurrency, unproven_ns)
        if time.perf_counter_ns() - self._polled_ns >= pause_ns:
            self._poll_server()

    def _poll_server(self) -> None:
        self._polled_ns = time.perf_counter_ns()
        counters = self._server.counters()
        if counters is not None and counters.running is not None:
            self._in_flight.append((time.perf_counter_ns(), counters.running + (counters.waiting or 0.0)))

    def _settled(self, before: Counters | None) -> Counters | None:
        """The counters after the drain, once they have taken in what the streams carried."""
        if before is None:
            return None
        carried = sum(told.tokens for told in self._clients.progress)
        deadline = time.monotonic() + COUNTER_SETTLE_S
        while True:
            after = self._server.counters()
            if after is None or after.generation_tokens is None or before.generation_tokens is None:
                return after
            if after.generation_tokens - before.generation_tokens >= carried or time.monotonic() > deadline:
                return after
            time.sleep(POLL_S)

    def _phase(self, name: str) -> None:
        self._on_phase(f"C={self._concurrency} {name}")


def poll_interval_ns(span_ns: int) -> int:
    """Time between two polls of the server over a span: about one a second, more seldom in long spans."""
    return max(span_ns // SERVER_POLLS, min(NS_PER_S, span_ns // FEWEST_POLLS))


def until_next_poll_ns(
    planned_ns: int, shown: Sequence[float], concurrency: int, unproven_ns: int = UNPROVEN_POLL_NS
) -> int:
    """As planned once the server has shown the concurrency; sooner until then.

    A server counts a request when its first step is over, so a slow one at small C shows all of them only for moments,
    and a few polls may miss each of these.
    """
    return planned_ns if reached(shown, concurrency) else min(planned_ns, unproven_ns)


class FrontEnd:
    """CPU of the server's front-end processes since this was made; processes that cannot be seen are left out."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._began_s = time.monotonic()
        self._used_s = {pid: used for pid in pids if (used := _cpu_s(pid)) is not None}

    def busiest_cores(self) -> float | None:
        """Cores the busiest one used; None when none can be seen."""
        seconds = time.monotonic() - self._began_s
        used = [now - before for pid, before in self._used_s.items() if (now := _cpu_s(pid)) is not None]
        return max(used) / seconds if used and seconds > 0 else None


def _cpu_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def lag_ms(samples: list[Samples], span_ns: tuple[int, int]) -> tuple[float | None, float | None]:
    """Mean and 99th percentile of the event-loop lag inside the span, each of the worst process. Milliseconds."""
    means, p99s = [], []
    for part in samples:
        pairs = np.frombuffer(part.lag_ns, np.int64).reshape(-1, 2)
        lag = pairs[(pairs[:, 0] >= span_ns[0]) & (pairs[:, 0] < span_ns[1]), 1] / NS_PER_MS
        if len(lag):
            means.append(float(lag.mean()))
            p99s.append(float(np.percentile(lag, 99)))
    return (max(means), max(p99s)) if means else (None, None)
