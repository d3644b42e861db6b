"""Makes a typed failure out of what was observed and what the log says. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import EngineDead, EnvironmentFault, OutOfMemory, ServerExited, TrialFailure
from runner.serving import signatures
from runner.serving.signatures import Finding

TAIL_LINES = 40


@dataclass(frozen=True)
class Observation:
    """What was seen of a server that failed.

    Attributes:
        kind: What that is by itself: an exit, a silence, a deadline, a dead engine.
        message: One sentence on it.
        phase: Where the trial was.
        waited_s: Seconds since the server was started, or was ready.
        exit_code: Of the server, when it ended by itself.
        evidence: Further facts.
        starting: Whether the server had not yet answered ``/health``.
        abandoned: Why the server was taken down though it had done nothing wrong, if it was; whatever else was seen of
            it comes of that.
        oom_killed: Whether the kernel has killed something for want of memory meanwhile; it counts when a process of
            the server was killed.
    """

    kind: type[TrialFailure]
    message: str
    phase: str
    waited_s: float
    exit_code: int | None = None
    evidence: dict[str, Any] | None = None
    starting: bool = False
    abandoned: str | None = None
    oom_killed: bool = False


def failure(seen: Observation, lines: Sequence[str]) -> TrialFailure:
    """The failure that the log proves, else the one that was observed.

    Args:
        seen: What was observed.
        lines: The server's log, oldest first; after the start, only what came since.
    """
    if seen.abandoned is not None:
        return EnvironmentFault(
            taken_down(seen.abandoned),
            phase=seen.phase,
            waited_s=round(seen.waited_s, 1),
            log_tail=tuple(lines[-TAIL_LINES:]),
        )
    finding = signatures.find(lines)
    message = seen.message if finding is None else f"{seen.message}; {finding.message}"
    kind = _kind(seen, finding)
    if _killed_for_memory(seen, finding):
        kind, message = OutOfMemory, f"{message}; the kernel killed a process for want of host memory"
    return kind(
        message,
        phase=seen.phase,
        waited_s=round(seen.waited_s, 1),
        exit_code=seen.exit_code,
        line=None if finding is None else finding.line,
        log_tail=tuple(lines[-TAIL_LINES:]),
        evidence=seen.evidence,
    )


def taken_down(why: str) -> str:
    """What is said of a server that lost its owners."""
    return f"the server was taken down by no fault of its own: {why}"


def _kind(seen: Observation, finding: Finding | None) -> type[TrialFailure]:
    """An exit or a dead engine is only what was seen, and a known line says why: it overrules them.

    Unless it is as generic itself ("the engine died"). A silence stays a silence. A server that came as far as
    answering requests was not refused its configuration, so after that only memory and environment overrule.
    """
    if finding is None or seen.kind not in (ServerExited, EngineDead):
        return seen.kind
    proven = finding.signature.failure
    if proven in (OutOfMemory, EnvironmentFault) or (seen.starting and proven is not EngineDead):
        return proven
    return seen.kind


def _killed_for_memory(seen: Observation, finding: Finding | None) -> bool:
    worker_killed = finding is not None and finding.signature.name == "worker_killed"
    return seen.oom_killed and (worker_killed or seen.exit_code == -signal.SIGKILL)
