"""The standings of a study: configurations over their starts, against the baseline, the guard-rails and the goal.

Speculation with a synthetic acceptance rate makes numbers that no real text gives, so such configurations are ranked
apart and never win over real ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.errors import FailureKind
from runner.schema.base import Scalar
from runner.schema.experiment import Experiment, GuardRail
from runner.schema.launch import LaunchConfig
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.verdict.objective import excess_percent, output_tok_s
from runner.verdict.starts import Finding, Verdict, judge, mean_over_starts


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that was measured, over all its starts.

    Attributes:
        numbers: Its trials, in order; the first proposed it.
        starts: Concurrency -> output tok/s of each start that gave a valid number.
        front_end_bound: Concurrencies at which the server's front end, not its engine, was the limit of a start.
    """

    fingerprint: str
    config: LaunchConfig
    params: dict[str, Scalar]
    numbers: tuple[int, ...]
    is_baseline: bool
    simulated: bool
    synthetic_acceptance: float | None
    starts: dict[int, tuple[float, ...]]
    front_end_bound: frozenset[int] = frozenset()

    def mean(self, concurrency: int) -> float | None:
        """Geometric mean of output tok/s over starts, as the verdict takes it; None when none gave a valid number."""
        return mean_over_starts(self.starts.get(concurrency, ()))


@dataclass(frozen=True, slots=True)
class Level:
    """One concurrency of a candidate beside the baseline's.

    Attributes:
        verdict: None for the baseline and without one.
        front_end_bound: Whether the figure is the limit of the server's front end, not of its engine.
    """

    concurrency: int
    output_tok_s: float | None
    baseline_tok_s: float | None
    starts: int
    verdict: Verdict | None
    front_end_bound: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """A candidate in its rank.

    Attributes:
        excess_percent: Guard-rail's concurrency -> how far it is missed (<= 0 holds); empty without a baseline.
        percent_of_goal: Of the goal's tok/s at the goal's concurrency.
    """

    rank: int
    candidate: Candidate
    levels: tuple[Level, ...]
    excess_percent: dict[int, float]
    percent_of_goal: float | None

    @property
    def within_guard_rails(self) -> bool:
        return all(excess <= 0 for excess in self.excess_percent.values())

    def level(self, concurrency: int) -> Level | None:
        return next((level for level in self.levels if level.concurrency == concurrency), None)


@dataclass(frozen=True, slots=True)
class Winner:
    """What should be served for one concurrency, and by which rule.

    ``runner_up`` is the next fastest configuration of the same ranking, ``margin_percent`` the lead over it (negative:
    it measured faster but could not be shown to be).
    """

    standing: Standing
    concurrency: int
    rule: str
    runner_up: Standing | None
    margin_percent: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a table or an export needs of a study.

    Attributes:
        standings: Ranked by tok/s at the goal's concurrency, those within the guard-rails first; the baseline among
            them. Without synthetic acceptance.
        synthetic: The same for configurations with a synthetic acceptance rate.
        baseline: The baseline's standing, or None; ``no_baseline`` then says why (``no baseline: <kind>``).
        outcomes: Outcome or failure kind -> trials.
    """

    experiment: Experiment
    standings: tuple[Standing, ...]
    synthetic: tuple[Standing, ...]
    baseline: Standing | None
    no_baseline: str | None
    winner: Winner | None
    synthetic_winner: Winner | None
    outcomes: dict[str, int]
    simulated: bool

    @property
    def trials(self) -> int:
        return sum(self.outcomes.values())


def summarise(records: Sequence[TrialRecord], experiment: Experiment) -> Summary:
    """The standings of all that was measured so far."""
    found = candidates(records)
    baseline = next((candidate for candidate in found if candidate.is_baseline), None)
    real = _rank([c for c in found if c.synthetic_acceptance is None], found, baseline, experiment)
    synthetic = _rank([c for c in found if c.synthetic_acceptance is not None], found, baseline, experiment)
    return Summary(
        experiment=experiment,
        standings=real,
        synthetic=synthetic,
        baseline=next((s for s in (*real, *synthetic) if s.candidate.is_baseline), None),
        no_baseline=None if baseline else _no_baseline(records),
        winner=_winner(real, experiment.goal.concurrency, guarded=True),
        synthetic_winner=_winner(synthetic, experiment.goal.concurrency, guarded=True),
        outcomes=_outcomes(records),
        simulated=any(record.simulated for record in records),
    )


def best_at(summary: Summary, concurrency: int, *, synthetic: bool = False) -> Winner | None:
    """The winner for one concurrency alone: guard-rails protect the goal's winner and do not bind here."""
    return _winner(summary.synthetic if synthetic else summary.standings, concurrency, guarded=False)


def best_so_far(records: Sequence[TrialRecord], experiment: Experiment) -> float | None:
    """Highest output tok/s at the goal's concurrency of one start within the guard-rails, synthetic ones left out.

    This is what was measured, for a progress line; whether it beats the baseline is ``summarise``'s to say.
    """
    found = candidates(records)
    baseline = next((candidate for candidate in found if candidate.is_baseline), None)
    allowed = [
        candidate
        for candidate in found
        if candidate.synthetic_acceptance is None
        and all(excess <= 0 for excess in _excess(candidate, baseline, experiment.guard_rails).values())
    ]
    return max((x for c in allowed for x in c.starts.get(experiment.goal.concurrency, ())), default=None)


def candidates(records: Iterable[TrialRecord]) -> tuple[Candidate, ...]:
    """Complete trials grouped by fingerprint, in order of first appearance.

    A trial that took over another's ladder (``duplicate_of``) is no start of its own and is left out.
    """
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.outcome is Outcome.COMPLETE and record.duplicate_of is None:
            groups.setdefault(record.fingerprint, []).append(record)
    return tuple(_candidate(group) for group in groups.values())


def _candidate(group: Sequence[TrialRecord]) -> Candidate:
    first = group[0]
    starts: dict[int, list[float]] = {}
    for record in group:
        for concurrency in sorted({m.concurrency for m in record.measurements}):
            if (value := output_tok_s(record, concurrency)) is not None:
                starts.setdefault(concurrency, []).append(value)
    return Candidate(
        fingerprint=first.fingerprint,
        config=first.config,
        params=first.params,
        numbers=tuple(record.number for record in group),
        is_baseline=any(record.role is Role.BASELINE for record in group),
        simulated=any(record.simulated for record in group),
        synthetic_acceptance=first.synthetic_acceptance,
        starts={concurrency: tuple(figures) for concurrency, figures in starts.items()},
        front_end_bound=frozenset(
            m.concurrency for record in group for m in record.measurements if m.limited_by == "api_server"
        ),
    )


def _rank(
    ranked: Sequence[Candidate], everyone: Sequence[Candidate], baseline: Candidate | None, experiment: Experiment
) -> tuple[Standing, ...]:
    goal = experiment.goal
    standings = [
        Standing(
            rank=0,
            candidate=candidate,
            levels=tuple(_level(candidate, c, everyone, baseline) for c in experiment.ladder),
            excess_percent=_excess(candidate, baseline, experiment.guard_rails),
            percent_of_goal=None
            if (mean := candidate.mean(goal.concurrency)) is None
            else 100 * mean / goal.output_tok_s,
        )
        for candidate in ranked
    ]
    standings.sort(key=lambda s: (not s.within_guard_rails, -(s.candidate.mean(goal.concurrency) or 0.0)))
    return tuple(
        Standing(place, s.candidate, s.levels, s.excess_percent, s.percent_of_goal)
        for place, s in enumerate(standings, start=1)
    )


def _level(candidate: Candidate, concurrency: int, everyone: Sequence[Candidate], baseline: Candidate | None) -> Level:
    mine = candidate.starts.get(concurrency, ())
    verdict = None
    if baseline is not None and baseline is not candidate and mine:
        others = [c.starts.get(concurrency, ()) for c in everyone if c is not candidate and c is not baseline]
        verdict = judge(mine, baseline.starts.get(concurrency, ()), repeats=[group for group in others if group])
    return Level(
        concurrency=concurrency,
        output_tok_s=candidate.mean(concurrency),
        baseline_tok_s=None if baseline is None else baseline.mean(concurrency),
        starts=len(mine),
        verdict=verdict,
        front_end_bound=concurrency in candidate.front_end_bound,
    )


def _excess(candidate: Candidate, baseline: Candidate | None, rails: Iterable[GuardRail]) -> dict[int, float]:
    if baseline is None or baseline is candidate:
        return {}
    found = {
        rail.concurrency: excess_percent(candidate.mean(rail.concurrency), rail, baseline.mean(rail.concurrency))
        for rail in rails
    }
    return {concurrency: excess for concurrency, excess in found.items() if excess is not None}


def _winner(ranked: Sequence[Standing], concurrency: int, *, guarded: bool) -> Winner | None:
    """The fastest that is shown to beat the baseline; else the baseline; without a yardstick, the fastest measured."""
    order = [s for s in ranked if s.candidate.mean(concurrency) is not None]
    order.sort(key=lambda s: -(s.candidate.mean(concurrency) or 0.0))
    allowed = [s for s in order if s.within_guard_rails or not guarded]
    if not allowed:
        return None
    verdicts = {s.rank: level.verdict for s in allowed if (level := s.level(concurrency)) is not None}
    better = [s for s in allowed if (v := verdicts.get(s.rank)) is not None and v.finding is Finding.BETTER]
    baseline = next((s for s in allowed if s.candidate.is_baseline), None)
    if better:
        chosen, rule = _simplest(better, concurrency)
    elif all(v is None or v.spread_percent is None for v in verdicts.values()):
        chosen, rule = allowed[0], "fastest measured; not decided, since nothing was started twice"
    elif baseline is not None:
        chosen, rule = baseline, "nothing was shown to be better"
    else:
        chosen, rule = allowed[0], "fastest measured of this ranking; none was shown to be better than the baseline"
    runner_up = next((s for s in allowed if s is not chosen), None)
    return Winner(chosen, concurrency, rule, runner_up, _margin(chosen, runner_up, concurrency))


def _simplest(better: Sequence[Standing], concurrency: int) -> tuple[Standing, str]:
    """Of those shown to be better, fastest first: whoever is not told apart from the fastest and changes the least."""
    level = better[0].level(concurrency)
    spread = 0.0 if level is None or level.verdict is None else level.verdict.spread_percent or 0.0
    tied = [s for s in better if (_margin(better[0], s, concurrency) or 0.0) <= spread]
    chosen = min(tied, key=lambda s: (not s.within_guard_rails, len(s.candidate.params)))
    if chosen is better[0]:
        return chosen, "fastest of those shown to be better than the baseline"
    return chosen, f"shown to be better than the baseline, and simpler than what is no more than {spread:.1f} % faster"


def _margin(chosen: Standing, runner_up: Standing | None, concurrency: int) -> float | None:
    mine = chosen.candidate.mean(concurrency)
    theirs = None if runner_up is None else runner_up.candidate.mean(concurrency)
    return None if mine is None or theirs is None else 100 * (mine / theirs - 1)


def _no_baseline(records: Sequence[TrialRecord]) -> str:
    tries = [record for record in records if record.role is Role.BASELINE and record.failure is not None]
    counted = [r for r in tries if r.failure is not None and r.failure.kind is not FailureKind.CANCELLED] or tries
    last = counted[-1].failure if counted else None
    return f"no baseline: {last.kind}" if last is not None else "no baseline: not run"


def _outcomes(records: Sequence[TrialRecord]) -> dict[str, int]:
    return dict(Counter(str(r.failure.kind if r.failure is not None else r.outcome) for r in records))
