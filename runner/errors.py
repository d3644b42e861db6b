"""What can go wrong, as types that carry facts. Imports nothing of the package.

Two trees: ``UsageError`` is the user's to mend (exit code 2, nothing was started); ``TrialFailure`` ends one trial
and becomes part of its record (the sweep goes on).
"""

from enum import StrEnum
from pathlib import Path
from typing import Any


class RunnerError(Exception):
    """Anything this package raises on purpose."""


class UsageError(RunnerError):
    """Bad input, found before any server starts. The message says what is wrong and what would be right.

    Args:
        problem: What is wrong, with the value.
        remedy: What would be right.
        path: The file at fault, when it is a file.
        line: 1-based line in ``path``.
        column: 1-based column in ``path``.
    """

    def __init__(
        self,
        problem: str,
        *,
        remedy: str = "",
        path: Path | str | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        super().__init__(problem, remedy, path, line, column)
        self.problem = problem
        self.remedy = remedy
        self.path = path
        self.line = line
        self.column = column

    def __str__(self) -> str:
        numbers = [str(number) for number in (self.line, self.column) if number is not None]
        place = ":".join([str(self.path), *numbers]) + ": " if self.path is not None else ""
        return f"{place}{self.problem}" + (f"\n  {self.remedy}" if self.remedy else "")


class StoreError(RunnerError):
    """The results cannot be written (disk full, no permission). The sweep stops; what was finished is safe.

    Args:
        problem: What could not be written, and why.
        path: Where.
        remedy: What to do before the same command goes on.
    """

    def __init__(self, problem: str, path: Path | str, remedy: str = "") -> None:
        super().__init__(problem, path, remedy)
        self.problem = problem
        self.path = path
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" + (f"\n  {self.remedy}" if self.remedy else "")


class FailureKind(StrEnum):
    """How a trial failed. One meaning each; the search and the tables decide by it."""

    INVALID_CONFIG = "invalid_config"
    INFEASIBLE = "infeasible"
    OUT_OF_MEMORY = "out_of_memory"
    START_TIMEOUT = "start_timeout"
    SERVER_EXITED = "server_exited"
    ENGINE_DEAD = "engine_dead"
    HANG = "hang"
    LOAD_FAILED = "load_failed"
    CLIENT_BOUND = "client_bound"
    ENVIRONMENT = "environment"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"


NOT_ITS_FAULT = frozenset(
    {FailureKind.CANCELLED, FailureKind.ENVIRONMENT, FailureKind.CLIENT_BOUND, FailureKind.QUARANTINED}
)
"""Failures that say nothing of the configuration: it is tried once more, and the first one costs no budget."""


class TrialFailure(RunnerError):
    """Ends a trial. Raised where the kind is known; crosses process borders by pickle.

    Args:
        message: One sentence: what was tried, with which value, what came back.
        phase: Where in the trial (``starting``, ``weights``, ``capture``, ``C=8``, ...), if known.
        waited_s: Seconds waited before giving up.
        exit_code: Of the server, when it ended by itself. Negative: ended by that signal.
        line: The log line that tells, if one does.
        log_tail: Last lines of the server's log.
        evidence: Further facts, JSON-able (stacks, GPU use, first errors).
    """

    kind: FailureKind

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        waited_s: float | None = None,
        exit_code: int | None = None,
        line: str | None = None,
        log_tail: tuple[str, ...] = (),
        evidence: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.phase = phase
        self.waited_s = waited_s
        self.exit_code = exit_code
        self.line = line
        self.log_tail = log_tail
        self.evidence = evidence or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, {k: v for k, v in vars(self).items() if k != "message"}))


def _rebuild(cls: type[TrialFailure], message: str, facts: dict[str, Any]) -> TrialFailure:
    return cls(message, **facts)


class InvalidConfig(TrialFailure):
    """The server refused the configuration; the message is its own."""

    kind = FailureKind.INVALID_CONFIG


class Infeasible(TrialFailure):
    """The model or the node rules the configuration out; found without a launch."""

    kind = FailureKind.INFEASIBLE


class OutOfMemory(TrialFailure):
    """Out of GPU or host memory: at load, at capture or under load (``phase`` says which)."""

    kind = FailureKind.OUT_OF_MEMORY


class StartTimeout(TrialFailure):
    """A phase of the start outlived its deadline while the log still moved."""

    kind = FailureKind.START_TIMEOUT


class ServerExited(TrialFailure):
    """The server ended before anybody asked it to, whatever its exit code (0 included)."""

    kind = FailureKind.SERVER_EXITED


class EngineDead(TrialFailure):
    """The API server lives, the engine behind it does not."""

    kind = FailureKind.ENGINE_DEAD


class Hang(TrialFailure):
    """No progress for the set time, at start or under load, whatever ``/health`` says."""

    kind = FailureKind.HANG


class LoadFailed(TrialFailure):
    """The load benchmark could not make a valid number; the first errors are in the evidence."""

    kind = FailureKind.LOAD_FAILED


class ClientBound(TrialFailure):
    """The client, not the server, was the limit at every level; says nothing of the configuration."""

    kind = FailureKind.CLIENT_BOUND


class EnvironmentFault(TrialFailure):
    """Not the configuration's fault (port taken, GPU memory held by others); retried once, never charged to it."""

    kind = FailureKind.ENVIRONMENT


class Quarantined(TrialFailure):
    """The GPUs are not to be had, since those of an earlier trial did not come back to their memory level."""

    kind = FailureKind.QUARANTINED


class Cancelled(TrialFailure):
    """Somebody stopped the trial (Ctrl-C, a killed driver, a lost actor)."""

    kind = FailureKind.CANCELLED
