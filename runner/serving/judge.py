"""Makes a typed failure out of what was observed and what the log says. Pure."""

import signal
from collections.abc import Sequence
from typing import Any

from runner.errors import EngineDead, EnvironmentFault, OutOfMemory, ServerExited, TrialFailure
from runner.serving import signatures

TAIL_LINES = 40


def failure(
    observed: type[TrialFailure],
    message: str,
    lines: Sequence[str],
    *,
    phase: str,
    waited_s: float,
    exit_code: int | None = None,
    evidence: dict[str, Any] | None = None,
    starting: bool = False,
    oom_killed: bool = False,
) -> TrialFailure:
    """The failure that the log proves, else the one that was observed.

    An exit or a dead engine is only what was seen, and a known line says why: it overrules them, unless it is as
    generic itself ("the engine died"). A silence stays a silence. A server that came as far as answering requests
    was not refused its configuration, so after that only memory and environment overrule.

    Args:
        observed: What was seen: an exit, a silence, a deadline, a dead engine.
        message: One sentence on that.
        lines: The server's log, oldest first; after the start, only what came since.
        phase: Where the trial was.
        waited_s: Seconds since the server was started, or was ready.
        exit_code: Of the server, when it ended by itself.
        evidence: Further facts.
        starting: Whether the server had not yet answered ``/health``.
        oom_killed: Whether the kernel has killed something for want of memory meanwhile. It counts when a process of
            the server was killed.
    """
    finding = signatures.find(lines)
    kind = observed
    if finding is not None:
        message = f"{message}; {finding.message}"
        proven = finding.signature.failure
        if observed in (ServerExited, EngineDead) and (
            proven in (OutOfMemory, EnvironmentFault) or (starting and proven is not EngineDead)
        ):
            kind = proven
    if oom_killed and (exit_code == -signal.SIGKILL or (finding and finding.signature.name == "worker_killed")):
        kind, message = OutOfMemory, f"{message}; the kernel killed a process for want of host memory"
    return kind(
        message,
        phase=phase,
        waited_s=round(waited_s, 1),
        exit_code=exit_code,
        line=None if finding is None else finding.line,
        log_tail=tuple(lines[-TAIL_LINES:]),
        evidence=evidence,
    )
