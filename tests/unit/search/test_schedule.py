"""What is due: baseline, retry, search, finalist, nothing."""

import pytest

from runner.errors import FailureKind
from runner.schema.experiment import Experiment, GuardRail, Search
from runner.schema.trial import Role, TrialRecord
from runner.search.schedule import Due, Proposal, counted, due, slots
from tests.studies import experiment, record

SEARCH = Due(Role.SEARCH, None)


def roles(given: Experiment) -> list[Role]:
    """The roles of a whole study in which everything works and each searched configuration is a little faster."""
    records: list[TrialRecord] = []
    while (wanted := due(records, (), given)) is not None:
        number = len(records)
        params = {"a": number} if wanted.params is None else wanted.params
        records.append(record(number, 10.0 + number, params=params, role=wanted.role, repeat_of=wanted.repeat_of))
    return [r.role for r in records]


def test_the_baseline_comes_first_and_again_before_the_finalists() -> None:
    """The default plan of twelve trials."""
    found = roles(experiment(trials=12))
    assert found == [Role.BASELINE, *[Role.SEARCH] * 9, Role.BASELINE, Role.FINALIST]


def test_three_baselines_stand_at_the_beginning_middle_and_end() -> None:
    """So that drift over the study shows."""
    found = roles(experiment(trials=17, search=Search(baseline_starts=3, finalists=2, finalist_starts=1)))
    assert [i for i, role in enumerate(found) if role is Role.BASELINE] == [0, 7, 14]
    assert [i for i, role in enumerate(found) if role is Role.FINALIST] == [15, 16]


@pytest.mark.parametrize("trials", range(1, 40))
def test_the_budget_is_met_exactly_and_searching_keeps_two_thirds(trials: int) -> None:
    """Whatever is asked for in repeats."""
    given = experiment(trials=trials, search=Search(baseline_starts=4, finalists=3, finalist_starts=2))
    found = roles(given)
    assert len(found) == trials
    assert found.count(Role.SEARCH) >= 2 * (trials - 1) / 3
    division = slots(given)
    assert found.count(Role.SEARCH) == division.search


def test_two_trials_are_a_baseline_and_a_search() -> None:
    """A short study is for searching."""
    assert roles(experiment(trials=2)) == [Role.BASELINE, Role.SEARCH]
    assert roles(experiment(trials=1)) == [Role.BASELINE]


def test_a_failed_baseline_is_tried_once_more_and_then_given_up() -> None:
    """The study goes on without it, and asks for no further starts of it."""
    given = experiment(trials=12)
    failed = [record(0, None, role=Role.BASELINE, failure=FailureKind.OUT_OF_MEMORY)]
    assert due(failed, (), given) == Due(Role.BASELINE, {}, 0)
    failed.append(record(1, None, role=Role.BASELINE, failure=FailureKind.HANG))
    assert due(failed, (), given) == SEARCH
    searched = [*failed, *(record(i, 10.0, params={"a": i}) for i in range(2, 11))]
    late = due(searched, (), given)
    assert late is not None
    assert late.role is Role.FINALIST


def test_a_baseline_that_was_cancelled_is_not_a_failed_one() -> None:
    """Ctrl-C at the baseline, however often: it is still owed."""
    cancelled = [record(i, None, role=Role.BASELINE, failure=FailureKind.CANCELLED) for i in range(3)]
    wanted = due(cancelled, (), experiment())
    assert wanted is not None
    assert wanted.role is Role.BASELINE


def test_a_baseline_start_lost_to_the_environment_is_made_up_for_once() -> None:
    """A repeat that says nothing of the baseline is owed again, then no more."""
    given = experiment(trials=4)
    records = [record(0, 10.0, role=Role.BASELINE), *(record(i, 11.0, params={"a": i}) for i in range(1, 3))]
    for expected in (Role.BASELINE, Role.BASELINE, None):
        wanted = due(records, (), given)
        assert (None if wanted is None else wanted.role) is expected
        records.append(record(len(records), None, role=Role.BASELINE, failure=FailureKind.ENVIRONMENT))


@pytest.mark.parametrize(
    "kind",
    [FailureKind.CANCELLED, FailureKind.ENVIRONMENT, FailureKind.CLIENT_BOUND, FailureKind.QUARANTINED],
)
def test_what_failed_by_no_fault_of_its_own_is_queued_once_more(kind: FailureKind) -> None:
    """Once; the first time costs no budget, the second does."""
    baseline = record(0, 10.0, role=Role.BASELINE)
    first = record(1, None, params={"a": 1}, failure=kind)
    assert due([baseline, first], (), experiment()) == Due(Role.SEARCH, {"a": 1}, 1)
    assert [r.number for r in counted([baseline, first])] == [0]
    second = record(2, None, params={"a": 1}, failure=kind, repeat_of=1)
    assert due([baseline, first, second], (), experiment()) == SEARCH
    assert [r.number for r in counted([baseline, first, second])] == [0, 2]


def test_a_retry_under_way_is_not_queued_again() -> None:
    """Two trials at once never run the same configuration."""
    records = [record(0, 10.0, role=Role.BASELINE), record(1, None, params={"a": 1}, failure=FailureKind.CANCELLED)]
    assert due(records, [Proposal(2, {"a": 1}, Role.SEARCH, 1)], experiment()) == SEARCH


def test_a_cancelled_finalist_gets_its_start_all_the_same() -> None:
    """It is owed until it ran."""
    given = experiment(trials=4, search=Search(baseline_starts=1))
    records = [record(0, 10.0, role=Role.BASELINE), record(1, 11.0, params={"a": 1}), record(2, 9.0, params={"a": 2})]
    wanted = Due(Role.FINALIST, {"a": 1}, 1)
    assert due(records, (), given) == wanted
    records.append(record(3, None, params={"a": 1}, role=Role.FINALIST, failure=FailureKind.CANCELLED))
    assert due(records, (), given) == wanted
    records.append(record(4, 11.0, params={"a": 1}, role=Role.FINALIST))
    assert due(records, (), given) is None


def test_finalists_are_the_best_within_the_guard_rails_and_take_turns() -> None:
    """Real ones before those with a synthetic acceptance rate."""
    rails = (GuardRail(concurrency=8, max_loss_percent=10),)
    given = experiment(trials=16, guard_rails=rails, search=Search(baseline_starts=1, finalists=2, finalist_starts=2))
    records = [
        record(0, {1: 10.0, 8: 80.0}, role=Role.BASELINE),
        record(1, {1: 90.0, 8: 8.0}, params={"a": "greedy"}),
        record(2, {1: 80.0, 8: 80.0}, params={"a": "synthetic"}, synthetic_acceptance=2.5),
        record(3, {1: 30.0, 8: 80.0}, params={"a": "third"}),
        record(4, {1: 50.0, 8: 80.0}, params={"a": "first"}),
        record(5, {1: 40.0, 8: 80.0}, params={"a": "second"}),
        record(6, None, params={"a": "dead"}, failure=FailureKind.HANG),
        *(record(i, {1: 1.0, 8: 80.0}, params={"a": i}) for i in range(7, 12)),
    ]
    asked = []
    while (wanted := due(records, (), given)) is not None:
        assert wanted.params is not None
        asked.append(wanted.params["a"])
        records.append(record(len(records), {1: 1.0, 8: 80.0}, params=wanted.params, role=wanted.role))
    assert asked == ["first", "second", "first", "second"]


def test_closing_owes_the_last_baseline_and_the_finalists_only() -> None:
    """When the space is exhausted or the time is up, nothing new is searched."""
    given = experiment(trials=30)
    records = [record(0, 10.0, role=Role.BASELINE), record(1, 11.0, params={"a": 1})]
    assert due(records, (), given) == SEARCH
    asked = []
    while (wanted := due(records, (), given, closing=True)) is not None:
        asked.append(wanted.role)
        params = wanted.params or {}
        records.append(record(len(records), 10.0, params=params, role=wanted.role, repeat_of=wanted.repeat_of))
    assert asked == [Role.BASELINE, Role.FINALIST]


def test_a_raised_total_goes_on_searching() -> None:
    """A study that was finished with twelve trials and is asked for twenty has eight more."""
    given = experiment(trials=12)
    records: list[TrialRecord] = []
    while (wanted := due(records, (), given)) is not None:
        params = {"a": len(records)} if wanted.params is None else wanted.params
        records.append(record(len(records), 10.0 + len(records), params=params, role=wanted.role))
    more = experiment(trials=20)
    added = []
    while (wanted := due(records, (), more)) is not None:
        params = {"a": len(records)} if wanted.params is None else wanted.params
        added.append(wanted.role)
        records.append(record(len(records), 10.0 + len(records), params=params, role=wanted.role))
    assert len(added) == 8
    assert added[-1] is Role.FINALIST
    assert added.count(Role.SEARCH) >= 6
