"""What kind of trial is due, from the records alone: baseline, retry, search or finalist. Pure; knows no sampler.

The baseline opens the study, stands spread over it and closes its search part, so that drift shows and the verdict has
a start-to-start spread; fresh starts of the best configurations end it, since a figure that was picked for being the
highest of many is too high by the picking.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from runner.errors import NOT_ITS_FAULT, FailureKind
from runner.schema.base import Scalar
from runner.schema.experiment import Experiment
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.verdict import baseline_tok_s, excess_percent, objective

FIRST_TRIES = 2
"""Starts the first baseline gets; a study whose baseline cannot run goes on without one."""

REPEATS_SHARE = 3
"""At most one in this many trials after the first repeats a known configuration: short studies are for searching."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trial to run. ``number`` is its place in the study, ``repeat_of`` the trial it deliberately repeats."""

    number: int
    params: dict[str, Scalar]
    role: Role
    repeat_of: int | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """What to run next. ``params`` is None when the sampler is to propose."""

    role: Role
    params: dict[str, Scalar] | None
    repeat_of: int | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """How a budget is divided. ``baselines``: numbers of counted trials before which the baseline is due."""

    total: int
    baselines: tuple[int, ...]
    finalists: int

    @property
    def repeats(self) -> int:
        """Trials of configurations that were tried before."""
        return len(self.baselines) - 1 + self.finalists

    @property
    def search(self) -> int:
        return self.total - len(self.baselines) - self.finalists


def slots(experiment: Experiment) -> Slots:
    """Divides the budget; repeats are cut when it is small, finalists first (a verdict needs the baseline's spread)."""
    total, search = experiment.budget.trials, experiment.search
    spare = (total - 1) // REPEATS_SHARE
    repeats = min(search.baseline_starts - 1, spare)
    finalists = min(search.finalists * search.finalist_starts, spare - repeats)
    last = total - finalists - 1
    return Slots(total, tuple(round(i * last / repeats) if repeats else 0 for i in range(repeats + 1)), finalists)


def repeats_owed(records: Sequence[TrialRecord], experiment: Experiment) -> int:
    """Deliberate repeats that a study still makes, whatever ends its search."""
    done = sum(record.repeat_of is not None and record.role is not Role.SEARCH for record in counted(records))
    return max(slots(experiment).repeats - done, 0)


def counted(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The records that use up the budget: all but the first of a configuration that failed by no fault of its own."""
    forgiven: set[tuple[str, Role]] = set()
    kept = []
    for record in records:
        key = (record.fingerprint, record.role)
        if not_its_fault(record) and key not in forgiven:
            forgiven.add(key)
        else:
            kept.append(record)
    return kept


def not_its_fault(record: TrialRecord) -> bool:
    return record.failure is not None and record.failure.kind in NOT_ITS_FAULT


def due(
    records: Sequence[TrialRecord],
    running: Collection[Proposal],
    experiment: Experiment,
    *,
    closing: bool = False,
) -> Due | None:
    """What to run next; None when the budget is used up.

    Args:
        records: Of the study so far, in order.
        running: Asked for and not told yet.
        experiment: Budget, goal, guard-rails and what to repeat.
        closing: Nothing new is left to search (exhausted, or out of time): only what is still owed in repeats.
    """
    division = slots(experiment)
    used = len(counted(records)) + len(running)
    if used >= division.total:
        return None
    if (baseline := _baseline_due(records, running, division, used, closing)) is not None:
        return baseline
    if (again := _retry_due(records, running)) is not None:
        return again
    if closing or used >= division.total - division.finalists:
        finalist = _finalist_due(records, running, experiment, division)
        if finalist is not None or closing:
            return finalist
    return Due(Role.SEARCH, None)


def _baseline_due(
    records: Sequence[TrialRecord], running: Collection[Proposal], division: Slots, used: int, closing: bool
) -> Due | None:
    """The first, a second try if that failed, then one at each place; none any more if both tries failed."""
    every = [r for r in records if _tried_baseline(r)]
    under_way = sum(proposal.role is Role.BASELINE for proposal in running)
    worked = [r for r in every if r.outcome is Outcome.COMPLETE]
    if not worked:
        wanted = under_way == 0 and len(every) < FIRST_TRIES
    else:
        owed = len(division.baselines) if closing else sum(place <= used for place in division.baselines)
        # The first one counts by having worked, however many tries it took.
        later = [r for r in counted(records) if _tried_baseline(r) and r.number > worked[0].number]
        wanted = 1 + len(later) + under_way < owed
    first = worked[0] if worked else next(iter(every), None)
    return Due(Role.BASELINE, {}, None if first is None else first.number) if wanted else None


def _retry_due(records: Sequence[TrialRecord], running: Collection[Proposal]) -> Due | None:
    """A searched configuration whose one and only trial failed by no fault of its own."""
    searched = [record for record in records if record.role is Role.SEARCH]
    trials = Counter(record.fingerprint for record in searched)
    under_way = [proposal.params for proposal in running]
    for record in searched:
        if not_its_fault(record) and trials[record.fingerprint] == 1 and record.params not in under_way:
            return Due(Role.SEARCH, record.params, record.number)
    return None


def _finalist_due(
    records: Sequence[TrialRecord], running: Collection[Proposal], experiment: Experiment, division: Slots
) -> Due | None:
    """The next fresh start of one of the best configurations; they take turns."""
    best = best_first(records, experiment, (Role.SEARCH,))[: experiment.search.finalists]
    done = Counter(r.fingerprint for r in counted(records) if r.role is Role.FINALIST)
    under_way = [proposal.params for proposal in running if proposal.role is Role.FINALIST]
    starts = {record.number: done[record.fingerprint] + under_way.count(record.params) for record in best}
    owed = [record for record in best if starts[record.number] < experiment.search.finalist_starts]
    if not owed or sum(starts.values()) >= division.finalists:
        return None
    chosen = min(owed, key=lambda record: starts[record.number])
    return Due(Role.FINALIST, chosen.params, chosen.number)


def best_first(records: Sequence[TrialRecord], experiment: Experiment, roles: Collection[Role]) -> list[TrialRecord]:
    """Trials of these roles by their first figure, within the guard-rails, real ones before synthetic acceptance.

    By the first start only, so that the choice does not change while the finalists run.
    """
    allowed: list[tuple[bool, float, TrialRecord]] = []
    for record in records:
        values = objective(record, experiment)
        if record.role not in roles or record.duplicate_of is not None or values is None:
            continue
        if all(excess <= 0 for excess in excesses(record, records, experiment).values()):
            allowed.append((record.synthetic_acceptance is not None, -values[0], record))
    return [record for _, _, record in sorted(allowed, key=lambda item: item[:2])]


def excesses(record: TrialRecord, records: Sequence[TrialRecord], experiment: Experiment) -> dict[int, float]:
    """Guard-rail's concurrency -> how far ``record`` misses it, in percent (<= 0 holds); baseline: ``records``' own."""
    found = {}
    for rail in experiment.guard_rails:
        measurement = record.at(rail.concurrency)
        value = None if measurement is None else measurement.output_tok_s
        excess = excess_percent(value, rail, baseline_tok_s(records, rail.concurrency))
        if excess is not None:
            found[rail.concurrency] = excess
    return found


def _tried_baseline(record: TrialRecord) -> bool:
    cancelled = record.failure is not None and record.failure.kind is FailureKind.CANCELLED
    return record.role is Role.BASELINE and not cancelled
