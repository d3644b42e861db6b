"""Where a start is, read from the server's log; how long each phase may take; what counts as progress. Pure."""

import re
from dataclasses import dataclass

from runner.schema.experiment import Deadlines

PROCESS, WEIGHTS, COMPILE, CAPTURE, FIRST_TOKEN = "process", "weights", "compile", "capture", "first token"
PHASES = (PROCESS, WEIGHTS, COMPILE, CAPTURE, FIRST_TOKEN)
SETTINGS = "settings"
"""After the start: the server is asked what it resolved."""

_ENTERS = (
    (COMPILE, re.compile(r"Loading weights took|Model loading took|Warming up model for the compilation")),
    (COMPILE, re.compile(r"Dynamo bytecode transform|torch\.compile cache|Compiling a graph")),
    (CAPTURE, re.compile(r"torch\.compile (takes|took)|Warming up done|Memory profiling takes|KV cache size")),
    (CAPTURE, re.compile(r"Available KV cache memory|Capturing CUDA graphs?|Profiling CUDA graph memory")),
    (FIRST_TOKEN, re.compile(r"Application startup complete")),
)
"""First line of each phase. Wordings of vLLM 0.24 to 0.33 (vllm/v1/worker, vllm/compilation, uvicorn)."""

_WORLD = re.compile(r"Starting to load model|Loading weights took|Model loading took")
"""The distributed world exists when a worker begins to load: nobody picks rendezvous ports after that."""

_STUCK = re.compile(r"No available shared memory broadcast block found")
"""The engine has waited a minute for its workers. A long compile says it as well (measured on a busy CPU)."""

_UNKNOWN_S = 7200.0
"""For weights of unknown size."""

_LARGEST_GIB = 700.0
"""Of the largest models, such as one of 744 billion parameters in 8 bits: what counts for a size that is unknown."""

_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) *)?([A-Z]+ )?([\d-]+ [\d:.]+ )?(\[\S+:\d+\] *)?")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")
_FRACTION = re.compile(r"\b\d+/\d+\b")


@dataclass(frozen=True)
class Allowed:
    """Seconds each phase may take, and how long the log may say nothing new in it."""

    by_phase: dict[str, float]
    silence_s: dict[str, float]

    @property
    def total_s(self) -> float:
        """The longest start there can be."""
        return sum(self.by_phase.values())


def allowed(deadlines: Deadlines, *, model_gib: float | None, compiles: bool) -> Allowed:
    """Deadlines as given, else by model size.

    Defaults: a process says its first word within 2 min even from a cold disk (measured: 10 s warm, 43 s cold);
    weights come at 0.2 GiB/s at worst (a slow network disk); a compile of the largest models takes minutes, and so
    does the capture of a full set of graphs. Silence is a hang after half of that, and not before 2 min (a compile
    logs nothing while it works). They are ceilings against hanging for ever, not targets.

    Weights of unknown size have to be downloaded first, at a speed nobody knows, and vLLM says nothing until it is
    done (it disables the progress bars): 2 h, and 1 h of silence, are room for 140 GiB at 40 MiB/s. From the next
    start on the size is known.

    Args:
        deadlines: Of the experiment.
        model_gib: Size of the weights; None when it is unknown.
        compiles: Whether the server compiles at all.
    """
    weights_s = _UNKNOWN_S if model_gib is None else 300.0 + model_gib / 0.2
    model_gib = _LARGEST_GIB if model_gib is None else model_gib
    defaults = {
        PROCESS: 120.0,
        WEIGHTS: weights_s,
        COMPILE: 600.0 + 3.0 * model_gib if compiles else 180.0,
        CAPTURE: 300.0 + 2.0 * model_gib,
        FIRST_TOKEN: 120.0,
    }
    given = {
        PROCESS: deadlines.process_s,
        WEIGHTS: deadlines.weights_s,
        COMPILE: deadlines.compile_s,
        CAPTURE: deadlines.capture_s,
        FIRST_TOKEN: deadlines.first_token_s,
    }
    by_phase = {phase: given[phase] or defaults[phase] for phase in PHASES}
    silence_s = {phase: deadlines.silence_s or max(120.0, by_phase[phase] / 2) for phase in PHASES}
    return Allowed(by_phase, silence_s)


def information(line: str) -> str:
    """What a line says apart from when, who and how often: two lines that say the same are equal.

    Numbers do not count, except progress written as a fraction: a message that repeats every 30 s is no progress,
    ``3/8`` after ``2/8`` is.
    """
    text = _PREFIX.sub("", line.strip())
    fractions = " ".join(_FRACTION.findall(text)[:1])
    return f"{_NUMBER.sub('#', text)}|{fractions}"


class Progress:
    """Follows a start through its log.

    Args:
        now_s: Time of the process's birth, on the clock that every ``now_s`` here uses.
    """

    def __init__(self, now_s: float) -> None:
        self.phase = PROCESS
        self.entered_s = now_s
        self.last_news_s = now_s
        self.world_ready = False
        self.durations_s: dict[str, float] = {}
        self._seen: set[str] = set()
        self._stuck = 0

    def feed(self, line: str, now_s: float) -> None:
        """Take one line."""
        news = information(line)
        if news not in self._seen:
            self._seen.add(news)
            self.last_news_s = now_s
            self._stuck = 0
        elif _STUCK.search(line):
            self._stuck += 1
        self.world_ready = self.world_ready or _WORLD.search(line) is not None
        self.enter(WEIGHTS, now_s)
        for phase, pattern in _ENTERS:
            if pattern.search(line):
                self.enter(phase, now_s)

    def enter(self, phase: str, now_s: float) -> None:
        """Go on to a phase; going back does nothing."""
        if PHASES.index(phase) <= PHASES.index(self.phase):
            return
        self.durations_s[self.phase] = now_s - self.entered_s
        self.phase, self.entered_s, self.last_news_s = phase, now_s, now_s

    def finish(self, now_s: float) -> dict[str, float]:
        """Seconds by phase, the running one ended now."""
        return self.durations_s | {self.phase: now_s - self.entered_s}

    def overdue(self, limits: Allowed, now_s: float) -> float | None:
        """Seconds the running phase has taken, if that is too long."""
        spent_s = now_s - self.entered_s
        return spent_s if spent_s > limits.by_phase[self.phase] else None

    def silent(self, limits: Allowed, now_s: float) -> float | None:
        """Seconds without anything new, if that is too long."""
        quiet_s = now_s - self.last_news_s
        stuck = self._stuck > 0 and self.phase != COMPILE
        return quiet_s if stuck or quiet_s > limits.silence_s[self.phase] else None
