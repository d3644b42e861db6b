"""Watches a server that is ready, from a thread of its own, so that asking for the verdict costs nothing.

Health is a flag and not a forward pass: what counts is that tokens advance while requests are open.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from runner.errors import EngineDead, EnvironmentFault, Hang, ServerExited, TrialFailure
from runner.serving.evidence import Witness, evidence
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
        follower: Of the server's log, at the end of the start.
        gpu_ids: Its GPUs, for evidence.
        stall_s: No progress for this long while requests are open is a hang.
    """

    def __init__(
        self, process: Supervised, probe: Probe, follower: LogFollower, *, gpu_ids: Sequence[str], stall_s: float
    ) -> None:
        self._process = process
        self._probe = probe
        self._follower = follower
        self._gpu_ids = gpu_ids
        self._stall_s = stall_s
        self._witness = Witness()
        self._progress: tuple[float, ...] = ()
        self._moved_s = self._answered_s = self._witness.since_s
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
        if self._process.log_error is not None:
            return self._failed(EnvironmentFault, f"the server's log cannot be written: {self._process.log_error}")
        if self._process.ended:
            return self._ended()
        try:
            status = self._probe.health()
            if status == 503:
                return self._failed(EngineDead, "/health answers 503: the engine is dead, its API server lives on")
            if status != 200:
                return self._unanswered(now_s)
            self._answered_s = now_s
            if now_s - self._counted_s >= min(2.0, self._stall_s / 4):
                self._counted_s = now_s
                self._count(now_s)
        except (Unreachable, Refused):
            return self._unanswered(now_s)
        if now_s - self._moved_s > self._stall_s:
            return self._stuck(f"no token for {now_s - self._moved_s:.0f} s while requests are open")
        return None

    def _unanswered(self, now_s: float) -> TrialFailure | None:
        """One missed answer is not yet a verdict: the front end may be at its limit."""
        quiet_s = now_s - self._answered_s
        return self._stuck(f"no good answer for {quiet_s:.0f} s") if quiet_s > self._stall_s else None

    def _count(self, now_s: float) -> None:
        counters = self._probe.counters()
        progress = tuple(counters.get(name, 0.0) for name in _PROGRESS)
        idle = counters.get("num_requests_running", 0.0) + counters.get("num_requests_waiting", 0.0) == 0
        if idle or progress != self._progress:
            self._progress, self._moved_s = progress, now_s

    def _ended(self) -> TrialFailure:
        if self._process.unsupervised:
            return self._failed(ServerExited, "the supervisor died, and its server was ended with it")
        code = self._process.exit_code
        ended = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return self._failed(ServerExited, f"the server ended {ended} before anybody asked it to", exit_code=code)

    def _stuck(self, message: str) -> TrialFailure:
        return self._failed(Hang, message, facts=evidence(self._process.marker, self._gpu_ids))

    def _failed(
        self,
        kind: type[TrialFailure],
        message: str,
        *,
        exit_code: int | None = None,
        facts: dict[str, Any] | None = None,
    ) -> TrialFailure:
        lines = self._follower.lines()
        why = self._process.abandoned
        return self._witness.failure(
            kind, message, lines, phase="load", exit_code=exit_code, abandoned=why, facts=facts
        )
