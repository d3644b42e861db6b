"""Search spaces: YAML -> knobs -> LaunchConfig -> argv and environment. Pure; starts nothing."""

from runner.space.command import argv
from runner.space.document import read_model
from runner.space.environment import server_env, stray_files, stray_variables
from runner.space.equivalence import equivalent_key
from runner.space.explain import explain
from runner.space.installed import installed_flags
from runner.space.knobs import UNSET, Knob, Params
from runner.space.load import load_experiment, load_space
from runner.space.model_facts import ModelFacts, model_facts, read_model_facts
from runner.space.space import RuledOut, Space
from runner.space.surroundings import Machine, this_machine

__all__ = [
    "UNSET",
    "Knob",
    "Machine",
    "ModelFacts",
    "Params",
    "RuledOut",
    "Space",
    "argv",
    "equivalent_key",
    "explain",
    "installed_flags",
    "load_experiment",
    "load_space",
    "model_facts",
    "read_model",
    "read_model_facts",
    "server_env",
    "stray_files",
    "stray_variables",
    "this_machine",
]
