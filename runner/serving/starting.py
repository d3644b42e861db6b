"""Follows one start from the first log line to a real completion, or to the failure that ends it."""

import time
from collections.abc import Callable
from typing import Any, NoReturn

from runner.errors import (
    EngineDead,
    EnvironmentFault,
    Hang,
    InvalidConfig,
    ServerExited,
    StartTimeout,
    TrialFailure,
)
from runner.serving import signatures
from runner.serving.evidence import Witness, evidence
from runner.serving.log import LogFollower
from runner.serving.phases import FIRST_TOKEN, Allowed, Progress
from runner.serving.probe import PROBE_TOKENS, Probe, Refused, Unreachable
from runner.serving.supervised import Supervised

_POLL_S = 0.1
_HEALTH_EVERY_S = 0.5
_EXIT_SHOWS_S = 5.0
"""How long after a broken connection an exit may take to be seen."""

_LAST_WORDS_S = 8.0
"""How long an API server may live on after its engine failed before it is taken for one that stays (vLLM's own
shutdown takes up to 5 s)."""


class Start:
    """One start under way.

    Args:
        process: The server's tree.
        probe: Asks the server.
        limits: Deadlines.
        gpu_ids: Its GPUs, for evidence.
        on_phase: Told each phase as it begins, with a detail.
        check_open: Raises ``Cancelled`` once somebody wants the server stopped.
    """

    def __init__(
        self,
        process: Supervised,
        probe: Probe,
        *,
        limits: Allowed,
        gpu_ids: tuple[str, ...],
        on_phase: Callable[[str, str], None],
        check_open: Callable[[], None],
    ) -> None:
        self._process = process
        self._check_open = check_open
        self._probe = probe
        self._limits = limits
        self._gpu_ids = gpu_ids
        self._on_phase = on_phase
        self.follower = LogFollower(process.log)
        self._witness = Witness()
        self._progress = Progress(self._witness.since_s)
        self._fatal_s: float | None = None
        self._unhealthy_s: float | None = None
        self.lines: list[str] = []

    def wait(self, on_world: Callable[[], None]) -> dict[str, float]:
        """Return the seconds of each phase once the server has answered a completion.

        Args:
            on_world: Called when the server's distributed world exists (or it is ready, if its log does not tell).

        Raises:
            TrialFailure: The start failed; the kind says how.
        """
        asked_s = 0.0
        while True:
            now_s = time.monotonic()
            self._follow(now_s)
            if self._progress.world_ready:
                on_world()
            self._raise_if_over(now_s)
            if now_s - asked_s > _HEALTH_EVERY_S:
                asked_s = now_s
                if self._is_healthy():
                    break
            time.sleep(_POLL_S)
        on_world()
        self._enter(FIRST_TOKEN)
        self._prove_ready()
        self._follow(time.monotonic())
        return self._progress.finish(time.monotonic())

    def _enter(self, phase: str) -> None:
        before = self._progress.phase
        self._progress.enter(phase, time.monotonic())
        if self._progress.phase != before:
            self._on_phase(self._progress.phase, "")

    def _follow(self, now_s: float) -> None:
        before = self._progress.phase
        for line in self.follower.lines():
            self.lines.append(line)
            self._progress.feed(line, now_s)
            if self._fatal_s is None and signatures.FATAL.search(line):
                self._fatal_s = now_s
        if self._progress.phase != before:
            self._on_phase(self._progress.phase, "")

    def _raise_if_over(self, now_s: float) -> None:
        self._check_open()
        if self._process.log_error is not None:
            raise self._failure(EnvironmentFault, f"the server's log cannot be written: {self._process.log_error}")
        if self._process.ended:
            self._raise_exit()
        if self._fatal_s is not None and now_s - self._fatal_s > _LAST_WORDS_S:
            raise self._failure(EngineDead, "the engine failed to start, and its API server lives on")
        if (quiet_s := self._progress.silent(self._limits, now_s)) is not None:
            self._raise_stuck(Hang, f"nothing new in the log for {quiet_s:.0f} s")
        if (spent_s := self._progress.overdue(self._limits, now_s)) is not None:
            self._raise_stuck(StartTimeout, f"still in phase {self._progress.phase} after {spent_s:.0f} s")

    def _raise_exit(self) -> NoReturn:
        self._check_open()
        if self._process.unsupervised:
            raise self._failure(ServerExited, "the supervisor died, and its server was ended with it")
        code = self._process.exit_code
        self._follow(time.monotonic())
        ended = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        raise self._failure(ServerExited, f"the server ended {ended} before it was ready", exit_code=code)

    def _raise_stuck(self, kind: type[TrialFailure], message: str) -> NoReturn:
        facts = evidence(self._process.marker, self._gpu_ids)
        self._follow(time.monotonic())
        told = f"hang at {self._progress.phase}: {message}" if kind is Hang else message
        raise self._failure(kind, told, facts=facts)

    def _is_healthy(self) -> bool:
        try:
            status = self._probe.health()
        except Unreachable:
            return False
        if status == 503:  # Some front ends say so while the engine comes up; a dead one goes on saying it.
            now_s = time.monotonic()
            self._unhealthy_s = self._unhealthy_s or now_s
            if now_s - self._unhealthy_s > _LAST_WORDS_S and self._progress.phase == FIRST_TOKEN:
                raise self._failure(EngineDead, "/health answers 503 though the start is over")
        return status == 200

    def _prove_ready(self) -> None:
        try:
            names = self._probe.models()
            if self._probe.served_name not in names:
                message = f"the server on this port serves {', '.join(names)}, not {self._probe.served_name}"
                raise self._failure(EnvironmentFault, message)
            made = self._probe.completion(self._limits.by_phase[FIRST_TOKEN])
        except Unreachable as error:
            self._raise_unanswered(error)
        except Refused as error:
            kind = InvalidConfig if error.status in range(400, 500) else EngineDead
            if kind is EngineDead:  # Its reason may reach the log after the answer that it spoilt.
                self._await_exit(_LAST_WORDS_S)
            self._follow(time.monotonic())
            raise self._failure(kind, f"the first completion failed: {error}") from error
        if made != PROBE_TOKENS:
            raise self._failure(EngineDead, f"the first completion has {made} tokens, {PROBE_TOKENS} were asked for")

    def _raise_unanswered(self, error: Unreachable) -> NoReturn:
        """The first completion did not come back: the server is gone, it is stuck, or the connection broke."""
        if not error.timed_out:
            self._await_exit(_EXIT_SHOWS_S)
        if self._process.ended:
            self._raise_exit()
        if error.timed_out:
            self._raise_stuck(Hang, f"no answer to the first completion ({error})")
        raise self._failure(EngineDead, f"the connection of the first completion broke: {error}") from error

    def _await_exit(self, within_s: float) -> None:
        end_s = time.monotonic() + within_s
        while not self._process.ended and time.monotonic() < end_s:
            self._check_open()
            time.sleep(_POLL_S)

    def _failure(
        self,
        kind: type[TrialFailure],
        message: str,
        *,
        exit_code: int | None = None,
        facts: dict[str, Any] | None = None,
    ) -> TrialFailure:
        phase = self._progress.phase
        starting = phase != FIRST_TOKEN
        return self._witness.failure(
            kind,
            message,
            self.lines,
            phase=phase,
            starting=starting,
            exit_code=exit_code,
            abandoned=self._process.abandoned,
            facts=facts,
        )
