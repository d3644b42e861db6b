"""Watches a server that is ready, from a thread of its own, so that asking for the verdict costs nothing.

Health is a flag and not a forward pass: what counts is that tokens advance while requests are open.
"""

import threading
import time
from collections.abc import Sequence

from runner.errors import EngineDead, Hang, ServerExited, TrialFailure
from runner.serving.evidence import evidence
from runner.serving.judge import failure
from runner.serving.log import LogFollower
from runner.serving.probe import Probe, Refused, Unreachable
from runner.serving.supervised import Supervised

_HEALTH_EVERY_S = 0.5
_PROGRESS = ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_sum")


class Watch:
    """Looks after one server until told to stop.

    Args:
        process: The server's tree.
        probe: Asks the server; used by this thread alone.
        lines: The log so far.
        gpu_ids: Its GPUs, for evidence.
        stall_s: No progress for this long while requests are open is a hang.
    """

    def __init__(
        self, process: Supervised, probe: Probe, *, lines: Sequence[str], gpu_ids: Sequence[str], stall_s: float
    ) -> None:
        self._process = process
        self._probe = probe
        self._lines = list(lines)
        self._follower = LogFollower(process.log)
        self._gpu_ids = gpu_ids
        self._stall_s = stall_s
        self._begin_s = time.monotonic()
        self._progress: tuple[float, ...] = ()
        self._moved_s = self._begin_s
        self._answered_s = self._begin_s
        self._counted_s = 0.0
        self._done = threading.Event()
        self.failure: TrialFailure | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{process.marker}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch. What it found stays."""
        self._done.set()
        self._thread.join(timeout=30.0)
        self._probe.close()

    def _run(self) -> None:
        while self.failure is None and not self._done.wait(_HEALTH_EVERY_S):
            self.failure = self._look(time.monotonic())

    def _look(self, now_s: float) -> TrialFailure | None:
        if self._process.ended:
            return self._ended()
        try:
            if self._probe.health() == 503:
                return self._failed(EngineDead, "/health answers 503: the engine is dead, its API server lives on")
            self._answered_s = now_s
            if now_s - self._counted_s >= min(2.0, self._stall_s / 4):
                self._counted_s = now_s
                self._count(now_s)
        except (Unreachable, Refused):
            # One missed answer is not yet a verdict: the front end may be at its limit.
            if now_s - self._answered_s < self._stall_s:
                return None
            return self._stuck(f"/health gave no answer for {now_s - self._answered_s:.0f} s")
        if now_s - self._moved_s > self._stall_s:
            return self._stuck(f"no token for {now_s - self._moved_s:.0f} s while requests are open")
        return None

    def _count(self, now_s: float) -> None:
        counters = self._probe.counters()
        progress = tuple(counters.get(name, 0.0) for name in _PROGRESS)
        idle = counters.get("num_requests_running", 0.0) + counters.get("num_requests_waiting", 0.0) == 0
        if idle or progress != self._progress:
            self._progress, self._moved_s = progress, now_s

    def _ended(self) -> TrialFailure:
        if self._process.abandoned:
            return self._failed(ServerExited, "the supervisor died, and its server was ended with it")
        code = self._process.exit_code
        ended = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return self._failed(ServerExited, f"the server ended {ended} before anybody asked it to", exit_code=code)

    def _stuck(self, message: str) -> TrialFailure:
        found = self._failed(Hang, message, facts=evidence(self._process.marker, self._gpu_ids))
        return found

    def _failed(
        self,
        kind: type[TrialFailure],
        message: str,
        *,
        exit_code: int | None = None,
        facts: dict[str, object] | None = None,
    ) -> TrialFailure:
        self._lines = [*self._lines, *self._follower.lines()][-5000:]
        return failure(
            kind,
            message,
            self._lines,
            phase="load",
            waited_s=time.monotonic() - self._begin_s,
            exit_code=exit_code,
            evidence=facts,
        )
