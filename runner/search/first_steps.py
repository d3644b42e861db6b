"""The first proposals of a study: one knob at a time away from the baseline. Pure.

A dozen server starts cannot fill a space of ten knobs at random, but they can say what each knob is worth by itself,
which is also what a reader wants to know; the sampler then learns from them how to combine.
"""

import math
from collections.abc import Iterator

from runner.schema.base import Scalar
from runner.schema.space import FloatRange, IntRange
from runner.space import Knob, Params, Space

SHARE = 2
"""At most one in this many of the searched trials is a first step; the rest is the sampler's."""


def first_steps(space: Space) -> Iterator[dict[str, Scalar]]:
    """Points that set one knob, and what that knob's existence and company require.

    Knobs take turns in the order of the file, first with their first value each, then with their second: an author
    writes first what matters most.
    """
    by_name = {knob.name: knob for knob in space.knobs}
    values = {knob.name: _values(knob) for knob in space.knobs}
    for turn in range(max((len(found) for found in values.values()), default=0)):
        for knob in space.knobs:
            if turn < len(values[knob.name]):
                params = _parents(knob, by_name) | {knob.name: values[knob.name][turn]}
                yield _completed(params, space, values)


def _values(knob: Knob) -> tuple[Scalar, ...]:
    """A knob's labels; of a range its middle, then its ends."""
    limits = knob.range
    if limits is None:
        return tuple(label for label in knob.labels if label not in knob.keep_failing)
    return (_middle(limits), limits.low, limits.high)


def _middle(limits: IntRange | FloatRange) -> int | float:
    middle = math.sqrt(limits.low * limits.high) if limits.log else (limits.low + limits.high) / 2
    if limits.step is not None:
        middle = limits.low + round((middle - limits.low) / limits.step) * limits.step
    return round(middle) if isinstance(limits, IntRange) else middle


def _parents(knob: Knob, by_name: dict[str, Knob]) -> dict[str, Scalar]:
    """What must be chosen for ``knob`` to exist: of each parent the first label that its condition allows."""
    params: dict[str, Scalar] = {}
    for name, labels in knob.when.items():
        parent = by_name[name]
        params |= _parents(parent, by_name)
        if parent.unset_label not in labels:
            params[name] = labels[0]
    return params


def _completed(params: Params, space: Space, values: dict[str, tuple[Scalar, ...]]) -> dict[str, Scalar]:
    """``params`` with the first value of every knob that these choices require."""
    complete = dict(params)
    for knob in space.knobs:
        if knob.required and knob.name not in complete and space.is_active(knob, complete):
            complete[knob.name] = values[knob.name][0]
    return complete
