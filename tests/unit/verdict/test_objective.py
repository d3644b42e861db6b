"""The objective and the guard-rails of one record."""

import pytest

from runner.errors import FailureKind
from runner.schema.experiment import GuardRail, Search
from runner.schema.trial import Measurement, Outcome, Role
from runner.verdict import baseline_tok_s, excess_percent, objective, objective_levels
from tests.studies import experiment, record

RAIL = GuardRail(concurrency=8, max_loss_percent=10)


def test_the_objective_is_the_speed_at_the_goals_concurrency() -> None:
    """One figure, of the goal's level, whatever the other levels gave."""
    assert objective(record(1, {1: 56.1, 8: 300.0}), experiment()) == (56.1,)


def test_pareto_maximises_both_ends_of_the_ladder() -> None:
    """Two figures: the lowest and the highest concurrency."""
    given = experiment(ladder=(1, 2, 8), search=Search(objective="pareto"))
    assert objective_levels(given) == (1, 8)
    assert objective(record(1, {1: 50.0, 2: 90.0, 8: 300.0}), given) == (50.0, 300.0)
    assert objective(record(1, {1: 50.0, 2: 90.0}), given) is None


@pytest.mark.parametrize("tok_s", [None, 0.0])
def test_no_figure_is_no_objective(tok_s: float | None) -> None:
    """Missing is None, and a server that made no token has no speed: never a zero to learn from."""
    measured = Measurement(concurrency=1, valid=True, output_tok_s=tok_s)
    assert objective(record(1, 5.0).model_copy(update={"measurements": (measured,)}), experiment()) is None


def test_an_invalid_level_is_no_objective() -> None:
    """A void cell's number does not count."""
    measured = Measurement(concurrency=1, valid=False, reason="counts differ", output_tok_s=50.0)
    assert objective(record(1, 5.0).model_copy(update={"measurements": (measured,)}), experiment()) is None


def test_a_failed_trials_figures_do_not_count() -> None:
    """The levels that were measured before a trial failed are no objective."""
    assert objective(record(1, 50.0, failure=FailureKind.HANG), experiment()) is None


def test_the_baseline_is_the_mean_of_its_starts() -> None:
    """Failed baselines and other roles are left out."""
    records = [
        record(0, 10.0, role=Role.BASELINE),
        record(1, 99.0),
        record(2, 14.0, role=Role.BASELINE),
        record(3, 50.0, role=Role.BASELINE, failure=FailureKind.HANG),
    ]
    assert baseline_tok_s(records, 1) == pytest.approx(140.0**0.5)
    assert baseline_tok_s(records, 8) is None
    assert baseline_tok_s([], 1) is None


@pytest.mark.parametrize(("value", "excess"), [(100.0, -10.0), (90.0, 0.0), (85.0, 5.0), (120.0, -30.0), (None, 90.0)])
def test_excess_is_the_loss_beyond_what_is_allowed(value: float | None, excess: float) -> None:
    """By hand, against a baseline of 100 tok/s and 10 % allowed; a level without a number is lost whole."""
    assert excess_percent(value, RAIL, 100.0) == pytest.approx(excess)


def test_without_a_baseline_no_guard_rail_applies() -> None:
    """There is nothing to be relative to."""
    assert excess_percent(1.0, RAIL, None) is None


def test_a_pruned_trial_has_no_objective() -> None:
    """It was never launched."""
    assert objective(record(1, None, failure=FailureKind.INFEASIBLE, outcome=Outcome.PRUNED), experiment()) is None
