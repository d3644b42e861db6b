"""Optuna behind two calls: ask and tell.

Two Optuna studies: one in memory that the sampler learns from, and ``study.db``, which gets each trial when it is
finished. Proposals that are refused (a duplicate, or what the model rules out) only ever exist in memory.
"""

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from runner.errors import NOT_ITS_FAULT, FailureKind, Infeasible, UsageError
from runner.schema.base import Scalar
from runner.schema.experiment import Experiment
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.search.encoding import as_params, encode, suggest
from runner.search.first_steps import SHARE, first_steps
from runner.search.schedule import Due, Proposal, best_first, due, excesses, not_its_fault, slots
from runner.search.store import Store
from runner.space import Params, Space
from runner.verdict import objective, objective_levels

MAX_REFUSED = 1000
"""Proposals in a row that may be refused before the search looks through the points one by one."""

MAX_LEARNED_REFUSED = 20
"""Of these, the sampler's own; then random ones, which are ten times cheaper and do not insist on one region."""

STARTUP_TRIALS = 5
EI_CANDIDATES = 4
"""Of TPE, in place of Optuna's 10 and 24, which are made for hundreds of trials: a study here has a dozen or two.
Source: tests/bench/search; on its surface the winner is as good or better at 12, 20, 30 and 60 trials."""

ENVIRONMENT_IN_A_ROW = 4
"""Trials in a row that failed by the environment before it is the machine that is given up: two configurations, each
tried twice."""

BY_THE_ENVIRONMENT = NOT_ITS_FAULT - {FailureKind.CANCELLED}

MAX_ENUMERATED = 4096
"""A space of more points than this is not enumerated; no budget of server starts comes near it."""


@dataclass(frozen=True, slots=True)
class Told:
    """What Optuna is told of a record."""

    state: TrialState
    values: tuple[float, ...] | None
    constraints: dict[str, float]


class Searcher:
    """Proposes trials of one study, and learns from their records.

    Args:
        space: Knobs, their conditions, and what a point resolves to.
        experiment: Budget, goal, guard-rails, sampler and seed.
        study: Name in the store.
        storage: SQLite file; None keeps no store.
        records: What was finished before, in order.

    Raises:
        UsageError: ``sampler: grid`` on a space that cannot be enumerated, or ``try_first`` names no point of it.
        StoreError: The store cannot be opened or written.

    Attributes:
        ended: Why there is nothing more to run in this study; None while there is.
        stopped: Why ``ask`` gave None although there is more to run; the same command goes on later.
        refused: Reason -> proposals that were not worth a trial: ruled out, tried already, known to fail.
    """

    def __init__(
        self,
        space: Space,
        experiment: Experiment,
        *,
        study: str,
        storage: Path | None,
        records: Sequence[TrialRecord] = (),
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.ended: str | None = None
        self.stopped: str | None = None
        self.refused: Counter[str] = Counter()
        self._space = space
        self._experiment = experiment
        self._directions = [StudyDirection.MAXIMIZE] * len(objective_levels(experiment))
        self._memory = optuna.create_study(directions=self._directions)
        self._records: list[TrialRecord] = []
        self._running: dict[int, tuple[Proposal, optuna.Trial]] = {}
        self._proposed: set[str] = set()
        self._exhausted = False
        self._environment_failures = 0
        self._first = [as_params(written, space) for written in experiment.search.try_first]
        self._grid = self._choose_grid()
        frozen = [self._learn(record) for record in records]
        self._store = None if storage is None else Store(storage, study, self._directions, frozen)

    def ask(self, *, closing: bool = False) -> Proposal | None:
        """The next trial; None when there is nothing more to run (``ended`` or ``stopped`` says why).

        Args:
            closing: Propose nothing new, only what is still owed: the baseline's last start and finalists.
        """
        if self.stopped is not None:
            return None
        if self._environment_failures >= ENVIRONMENT_IN_A_ROW:
            self.stopped = (
                f"{self._environment_failures} trials in a row failed by the environment: mend it, then go on"
            )
            return None
        running = [proposal for proposal, _ in self._running.values()]
        wanted = due(self._records, running, self._experiment, closing=closing)
        if wanted is not None and wanted.params is None:
            found = None if self._exhausted else self._new_point()
            if found is not None:
                return self._hand_out(Due(Role.SEARCH, found[0]), found[1])
            self._exhausted = True
            wanted = due(self._records, running, self._experiment, closing=True)
        if wanted is None or wanted.params is None:
            self.ended = self._why_ended(closing)
            return None
        return self._hand_out(wanted, self._fixed(wanted.params))

    def stop(self, why: str) -> None:
        """Proposes nothing more: what there is to run cannot run now."""
        self.stopped = why

    def tell(self, record: TrialRecord) -> None:
        """Learns from a record, be it of a trial that was asked for or not.

        Raises:
            StoreError: The store cannot be written.
        """
        _, trial = self._running.pop(record.number, (None, None))
        frozen = self._learn(record, trial)
        by_environment = record.failure is not None and record.failure.kind in BY_THE_ENVIRONMENT
        self._environment_failures = self._environment_failures + 1 if by_environment else 0
        if self._store is not None:
            self._store.add(frozen)

    def close(self) -> None:
        """Lets go of the store."""
        if self._store is not None:
            self._store.close()

    def _why_ended(self, closing: bool) -> str:
        if self._exhausted:
            return "every configuration was tried"
        return "the time is used up (the same command goes on)" if closing else "the budget of trials is used up"

    # Proposing

    def _hand_out(self, wanted: Due, trial: optuna.Trial) -> Proposal:
        assert wanted.params is not None
        number = max([r.number for r in self._records] + list(self._running), default=-1) + 1
        proposal = Proposal(number, wanted.params, wanted.role, wanted.repeat_of)
        self._running[number] = (proposal, trial)
        self._proposed.update(self._keys(wanted.params))
        return proposal

    def _new_point(self) -> tuple[dict[str, Scalar], optuna.Trial] | None:
        """A point not tried yet: asked for, next of the grid, a first step, or the sampler's; None: there is none."""
        if (wished := self._next_of(iter(self._first))) is not None:
            return wished
        if self._grid is not None:
            return self._next_of(self._grid)
        if self._is_early() and (step := self._next_of(self._first_steps())) is not None:
            return step
        self._memory.sampler = self._sampler()
        for attempt in range(MAX_REFUSED):
            if attempt == MAX_LEARNED_REFUSED:
                self._memory.sampler = RandomSampler(seed=self._seed())
            trial = self._memory.ask()
            params = suggest(trial, self._space)
            refusal = self._refusal(params)
            if refusal is None:
                return params, trial
            self.refused[refusal] += 1
            self._memory.tell(trial, state=TrialState.FAIL)
        return self._next_of(itertools.islice(self._every_point() or (), MAX_ENUMERATED))

    def _is_early(self) -> bool:
        """Whether the study's first part still runs, in which knobs are set one at a time."""
        searched = sum(record.role is Role.SEARCH for record in self._records)
        return self._experiment.search.sampler in ("auto", "tpe") and searched < slots(self._experiment).search // SHARE

    def _first_steps(self) -> Iterator[dict[str, Scalar]]:
        """From the best configuration so far, among the baseline and all that was searched, within the guard-rails."""
        found = best_first(self._records, self._experiment, (Role.BASELINE, Role.SEARCH))
        tried = {item for record in self._records for item in record.params.items()}
        return first_steps(self._space, found[0].params if found else {}, tried)

    def _next_of(self, every: Iterator[dict[str, Scalar]]) -> tuple[dict[str, Scalar], optuna.Trial] | None:
        fresh = next((point for point in every if self._refusal(point) is None), None)
        return None if fresh is None else (fresh, self._fixed(fresh))

    def _refusal(self, params: Params) -> str | None:
        """Why a point is not worth a trial: tried already, ruled out, or known to fail; None when it is."""
        failing = {k.name: params[k.name] for k in self._space.knobs if params.get(k.name) in k.keep_failing}
        if any(self._failed_with(name, label) for name, label in failing.items()):
            return "kept to fail on purpose, and has failed"
        if self._proposed.intersection(self._keys(params)):
            return "tried already"
        try:
            self._space.resolve(params)
        except Infeasible as reason:
            return None if failing else reason.message
        return None

    def _failed_with(self, knob: str, label: Scalar) -> bool:
        return any(
            r.params.get(knob) == label and r.outcome is not Outcome.COMPLETE and not not_its_fault(r)
            for r in self._records
        )

    def _keys(self, params: Params) -> set[str]:
        """Names of a point: as asked and, where it can run, as vLLM's rules tell configurations apart."""
        try:
            return {_asked(params), self._space.key(self._space.resolve(params))}
        except Infeasible:
            return {_asked(params)}

    def _fixed(self, params: Params) -> optuna.Trial:
        encoded = encode(params, self._space)
        if encoded is None:
            raise ValueError(f"{dict(params)} is no point of the space")
        self._memory.enqueue_trial(encoded[0])
        trial = self._memory.ask()
        suggest(trial, self._space)
        return trial

    def _sampler(self) -> BaseSampler:
        if self._experiment.search.sampler == "random":
            return RandomSampler(seed=self._seed())
        startup = self._experiment.search.startup_trials or STARTUP_TRIALS
        return TPESampler(seed=self._seed(), n_startup_trials=startup, n_ei_candidates=EI_CANDIDATES)

    def _seed(self) -> int:
        """Of the next trial's sampler: with the study's own seed alone, a resumed study would replay its beginning."""
        text = f"{self._experiment.search.seed}:{len(self._records) + len(self._running)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])

    # Enumerating

    def _choose_grid(self) -> Iterator[dict[str, Scalar]] | None:
        """The points to go through one by one, in an order of the seed; None: the sampler proposes."""
        sampler = self._experiment.search.sampler
        if sampler not in ("auto", "grid"):
            return None
        every = self._every_point()
        countable = every is not None and (self._space.size() or 0) <= MAX_ENUMERATED
        if sampler == "grid" and not countable:
            raise UsageError(
                f"`sampler: grid` needs a space of at most {MAX_ENUMERATED} points that can be counted",
                remedy="Use `sampler: auto`, or give each range a step.",
            )
        if every is None or not countable:
            return None
        found = list(every)
        if sampler == "auto" and not self._all_fit(found):
            return None
        random.Random(self._experiment.search.seed).shuffle(found)
        return iter(found)

    def _every_point(self) -> Iterator[dict[str, Scalar]] | None:
        return None if self._space.size() is None else self._space.combinations()

    def _all_fit(self, every: Iterable[dict[str, Scalar]]) -> bool:
        """Whether the budget is enough to search all points that are worth a trial."""
        places = slots(self._experiment).search
        seen = self._keys({})
        for point in every:
            keys = self._keys(point)
            places -= not seen & keys and self._refusal(point) is None
            if places < 0:
                return False
            seen |= keys
        return True

    # Learning

    def _learn(self, record: TrialRecord, trial: optuna.Trial | None = None) -> FrozenTrial:
        told = self._told(record)
        frozen = self._frozen(record, told)
        if trial is None:
            self._memory.add_trial(frozen)
        else:
            for name, value in told.constraints.items():
                trial.set_constraint(name, value)
            self._memory.tell(trial, told.values, told.state)
        self._records.append(record)
        self._proposed.add(_asked(record.params))
        if record.outcome is not Outcome.PRUNED:
            self._proposed.add(self._space.key(record.config))
        return frozen

    def _told(self, record: TrialRecord) -> Told:
        """Samplers forget FAIL, so a configuration that failed is told PRUNED with a constraint that is not met."""
        if not_its_fault(record) or encode(record.params, self._space) is None:
            return Told(TrialState.FAIL, None, {})
        values = objective(record, self._experiment)
        if values is None:
            return Told(TrialState.PRUNED, None, {"failed": 1.0})
        missed = excesses(record, [*self._records, record], self._experiment)
        return Told(TrialState.COMPLETE, values, {"failed": 0.0, **{f"C={c}": x for c, x in missed.items()}})

    def _frozen(self, record: TrialRecord, told: Told) -> FrozenTrial:
        values, distributions = encode(record.params, self._space) or ({}, {})
        return create_trial(
            state=told.state,
            values=told.values,
            params=values,
            distributions=distributions,
            constraints=told.constraints,
            user_attrs=_attributes(record),
        )


def _asked(params: Params) -> str:
    return json.dumps(dict(params), sort_keys=True)


def _attributes(record: TrialRecord) -> dict[str, Scalar]:
    """What a reader of the store wants to know of a trial; ``number`` ties it to its record."""
    found: dict[str, Scalar] = {
        "number": record.number,
        "role": str(record.role),
        "outcome": str(record.outcome),
        "fingerprint": record.fingerprint,
        "simulated": record.simulated,
    }
    if record.failure is not None:
        found["failure"] = str(record.failure.kind)
    return found
