"""Standings, winners, and what is kept apart."""

import pytest

from runner.errors import FailureKind
from runner.schema.experiment import GuardRail
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.verdict import Finding, Summary, best_at, best_so_far, rows, summarise
from tests.studies import experiment, record

GIVEN = experiment(guard_rails=(GuardRail(concurrency=8, max_loss_percent=10),))


def baselines(*figures: float) -> list[TrialRecord]:
    """Starts of the baseline, eight times as fast at C=8, numbered from 0."""
    return [record(i, {1: x, 8: 8 * x}, role=Role.BASELINE) for i, x in enumerate(figures)]


def params_of(summary: Summary) -> list[dict[str, object]]:
    return [dict(standing.candidate.params) for standing in summary.standings]


def test_configurations_rank_by_their_mean_over_starts() -> None:
    """A first figure that was lucky is averaged with its fresh start."""
    records = [
        *baselines(50.0, 50.4),
        record(2, {1: 60.0, 8: 480.0}, params={"a": "lucky"}),
        record(3, {1: 58.0, 8: 480.0}, params={"a": "steady"}),
        record(4, {1: 52.0, 8: 480.0}, params={"a": "lucky"}, role=Role.FINALIST, repeat_of=2),
    ]
    summary = summarise(records, GIVEN)
    assert params_of(summary) == [{"a": "steady"}, {"a": "lucky"}, {}]
    assert summary.standings[1].candidate.numbers == (2, 4)
    assert summary.standings[1].percent_of_goal == pytest.approx((60.0 * 52.0) ** 0.5)
    assert summary.baseline is not None
    assert summary.baseline.rank == 3


def test_a_missed_guard_rail_ranks_last_and_cannot_win() -> None:
    """Fast for one user and slow for all others is not what was asked for."""
    records = [*baselines(50.0, 50.1), record(2, {1: 90.0, 8: 200.0}, params={"a": "greedy"})]
    summary = summarise(records, GIVEN)
    assert params_of(summary) == [{}, {"a": "greedy"}]
    assert summary.standings[1].excess_percent[8] == pytest.approx(100 * (1 - 200 / 400.4) - 10)
    assert summary.winner is not None
    assert summary.winner.standing.candidate.is_baseline


def test_a_level_without_a_number_misses_its_guard_rail() -> None:
    """Nobody knows how slow it is there, so it is not shown to be fast enough."""
    summary = summarise([*baselines(50.0, 50.1), record(2, {1: 90.0}, params={"a": "x"})], GIVEN)
    assert not summary.standings[1].within_guard_rails


def test_the_winner_is_the_fastest_that_is_shown_to_be_better() -> None:
    """Not merely the highest figure: 229 beside a baseline of 228.5 is no reason to change anything."""
    steady = [record(i, 228.0 + i % 2, role=Role.BASELINE) for i in range(3)]
    ll = record(3, 229.0, params={"proto": "LL"})
    summary = summarise([*steady, ll], experiment(ladder=(1,)))
    assert params_of(summary)[0] == {"proto": "LL"}
    assert summary.winner is not None
    assert summary.winner.standing.candidate.is_baseline
    assert summary.winner.runner_up is not None
    assert summary.winner.margin_percent is not None
    assert summary.winner.margin_percent < 0
    drafts = record(4, 320.0, params={"drafts": 3})
    winner = summarise([*steady, ll, drafts], experiment(ladder=(1,))).winner
    assert winner is not None
    assert winner.standing.candidate.params == {"drafts": 3}


def test_among_those_not_told_apart_the_simplest_wins() -> None:
    """Two tenths of a percent are no reason to force a protocol as well; ten percent are."""
    baseline = [record(i, 100.0 + i, role=Role.BASELINE) for i in range(3)]
    plain = record(3, 110.0, params={"channels": 16})
    forced = record(4, 110.2, params={"channels": 16, "proto": "LL"})
    winner = summarise([*baseline, plain, forced], experiment(ladder=(1,))).winner
    assert winner is not None
    assert winner.standing.candidate.params == {"channels": 16}
    assert "simpler than what is no more than 2.0 % faster" in winner.rule
    assert winner.margin_percent is not None
    assert winner.margin_percent < 0
    faster = record(5, 121.0, params={"channels": 16, "proto": "LL128"})
    winner = summarise([*baseline, plain, forced, faster], experiment(ladder=(1,))).winner
    assert winner is not None
    assert winner.standing.candidate.params["proto"] == "LL128"


def test_with_nothing_started_twice_the_fastest_is_named_and_called_undecided() -> None:
    """A two-trial study still exports something, and says what it is worth."""
    free = experiment(ladder=(1,))
    winner = summarise([record(0, 20.0, role=Role.BASELINE), record(1, 43.0, params={"a": "x"})], free).winner
    assert winner is not None
    assert winner.standing.candidate.params == {"a": "x"}
    assert "not decided" in winner.rule


def test_synthetic_acceptance_is_ranked_apart() -> None:
    """Drafts that are accepted by a coin never beat real text."""
    synthetic = record(3, {1: 320.0, 8: 800.0}, params={"s": "ngram"}, synthetic_acceptance=2.5)
    records = [*baselines(50.0, 50.1), record(2, {1: 60.0, 8: 480.0}, params={"a": "real"}), synthetic]
    summary = summarise(records, GIVEN)
    assert params_of(summary) == [{"a": "real"}, {}]
    assert [s.candidate.params for s in summary.synthetic] == [{"s": "ngram"}]
    assert summary.winner is not None
    assert summary.winner.standing.candidate.params == {"a": "real"}
    assert summary.synthetic_winner is not None
    assert summary.synthetic_winner.standing.candidate.params == {"s": "ngram"}
    assert best_so_far(records, GIVEN) == 60.0


def test_the_best_differs_by_concurrency() -> None:
    """What wins at C=8 is found for C=8 alone, guard-rails of the goal aside."""
    many = record(2, {1: 20.0, 8: 900.0}, params={"a": "many"})
    one = record(3, {1: 90.0, 8: 390.0}, params={"a": "one"})
    summary = summarise([*baselines(50.0, 50.1), many, one], GIVEN)
    at_1, at_8 = best_at(summary, 1), best_at(summary, 8)
    assert at_1 is not None
    assert at_8 is not None
    assert (at_1.standing.candidate.params, at_8.standing.candidate.params) == ({"a": "one"}, {"a": "many"})


def test_a_trial_that_took_over_anothers_ladder_is_no_start() -> None:
    """Its figures are the first one's; counting them would fake a second start."""
    twin = record(3, {1: 60.0, 8: 480.0}, params={"a": "same"}, duplicate_of=2)
    summary = summarise([*baselines(50.0, 50.1), record(2, {1: 60.0, 8: 480.0}, params={"a": "x"}), twin], GIVEN)
    assert params_of(summary) == [{"a": "x"}, {}]
    assert summary.trials == 4


def test_without_a_baseline_no_gain_is_claimed() -> None:
    """The reason stands in every table; guard-rails relative to it do not apply."""
    failed = [record(i, None, role=Role.BASELINE, failure=FailureKind.OUT_OF_MEMORY) for i in range(2)]
    summary = summarise([*failed, record(2, {1: 60.0, 8: 10.0}, params={"a": "x"})], GIVEN)
    assert summary.no_baseline == "no baseline: out_of_memory"
    assert summary.standings[0].within_guard_rails
    assert all(level.verdict is None for level in summary.standings[0].levels)
    assert any("no baseline: out_of_memory" in note for note in rows(summary).notes)
    assert "+" not in "".join(cell for row in rows(summary).rows for cell in row)


def test_nothing_measured_gives_empty_standings() -> None:
    """And no winner to serve."""
    summary = summarise([record(0, None, failure=FailureKind.HANG, role=Role.BASELINE)], GIVEN)
    assert (summary.standings, summary.winner, summary.baseline) == ((), None, None)
    assert summary.no_baseline == "no baseline: hang"
    assert summary.outcomes == {"hang": 1}
    assert summarise([], GIVEN).no_baseline == "no baseline: not run"


def test_best_so_far_is_the_highest_single_start_within_the_guard_rails() -> None:
    """What a progress line shows; a configuration that misses a guard-rail never counts."""
    records = [*baselines(50.0), record(2, {1: 70.0, 8: 380.0}, params={"a": "x"})]
    assert best_so_far(records, GIVEN) == 70.0
    assert best_so_far([*records, record(3, {1: 99.0, 8: 100.0}, params={"a": "greedy"})], GIVEN) == 70.0
    assert best_so_far([], GIVEN) is None


def test_the_spread_of_a_finalist_helps_to_judge_the_others() -> None:
    """Pooled over all configurations that were started more than once."""
    records = [
        *baselines(50.0, 50.2),
        record(2, {1: 60.0, 8: 480.0}, params={"a": "x"}),
        record(3, {1: 60.3, 8: 480.0}, params={"a": "x"}, role=Role.FINALIST, repeat_of=2),
        record(4, {1: 53.0, 8: 480.0}, params={"a": "y"}),
    ]
    level = summarise(records, GIVEN).standings[1].level(1)
    assert level is not None
    assert level.verdict is not None
    assert level.verdict.finding is Finding.BETTER
    assert "2 degrees of freedom" in level.verdict.rule


def test_pruned_and_failed_are_counted_by_kind() -> None:
    """The table's last line."""
    pruned = record(1, None, failure=FailureKind.INFEASIBLE, outcome=Outcome.PRUNED)
    summary = summarise([*baselines(50.0), pruned, record(2, None, failure=FailureKind.HANG)], GIVEN)
    assert summary.outcomes == {"complete": 1, "infeasible": 1, "hang": 1}
    assert rows(summary).notes[-1] == "3 trials: 1 complete, 1 infeasible, 1 hang"
