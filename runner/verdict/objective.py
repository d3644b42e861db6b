"""The number that is maximised and the bounds that must hold. Knows one record at a time, and the baseline's mean."""

from collections.abc import Iterable

from runner.schema.experiment import Experiment, GuardRail
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.verdict.starts import mean_over_starts


def objective_levels(experiment: Experiment) -> tuple[int, ...]:
    """The concurrencies whose output tok/s is maximised: the goal's, or the ladder's ends for ``pareto``."""
    if experiment.search.objective == "pareto":
        return tuple(dict.fromkeys((experiment.ladder[0], experiment.ladder[-1])))
    return (experiment.goal.concurrency,)


def objective(record: TrialRecord, experiment: Experiment) -> tuple[float, ...] | None:
    """Output tok/s at each of ``objective_levels``; None when the trial failed or one of them has no valid number."""
    if record.outcome is not Outcome.COMPLETE:
        return None
    values = [output_tok_s(record, concurrency) for concurrency in objective_levels(experiment)]
    found = tuple(value for value in values if value is not None)
    return found if len(found) == len(values) else None


def output_tok_s(record: TrialRecord, concurrency: int) -> float | None:
    """The valid output tok/s at ``concurrency``; None when there is none (a server that made no token has no speed)."""
    measurement = record.at(concurrency)
    if measurement is None or measurement.output_tok_s is None or measurement.output_tok_s <= 0:
        return None
    return measurement.output_tok_s


def baseline_tok_s(records: Iterable[TrialRecord], concurrency: int) -> float | None:
    """Mean over the baseline's starts at ``concurrency``; None without one."""
    values = [
        value
        for record in records
        if record.role is Role.BASELINE and record.outcome is Outcome.COMPLETE and record.duplicate_of is None
        if (value := output_tok_s(record, concurrency)) is not None
    ]
    return mean_over_starts(values)


def excess_percent(value: float | None, rail: GuardRail, baseline: float | None) -> float | None:
    """How far beyond the allowed loss ``value`` lies, in percent of the baseline; <= 0: the guard-rail holds.

    Excess = 100 * (1 - value / baseline) - max_loss_percent. A level that gave no valid number counts as lost whole.
    None: there is no baseline to be relative to, so the rail does not apply.
    """
    if baseline is None:
        return None
    loss = 100.0 if value is None else 100.0 * (1.0 - value / baseline)
    return loss - rail.max_loss_percent
