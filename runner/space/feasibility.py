"""What the model, the node and the constraints rule out for good, found once when a space is loaded.

A verdict of a rule depends only on what the rule looked at, and ``Reading`` remembers that. So when a label breaks a
rule and nothing the rule looked at can be set by another knob, the label can never run: it leaves the space, with the
reason. Everything else is judged when it is proposed.
"""

from collections.abc import Iterator

from runner.errors import Infeasible
from runner.schema.base import Scalar
from runner.space.defaults import defaults, same_value
from runner.space.knobs import Knob
from runner.space.names import value_of_name
from runner.space.presets import calculate_presets
from runner.space.rules import RULES
from runner.space.settings import Target, overlap
from runner.space.space import RuledOut, Space
from runner.space.surroundings import Reading


def nothing_can_run(space: Space) -> str | None:
    """Why the experiment's own settings break a rule that no knob can mend; None when none does."""
    movable = {target for knob in space.knobs for target in knob.targets} | {("knob", k.name) for k in space.knobs}
    return next((reason for reason, read in _verdicts(space, {}) if not _touches(read, movable)), None)


def without_hopeless(space: Space) -> Space:
    """``space`` without the labels that cannot run whatever else is chosen; those kept to fail on purpose stay."""
    for name in [knob.name for knob in space.knobs]:  # parents first: what only a lost label leads to goes with it
        for knob in [knob for knob in space.knobs if knob.name == name]:
            gone = [
                RuledOut(name, option.label, reason)
                for option in knob.options
                if option.keep_failing is None
                for reason in _hopeless(space, knob, option.label)
            ]
            space = space.without(tuple(gone)) if gone else space
    return space


def check_constraints(space: Space) -> None:
    """Evaluates each constraint with each label and with both ends of each range.

    Raises:
        UsageError: One of them cannot be evaluated.
    """
    for knob in space.knobs:
        _, needed = activation(space, knob)
        for value in knob.labels if knob.range is None else (knob.range.low, knob.range.high):
            params = space.completed({**needed, knob.name: value})
            for constraint in space.constraints:
                constraint.check(space.values(space.state(params), params))


def same_as_unset(space: Space) -> tuple[RuledOut, ...]:
    """Labels that set what holds anyway, so that trying them would try the same configuration twice."""
    return tuple(
        RuledOut(knob.name, option.label, "the same as leaving it unset")
        for knob in space.knobs
        for option in knob.options
        if option.keep_failing is None
        and not knob.required
        and all(_holds_anyway(space, target, value) for target, value in option.settings.items())
        and not any(overlap(t, o) for t in option.settings for k in space.knobs if k is not knob for o in k.targets)
        and not any(_tells_apart(knob, option.label, other) for other in space.knobs)
    )


def _holds_anyway(space: Space, target: Target, value: object) -> bool:
    return same_value(space.base.get(target, defaults(space.around.version).get(target)), value)


def _tells_apart(knob: Knob, label: str, other: Knob) -> bool:
    """Whether ``other`` exists with the label but not without a choice, or the other way round."""
    wanted = other.when.get(knob.name)
    return wanted is not None and (label in wanted) != (knob.unset_label in wanted)


def _hopeless(space: Space, knob: Knob, label: str) -> Iterator[str]:
    """At most one reason."""
    fixed, params = activation(space, knob)
    others = [k for k in space.knobs if k.name != knob.name and k.name not in fixed]
    movable = {target for other in others for target in other.targets} | {("knob", other.name) for other in others}
    for reason, read in _verdicts(space, {**params, knob.name: label}):
        if not _touches(read, movable):
            yield reason
            return


def activation(space: Space, knob: Knob) -> tuple[set[str], dict[str, Scalar]]:
    """Choices that make ``knob`` exist, and the parents among them that have no alternative."""
    by_name = {k.name: k for k in space.knobs}
    fixed: set[str] = set()
    params: dict[str, Scalar] = {}
    for parent, labels in knob.when.items():
        above, needed = activation(space, by_name[parent])
        fixed |= above | ({parent} if len(labels) == 1 else set())
        params.update(needed)
        chosen = by_name[parent].chosen(labels[0])
        if by_name[parent].unset_label not in labels and chosen is not None:
            params[parent] = chosen
    return fixed, params


def _touches(read: set[Target], movable: set[Target]) -> bool:
    return any(overlap(one, other) for one in read for other in movable)


def _verdicts(space: Space, params: dict[str, Scalar]) -> Iterator[tuple[str, set[Target]]]:
    """Each broken rule, preset or constraint under ``params``, with everything its verdict depends on."""
    by_name = {knob.name: knob for knob in space.knobs}
    state = dict(space.base)
    for name, value in params.items():
        for target, setting in by_name[name].settings(value).items():
            state[target] = setting
    presets = Reading(state, space.around)
    try:
        calculate_presets(state, lambda: presets)
    except Infeasible as error:
        yield error.message, presets.read
        return
    for rule in RULES:
        if rule.since <= space.around.version <= rule.until:
            reading = Reading(state, space.around)
            reason = rule.check(reading)
            if reason is not None:
                yield reason, reading.read
    for constraint in space.constraints:
        reading = Reading(state, space.around)
        reason = constraint.broken(lambda name, seen=reading: value_of_name(name, seen, by_name, params))  # type: ignore[misc]
        if reason is not None:
            yield reason, reading.read
