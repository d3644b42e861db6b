"""Knobs as Optuna's parameters, and back.

A knob of choices is one categorical parameter, unset being ``None``. A range is a parameter of its own and, unless it
is required, a second one that says whether it is set: a number cannot stand for "unset".
"""

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from runner.errors import UsageError
from runner.schema.base import Scalar
from runner.schema.space import IntRange
from runner.space import Knob, Params, Space
from runner.space.knobs import label_of


def switch(knob: Knob) -> str:
    """The parameter that says whether an optional range is set."""
    return f"{knob.name} is set"


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Scalar]:
    """Asks ``trial`` for a value of every active knob."""
    params: dict[str, Scalar] = {}
    for knob in space.knobs:
        if not space.is_active(knob, params):
            continue
        value = _suggest_one(trial, knob)
        if value is not None:
            params[knob.name] = value
    return params


def _suggest_one(trial: optuna.Trial, knob: Knob) -> Scalar | None:
    limits = knob.range
    if limits is None:
        return trial.suggest_categorical(knob.name, _choices(knob))
    if not knob.required and not trial.suggest_categorical(switch(knob), [False, True]):
        return None
    if isinstance(limits, IntRange):
        return trial.suggest_int(knob.name, limits.low, limits.high, step=limits.step, log=limits.log)
    return trial.suggest_float(knob.name, limits.low, limits.high, step=limits.step, log=limits.log)


def encode(params: Params, space: Space) -> tuple[dict[str, Scalar | None], dict[str, BaseDistribution]] | None:
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


def as_params(written: Params, space: Space) -> dict[str, Scalar]:
    """A configuration as somebody writes it, ``max_seqs: 16`` for the label ``16``.

    Raises:
        UsageError: It is no point of the space.
    """
    ranges = {knob.name for knob in space.knobs if knob.range is not None}
    params = {name: value if name in ranges else label_of(value) for name, value in written.items()}
    if encode(params, space) is None:
        knobs = ", ".join(f"{knob.name}: {'|'.join(knob.labels) or knob.range}" for knob in space.knobs)
        raise UsageError(f"`search.try_first` has {params}, which is no point of the space", remedy=f"Knobs: {knobs}.")
    return params


def _choices(knob: Knob) -> list[str | None]:
    return list(knob.labels) if knob.required else [None, *knob.labels]


def _distribution(knob: Knob) -> BaseDistribution:
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
