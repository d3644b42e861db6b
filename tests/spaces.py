"""Search spaces and configurations that tests of the space room build from a few words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import Infeasible, UsageError
from runner.schema.experiment import Engine, Experiment, Settings
from runner.schema.launch import LaunchConfig
from runner.space.checks import base_settings
from runner.space.load import load_space
from runner.space.model_facts import ModelFacts, model_facts
from runner.space.space import Space
from runner.space.surroundings import Machine, Surroundings, parse_version

DENSE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "vocab_size": 32000,
    "intermediate_size": 12288,
    "head_dim": 128,
}
"""The 8B shape that the project ships."""

H200 = Machine(cpus=(0, 1, 2, 3), gpu_memory_gib=139.8)
NCCL_PATH: dict[str, Any] = {
    "flags": {"disable-custom-all-reduce": True},
    "json": {"compilation-config": {"pass_config": {"fuse_allreduce_rms": False}}},
    "env": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"},
}


def dense(**changes: Any) -> ModelFacts:
    """Facts of the 8B shape, with keys of its config.json changed."""
    return model_facts({**DENSE_CONFIG, **changes})


def experiment_of(
    *,
    defaults: Mapping[str, Any] | None = None,
    pinned: Mapping[str, Any] | None = None,
    cpu: bool = False,
    ladder: tuple[int, ...] = (1, 10, 64, 256),
    drafts: Mapping[str, str] | None = None,
    model: str = "some/model",
) -> Experiment:
    """An experiment with these settings; everything else at its default."""
    return Experiment(
        name="test",
        engine=Engine(device="cpu" if cpu else "gpu"),
        model=model,
        ladder=ladder,
        defaults=Settings.model_validate(dict(defaults or {})),
        pinned=Settings.model_validate(dict(pinned or {})),
        drafts=dict(drafts or {}),
    )


def space_of(
    folder: Path,
    text: str,
    experiment: Experiment | None = None,
    *,
    facts: ModelFacts | None = None,
    gpus: int | None = 8,
    version: str = "0.33.0",
    machine: Machine = H200,
) -> Space:
    """The space that ``text`` writes, loaded as a user's file would be."""
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return load_space(
        path, experiment or experiment_of(), facts=facts, gpus=gpus, vllm_version=version, machine=machine
    )


def refusal(folder: Path, text: str, experiment: Experiment | None = None, machine: Machine = H200) -> UsageError:
    """The error with which a space is refused at load; fails when it is not."""
    try:
        space_of(folder, text, experiment, machine=machine)
    except UsageError as error:
        return error
    raise AssertionError("the space was not refused")


def reasons(
    *,
    defaults: Mapping[str, Any],
    facts: ModelFacts | None = None,
    gpus: int | None = 8,
    machine: Machine = H200,
    version: str = "0.33.0",
) -> tuple[str, ...]:
    """Why an experiment with these defaults cannot run."""
    around = Surroundings("gpu", parse_version(version), machine, gpus=gpus, facts=facts)
    base = base_settings(experiment_of(defaults=defaults), machine)
    return Space("test", "some/model", (), base, (), around).judged({})[1]


def config_of(**settings: Any) -> LaunchConfig:
    """A configuration with these flags, structured flags (``json``) and variables."""
    gpus = settings.pop("gpus", 2)
    return LaunchConfig.model_validate({"model": "some/model", "gpus": gpus, **settings})


def infeasible(space: Space, params: Mapping[str, Any]) -> str:
    """The reason with which ``params`` are pruned; fails when they are not."""
    try:
        space.resolve(params)
    except Infeasible as error:
        return error.message
    raise AssertionError(f"{params} was not pruned")
