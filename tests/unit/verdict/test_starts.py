"""A verdict is about server starts."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.verdict import Finding, judge

figures = st.lists(st.floats(min_value=0.1, max_value=1e5), min_size=1, max_size=5)


def test_several_starts_a_side_give_an_interval() -> None:
    """Against the interval worked out by hand: two against two, 2 degrees of freedom, t = 4.3027."""
    candidate, baseline = [110.0, 112.0], [100.0, 101.0]
    logs = [[math.log(x) for x in side] for side in (candidate, baseline)]
    gap = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    spread = math.sqrt(sum(statistics.variance(side) for side in logs) / 2)
    half = 4.302653 * spread * math.sqrt(1 / 2 + 1 / 2)
    verdict = judge(candidate, baseline)
    assert verdict.finding is Finding.BETTER
    assert verdict.change_percent == pytest.approx(100 * math.expm1(gap))
    assert verdict.interval_percent is not None
    assert verdict.interval_percent == pytest.approx([100 * math.expm1(gap - half), 100 * math.expm1(gap + half)])


def test_a_clear_loss_is_worse() -> None:
    """The other direction is found as well."""
    assert judge([50.0, 50.5], [100.0, 101.0]).finding is Finding.WORSE


def test_a_gap_inside_the_noise_is_no_difference_seen() -> None:
    """Several starts a side that overlap: said as such, with the interval that holds zero."""
    verdict = judge([100.0, 104.0], [101.0, 103.5])
    assert verdict.finding is Finding.NO_DIFFERENCE
    assert verdict.interval_percent is not None
    assert verdict.interval_percent[0] < 0 < verdict.interval_percent[1]


def test_one_start_a_side_is_not_decided() -> None:
    """Nobody knows how much two starts of the same thing differ; the change is still told."""
    verdict = judge([150.0], [100.0])
    assert verdict.finding is Finding.NOT_DECIDED
    assert verdict.change_percent == pytest.approx(50.0)
    assert verdict.interval_percent is None
    assert "no start-to-start spread" in verdict.rule


def test_one_start_within_the_baselines_spread_is_not_decided() -> None:
    """LL against unset on a box where it gains nothing: 229 beside 228 and 229 is no finding."""
    verdict = judge([229.0], [229.0, 228.0, 228.4])
    assert verdict.finding is Finding.NOT_DECIDED
    assert "1 start against 3 starts" in verdict.rule


def test_one_start_far_outside_the_baselines_spread_is_decided() -> None:
    """Eager at a ninth of the speed needs no second start."""
    assert judge([25.0], [229.0, 228.0, 228.4]).finding is Finding.WORSE
    assert judge([320.0], [229.0, 228.0, 228.4]).finding is Finding.BETTER


def test_one_start_beyond_the_range_of_three_is_decided_by_it() -> None:
    """PP=2 at C=64 on two H200s: 9 % over a baseline whose three starts differ by 6 %; 3 % would not do."""
    baseline = [6505.8, 6203.4, 6123.6]
    verdict = judge([6840.8], baseline)
    assert verdict.finding is Finding.BETTER
    assert verdict.interval_percent is None
    assert "whose own differ by 6.2 %" in verdict.rule
    assert verdict.spread_percent == pytest.approx(6.24, abs=0.01)
    assert judge([6500.0], baseline).finding is Finding.NOT_DECIDED
    assert judge([5800.0], baseline).finding is Finding.WORSE


def test_one_start_beyond_the_range_of_two_needs_the_interval_too() -> None:
    """Two starts that happen to agree are no spread: 5 % beyond their 1 % is not decided."""
    assert judge([106.0], [100.0, 101.0]).finding is Finding.NOT_DECIDED


def test_other_repeated_configurations_sharpen_the_verdict() -> None:
    """The start-to-start spread is the machine's: repeats of others say how large it is."""
    assert judge([105.0], [100.0, 101.0]).finding is Finding.NOT_DECIDED
    repeats = [[50.0, 50.4], [200.0, 201.0, 200.2], [80.0, 80.3]]
    assert judge([105.0], [100.0, 101.0], repeats=repeats).finding is Finding.BETTER


def test_with_one_start_the_gap_must_exceed_the_baselines_own_range() -> None:
    """Even when others were steadier: a gap smaller than what the baseline shows by itself is no finding."""
    steady = [[50.0, 50.0], [200.0, 200.0], [80.0, 80.0], [30.0, 30.0], [70.0, 70.0], [90.0, 90.0]]
    verdict = judge([107.5], [100.0, 106.0], repeats=steady * 20)
    assert verdict.interval_percent is not None
    assert verdict.interval_percent[0] > 0
    assert verdict.finding is Finding.NOT_DECIDED


@pytest.mark.parametrize(("candidate", "baseline"), [([], [1.0]), ([1.0], []), ([], [])])
def test_nothing_to_compare_is_not_decided(candidate: list[float], baseline: list[float]) -> None:
    """No figure, no change, no interval."""
    verdict = judge(candidate, baseline)
    assert (verdict.finding, verdict.change_percent, verdict.interval_percent) == (Finding.NOT_DECIDED, None, None)


@given(figures, figures, st.floats(min_value=0.01, max_value=100))
def test_the_verdict_does_not_depend_on_the_unit(candidate: list[float], baseline: list[float], scale: float) -> None:
    """Twice as fast is twice as fast, at any speed."""
    plain = judge(candidate, baseline)
    scaled = judge([scale * x for x in candidate], [scale * x for x in baseline])
    assert plain.change_percent is not None
    assert scaled.change_percent == pytest.approx(plain.change_percent, rel=1e-6, abs=1e-6)


@given(figures, figures)
def test_swapping_the_sides_turns_the_finding_round(candidate: list[float], baseline: list[float]) -> None:
    """With several starts a side, better one way is worse the other way."""
    turned = {Finding.BETTER: Finding.WORSE, Finding.WORSE: Finding.BETTER}
    if min(len(candidate), len(baseline)) > 1:
        one, other = judge(candidate, baseline).finding, judge(baseline, candidate).finding
        assert other is turned.get(one, one)


@given(st.floats(min_value=0.1, max_value=1e5), st.integers(1, 4), st.integers(1, 4))
def test_equal_figures_never_differ(figure: float, n: int, m: int) -> None:
    """A noiseless engine that gives the same figure twice shows no difference."""
    assert judge([figure] * n, [figure] * m).finding in (Finding.NO_DIFFERENCE, Finding.NOT_DECIDED)


def test_equal_configurations_are_called_better_in_one_study_of_twenty_or_so() -> None:
    """A/A over 1,000 studies: nine equal candidates, the fastest started once more, against two baseline starts."""
    chance = random.Random(0)
    fooled = 0
    for _ in range(1_000):
        baseline = [chance.lognormvariate(0, 0.02) for _ in range(2)]
        candidates = sorted(([chance.lognormvariate(0, 0.02)] for _ in range(9)), reverse=True)
        candidates[0].append(chance.lognormvariate(0, 0.02))
        findings = [
            judge(candidate, baseline, repeats=[] if candidate is candidates[0] else [candidates[0]]).finding
            for candidate in candidates
        ]
        fooled += Finding.BETTER in findings
    assert fooled / 1_000 < 0.08
