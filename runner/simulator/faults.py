"""Faults on demand: ``SIMULATED_FAULT`` holds them, separated by ``;`` (a message may hold commas and colons).

A fault is ``name``, ``name:value`` or ``name=value``. Phases are ``process``, ``config``, ``init``, ``weights``,
``compile``, ``profile``, ``capture`` and ``first_token``.
"""

import re
from dataclasses import dataclass, fields

PHASES = ("process", "config", "init", "weights", "compile", "profile", "capture", "first_token")
_SIGN = re.compile(r"\w+=")


class BadFault(ValueError):
    """``SIMULATED_FAULT`` names a fault that does not exist, or gives it a wrong value."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong. None and False: nothing.

    Attributes:
        hang_at: ``PHASE``: the start stops there for ever, without a word.
        crash_at: ``PHASE:MESSAGE``: the start fails there with this message, exit code 1.
        engine_fails_at: ``PHASE:MESSAGE``: the engine fails there, the API server stays alive and never gets ready.
        slow_start: ``SECONDS``: the weights take so much longer; progress is logged all the while.
        exit0_after: ``SECONDS`` after readiness the API server exits with code 0; its children stay.
        kill_worker_after: ``SECONDS`` after readiness a worker dies of SIGKILL; the engine follows.
        engine_dead_after: ``TOKENS`` generated, then the engine dies: open streams get an error, ``/health`` says 503.
        engine_stuck_after: ``TOKENS`` generated, then nothing comes any more; ``/health`` says 200.
        green_health: ``/health`` says 200 even when the engine is dead.
        stream_error_after: Each stream ends with an error object after so many ``TOKENS`` (HTTP status 200).
        truncate_after: The connection of each stream is closed after so many ``CHUNKS``.
        short_output: Each answer ends so many ``TOKENS`` early, with reason ``stop``.
        tokens_per_chunk: ``TOKENS`` gathered for each chunk, as a stream interval would.
        no_usage: No usage and no token ids in streams.
        no_counters: ``/metrics`` has no token counters.
        wrong_counter: ``/metrics`` counts so many per cent more tokens than were sent.
        wrong_model: ``NAME`` that ``/v1/models`` lists instead of its own.
        no_cache_reset: ``/reset_prefix_cache`` answers ``false``.
        prefix_hits: Every prompt is half found in the prefix cache.
        sigterm_deaf: API server, engine and workers ignore SIGTERM and SIGINT.
        orphan: A worker starts a grandchild in a session of its own that ignores SIGTERM and SIGHUP.
        double_fork: A child is forked twice, so that it has no parent in the server's tree.
        log_flood: ``LINES`` a second in the log, for ever.
        silent: No log line at all.
    """

    hang_at: str | None = None
    crash_at: str | None = None
    engine_fails_at: str | None = None
    slow_start: float | None = None
    exit0_after: float | None = None
    kill_worker_after: float | None = None
    engine_dead_after: int | None = None
    engine_stuck_after: int | None = None
    green_health: bool = False
    stream_error_after: int | None = None
    truncate_after: int | None = None
    short_output: int | None = None
    tokens_per_chunk: int | None = None
    no_usage: bool = False
    no_counters: bool = False
    wrong_counter: float | None = None
    wrong_model: str | None = None
    no_cache_reset: bool = False
    prefix_hits: bool = False
    sigterm_deaf: bool = False
    orphan: bool = False
    double_fork: bool = False
    log_flood: float | None = None
    silent: bool = False

    def hangs(self, phase: str) -> bool:
        """Whether the start hangs in ``phase``."""
        return self.hang_at == phase

    def crash(self, phase: str) -> str | None:
        """The message with which the start crashes in ``phase``."""
        return _message(self.crash_at, phase)

    def engine_failure(self, phase: str) -> str | None:
        """The message with which only the engine fails in ``phase``."""
        return _message(self.engine_fails_at, phase)


def read_faults(text: str) -> Faults:
    """Reads ``SIMULATED_FAULT``.

    Raises:
        BadFault: Unknown fault or phase, or a value that is no number.
    """
    kinds = {field.name: getattr(field.type, "__name__", str(field.type)) for field in fields(Faults)}
    values: dict[str, object] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, _, value = part.replace("=", ":", 1).partition(":") if _SIGN.match(part) else part.partition(":")
        if name not in kinds:
            raise BadFault(f"unknown fault {name!r}; known are {', '.join(kinds)}")
        values[name] = _value(name, kinds[name], value)
    return Faults(**values)  # type: ignore[arg-type]


def _value(name: str, kind: str, text: str) -> object:
    if kind == "bool":
        return True
    if name.endswith("_at") and text.partition(":")[0] not in PHASES:
        raise BadFault(f"{name}: no phase {text.partition(':')[0]!r}; phases are {', '.join(PHASES)}")
    if kind.startswith("str"):
        return text
    try:
        return int(text) if kind.startswith("int") else float(text)
    except ValueError:
        raise BadFault(f"{name} needs a number, not {text!r}") from None


def _message(place: str | None, phase: str) -> str | None:
    where, _, message = (place or "").partition(":")
    return (message or f"RuntimeError: fault asked for in phase {phase}") if where == phase else None
