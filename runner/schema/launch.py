"""One resolved configuration, and the order that carries it to the node."""

import hashlib
import json

from pydantic import Field, PositiveInt

from runner.schema.base import FlagValue, JsonObject, Model
from runner.schema.experiment import Deadlines, Engine, Protocol, Workload


class LaunchConfig(Model):
    """Defaults + pinned + knobs: everything that makes a server what it is, except port, served name and paths.

    Attributes:
        model: As the experiment names it.
        flags: Flag without dashes -> value; what is absent is vLLM's own default.
        structured: Flag without dashes -> JSON object; one literal on the command line each.
        env: Variables set on top of the known base.
        gpus: GPUs the server needs (TP x PP); 0 on CPU.
    """

    model: str
    flags: dict[str, FlagValue] = {}
    structured: dict[str, JsonObject] = Field(default={}, alias="json")
    env: dict[str, str] = {}
    gpus: int = Field(default=0, ge=0)

    def canonical_json(self) -> str:
        """The text the fingerprint is taken of: sorted keys, no spaces."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, first 12 hex digits."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:12]


class TrialOrder(Model):
    """What the driver sends to the node for one trial.

    Attributes:
        study: Name of the study.
        number: Trial number in the study.
        marker: Unique per trial; stands in the environment of every process of the trial.
        model: What ``vllm serve`` is given as MODEL on the node.
        ladder: Concurrencies that will be asked for, in order.
        seed: Seed from which every cell's prompts derive.
        evidence: Start with NCCL's debug log on and collect it; such a start is never timed.
        allow_env: Stray variables of the node's shell that may reach the server (``allow_env`` of the experiment).
        python: Interpreter that has vLLM; None takes ``TOK100_PYTHON`` of the node, else the one that runs this.
    """

    study: str
    number: int = Field(ge=0)
    marker: str
    engine: Engine
    model: str
    config: LaunchConfig
    workload: Workload
    protocol: Protocol
    deadlines: Deadlines
    ladder: tuple[PositiveInt, ...]
    seed: int
    evidence: bool = False
    allow_env: tuple[str, ...] = ()
    python: str | None = None


class Phase(Model):
    """Where a trial is right now; what the progress display shows."""

    name: str
    elapsed_s: float
    detail: str = ""


class Effective(Model):
    """What the started server really runs, as far as it tells. None: it did not tell.

    Attributes:
        version: vLLM's own version.
        all_reduce: Backends in dispatch order.
        graph_mode: Resolved CUDA-graph mode.
        capture_sizes: Captured sizes, tokens.
        runner: Model runner, ``V1`` or ``V2``.
        async_scheduling: Whether scheduling overlaps execution.
        nccl_version: As the server logged it.
        nccl_choice: NCCL's own algorithm/protocol per size; only from an evidence start.
        settings: The resolved configuration that ``/server_info`` gives, flattened to dotted keys.
        degraded: Signs that a setting did not take effect as asked (e.g. truncated capture sizes), the log lines.
        attention: Attention backend, as logged.
        kv_cache_tokens: Size of the KV cache.
    """

    version: str | None = None
    all_reduce: tuple[str, ...] | None = None
    graph_mode: str | None = None
    capture_sizes: tuple[int, ...] | None = None
    runner: str | None = None
    async_scheduling: bool | None = None
    nccl_version: str | None = None
    nccl_choice: dict[str, str] | None = None
    attention: str | None = None
    kv_cache_tokens: int | None = None
    settings: dict[str, FlagValue | None] = {}
    degraded: tuple[str, ...] = ()


class StartReport(Model):
    """What came back from a start that succeeded. Durations in seconds, by phase."""

    argv: tuple[str, ...]
    env: dict[str, str]
    durations_s: dict[str, float]
    effective: Effective
    gpu_ids: tuple[str, ...] = ()


class StopReport(Model):
    """What came back from a stop. ``files`` are the trial's files by name (server.log, evidence)."""

    durations_s: dict[str, float]
    files: dict[str, bytes] = {}
    gpu_memory_gib: dict[str, float] = {}
    quarantined: tuple[str, ...] = ()
