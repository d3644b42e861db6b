"""What stays fixed in a study: ``experiments/*.yaml``."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from runner.schema.base import FlagValue, JsonObject, Model, Scalar


class Settings(Model):
    """Flags, structured flags and environment variables, in vLLM's and NCCL's own words (no leading dashes)."""

    flags: dict[str, FlagValue] = {}
    structured: dict[str, JsonObject] = Field(default={}, alias="json")
    env: dict[str, str] = {}


class Engine(Model):
    """What answers the requests.

    Attributes:
        kind: ``vllm`` is the real thing; ``simulated`` is this project's own server with a cost model.
        device: Where the real thing runs.
        node: Simulated only: a node of ``experiments/nodes/`` (name or path).
        gpus: GPUs the study may use at once; None takes those visible (real) or those of the node (simulated).
    """

    kind: Literal["vllm", "simulated"] = "vllm"
    device: Literal["cpu", "gpu"] = "gpu"
    node: str | None = None
    gpus: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _node_belongs_to_simulation(self) -> Self:
        if (self.kind == "simulated") != (self.node is not None):
            raise ValueError("`node` names the simulated node: give it with `kind: simulated`, and only there")
        return self


class Uniform(Model):
    """Token counts drawn uniformly from ``low..high``, both included."""

    low: PositiveInt
    high: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Normal(Model):
    """Token counts drawn from a normal distribution, rounded and clipped to ``low..high``."""

    mean: PositiveFloat
    stddev: PositiveFloat
    low: PositiveInt
    high: PositiveInt


Length = PositiveInt | Uniform | Normal


class Workload(Model):
    """What a request asks for.

    Attributes:
        prompts: ``text`` is English prose that ships with Python; ``random_tokens`` are token ids of exact length;
            ``file`` is a JSONL or ShareGPT file of the user's.
        file: For ``prompts: file``.
        input_tokens: Tokens in, the shared prefix included.
        output_tokens: Tokens out, exact (``ignore_eos``, ``min_tokens = max_tokens``).
        shared_prefix_tokens: Tokens at the front that all prompts of a study have in common; 0 for none.
        temperature: Sent explicitly with every request.
        endpoint: Which API is loaded.
        vocabulary: For ``random_tokens``: ids are drawn below it; None asks the model's config.json.
    """

    prompts: Literal["text", "random_tokens", "file"] = "text"
    file: str | None = None
    input_tokens: Length = 128
    output_tokens: Length = 128
    shared_prefix_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0.0)
    endpoint: Literal["completions", "chat"] = "completions"
    vocabulary: PositiveInt | None = None

    @model_validator(mode="after")
    def _file_belongs_to_file(self) -> Self:
        if (self.prompts == "file") != (self.file is not None):
            raise ValueError("`file` goes with `prompts: file`, and only there")
        return self


class Slo(Model):
    """Service-level objective for goodput; a request counts when it meets every bound given. Milliseconds."""

    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None
    e2el_ms: PositiveFloat | None = None


class LevelProtocol(Model):
    """What one concurrency does differently from the rest of the ladder; None: the same. See ``Protocol``."""

    warmup_min_s: float | None = Field(default=None, ge=0)
    warmup_max_s: float | None = Field(default=None, ge=0)
    window_s: PositiveFloat | None = None
    windows: PositiveInt | None = None
    max_windows: PositiveInt | None = None
    requests: PositiveInt | None = None


class Protocol(Model):
    """How one concurrency is measured.

    Attributes:
        warmup_min_s: Shortest warm-up before the first window.
        warmup_max_s: Budget of the warm-up; it ends earlier when tok/s is steady.
        steady_tolerance: Relative change of tok/s between the last two warm-up slices that counts as steady.
        window_s: Length of one window; only whole-second bins fully inside count.
        windows: Fewest windows.
        max_windows: Most windows; more than ``windows`` are only run until ``interval`` is reached.
        interval: Relative half-width of the 95 % interval over windows at which repeats stop; None: no repeats.
        requests: Naive protocol instead: this many requests, whole wall time, no warm-up cut (as ``vllm bench serve``).
        request_timeout_s: Longest a single request may take.
        stall_s: No token on any open stream for this long is a hang.
        max_error_rate: Share of requests that may fail before the level is failed.
        drain_s: Longest wait for open streams at the end of a cell.
        reset_prefix_cache: Reset between cells (checked by reply and by counters).
        slo: Bounds for goodput, if any.
        levels: What single concurrencies do differently (noisy ones want more windows).
    """

    warmup_min_s: float = Field(default=2.0, ge=0)
    warmup_max_s: float = Field(default=30.0, ge=0)
    steady_tolerance: float = Field(default=0.05, gt=0, lt=1)
    window_s: PositiveFloat = 10.0
    windows: PositiveInt = 3
    max_windows: PositiveInt = 3
    interval: float | None = Field(default=None, gt=0, lt=1)
    requests: PositiveInt | None = None
    request_timeout_s: PositiveFloat = 600.0
    stall_s: PositiveFloat = 60.0
    max_error_rate: float = Field(default=0.0, ge=0, le=1)
    drain_s: PositiveFloat = 120.0
    reset_prefix_cache: bool = True
    slo: Slo | None = None
    levels: dict[PositiveInt, LevelProtocol] = {}

    def at(self, concurrency: int) -> "Protocol":
        """The protocol of one concurrency, its own differences applied."""
        own = self.levels.get(concurrency, LevelProtocol()).model_dump(exclude_none=True)
        return Protocol.model_validate(self.model_dump() | {"levels": {}} | own)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.windows > self.max_windows:
            raise ValueError(f"windows {self.windows} is above max_windows {self.max_windows}")
        if self.warmup_min_s > self.warmup_max_s:
            raise ValueError(f"warmup_min_s {self.warmup_min_s} is above warmup_max_s {self.warmup_max_s}")
        return self


class Deadlines(Model):
    """Seconds a phase of the server's life may take. None takes a default by model size.

    Attributes:
        process_s: Until the server's first log line.
        weights_s: Until the weights are in memory.
        compile_s: torch.compile.
        capture_s: CUDA-graph capture and memory profiling, until ``/health`` answers.
        first_token_s: Until the first completion came back.
        silence_s: No new information in the log for this long is a hang.
        stop_s: From SIGTERM to SIGKILL.
        memory_s: Until each GPU is back at its memory level before the trial.
    """

    process_s: PositiveFloat | None = None
    weights_s: PositiveFloat | None = None
    compile_s: PositiveFloat | None = None
    capture_s: PositiveFloat | None = None
    first_token_s: PositiveFloat | None = None
    silence_s: PositiveFloat | None = None
    stop_s: PositiveFloat = 20.0
    memory_s: PositiveFloat = 60.0


class Goal(Model):
    """The number everybody waits for."""

    concurrency: PositiveInt = 1
    output_tok_s: PositiveFloat = 100.0


class GuardRail(Model):
    """A concurrency that must not fall more than ``max_loss_percent`` under the baseline."""

    concurrency: PositiveInt
    max_loss_percent: float = Field(gt=0, le=100)


class Budget(Model):
    """When the sweep ends. ``trials`` is the total of the study, baseline included."""

    trials: PositiveInt = 12
    wall_s: PositiveFloat | None = None


class Search(Model):
    """How Optuna is used.

    Attributes:
        objective: ``goal`` maximises tok/s at the goal's concurrency under the guard-rails; ``pareto`` maximises
            the lowest and the highest concurrency of the ladder.
        sampler: ``auto`` enumerates small spaces and uses TPE otherwise.
        seed: Seed of the study.
        startup_trials: Random proposals before the sampler learns; None: 5 (``runner/search/searcher.py``).
        baseline_starts: How often the baseline is started in all (first, and spread over the study).
        finalist_starts: Fresh starts each of the best configurations gets at the end.
        finalists: How many configurations get them.
        try_first: Configurations to try right after the baseline, knob -> value: what somebody already found by hand.
    """

    objective: Literal["goal", "pareto"] = "goal"
    sampler: Literal["auto", "tpe", "random", "grid"] = "auto"
    seed: int = 0
    startup_trials: PositiveInt | None = None
    baseline_starts: PositiveInt = 2
    finalists: int = Field(default=1, ge=0)
    finalist_starts: int = Field(default=1, ge=0)
    try_first: tuple[dict[str, Scalar], ...] = ()


class Experiment(Model):
    """One file of ``experiments/``.

    Attributes:
        name: Stem of the file unless given.
        model: Folder, hub name, ``bundled:NAME`` or, for a simulated engine, a file of ``experiments/models/``.
        defaults: Flags and variables that a knob may override.
        pinned: Flags and variables that nothing may override; a space that tries is refused at load.
        allow_env: Stray NCCL_/VLLM_/CUDA_ variables of the shell that may stay, and names that are not listed.
        drafts: Speculative method (``eagle3``, ``draft_model``, ...) -> draft model that belongs to ``model``.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    engine: Engine
    model: str
    workload: Workload = Workload()
    ladder: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    protocol: Protocol = Protocol()
    deadlines: Deadlines = Deadlines()
    goal: Goal = Goal()
    guard_rails: tuple[GuardRail, ...] = ()
    budget: Budget = Budget()
    search: Search = Search()
    defaults: Settings = Settings()
    pinned: Settings = Settings()
    allow_env: tuple[str, ...] = ()
    drafts: dict[str, str] = {}

    @field_validator("ladder")
    @classmethod
    def _ladder_rises(cls, ladder: tuple[int, ...]) -> tuple[int, ...]:
        if not ladder or list(ladder) != sorted(set(ladder)):
            raise ValueError(f"ladder {list(ladder)} must rise and name each concurrency once, e.g. [1, 2, 4, 8]")
        return ladder

    @model_validator(mode="after")
    def _levels_are_measured(self) -> Self:
        wanted = [self.goal.concurrency, *(rail.concurrency for rail in self.guard_rails)]
        for concurrency in wanted:
            if concurrency not in self.ladder:
                raise ValueError(f"concurrency {concurrency} of the goal or a guard-rail is not in the ladder")
        return self

    @model_validator(mode="after")
    def _every_level_can_be_measured(self) -> Self:
        for concurrency in self.ladder:
            protocol = self.protocol.at(concurrency)
            if protocol.requests is not None and protocol.requests < concurrency:
                raise ValueError(f"{protocol.requests} requests cannot keep the {concurrency} streams of a level busy")
            if protocol.requests is None and protocol.window_s < 1:
                raise ValueError(f"a window of {protocol.window_s:g} s holds no whole second, and only those count")
        return self
