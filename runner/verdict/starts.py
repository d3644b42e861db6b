"""Whether one configuration is faster than another, judged over server starts.

Windows inside one start share its luck (placement, clocks, graph memory); only starts are independent. So a verdict
takes one figure per start and knows nothing of windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, geometric_mean

from scipy.special import stdtrit

CONFIDENCE = 0.95
"""Two-sided, of the interval that decides."""

RANGE_STARTS = 3
"""Starts of the baseline whose range is taken for its spread. The range of two is too often nearly nothing: nine equal
configurations beside it would hold a "better" one in most studies (``tests/unit/verdict/test_starts.py``).
"""

_ROUNDING = 1e-12
"""Two equal figures are no further apart than this after their logarithms were averaged."""


class Finding(StrEnum):
    """What can be said of a candidate against the baseline."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference seen"
    NOT_DECIDED = "not decided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding with its reasons.

    Attributes:
        finding: What was found.
        change_percent: Candidate against baseline (geometric means over starts); None without figures.
        interval_percent: 95 % interval of the change; None when no start-to-start spread is known, and where the
            baseline's own range decided.
        rule: The rule that was used, in words.
        spread_percent: How much starts of the same differ, as far as the rule knows; None when it does not.
    """

    finding: Finding
    change_percent: float | None
    interval_percent: tuple[float, float] | None
    rule: str
    spread_percent: float | None = None


def mean_over_starts(figures: Sequence[float]) -> float | None:
    """Geometric mean, so that a table's figures and its changes agree; exact for one start, None without any."""
    if len(figures) == 1:
        return figures[0]
    return geometric_mean(figures) if figures else None


def judge(candidate: Sequence[float], baseline: Sequence[float], *, repeats: Sequence[Sequence[float]] = ()) -> Verdict:
    """Judges a candidate's starts against the baseline's.

    The change is the difference of mean log figures. With several starts a side, its interval is Student's with a
    pooled variance: the relative start-to-start spread is taken to be the machine's, so every configuration that was
    started more than once contributes (Welch's form would have one or two degrees of freedom and decide nothing).
    With one start a side, the gap must exceed the range of the baseline's own starts; and where these are fewer than
    ``RANGE_STARTS``, the interval must leave zero out as well.

    Args:
        candidate: Output tok/s of each start, all > 0.
        baseline: The same of the baseline.
        repeats: Figures per start of further configurations of the same study, neither of these two.

    Source: pooled two-sample t interval, e.g. NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.3.
    """
    sides = f"{_starts(len(candidate))} against {_starts(len(baseline))} of the baseline"
    if not candidate or not baseline:
        return Verdict(Finding.NOT_DECIDED, None, None, f"nothing to compare: {sides}")
    logs = [_logs(group) for group in (candidate, baseline, *repeats)]
    gap = fmean(logs[0]) - fmean(logs[1])
    single = min(len(candidate), len(baseline)) == 1
    own = max(logs[1]) - min(logs[1])
    if single and len(baseline) >= RANGE_STARTS:
        rule = f"{sides}, whose own differ by {_percent(own):.1f} %, beyond which one start counts"
        return Verdict(_finding(gap, abs(gap) > own + _ROUNDING, single), _percent(gap), None, rule, _percent(own))
    freedom = sum(len(group) - 1 for group in logs)
    if freedom == 0:
        return Verdict(Finding.NOT_DECIDED, _percent(gap), None, f"{sides}: no start-to-start spread known")
    spread = math.sqrt(sum((x - fmean(group)) ** 2 for group in logs for x in group) / freedom)
    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * spread * math.sqrt(1 / len(candidate) + 1 / len(baseline))
    decided = abs(gap) > half and not (single and abs(gap) <= own)
    return Verdict(
        _finding(gap, decided, single),
        _percent(gap),
        (_percent(gap - half), _percent(gap + half)),
        f"{sides}; 95 % interval, spread {100 * spread:.1f} % between starts ({freedom} degrees of freedom)"
        + ("; with one start a side the gap must exceed the baseline's own spread too" if single else ""),
        _percent(spread),
    )


def _finding(gap: float, decided: bool, single: bool) -> Finding:
    if not decided:
        return Finding.NOT_DECIDED if single else Finding.NO_DIFFERENCE
    return Finding.BETTER if gap > 0 else Finding.WORSE


def _logs(figures: Sequence[float]) -> list[float]:
    return [math.log(figure) for figure in figures]


def _percent(log_ratio: float) -> float:
    return 100.0 * math.expm1(log_ratio)


def _starts(count: int) -> str:
    return "1 start" if count == 1 else f"{count} starts"
