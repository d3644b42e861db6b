"""Makes a typed failure out of what was observed and what the log says. Pure but for reading nothing."""

from collections.abc import Sequence
from typing import Any

from runner.errors import EngineDead, TrialFailure
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
) -> TrialFailure:
    """The failure that the log proves, else the one that was observed.

    An exit or a silence is only what was seen; a known line says why. "The engine is dead" is such a generic line
    itself, so it never overrules an exit.

    Args:
        observed: What was seen: an exit, a silence, a deadline, a dead engine.
        message: One sentence on that.
        lines: The server's log, oldest first.
        phase: Where the trial was.
        waited_s: Seconds since the server was started, or was ready.
        exit_code: Of the server, when it ended by itself.
        evidence: Further facts.
    """
    finding = signatures.find(lines)
    kind = observed
    if finding is not None:
        if finding.signature.failure is not EngineDead:
            kind = finding.signature.failure
        message = f"{message}; {finding.message}"
    return kind(
        message,
        phase=phase,
        waited_s=round(waited_s, 1),
        exit_code=exit_code,
        line=None if finding is None else finding.line,
        log_tail=tuple(lines[-TAIL_LINES:]),
        evidence=evidence,
    )
