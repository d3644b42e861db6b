"""Knobs as Optuna's parameters, and back.

A knob of choices is one categorical parameter, unset being ``None``. A range is a parameter of its own and, unless it
is required, a second one that says whether it is set: a number cannot stand for "unset".
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from runner.schema.base import Scalar
from runner.schema.launch import LaunchConfig
from runner.schema.space import FloatRange, IntRange

Params = Mapping[str, Scalar]
"""Knob -> label of the choice, or the number of a range; an unset knob is absent."""


class SearchedKnob(Protocol):
    """What the search needs of a knob."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def range(self) -> IntRange | FloatRange | None: ...

    @property
    def required(self) -> bool: ...

    @property
    def keep_failing(self) -> Mapping[str, str]: ...


class SearchedSpace(Protocol):
    """What the search needs of a space. ``knobs`` stand in dependency order."""

    @property
    def knobs(self) -> tuple[SearchedKnob, ...]: ...

    def is_active(self, knob: Any, params: Params, /) -> bool: ...

    def resolve(self, params: Params, /) -> LaunchConfig: ...


def switch(knob: SearchedKnob) -> str:
    """The parameter that says whether an optional range is set."""
    return f"{knob.name} is set"


def suggest(trial: optuna.Trial, space: SearchedSpace) -> dict[str, Scalar]:
    """Asks ``trial`` for a value of every active knob."""
    params: dict[str, Scalar] = {}
    for knob in space.knobs:
        if not space.is_active(knob, params):
            continue
        value = _suggest_one(trial, knob)
        if value is not None:
            params[knob.name] = value
    return params


def _suggest_one(trial: optuna.Trial, knob: SearchedKnob) -> Scalar | None:
    limits = knob.range
    if limits is None:
        return trial.suggest_categorical(knob.name, _choices(knob))
    if not knob.required and not trial.suggest_categorical(switch(knob), [False, True]):
        return None
    if isinstance(limits, IntRange):
        return trial.suggest_int(knob.name, limits.low, limits.high, step=limits.step, log=limits.log)
    return trial.suggest_float(knob.name, limits.low, limits.high, step=limits.step, log=limits.log)


def encode(params: Params, space: SearchedSpace) -> tuple[dict[str, Scalar | None], dict[str, BaseDistribution]] | None:
    """Optuna's values and distributions of ``params``; None when they do not fit the space (a fork of an edited one).

    A number off its range's step is taken in all the same: Optuna only asks that it lies inside.
    """
    values: dict[str, Scalar | None] = {}
    distributions: dict[str, BaseDistribution] = {}
    active = [knob for knob in space.knobs if space.is_active(knob, params)]
    for knob in active:
        value = params.get(knob.name)
        if knob.range is not None and not knob.required:
            values[switch(knob)] = value is not None
            distributions[switch(knob)] = CategoricalDistribution([False, True])
        if knob.range is None or value is not None:
            values[knob.name] = value
            distributions[knob.name] = _distribution(knob)
    fits = set(params) <= {knob.name for knob in active} and all(
        _contains(distributions[name], value) for name, value in values.items()
    )
    complete = all(knob.name in params for knob in active if knob.required)
    return (values, distributions) if fits and complete else None


def points(space: SearchedSpace) -> Iterator[dict[str, Scalar]] | None:
    """Every point of a space, one after the other; None when a knob has uncountably many values."""
    values = {knob.name: _values(knob) for knob in space.knobs}
    if any(found is None for found in values.values()):
        return None
    return _walk(space, {name: found for name, found in values.items() if found is not None}, 0, {})


def _walk(
    space: SearchedSpace, values: Mapping[str, "range | tuple[Scalar, ...]"], depth: int, params: dict[str, Scalar]
) -> Iterator[dict[str, Scalar]]:
    if depth == len(space.knobs):
        yield params
        return
    knob = space.knobs[depth]
    active = space.is_active(knob, params)
    if not active or not knob.required:
        yield from _walk(space, values, depth + 1, params)
    if active:
        for value in values[knob.name]:
            yield from _walk(space, values, depth + 1, {**params, knob.name: value})


def _values(knob: SearchedKnob) -> "range | tuple[Scalar, ...] | None":
    limits = knob.range
    if limits is None:
        return knob.labels
    if isinstance(limits, IntRange):
        return range(limits.low, limits.high + 1, limits.step)
    if limits.step is None:
        return None
    step = limits.step
    steps = itertools.takewhile(lambda i: limits.low + i * step <= limits.high + step * 1e-9, itertools.count())
    return tuple(round(limits.low + i * step, 12) for i in steps)


def _choices(knob: SearchedKnob) -> list[str | None]:
    return list(knob.labels) if knob.required else [None, *knob.labels]


def _distribution(knob: SearchedKnob) -> BaseDistribution:
    limits = knob.range
    if limits is None:
        return CategoricalDistribution(_choices(knob))
    if isinstance(limits, IntRange):
        return IntDistribution(limits.low, limits.high, step=limits.step, log=limits.log)
    return FloatDistribution(limits.low, limits.high, step=limits.step, log=limits.log)


def _contains(distribution: BaseDistribution, value: Scalar | None) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    number = isinstance(value, int | float) and not isinstance(value, bool)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return number and isinstance(value, int | float) and distribution.low <= value <= distribution.high
