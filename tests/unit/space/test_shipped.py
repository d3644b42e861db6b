"""Every shipped search space loads, and every edge of every knob encodes to exactly the words in its golden file."""

import json
import os
from pathlib import Path

import pytest

from runner.errors import Infeasible
from runner.schema.base import Scalar
from runner.space.command import argv
from runner.space.feasibility import activation
from runner.space.load import load_experiment, load_space
from runner.space.model_facts import ModelFacts, model_facts
from runner.space.presets import PRESETS
from runner.space.space import Space
from runner.space.surroundings import Machine
from tests.spaces import dense, experiment_of, space_of

ROOT = Path(__file__).parents[3]
SPACES = sorted(path.stem for path in (ROOT / "search_spaces").glob("*.yaml"))
TWO_GPUS = {"two-gpus": "2x-h200-p2p-off", "two-gpus-nvlink": "2x-h200-nvlink"}
"""Spaces of one experiment each, which has decided what they leave open."""
GOLDEN = ROOT / "tests" / "golden" / "space"

SMOLLM2 = model_facts(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    }
)


def shipped(name: str, *, gpus: int = 8, facts: ModelFacts | None = None) -> Space:
    """A shipped space on a node that allows as much of it as any: drafts, MTP layers, eight large GPUs."""
    if name == "cpu":
        cpu = load_experiment(ROOT / "experiments" / "local-cpu.yaml")
        return load_space(
            ROOT / "search_spaces" / "cpu.yaml",
            cpu,
            facts=SMOLLM2,
            vllm_version="0.32.0",
            machine=Machine(cpus=(0, 1)),
        )
    if name in TWO_GPUS:
        two = load_experiment(ROOT / "experiments" / f"{TWO_GPUS[name]}.yaml")
        machine = Machine(gpu_memory_gib=139.8)
        path = ROOT / "search_spaces" / f"{name}.yaml"
        return load_space(path, two, facts=dense(), gpus=2, vllm_version="0.24.0", machine=machine)
    experiment = experiment_of(
        defaults={"flags": {"tensor-parallel-size": gpus}},
        drafts={"eagle3": "some/eagle3-draft", "draft_model": "some/small-draft"},
    )
    return load_space(
        ROOT / "search_spaces" / f"{name}.yaml",
        experiment,
        facts=facts or dense(num_nextn_predict_layers=1),
        gpus=gpus,
        vllm_version="0.33.0",
        machine=Machine(gpu_memory_gib=139.8),
    )


def edges(space: Space) -> list[dict[str, Scalar]]:
    """The baseline; then each label of each knob and each end of each range, with no more beside it than it needs."""
    points: list[dict[str, Scalar]] = [{}]
    for knob in space.knobs:
        _, needed = activation(space, knob)
        ends = knob.labels if knob.range is None else (knob.range.low, knob.range.high)
        points += [space.completed({**needed, knob.name: end}) for end in ends]
    return [point for position, point in enumerate(points) if point not in points[:position]]


def encoded(space: Space, params: dict[str, Scalar]) -> str:
    """One point as a golden file shows it."""
    name = " ".join(f"{knob}={value}" for knob, value in params.items()) or "baseline"
    try:
        config = space.resolve(params)
    except Infeasible as error:
        return f"# {name}\npruned: {error.message}\n"
    words = argv(config, model="MODEL", host="127.0.0.1", port=8000, served_name="NAME")
    env = "".join(f"{variable}={value}\n" for variable, value in sorted(config.env.items()))
    return f"# {name}\n{json.dumps(words[8:])}\n{env}gpus={config.gpus}\n"


def test_the_spaces_that_should_ship_are_there() -> None:
    """Seven and those for two GPUs, and no stray file."""
    assert sorted(["cpu", "cudagraph", "full", "nccl", "parallel", "scheduler", "speculative", *TWO_GPUS]) == SPACES


@pytest.mark.parametrize("name", SPACES)
def test_every_edge_encodes_as_its_golden_says(name: str) -> None:
    """Words after the served name, variables, GPUs. UPDATE_GOLDEN=1 rewrites the file, and fails all the same."""
    space = shipped(name)
    text = "\n".join(encoded(space, point) for point in edges(space))
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
        pytest.fail(f"{golden} was rewritten: read the difference, then run again without UPDATE_GOLDEN")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPACES)
def test_only_what_is_kept_to_fail_is_pruned_at_an_edge(name: str) -> None:
    """No shipped value is invalid by itself unless it says why it is kept."""
    space = shipped(name)
    kept = {(knob.name, label) for knob in space.knobs for label in knob.keep_failing}
    for point in edges(space):
        if not kept & set(point.items()):
            space.resolve(point)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_space_loads_whatever_the_number_of_gpus(name: str, gpus: int) -> None:
    """What a smaller node rules out leaves the space; a dense model without drafts has fewer choices, not errors."""
    space = shipped(name, gpus=gpus, facts=dense())
    assert space.judged({})[1] == ()
    for point in edges(space):
        space.judged(point)


def test_the_full_space_has_every_knob_of_the_gpu_spaces() -> None:
    """By include, not by copy."""
    full = {knob.name for knob in shipped("full").knobs}
    for name in SPACES:
        if name != "cpu" and name not in TWO_GPUS:
            assert {knob.name for knob in shipped(name).knobs} <= full, name


def test_the_cpu_space_holds_what_is_promised() -> None:
    """Its failures are marked: block size 16, tensor parallel over 9 heads, pipeline parallel over two halves."""
    space = shipped("cpu")
    kept = {(knob.name, label) for knob in space.knobs for label in knob.keep_failing}
    assert kept == {("split", "tensor_parallel"), ("split", "pipeline_parallel"), ("block_size", "16")}
    with pytest.raises(Infeasible, match="9"):
        space.resolve({"split": "tensor_parallel"})
    stages = space.resolve({"split": "pipeline_parallel"})
    assert stages.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert stages.flags["pipeline-parallel-size"] == 2
    assert space.resolve({"omp_threads": "all_cpus"}).env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


@pytest.mark.parametrize("name", SPACES)
def test_each_file_names_its_schema(name: str) -> None:
    """So that editors check it while it is written."""
    first = (ROOT / "search_spaces" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema/search_space.schema.json"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_experiment_loads(path: Path) -> None:
    """Strictly, under its file's name, with its schema named at the top."""
    assert load_experiment(path).name == path.stem
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema/experiment.schema.json"


def test_the_readme_knows_every_space_and_preset_and_its_example_loads(tmp_path: Path) -> None:
    """What it shows is what is there."""
    text = (ROOT / "search_spaces" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.yaml`" in text for name in SPACES)
    assert all(f"`{preset}`" in text for preset in PRESETS)
    example = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "nccl.yaml").write_text((ROOT / "search_spaces" / "nccl.yaml").read_text(encoding="utf-8"))
    # Its own knob of the same name wins over the included one.
    space = space_of(tmp_path, example)
    assert {"allreduce", "threads", "draft_tokens"} <= {knob.name for knob in space.knobs}


def test_the_folder_of_spaces_has_no_other_yaml() -> None:
    """A file that no test would load."""
    assert sorted(path.stem for path in (ROOT / "search_spaces").rglob("*.y*ml")) == SPACES
