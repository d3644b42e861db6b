"""A record as MLflow's params, metrics and tags. Pure.

What MLflow would cut, refuse or turn into a lie is dealt with here: a value too long becomes an artefact with a hash in
its place; a figure that is not finite is left out and named in the tag ``nonfinite_metrics``; a name MLflow does not
take is spelled out in characters that it does.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runner.schema.experiment import Experiment
from runner.schema.trial import Distribution, Measurement, TrialRecord
from runner.verdict import output_tok_s

PARAM_LENGTH = 6000
TAG_LENGTH = 8000
NAME_LENGTH = 250
"""Limits of MLflow 3.17 (mlflow/utils/validation.py); above them it cuts silently or refuses."""

_SPELLED = {"@": "_at_", "%": "_percent", "=": "_", ",": "_", "+": "_plus"}
_REFUSED = re.compile(r"[^\w.\- /:]", re.ASCII)

FIGURES = (
    "output_tok_s",
    "naive_tok_s",
    "per_user_tok_s",
    "request_per_s",
    "goodput_per_s",
    "requests_ok",
    "requests_failed",
    "in_flight_mean",
    "server_in_flight_mean",
    "acceptance_rate",
    "acceptance_length",
    "prefix_hit_rate",
    "preemptions",
    "client_lag_p99_ms",
    "client_cpu",
    "server_cpu",
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
PERCENTILES = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric. ``step`` is the concurrency, or the trial's number on the study's run."""

    key: str
    value: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Entries:
    """What goes onto a run. ``texts`` are artefacts: file name -> content."""

    params: dict[str, str] = field(default_factory=dict)
    metrics: tuple[Point, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def trial_entries(record: TrialRecord, experiment: Experiment) -> Entries:
    """A trial as a child run."""
    settings = _flat_settings(record)
    points = [point for m in record.measurements if m.valid for point in measurement_points(m)]
    points += [Point(f"duration_s.{phase}", spent_s) for phase, spent_s in record.durations_s.items()]
    goal = output_tok_s(record, experiment.goal.concurrency)
    if goal is not None:
        points.append(Point("percent_of_goal", 100 * goal / experiment.goal.output_tok_s))
    return entries({**record.params, **settings}, points, _tags(record))


def entries(params: Mapping[str, object], points: Iterable[Point], tags: Mapping[str, object]) -> Entries:
    """Anything as MLflow takes it; see the module's docstring."""
    every = list(points)
    finite = tuple(Point(name(p.key), p.value, p.step) for p in every if math.isfinite(p.value))
    nonfinite = sorted({p.key for p in every if not math.isfinite(p.value)})
    written: dict[str, str] = {}
    texts: dict[str, str] = {}
    for key, value in params.items():
        short, whole = _fitted(text(value), PARAM_LENGTH, f"params/{name(key)}.txt")
        written[name(key)] = short
        texts.update(whole)
    marked = {**tags, "nonfinite_metrics": ", ".join(nonfinite)} if nonfinite else dict(tags)
    tagged: dict[str, str] = {}
    for key, value in marked.items():
        short, whole = _fitted(text(value), TAG_LENGTH, f"tags/{name(key)}.txt")
        tagged[name(key)] = short
        texts.update(whole)
    return Entries(written, finite, tagged, texts)


def measurement_points(measurement: Measurement) -> list[Point]:
    """Each figure twice: with step = concurrency (a curve), and under its own key per concurrency (a column)."""
    figures: dict[str, float | None] = {key: getattr(measurement, key) for key in FIGURES}
    for latency in LATENCIES:
        distribution: Distribution | None = getattr(measurement, latency)
        if distribution is not None:
            figures.update({f"{latency}_{p}": getattr(distribution, p) for p in PERCENTILES})
    if measurement.interval_tok_s is not None:
        figures["output_tok_s_low"], figures["output_tok_s_high"] = measurement.interval_tok_s
    c = measurement.concurrency
    known = {key: value for key, value in figures.items() if value is not None}
    return [Point(key, value, c) for key, value in known.items()] + [
        Point(f"{key}_c{c}", value, c) for key, value in known.items()
    ]


def name(key: str) -> str:
    """``key`` in characters that MLflow takes: ``tput@1024`` -> ``tput_at_1024``; too long ones end in a hash."""
    for sign, spelled in _SPELLED.items():
        key = key.replace(sign, spelled)
    # A leading or trailing separator, or an empty or dotted part, would not be a path of its own.
    parts = [part for part in _REFUSED.sub("_", key).split("/") if part.strip(". ")]
    clean = "/".join(parts) or "_"
    return clean if len(clean) <= NAME_LENGTH else f"{clean[: NAME_LENGTH - 13]}_{_digest(clean)}"


def text(value: object) -> str:
    """One spelling for one value, so that logging it again never looks like a change."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _fitted(value: str, limit: int, file: str) -> tuple[str, dict[str, str]]:
    if len(value) <= limit:
        return value, {}
    return f"sha256:{_digest(value)} ({len(value)} characters in {file})", {file: value}


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:12]


def _flat_settings(record: TrialRecord) -> dict[str, object]:
    config = record.config
    return {
        **{f"flag.{flag}": value for flag, value in config.flags.items()},
        **{f"json.{flag}": value for flag, value in config.structured.items()},
        **{f"env.{variable}": value for variable, value in config.env.items()},
    }


def _tags(record: TrialRecord) -> dict[str, object]:
    void = {f"void_c{m.concurrency}": m.reason or "no reason given" for m in record.measurements if not m.valid}
    limited = {f"limited_by_c{m.concurrency}": m.limited_by for m in record.measurements if m.limited_by}
    tags: dict[str, object | None] = {
        "kind": "trial",
        "study": record.study,
        "trial": record.number,
        "role": str(record.role),
        "engine": "simulated" if record.simulated else "vllm",
        "simulated": record.simulated,
        "outcome": str(record.outcome),
        "failure": str(record.failure.kind) if record.failure else None,
        "failure_message": record.failure.message if record.failure else None,
        "fingerprint": record.fingerprint,
        "vllm": (record.effective.version if record.effective else None) or record.provenance.vllm,
        "repeat_of": record.repeat_of,
        "duplicate_of": record.duplicate_of,
        "synthetic_acceptance": record.synthetic_acceptance,
        "degraded": "; ".join(record.effective.degraded) if record.effective and record.effective.degraded else None,
        "host": record.provenance.host,
        "gpus": ", ".join(record.provenance.gpus) or None,
    }
    return {key: value for key, value in {**tags, **void, **limited}.items() if value is not None}
