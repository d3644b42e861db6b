"""Experiments and search spaces from their files, with everything checked that can be before a server starts."""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.errors import UsageError
from runner.schema.experiment import Experiment, Settings
from runner.schema.space import KnobSpec, SpaceFile
from runner.space.advice import warnings_for
from runner.space.collectives import canonical
from runner.space.constraints import Constraint, parse_constraint
from runner.space.document import Document, Where, find_file, read_document
from runner.space.environment import check_protection
from runner.space.feasibility import nothing_can_run, same_as_unset, without_hopeless
from runner.space.knobs import Knob, as_value, build_knob, in_dependency_order
from runner.space.model_facts import ModelFacts, read_model_facts
from runner.space.settings import State, Target, assign, flattened, overlap, spoken
from runner.space.space import Space
from runner.space.speculation_rules import METHODS_WITH_DRAFT
from runner.space.surroundings import PROTECTIVE, Machine, Surroundings, parse_version, this_machine
from runner.space.values import check_setting

_ALWAYS_KNOWN = ("gpus", "draft_tokens", "tensor_parallel_size", "pipeline_parallel_size")
_ALWAYS_KNOWN_FLAGS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")


def load_experiment(name_or_path: str | Path) -> Experiment:
    """An experiment by path, else ``experiments/`` NAME; its ``name`` is the file's stem unless given.

    Raises:
        UsageError: Unknown (those that exist are listed), or not a valid experiment (file, line, column).
    """
    path = find_file(name_or_path, "experiments", "experiment")
    document = read_document(path)
    document.data.setdefault("name", path.stem)
    return document.parse(Experiment)


def load_space(
    name_or_path: str | Path,
    experiment: Experiment,
    *,
    facts: ModelFacts | None = None,
    gpus: int | None = None,
    vllm_version: str | None = None,
    machine: Machine | None = None,
) -> Space:
    """A search space by path, else ``search_spaces/`` NAME, checked against an experiment.

    Args:
        name_or_path: ``nccl``, ``nccl.yaml`` or a path.
        experiment: What stays fixed.
        facts: Of the model; None: nothing is ruled out by it.
        gpus: GPUs the study may use; None takes the experiment's, and then nothing is ruled out by it if unknown.
        vllm_version: As the server's package names it; None: the newest version that is covered.
        machine: The node; None: this process's CPUs and protective variables.

    Raises:
        UsageError: Unknown, malformed, or contradictory: with file, line, column and what would be right.
    """
    path = find_file(name_or_path, "search_spaces", "search space")
    knobs, lines = _collected(path)
    ordered = in_dependency_order({name: build_knob(name, spec, doc) for name, (spec, doc) in knobs.items()})
    missing, vocabularies = _drafts(experiment)
    around = Surroundings(
        device=experiment.engine.device,
        version=parse_version(vllm_version),
        machine=machine if machine is not None else this_machine(os.environ),
        gpus=gpus if gpus is not None else experiment.engine.gpus,
        facts=facts,
        ladder=experiment.ladder,
        drafts=experiment.drafts,
        missing_drafts=missing,
        draft_vocabularies=vocabularies,
    )
    base = base_settings(experiment, around.machine)
    for knob in ordered:
        _check_knob(knob, around.machine)
    _check_pinned(ordered, experiment)
    _check_disjoint(ordered)
    constraints = tuple(_constraint(text, doc, place, ordered, base) for text, doc, place in lines)
    content = {
        "knobs": {
            name: spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            for name, (spec, _) in knobs.items()
        },
        "constraints": [text for text, _, _ in lines],
    }
    space = Space(path.stem, experiment.model, ordered, base, constraints, around, content=content)
    hopeless = nothing_can_run(space)
    if hopeless is not None:
        raise UsageError(f"nothing in this space can run: {hopeless}", remedy="change the experiment", path=path)
    space = without_hopeless(space)
    space = space.without(same_as_unset(space))
    return dataclasses.replace(space, warnings=warnings_for(space))


_Specs = dict[str, tuple[KnobSpec, Document]]
_Lines = list[tuple[str, Document, int]]


def _collected(path: Path, above: tuple[Path, ...] = ()) -> tuple[_Specs, _Lines]:
    """Knobs and constraints of a file and of all it includes, the file's own last and winning."""
    document = read_document(path)
    file = document.parse(SpaceFile)
    knobs: _Specs = {}
    lines: _Lines = []
    here = (*above, path.resolve())
    for position, name in enumerate(file.include):
        target = path.parent / name
        place = ("include", position)
        if target.resolve() in here:
            raise document.error(place, f"`{name}` includes itself, through {' -> '.join(p.name for p in here)}")
        if not target.is_file():
            raise document.error(place, f"no file `{name}` beside this one", f"looked for {target}")
        included, more = _collected(target, here)
        for knob, (spec, origin) in included.items():
            if knob in knobs and knobs[knob][0] != spec and knob not in file.knobs:
                remedy = f"also in {knobs[knob][1].path}; define it here, and that definition counts"
                raise document.error(place, f"`{knob}` of {origin.path.name} differs from one included before", remedy)
            knobs[knob] = (spec, origin)
        lines += [line for line in more if line[0] not in [text for text, _, _ in lines]]
    knobs.update((name, (spec, document)) for name, spec in file.knobs.items())
    lines += [(text, document, position) for position, text in enumerate(file.constraints)]
    return knobs, lines


def _drafts(experiment: Experiment) -> tuple[frozenset[str], dict[str, int]]:
    """Drafts that are not there, and the vocabularies of those that are.

    Only where the model itself is a folder of this machine: else the drafts may lie on another one too.
    """
    unknown = sorted(set(experiment.drafts) - set(METHODS_WITH_DRAFT))
    if unknown:
        remedy = f"methods that take a draft model: {', '.join(METHODS_WITH_DRAFT)}"
        raise UsageError(f"experiment `{experiment.name}`: `{unknown[0]}` under `drafts` takes none", remedy=remedy)
    if not Path(experiment.model).is_dir():
        return frozenset(), {}
    written_as_folders = {draft for draft in experiment.drafts.values() if draft.startswith((".", "/", "~"))}
    missing = {draft for draft in written_as_folders if not (Path(draft).expanduser() / "config.json").is_file()}
    there = written_as_folders - missing
    return frozenset(missing), {draft: read_model_facts(Path(draft).expanduser()).vocabulary for draft in there}


def base_settings(experiment: Experiment, machine: Machine) -> State:
    """Defaults and pinned settings of an experiment as one state, checked.

    Raises:
        UsageError: A setting in a wrong form or with an impossible value, or both pinned and a default.
    """
    state: State = {}
    pinned = {target for target, _, _ in _settings(experiment, "pinned")}
    for part in ("defaults", "pinned"):
        for target, value, place in _settings(experiment, part):
            complaint = check_setting(target, value) or _unknown_flag(target, value, machine)
            if complaint is not None:
                raise UsageError(f"experiment `{experiment.name}`, {place}: {complaint[0]}", remedy=complaint[1])
            if part == "defaults" and any(overlap(target, fixed) for fixed in pinned):
                raise UsageError(f"experiment `{experiment.name}`: {spoken(target)} is both a default and pinned")
            assign(state, target, canonical(target[1], value) if target[0] == "env" else value)
    check_protection({target[1]: value for target, value in state.items() if target[0] == "env"}, machine.protected)
    return state


def _settings(experiment: Experiment, part: str) -> Iterator[tuple[Target, Any, str]]:
    settings: Settings = getattr(experiment, part)
    try:
        for target, value, place in flattened(settings.flags, settings.structured, settings.env):
            yield target, value, ".".join((part, *place))
    except ValueError as error:
        raise UsageError(f"experiment `{experiment.name}`, {part}: {error}") from None


def _check_knob(knob: Knob, machine: Machine) -> None:
    """Values that can never be right are refused, unless they are kept to fail on purpose."""
    for option in knob.options:
        for target, value in option.settings.items():
            place = option.places[target]
            _check_protection_by(knob, place, target, value, machine)
            complaint = check_setting(target, value) or _unknown_flag(target, value, machine)
            if complaint is not None and option.keep_failing is None:
                raise knob.document.error(place, *complaint)
    if knob.range is not None and knob.target is not None:
        for end in (knob.range.low, knob.range.high):
            value = as_value(knob.target, end)
            _check_protection_by(knob, knob.where, knob.target, value, machine)
            complaint = check_setting(knob.target, value) or _unknown_flag(knob.target, value, machine)
            if complaint is not None:
                raise knob.document.error(knob.where, *complaint)


def _check_protection_by(knob: Knob, place: Where, target: Target, value: Any, machine: Machine) -> None:
    if target[0] == "env" and value != machine.protected.get(target[1], value):
        remedy = "this host sets it to protect itself and others; take the choice out"
        raise knob.document.error(place, f"{target[1]}={value} contradicts {target[1]}={PROTECTIVE[target[1]]}", remedy)


def _unknown_flag(target: Target, value: Any, machine: Machine) -> tuple[str, str] | None:
    known = machine.known_flags
    if known is None or target[0] == "env":
        return None
    name = f"no-{target[1]}" if value is False else target[1]
    if name in known:
        return None
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean `{close[0]}`? " if close else ""
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


def _constraint(
    text: str, document: Document, position: int, knobs: tuple[Knob, ...], base: Mapping[Target, Any]
) -> Constraint:
    known = {knob.name for knob in knobs} | set(_ALWAYS_KNOWN) | set(_ALWAYS_KNOWN_FLAGS) | set(ModelFacts.model_fields)
    targets = {target for knob in knobs for target in knob.targets} | set(base)
    known |= {target[1] if target[0] == "env" else target[1].replace("-", "_") for target in targets}
    return parse_constraint(text, known, document, ("constraints", position))
