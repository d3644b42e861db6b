"""Experiments and search spaces from their files, with everything checked that can be before a server starts."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import UsageError
from runner.schema.experiment import Experiment
from runner.schema.space import KnobSpec, SpaceFile
from runner.space.advice import warnings_for
from runner.space.checks import base_settings, check_experiment, check_knobs
from runner.space.constraints import Constraint, parse_constraint
from runner.space.document import Document, find_file, read_document
from runner.space.feasibility import check_constraints, nothing_can_run, same_as_unset, without_hopeless
from runner.space.knobs import Knob, build_knob, in_dependency_order
from runner.space.model_facts import ModelFacts, read_model_facts
from runner.space.names import ALWAYS_KNOWN, name_of
from runner.space.settings import Target
from runner.space.space import Space
from runner.space.speculation_rules import METHODS_WITH_DRAFT
from runner.space.surroundings import Draft, Machine, Surroundings, parse_version, this_machine


def load_experiment(name_or_path: str | Path) -> Experiment:
    """An experiment by path, else ``experiments/`` NAME; its ``name`` is the file's stem unless given.

    Raises:
        UsageError: Unknown (those that exist are listed), or not a valid experiment (file, line, column).
    """
    path = find_file(name_or_path, "experiments", "experiment")
    document = read_document(path)
    document.data.setdefault("name", path.stem)
    experiment = document.parse(Experiment)
    check_experiment(experiment, document)
    return experiment


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
    around = Surroundings(
        device=experiment.engine.device,
        simulated=experiment.engine.kind == "simulated",
        version=parse_version(vllm_version),
        machine=machine if machine is not None else this_machine(os.environ),
        gpus=gpus if gpus is not None else experiment.engine.gpus,
        facts=facts,
        ladder=experiment.ladder,
        drafts=read_drafts(experiment),
    )
    base = base_settings(experiment, around.machine)
    check_knobs(ordered, experiment, around.machine)
    constraints = tuple(_constraint(text, doc, place, ordered, base) for text, doc, place in lines)
    content = {
        "knobs": {
            name: spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            for name, (spec, _) in knobs.items()
        },
        "constraints": [text for text, _, _ in lines],
    }
    space = Space(path.stem, experiment.model, ordered, base, constraints, around, content=content)
    return _narrowed(space, path)


def _narrowed(space: Space, path: Path) -> Space:
    """The space without what can never run or changes nothing, and with its warnings."""
    check_constraints(space)
    hopeless = nothing_can_run(space)
    if hopeless is not None:
        remedy = "change the experiment's settings or its model, or let a knob vary what stands in the way"
        raise UsageError(f"nothing in this space can run: {hopeless}", remedy=remedy, path=path)
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


def read_drafts(experiment: Experiment) -> dict[str, Draft]:
    """The experiment's drafts by method, and what can be known of them without a hub.

    A folder is only looked at where the model itself is a folder of this machine: else it may lie on another one too.

    Raises:
        UsageError: A method that takes no draft.
    """
    unknown = sorted(set(experiment.drafts) - set(METHODS_WITH_DRAFT))
    if unknown:
        remedy = f"methods that take a draft model: {', '.join(METHODS_WITH_DRAFT)}"
        raise UsageError(f"experiment `{experiment.name}`: `{unknown[0]}` under `drafts` takes none", remedy=remedy)
    local = Path(experiment.model).is_dir()
    return {method: _draft(model, local) for method, model in experiment.drafts.items()}


def _draft(model: str, local: bool) -> Draft:
    if not (local and model.startswith((".", "/", "~"))):
        return Draft(model)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return Draft(model, missing=True)
    return Draft(model, vocabulary=read_model_facts(folder).vocabulary)


def _constraint(
    text: str, document: Document, position: int, knobs: tuple[Knob, ...], base: Mapping[Target, Any]
) -> Constraint:
    targets = {target for knob in knobs for target in knob.targets} | set(base)
    known = ALWAYS_KNOWN | {knob.name for knob in knobs} | {name for name in map(name_of, targets) if name is not None}
    return parse_constraint(text, known, document, ("constraints", position))
