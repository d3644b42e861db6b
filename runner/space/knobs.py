"""Knobs as the search sees them: labels or a range, conditions, and what each label sets.

Knows the shape of the space; knows nothing of vLLM, NCCL or the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.errors import UsageError
from runner.schema.base import Scalar
from runner.schema.space import Bundle, Choice, FloatRange, IntRange, KnobSpec, Preset
from runner.space.document import Document, Where
from runner.space.settings import Target, env_target, field_target, flag_target, flattened, overlap, spoken

Params = Mapping[str, Scalar]
"""Knob -> label of the choice, or the number for a range. An unset knob is absent."""

UNSET = "unset"


@dataclass(frozen=True)
class Option:
    """One label of a knob, what it sets, and where each value is written (for messages)."""

    label: str
    settings: dict[Target, Any]
    places: dict[Target, Where]
    keep_failing: str | None = None


@dataclass(frozen=True)
class Knob:
    """One dimension of the space.

    Attributes:
        options: The choices; empty for a range.
        range: The range; None for choices.
        required: A value is always chosen while the knob is active.
        when: Knob -> labels under which this knob exists (``unset_label`` of that knob among them).
        target: Where a single value goes; None for bundles.
        unset_label: What leaving the knob unset is called: ``unset``, or the name of the bundle's empty choice.
        document: The file that defines it, and ``where`` in there.
    """

    name: str
    options: tuple[Option, ...]
    range: IntRange | FloatRange | None
    required: bool
    when: dict[str, tuple[str, ...]]
    target: Target | None
    unset_label: str
    document: Document = field(repr=False, compare=False)
    where: Where = field(repr=False, compare=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """The choices' labels, unset not among them; empty for a range."""
        return tuple(option.label for option in self.options)

    @property
    def values(self) -> Sequence[Scalar] | None:
        """Everything that can be chosen, unset not among it; None for a continuous range."""
        if self.range is None:
            return self.labels
        if isinstance(self.range, IntRange):
            return range(self.range.low, self.range.high + 1, self.range.step)
        if self.range.step is None:
            return None
        steps = math.floor((self.range.high - self.range.low) / self.range.step + 1e-9)
        return tuple(round(self.range.low + step * self.range.step, 10) for step in range(steps + 1))

    @property
    def keep_failing(self) -> dict[str, str]:
        """Label -> why it is kept although it fails."""
        return {option.label: option.keep_failing for option in self.options if option.keep_failing}

    @property
    def targets(self) -> frozenset[Target]:
        """Everything any of its choices may set."""
        if self.target is not None:
            return frozenset({self.target})
        return frozenset(target for option in self.options for target in option.settings)

    def takes(self, label: str) -> bool:
        """Whether ``label`` is one of its values, unset among them."""
        return label == self.unset_label or self.chosen(label) is not None

    def chosen(self, label: str) -> Scalar | None:
        """What is chosen by ``label``: the label itself, of a range the number it spells; None when nothing is."""
        if self.range is None:
            return label if label in self.labels else None
        try:
            number = int(label) if isinstance(self.range, IntRange) else float(label)
            return self._in_range(number)
        except (ValueError, UsageError):
            return None

    def settings(self, chosen: Scalar) -> dict[Target, Any]:
        """What choosing ``chosen`` sets.

        Raises:
            UsageError: No such label, or a number outside the range.
        """
        if self.range is not None and self.target is not None:
            return {self.target: as_value(self.target, self._in_range(chosen))}
        for option in self.options:
            if option.label == chosen:
                return option.settings
        raise self._refusal(chosen, f"its labels: {', '.join((self.unset_label, *self.labels))}")

    def _in_range(self, chosen: Scalar) -> int | float:
        limits = self.range
        assert limits is not None
        number = isinstance(chosen, int | float) and not isinstance(chosen, bool)
        if not number or (isinstance(limits, IntRange) and not isinstance(chosen, int)):
            raise self._refusal(chosen, "it takes a number")
        assert isinstance(chosen, int | float)
        off_step = isinstance(limits, IntRange) and (int(chosen) - limits.low) % limits.step
        if not limits.low <= chosen <= limits.high or off_step:
            raise self._refusal(chosen, f"it takes {limits.low}..{limits.high}, step {limits.step}")
        return chosen

    def _refusal(self, chosen: Scalar, remedy: str) -> UsageError:
        return self.document.error(self.where, f"`{self.name}` has no value `{chosen}`", remedy)


def label_of(value: Scalar) -> str:
    """The label of a plain value. One text for one value: ``true``, ``16``, ``0.9``, ``LL``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def as_value(target: Target, value: Scalar) -> Scalar:
    """The value in the type its target takes: environment variables are text.

    Raises:
        ValueError: A truth value for an environment variable, whose spelling would be a guess.
    """
    if target[0] != "env":
        return value
    if isinstance(value, bool):
        raise ValueError('an environment variable is text: write "1" or "0"')
    return str(value)


def build_knob(name: str, spec: KnobSpec, document: Document) -> Knob:
    """The knob that ``spec``, standing at ``knobs.NAME`` of ``document``, describes.

    Raises:
        UsageError: A target or a value in a wrong form, or a label twice.
    """
    where: Where = ("knobs", name)
    if not name.isidentifier():
        raise document.error(where, f"`{name}` cannot name a knob", "letters, digits and _, no digit first")
    target = _target(spec, document, where)
    bundles = spec.choices if isinstance(spec.choices, dict) else {}
    empty = [label for label, bundle in bundles.items() if bundle.empty]
    if UNSET in bundles:
        remedy = "name the empty choice, e.g. `default: {}`"
        raise document.error((*where, "choices", UNSET), "`unset` is implicit and never written", remedy)
    if len(empty) > 1 or (empty and spec.required):
        why = "several choices are empty" if len(empty) > 1 else "a required knob has no empty choice"
        raise document.error((*where, "choices", empty[-1]), why, "the empty choice is the knob's unset; keep one")
    if target is not None and spec.choices is not None:
        options = _value_options(spec, target, document, where)
    else:
        options = tuple(
            _bundle_option(label, bundle, document, (*where, "choices", label))
            for label, bundle in bundles.items()
            if not bundle.empty
        )
    when = {parent: _labels(wanted) for parent, wanted in spec.when.items()}
    limits = spec.int_range or spec.float_range
    unset = empty[0] if empty else UNSET
    return Knob(name, options, limits, spec.required, when, target, unset, document, where)


def _labels(wanted: Scalar | tuple[Scalar, ...]) -> tuple[str, ...]:
    return tuple(label_of(value) for value in (wanted if isinstance(wanted, tuple) else (wanted,)))


def _target(spec: KnobSpec, document: Document, where: Where) -> Target | None:
    forms = {"flag": (spec.flag, flag_target), "env": (spec.env, env_target), "json": (spec.field, field_target)}
    for key, (written, parse) in forms.items():
        if written is not None:
            try:
                return parse(written)
            except ValueError as error:
                raise document.error((*where, key), str(error)) from None
    return None


def _value_options(spec: KnobSpec, target: Target, document: Document, where: Where) -> tuple[Option, ...]:
    options: dict[str, Option] = {}
    for position, item in enumerate(spec.choices or ()):
        choice = item if isinstance(item, Choice) else Choice(value=item)
        place = (*where, "choices", position)
        try:
            value = Preset(preset=choice.preset) if choice.value is None else as_value(target, choice.value)
        except ValueError as error:
            raise document.error(place, str(error)) from None
        label = choice.label or choice.preset or label_of(choice.value if choice.value is not None else "")
        if label in options or label == UNSET:
            remedy = "`unset` is implicit and never written" if label == UNSET else "give one a `label` or drop it"
            raise document.error(place, f"the label `{label}` is taken", remedy)
        options[label] = Option(label, {target: value}, {target: place}, choice.keep_failing)
    return tuple(options.values())


def _bundle_option(label: str, bundle: Bundle, document: Document, place: Where) -> Option:
    try:
        leaves = list(flattened(bundle.flags, bundle.structured, bundle.env))
    except ValueError as error:
        raise document.error(place, str(error)) from None
    settings: dict[Target, Any] = {}
    places: dict[Target, Where] = {}
    for target, value, below in leaves:
        if target[0] == "json" and target[-1] == "preset":
            target, value = target[:-1], Preset(preset=str(value))
        if any(overlap(target, known) for known in settings):
            raise document.error((*place, *below), f"{spoken(target)} is set twice", "one spelling, one value")
        settings[target], places[target] = value, (*place, *below)
    return Option(label, settings, places, bundle.keep_failing)


def in_dependency_order(knobs: Mapping[str, Knob]) -> tuple[Knob, ...]:
    """Parents before children, else as written.

    Raises:
        UsageError: A condition names an unknown knob or label, or knobs wait for each other.
    """
    ordered: dict[str, Knob] = {}
    for knob in knobs.values():
        _check_conditions(knob, knobs)
    while len(ordered) < len(knobs):
        left = [knob for knob in knobs.values() if knob.name not in ordered]
        ready = next((knob for knob in left if all(parent in ordered for parent in knob.when)), None)
        if ready is None:
            place = (*left[0].where, "when")
            raise left[0].document.error(place, f"`{left[0].name}` waits for itself, through its `when`")
        ordered[ready.name] = ready
    return tuple(ordered.values())


def _check_conditions(knob: Knob, knobs: Mapping[str, Knob]) -> None:
    for parent, labels in knob.when.items():
        place = (*knob.where, "when", parent)
        if parent not in knobs:
            raise knob.document.error(place, f"no knob `{parent}`", f"knobs: {', '.join(knobs)}", at_key=True)
        known = knobs[parent]
        for label in labels:
            if not known.takes(label):
                values = known.labels if known.range is None else (f"{known.range.low}..{known.range.high}",)
                names = ", ".join((known.unset_label, *values))
                raise knob.document.error(place, f"`{parent}` has no value `{label}`", f"its values: {names}")


def is_active(knob: Knob, params: Params, knobs: Mapping[str, Knob]) -> bool:
    """Whether ``knob`` exists under ``params``: each parent does, and has one of the labels asked for."""
    for parent, labels in knob.when.items():
        known = knobs[parent]
        chosen = label_of(params[parent]) if parent in params else known.unset_label
        if chosen not in labels or not is_active(known, params, knobs):
            return False
    return True
