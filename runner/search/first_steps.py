"""The first proposals of a study: the best configuration so far with one knob changed, each knob in its turn. Pure.

A dozen server starts cannot fill a space of ten knobs at random. One change at a time says what each knob is worth,
which is also what a reader wants to know, and what helped is kept on the way; the sampler then learns from all of it.
"""

import math
from collections.abc import Collection, Iterator

from runner.schema.base import Scalar
from runner.schema.space import FloatRange, IntRange
from runner.space import Knob, Params, Space

SHARE = 2
"""At most one in this many of the searched trials is a first step; the rest is the sampler's."""


def first_steps(space: Space, best: Params, tried: Collection[tuple[str, Scalar]]) -> Iterator[dict[str, Scalar]]:
    """Points that differ from ``best`` in one knob, and in what that knob needs and brings along.

    Knobs take turns in the order of the file, first with their first value each, then with their second: an author
    writes first what matters most.

    Args:
        space: What may vary.
        best: The best configuration so far; the baseline's is empty.
        tried: Knob and value of every trial before: they are known, alone or in company.
    """
    by_name = {knob.name: knob for knob in space.knobs}
    values = {knob.name: _values(knob) for knob in space.knobs}
    for turn in range(max((len(found) for found in values.values()), default=0)):
        for knob in space.knobs:
            if turn < len(values[knob.name]) and (knob.name, values[knob.name][turn]) not in tried:
                changed = {**best, **_parents(knob, by_name, best), knob.name: values[knob.name][turn]}
                yield _consistent(changed, space, values)


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


def _parents(knob: Knob, by_name: dict[str, Knob], best: Params) -> dict[str, Scalar]:
    """What must be chosen for ``knob`` to exist: of each parent the first label that its condition allows."""
    params: dict[str, Scalar] = {}
    for name, labels in knob.when.items():
        parent = by_name[name]
        params |= _parents(parent, by_name, best)
        if best.get(name, parent.unset_label) not in labels:
            params[name] = labels[0]
    return params


def _consistent(params: Params, space: Space, values: dict[str, tuple[Scalar, ...]]) -> dict[str, Scalar]:
    """``params`` without knobs that no longer exist, and with the first value of every knob that is now required."""
    kept: dict[str, Scalar] = {}
    for knob in space.knobs:
        if not space.is_active(knob, kept):
            continue
        if knob.name in params and params[knob.name] != knob.unset_label:
            kept[knob.name] = params[knob.name]
        elif knob.required:
            kept[knob.name] = values[knob.name][0]
    return kept
