"""A loaded search space: from the search's choices to a launch configuration, or to the reason why it cannot run.

Pure. Loading and its checks are in ``load``; what vLLM and NCCL do with a configuration is in ``rules``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runner.errors import Infeasible, UsageError
from runner.schema.base import Scalar
from runner.schema.launch import LaunchConfig
from runner.space.collectives import canonical
from runner.space.constraints import Constraint
from runner.space.equivalence import equivalent_key
from runner.space.knobs import Knob, Params, is_active
from runner.space.names import value_of_name
from runner.space.presets import calculate_presets
from runner.space.rules import broken_rules
from runner.space.settings import State, Target, assign, nested
from runner.space.surroundings import Reading, Surroundings

COUNT_LIMIT = 20_000
"""Combinations up to which ``Space.count`` tries each one; it takes about 0.1 ms each."""


@dataclass(frozen=True)
class RuledOut:
    """A label that was taken out at load, because nothing else in the space could make it run."""

    knob: str
    label: str
    reason: str


@dataclass(frozen=True)
class Space:
    """What may vary, on top of what an experiment fixes.

    Attributes:
        knobs: In dependency order: parents before the knobs that are conditional on them.
        base: Settings of the experiment, defaults and pinned ones.
        warnings: What a user should know before starting, one sentence each.
        ruled_out: Labels that the model or the node rules out whatever else is chosen.
        content: The knobs and constraints as written, includes resolved, JSON-able; for the study's description.
    """

    name: str
    model: str
    knobs: tuple[Knob, ...]
    base: Mapping[Target, Any]
    constraints: tuple[Constraint, ...]
    around: Surroundings
    warnings: tuple[str, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _by_name: dict[str, Knob] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_name.clear()
        self._by_name.update((knob.name, knob) for knob in self.knobs)

    def is_active(self, knob: Knob, params: Params) -> bool:
        """Whether ``knob`` exists under what ``params`` already chose."""
        return is_active(knob, params, self._by_name)

    def baseline(self) -> LaunchConfig:
        """Every knob unset: the experiment's own configuration. Raises ``Infeasible`` as ``resolve`` does."""
        return self.resolve({})

    def resolve(self, params: Params) -> LaunchConfig:
        """The configuration that ``params`` choose.

        Args:
            params: Knob -> label, or number for a range; unset knobs absent (or named by their unset label).

        Raises:
            Infeasible: It cannot run; the message is the reason.
            UsageError: ``params`` do not fit this space.
        """
        config, reasons = self.judged(params)
        if config is None or reasons:
            raise Infeasible(reasons[0])
        return config

    def judged(self, params: Params) -> tuple[LaunchConfig | None, tuple[str, ...]]:
        """The configuration, where it can be written down at all, and every reason why it cannot run."""
        state = self.state(params)
        try:
            self._calculate_presets(state)
        except Infeasible as error:
            return None, (error.message,)
        self._add_draft(state)
        reading = Reading(state, self.around)
        flags, structured, env = nested(state)
        gpus = reading.world if self.around.device == "gpu" else 0
        config = LaunchConfig(model=self.model, flags=flags, structured=structured, env=env, gpus=gpus)
        # The baseline is what it is: constraints say what may be proposed beside it.
        asked = self.constraints if params else ()
        broken = (constraint.broken(self.values(state, params)) for constraint in asked)
        return config, (*broken_rules(reading), *filter(None, broken))

    def state(self, params: Params) -> State:
        """Settings after ``params``, presets not yet calculated. Raises ``UsageError`` for params that do not fit."""
        chosen = self._checked(params)
        state: State = dict(self.base)
        for name, value in chosen.items():
            for target, setting in self._by_name[name].settings(value).items():
                spelt = canonical(target[1], setting) if target[0] == "env" and isinstance(setting, str) else setting
                assign(state, target, spelt)
        return state

    def _checked(self, params: Params) -> dict[str, Scalar]:
        unknown = [name for name in params if name not in self._by_name]
        if unknown:
            raise UsageError(f"no knob `{unknown[0]}`", remedy=f"knobs: {', '.join(self._by_name)}")
        chosen = {k.name: params[k.name] for k in self.knobs if params.get(k.name, k.unset_label) != k.unset_label}
        for knob in self.knobs:
            active = self.is_active(knob, chosen)
            if knob.name in chosen and not active:
                raise UsageError(f"`{knob.name}` does not exist under these choices", remedy=f"it needs {knob.when}")
            if knob.required and active and knob.name not in chosen:
                raise UsageError(f"`{knob.name}` is required here", remedy=f"choose one of {knob.labels or knob.range}")
        return chosen

    def completed(self, params: Params) -> dict[str, Scalar]:
        """``params``, with the first value for every required knob that they leave open."""
        chosen = dict(params)
        for knob in self.knobs:
            if knob.required and knob.name not in chosen and self.is_active(knob, chosen):
                chosen[knob.name] = knob.labels[0] if knob.range is None else knob.range.low
        return chosen

    def _calculate_presets(self, state: State) -> None:
        calculate_presets(state, lambda: Reading(state, self.around))

    def _add_draft(self, state: State) -> None:
        """A speculative method that needs a draft model takes the experiment's, unless it names one."""
        method = state.get(("json", "speculative-config", "method"))
        target = ("json", "speculative-config", "model")
        if isinstance(method, str) and method in self.around.drafts and target not in state:
            state[target] = self.around.drafts[method].model

    def values(self, state: Mapping[Target, Any], params: Params) -> Callable[[str], Any]:
        """Name in a constraint -> its value under ``state``; raises ``Unknown``."""
        reading = Reading(state, self.around)
        return lambda name: value_of_name(name, reading, self._by_name, params)

    def size(self) -> int | None:
        """Combinations of choices, conditions respected, rules not asked; None with a continuous range."""
        if any(knob.values is None for knob in self.knobs):
            return None
        parents = {name for knob in self.knobs for name in knob.when}
        branching = [knob for knob in self.knobs if knob.name in parents]
        leaves = [knob for knob in self.knobs if knob.name not in parents]
        return sum(
            math.prod(len(leaf.values or ()) + (not leaf.required) for leaf in leaves if self.is_active(leaf, params))
            for params in self._combinations(tuple(branching), {})
        )

    def combinations(self) -> Iterator[dict[str, Scalar]]:
        """Every choice of params in turn, the baseline's first, rules not asked.

        Raises:
            ValueError: A range is continuous.
        """
        return self._combinations(self.knobs, {})

    def _combinations(self, knobs: tuple[Knob, ...], params: dict[str, Scalar]) -> Iterator[dict[str, Scalar]]:
        if not knobs:
            yield params
            return
        knob, rest = knobs[0], knobs[1:]
        active = self.is_active(knob, params)
        if not (active and knob.required):
            yield from self._combinations(rest, params)
        if not active:
            return
        values = knob.values
        if values is None:
            raise ValueError(f"`{knob.name}` is a continuous range")
        for value in values:
            yield from self._combinations(rest, {**params, knob.name: value})

    def count(self) -> int | None:
        """Distinct configurations that can run; None when they are too many to try each, or not countable."""
        size = self.size()
        if size is None or size > COUNT_LIMIT:
            return None
        keys = set()
        for params in self.combinations():
            config, reasons = self.judged(params)
            if config is not None and not reasons:
                keys.add(self.key(config))
        return len(keys)

    def key(self, config: LaunchConfig) -> str:
        """Equal for configurations that vLLM's rules already tell to be the same."""
        return equivalent_key(config, self.around.version, self.around.facts)

    def without(self, gone: tuple[RuledOut, ...]) -> "Space":
        """This space with labels taken out, and what cannot be reached without them."""
        names = {(item.knob, item.label) for item in gone}
        knobs = [
            replace(knob, options=tuple(option for option in knob.options if (knob.name, option.label) not in names))
            for knob in self.knobs
        ]
        starved = [k for k in knobs if k.required and k.range is None and not k.options and len(k.when) == 1]
        lost = tuple(
            RuledOut(parent, label, f"`{knob.name}`, which it requires, has no value left")
            for knob in starved
            for parent, labels in knob.when.items()
            for label in labels
        )
        space = replace(self, knobs=_reachable(knobs), ruled_out=(*self.ruled_out, *gone), _by_name={})
        return space.without(lost) if lost else space


def _reachable(knobs: list[Knob]) -> tuple[Knob, ...]:
    """Knobs that still have a value and a way to exist, conditions trimmed to labels that are there."""
    alive: dict[str, Knob] = {}
    for knob in knobs:  # parents come first
        when = {
            parent: tuple(label for label in labels if parent in alive and alive[parent].takes(label))
            for parent, labels in knob.when.items()
        }
        # A parent without choices left is always at its unset.
        always = {
            parent for parent, labels in knob.when.items() if parent not in alive and _unset_of(parent, knobs) in labels
        }
        when = {parent: labels for parent, labels in when.items() if parent not in always}
        if (knob.options or knob.range is not None) and all(when.values()):
            alive[knob.name] = replace(knob, when=when)
    return tuple(alive.values())


def _unset_of(name: str, knobs: list[Knob]) -> str:
    return next(knob.unset_label for knob in knobs if knob.name == name)
