"""One trial seen from the driver: start, ladder, stop, and a result whatever happens.

Takes a node with three calls and knows neither Ray nor processes nor files. The package's only broad ``except`` stands
here: beyond this border a trial is a value, never an exception.
"""

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from runner.errors import ClientBound, EnvironmentFault, LoadFailed, TrialFailure
from runner.schema.launch import Effective, LaunchConfig, StartReport, StopReport, TrialOrder
from runner.schema.trial import Failure, Measurement, Outcome
from runner.space.asked import inert_environment, untold

log = logging.getLogger(__name__)


class TrialNode(Protocol):
    """What a trial needs of a node; the real one and the one behind Ray have it."""

    def start(self, order: TrialOrder) -> StartReport: ...

    def measure(self, concurrency: int) -> tuple[Measurement, bytes]: ...

    def stop(self) -> StopReport: ...


@dataclass(slots=True)
class TrialResult:
    """What one trial left behind. Durations in seconds by step (``start``, ``C=8``, ``stop``)."""

    failure: Failure | None = None
    measurements: list[Measurement] = field(default_factory=list)
    started: StartReport | None = None
    stopped: StopReport | None = None
    twin: int | None = None
    durations_s: dict[str, float] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return Outcome.COMPLETE if self.failure is None else Outcome.FAILED


def run(
    node: TrialNode,
    order: TrialOrder,
    *,
    on_measured: Callable[[Measurement], None],
    twin_of: Callable[[StartReport], int | None],
) -> TrialResult:
    """Runs one trial to its end.

    Args:
        node: Where it runs.
        order: What to run.
        on_measured: Called after each level, for the display.
        twin_of: Told what the started server really is; a trial that already measured the same ends this one.

    Returns:
        The result; a failure is in it, never raised. ``KeyboardInterrupt`` alone passes, after the stop.
    """
    result = TrialResult()
    try:
        try:
            _attempt(node, order, result, on_measured, twin_of)
        finally:
            _stop(node, result)
    except TrialFailure as failure:
        result.failure = failure_of(failure)
    except Exception as error:  # The trial border: a defect of ours costs one trial, not the sweep.
        log.exception("trial %d ended by an error of the runner", order.number)
        result.failure = failure_of(
            EnvironmentFault(f"{type(error).__name__}: {error}", evidence={"traceback": traceback.format_exc()})
        )
    return result


def _attempt(
    node: TrialNode,
    order: TrialOrder,
    result: TrialResult,
    on_measured: Callable[[Measurement], None],
    twin_of: Callable[[StartReport], int | None],
) -> None:
    with _timed(result, "start"):
        result.started = node.start(order)
    result.twin = twin_of(result.started)
    if result.twin is not None or order.evidence:
        return
    for concurrency in order.ladder:
        with _timed(result, f"C={concurrency}"):
            measurement, samples = node.measure(concurrency)
        result.measurements.append(measurement)
        if samples and measurement.samples:
            result.files[measurement.samples] = samples
        on_measured(measurement)
    if not any(measurement.valid for measurement in result.measurements):
        raise _without_a_number(result.measurements)


def _without_a_number(measurements: Sequence[Measurement]) -> TrialFailure:
    reasons = "; ".join(f"C={m.concurrency}: {m.reason}" for m in measurements)
    only_client = {m.limited_by for m in measurements} == {"client"}
    return (ClientBound if only_client else LoadFailed)(f"no level gave a valid number: {reasons}")


def _stop(node: TrialNode, result: TrialResult) -> None:
    try:
        with _timed(result, "stop"):
            result.stopped = node.stop()
        result.files.update(result.stopped.files)
    except TrialFailure as failure:
        # The first failure is the trial's; a failed stop only speaks when nothing else went wrong.
        log.warning("stopping: %s", failure.message)
        result.failure = result.failure or failure_of(failure)


@contextmanager
def _timed(result: TrialResult, step: str) -> Iterator[None]:
    """Adds the seconds spent in the block to the result, also when it raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        spent_s = time.monotonic() - began
        result.durations_s[step] = round(result.durations_s.get(step, 0.0) + spent_s, 3)


def failure_of(failure: TrialFailure) -> Failure:
    """The failure as a value for the record."""
    return Failure(
        kind=failure.kind,
        message=failure.message,
        phase=failure.phase,
        waited_s=failure.waited_s,
        exit_code=failure.exit_code,
        line=failure.line,
        log_tail=failure.log_tail,
        evidence=failure.evidence,
    )


def effective_key(config: LaunchConfig, effective: Effective | None) -> str | None:
    """Equal for two servers that really run the same thing; None when the server did not tell its settings.

    What a server's settings do not show counts as asked: the environment (NCCL's variables, but for those that are
    inert on its all-reduce path), flags of its front end (``api-server-count``), fields that it does not list. The
    rest counts as resolved.
    """
    if effective is None or not effective.settings:
        return None
    told = effective.model_dump(mode="json", exclude={"degraded", "nccl_choice", "kv_cache_tokens"})
    inert = inert_environment(config, effective)
    env = {name: value for name, value in config.env.items() if name not in inert}
    return json.dumps([config.model, env, config.gpus, untold(config, effective), told], sort_keys=True)
