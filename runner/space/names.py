"""What a name in a constraint stands for: knobs, flags, variables, the model's facts, the node."""

from collections.abc import Callable, Mapping
from typing import Any

from runner.space.constraints import Unknown
from runner.space.knobs import Knob, Params, label_of
from runner.space.model_facts import ModelFacts
from runner.space.settings import Target
from runner.space.surroundings import Reading

_RESOLVED: dict[str, Callable[[Reading], int | None]] = {
    "tensor-parallel-size": lambda config: config.tensor_parallel,
    "pipeline-parallel-size": lambda config: config.pipeline_parallel,
    "max-num-seqs": lambda config: config.max_seqs,
    "max-num-batched-tokens": lambda config: config.batched_tokens,
}
"""Flags whose value is known even where nobody sets them."""

_NODE: dict[str, Callable[[Reading], int | None]] = {
    "gpus": lambda config: config.around.gpus,
    "draft_tokens": lambda config: config.draft_tokens,
}

ALWAYS_KNOWN = frozenset(
    {*_NODE, *ModelFacts.model_fields, *(flag.replace("-", "_") for flag in _RESOLVED), "max_model_len"}
)
"""Names that every constraint may use."""


def name_of(target: Target) -> str | None:
    """The name of a flag or a variable in a constraint; None for a field, which only its knob names."""
    if target[0] == "env":
        return target[1]
    return target[1].replace("-", "_") if target[0] == "flag" else None


def value_of_name(name: str, config: Reading, knobs: Mapping[str, Knob], params: Params) -> Any:
    """What ``name`` stands for under ``config``; a bundle stands for the label of its choice.

    Raises:
        Unknown: Nobody knows.
    """
    knob = knobs.get(name)
    facts = config.around.facts
    if knob is not None and knob.target is None:
        config.read.add(("knob", name))
        return label_of(params[name]) if name in params else knob.unset_label
    if knob is not None and knob.target is not None:
        value = _value_of_target(knob.target, config)
    elif name in _NODE:
        value = _NODE[name](config)
    elif name in ModelFacts.model_fields:
        value = None if facts is None else getattr(facts, name)
    else:
        value = _value_of_target(("env", name) if name.isupper() else ("flag", name.replace("_", "-")), config)
    if value is None:
        raise Unknown(name)
    return value


def _value_of_target(target: Target, config: Reading) -> Any:
    kind, name, *keys = target
    if kind == "env":
        number = config.number(name)
        return number if number is not None else config.env(name)
    if kind == "json":
        return config.field(name, *keys)
    return _RESOLVED[name](config) if name in _RESOLVED else config.flag(name)
