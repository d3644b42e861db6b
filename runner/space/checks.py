"""What an experiment and the knobs of a space may not say, each alone and together. Found before anything starts."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.errors import UsageError
from runner.schema.base import Scalar
from runner.schema.experiment import Experiment, Settings
from runner.schema.space import FloatRange, IntRange
from runner.space.collectives import canonical
from runner.space.document import Document, Where
from runner.space.environment import check_protection
from runner.space.knobs import Knob, as_value
from runner.space.rules import contradiction
from runner.space.settings import State, Target, assign, flattened, overlap, spoken
from runner.space.surroundings import PROTECTIVE, Machine
from runner.space.values import Complaint, check_setting
from runner.space.variables import misspelt

_PARTS = ("defaults", "pinned")
_TRIED_OF_A_RANGE = 1024


def base_settings(experiment: Experiment, machine: Machine) -> State:
    """Defaults and pinned settings of an experiment as one state, checked.

    Raises:
        UsageError: A setting in a wrong form or with an impossible value, or both pinned and a default.
    """
    for place, problem, remedy in _wrong_settings(experiment, machine):
        where = ".".join(map(str, place))
        raise UsageError(f"experiment `{experiment.name}`, {where}: {problem}", remedy=remedy)
    state: State = {}
    for part in _PARTS:
        for target, value, _ in _settings(experiment, part):
            assign(state, target, canonical(target[1], value) if target[0] == "env" else value)
    check_protection({target[1]: value for target, value in state.items() if target[0] == "env"}, machine.protected)
    return state


def check_experiment(experiment: Experiment, document: Document) -> None:
    """Refuses what ``base_settings`` would, as far as the experiment's own file tells.

    Raises:
        UsageError: At the line and column where it is written.
    """
    for place, problem, remedy in _wrong_settings(experiment, Machine()):
        raise document.error(place, problem, remedy)


def _wrong_settings(experiment: Experiment, machine: Machine) -> Iterator[tuple[Where, str, str]]:
    """Place, problem and remedy of each setting that can never be right."""
    parts: dict[str, list[tuple[Target, Any, Where]]] = {}
    for part in _PARTS:
        try:
            parts[part] = list(_settings(experiment, part))
        except ValueError as error:
            yield (part,), str(error), ""
            return
    for part, settings in parts.items():
        for target, value, place in settings:
            complaint = _complaint(target, value, experiment, machine)
            if complaint is not None:
                yield place, *complaint
            elif part == "defaults" and any(overlap(target, fixed) for fixed, _, _ in parts["pinned"]):
                yield place, f"{spoken(target)} is both a default and pinned", "keep one of the two"


def _settings(experiment: Experiment, part: str) -> Iterator[tuple[Target, Any, Where]]:
    """Target, value and place of each setting. Raises ValueError for one in a wrong form."""
    settings: Settings = getattr(experiment, part)
    for target, value, place in flattened(settings.flags, settings.structured, settings.env):
        yield target, value, (part, *place)


def check_knobs(knobs: tuple[Knob, ...], experiment: Experiment, machine: Machine) -> None:
    """Refuses values that can never be right, knobs over pinned settings, and knobs that contradict each other.

    Raises:
        UsageError: At the line and column where it is written.
    """
    for knob in knobs:
        _check_knob(knob, experiment, machine)
    _check_pinned(knobs, experiment)
    _check_disjoint(knobs)


def _check_knob(knob: Knob, experiment: Experiment, machine: Machine) -> None:
    """Values that can never be right are refused, unless they are kept to fail on purpose."""
    for option in knob.options:
        for target, value in option.settings.items():
            place = option.places[target]
            _check_protection_by(knob, place, target, value, machine)
            complaint = _complaint(target, value, experiment, machine)
            if complaint is not None and option.keep_failing is None:
                raise knob.document.error(place, *complaint)
        reason = contradiction(option.settings) if option.keep_failing is None else None
        if reason is not None:
            place = (*knob.where, "choices", option.label)
            raise knob.document.error(place, f"`{option.label}` contradicts itself: {reason}", "leave one of them out")
    if knob.range is not None and knob.target is not None:
        _check_range(knob, knob.target, experiment, machine)


def _check_range(knob: Knob, target: Target, experiment: Experiment, machine: Machine) -> None:
    """The values that the search may propose, not the two ends alone: a grammar may refuse what lies between.

    Of a long range the first values and the last stand for all: bounds break at an end, steps and powers of two
    beside the first.
    """
    limits = knob.range
    assert limits is not None
    listed = knob.values or (limits.low, limits.high)
    tried = listed if len(listed) <= _TRIED_OF_A_RANGE else (*listed[:_TRIED_OF_A_RANGE], listed[-1])
    right: list[Scalar] = []
    wrong: list[Complaint] = []
    for number in tried:
        value = as_value(target, number)
        _check_protection_by(knob, knob.where, target, value, machine)
        complaint = _complaint(target, value, experiment, machine)
        if complaint is None:
            right.append(number)
        else:
            wrong.append(complaint)
    if wrong:
        problem, remedy = wrong[0]
        raise knob.document.error(knob.where, problem, "; ".join([remedy, *_narrower(right, limits)]))


def _narrower(right: Sequence[Scalar], limits: IntRange | FloatRange) -> Iterator[str]:
    """How a range with wrong values in it is written without them, when both its ends are right."""
    if not {limits.low, limits.high} <= set(right):
        return
    step = math.gcd(*(int(value) - int(limits.low) for value in right))
    stepped = len(right) > 2 and len(right) == len(range(int(limits.low), int(limits.high) + 1, step))
    yield f"use `step: {step}`, or `choices`" if stepped else "use `choices`"


def _complaint(target: Target, value: Any, experiment: Experiment, machine: Machine) -> Complaint | None:
    """What is wrong with ``target`` set to ``value``, whatever else is set; None when nothing is."""
    unknown = target[0] == "env" and target[1] not in experiment.allow_env and misspelt(target[1])
    return check_setting(target, value) or unknown or _unknown_flag(target, value, experiment, machine)


def _check_protection_by(knob: Knob, place: Where, target: Target, value: Any, machine: Machine) -> None:
    if target[0] == "env" and value != machine.protected.get(target[1], value):
        remedy = "this host sets it to protect itself and others; take the choice out"
        raise knob.document.error(place, f"{target[1]}={value} contradicts {target[1]}={PROTECTIVE[target[1]]}", remedy)


def _unknown_flag(target: Target, value: Any, experiment: Experiment, machine: Machine) -> Complaint | None:
    known = machine.known_flags
    if known is None or target[0] == "env":
        return None
    if target[0] == "flag" and not isinstance(value, bool) and {target[1], f"no-{target[1]}"} <= known:
        return f"`{value}` is no value of --{target[1]}", "true or false, without quotes"
    name = f"no-{target[1]}" if value is False and target[0] == "flag" else target[1]
    if name in known:
        return None
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean `{close[0]}`? " if close else ""
    if experiment.engine.kind == "simulated":
        return f"the simulated engine has no flag --{name}", f"{meant}it takes those of vLLM that change a launch"
    return f"the installed vLLM has no flag --{name}", f"{meant}`vllm serve --help=all` lists them"


def _check_pinned(knobs: tuple[Knob, ...], experiment: Experiment) -> None:
    pinned = [target for target, _, _ in _settings(experiment, "pinned")]
    for knob in knobs:
        for target in sorted(knob.targets):
            for fixed in pinned:
                if overlap(target, fixed):
                    raise knob.document.error(
                        knob.where,
                        f"`{knob.name}` would change {spoken(target)}, which experiment `{experiment.name}` pins",
                        "take the knob out, or move the setting from `pinned` to `defaults`",
                        at_key=True,
                    )


def _check_disjoint(knobs: tuple[Knob, ...]) -> None:
    """Two knobs that can set the same thing to different values at the same time contradict each other."""
    by_name = {knob.name: knob for knob in knobs}
    for position, knob in enumerate(knobs):
        for other in knobs[:position]:
            shared = [(a, b) for a in knob.targets for b in other.targets if overlap(a, b)]
            for target, theirs in sorted(shared):
                if not _agree(knob, target, other, theirs) and _may_meet(knob, target, other, theirs, by_name):
                    raise knob.document.error(
                        knob.where,
                        f"`{knob.name}` and `{other.name}` both set {spoken(target)}",
                        "separate them by `when`, so that never both do",
                        at_key=True,
                    )


def _may_meet(knob: Knob, target: Target, other: Knob, theirs: Target, knobs: Mapping[str, Knob]) -> bool:
    """Whether some choice has both knobs active, and each setting its target."""
    conditions = [*_conditions(knob, knobs), *_conditions(other, knobs)]
    conditions += [_setting_labels(knob, target), _setting_labels(other, theirs)]
    allowed: dict[str, set[str]] = {}
    for name, labels in conditions:
        if labels is not None:
            allowed[name] = allowed[name] & set(labels) if name in allowed else set(labels)
    return all(allowed.values())


def _agree(knob: Knob, target: Target, other: Knob, theirs: Target) -> bool:
    """Whether both only ever set the same target to the same value."""
    options = (*knob.options, *other.options)
    values = [option.settings[target] for option in options if target in option.settings]
    ranged = knob.range is not None or other.range is not None
    return target == theirs and not ranged and all(value == values[0] for value in values)


def _conditions(knob: Knob, knobs: Mapping[str, Knob]) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    for parent, labels in knob.when.items():
        yield parent, labels
        yield from _conditions(knobs[parent], knobs)


def _setting_labels(knob: Knob, target: Target) -> tuple[str, tuple[str, ...] | None]:
    if knob.range is not None:
        return knob.name, None
    return knob.name, tuple(option.label for option in knob.options if target in option.settings)
