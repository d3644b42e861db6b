"""What was measured, and the record of one trial: a line of ``trials.jsonl``."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, PositiveInt

from runner.errors import FailureKind
from runner.schema.base import Model, Scalar
from runner.schema.launch import Effective, LaunchConfig

SCHEMA_VERSION: Literal[1] = 1
"""Of ``TrialRecord``; a record of every earlier version stays readable (tests/golden/records)."""


class Distribution(Model):
    """Percentiles of a latency, each None when too few samples stand behind it.

    Attributes:
        n: Samples.
        p50: Needs 1 sample; p90 needs 10; p99 needs 100 (one sample expected beyond the percentile).
    """

    n: int = Field(ge=0)
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Measurement(Model):
    """One concurrency of one trial. Absent is None, never 0. The definitions stand in ``runner/load/figures.py``.

    Attributes:
        concurrency: Closed-loop streams in flight.
        valid: Whether the numbers count; ``reason`` says why not.
        protocol: ``steady`` (window inside a closed loop) or ``requests`` (naive: whole wall).
        output_tok_s: The headline figure by ``protocol``, server-side tokens per second of all streams.
        interval_tok_s: 95 % interval of it over windows, when there are enough.
        windows_tok_s: Each window's figure.
        naive_tok_s: Tokens of good requests / wall of the whole cell.
        per_user_tok_s: Decode tok/s of one stream, median (1000 / TPOT).
        goodput_per_s: Requests per second that met the SLO; None without one.
        errors: First error texts.
        unchecked: What could not be checked (``server_counter``).
        in_flight_mean: Mean requests in flight seen by the client inside the windows.
        server_in_flight_mean: Mean of running + waiting as the server tells.
        tokens_client: Tokens of the drained cell as streams told.
        tokens_server: The same by the server's own counter.
        acceptance_rate: Accepted / drafted tokens.
        acceptance_length: 1 + accepted / drafts.
        prefix_hit_rate: Prefix-cache hits / queries, tokens.
        client_lag_p99_ms: Event-loop lag of the worst client process.
        client_cpu: Busiest client process, in cores.
        server_cpu: Busiest process of the server's front end, in cores, where it can be seen.
        limited_by: What was the limit if not the engine (``client``, ``api_server``).
        samples: File of the raw samples, relative to the trial's folder.
    """

    concurrency: PositiveInt
    valid: bool
    reason: str | None = None
    protocol: Literal["steady", "requests"] = "steady"
    output_tok_s: float | None = None
    interval_tok_s: tuple[float, float] | None = None
    windows_tok_s: tuple[float, ...] = ()
    naive_tok_s: float | None = None
    per_user_tok_s: float | None = None
    request_per_s: float | None = None
    goodput_per_s: float | None = None
    requests_ok: int = Field(default=0, ge=0)
    requests_failed: int = Field(default=0, ge=0)
    errors: tuple[str, ...] = ()
    wall_s: float | None = None
    warmup_s: float | None = None
    window_s: float | None = None
    ttft_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    itl_ms: Distribution | None = None
    e2el_ms: Distribution | None = None
    in_flight_mean: float | None = None
    server_in_flight_mean: float | None = None
    tokens_client: int | None = None
    tokens_server: int | None = None
    chunks: int | None = None
    input_tokens_mean: float | None = None
    unchecked: tuple[str, ...] = ()
    acceptance_rate: float | None = None
    acceptance_length: float | None = None
    prefix_hit_rate: float | None = None
    preemptions: int | None = None
    client_lag_p99_ms: float | None = None
    client_cpu: float | None = None
    server_cpu: float | None = None
    limited_by: Literal["client", "api_server"] | None = None
    seed: int | None = None
    samples: str | None = None


class Outcome(StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


class Role(StrEnum):
    """Why a trial was run."""

    BASELINE = "baseline"
    SEARCH = "search"
    FINALIST = "finalist"


class Failure(Model):
    """A failed or pruned trial's reason, typed, with its facts."""

    kind: FailureKind
    message: str
    phase: str | None = None
    waited_s: float | None = None
    exit_code: int | None = None
    line: str | None = None
    log_tail: tuple[str, ...] = ()
    evidence: dict[str, Any] = {}


class Provenance(Model):
    """Where and with what a trial ran. None: could not be found out."""

    host: str | None = None
    python: str | None = None
    runner: str | None = None
    git_commit: str | None = None
    vllm: str | None = None
    torch: str | None = None
    ray: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    nccl: str | None = None
    stray_env: dict[str, str] = {}


class TrialRecord(Model):
    """One trial, as appended to ``trials.jsonl``.

    Attributes:
        role: Why it ran; ``repeat_of`` names the trial a deliberate repeat repeats.
        duplicate_of: The trial whose ladder this one took over because both are the same configuration.
        params: Knob -> chosen value, as the search asked; an unset knob is absent.
        config: The resolved configuration; its fingerprint stands beside it.
        durations_s: Seconds by phase (start phases, C=..., stop phases, evidence, overhead).
        simulated: True when no real engine ran; shown wherever a number is.
        synthetic_acceptance: The acceptance length asked for when speculation was synthetic, else None.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    study: str
    number: int = Field(ge=0)
    role: Role = Role.SEARCH
    repeat_of: int | None = None
    duplicate_of: int | None = None
    params: dict[str, Scalar] = {}
    config: LaunchConfig
    fingerprint: str
    outcome: Outcome
    failure: Failure | None = None
    measurements: tuple[Measurement, ...] = ()
    effective: Effective | None = None
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    durations_s: dict[str, float] = {}
    provenance: Provenance = Provenance()
    simulated: bool = False
    synthetic_acceptance: float | None = None
    started_at: datetime
    ended_at: datetime
    folder: str | None = None

    def at(self, concurrency: int) -> Measurement | None:
        """The valid measurement at ``concurrency``, else None."""
        found = [m for m in self.measurements if m.concurrency == concurrency and m.valid]
        return found[-1] if found else None
