"""What must hold of every tracked file, and of the files that are specifications."""

import re
import subprocess
from pathlib import Path

import pytest

from runner.search.encoding import as_params
from runner.simulator.describe import load_model, load_node
from runner.space import load_experiment, load_space

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
SPACES = sorted((ROOT / "search_spaces").glob("*.yaml"))
NODES = sorted((ROOT / "experiments" / "nodes").glob("*.yaml"))
MODELS = sorted((ROOT / "experiments" / "models").glob("*.yaml"))


def tracked() -> list[Path]:
    """Text files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_there_are_specifications_to_check() -> None:
    """The discovery below finds files at all."""
    assert len(LOCKS) == 2
    assert len(EXPERIMENTS) >= 3
    assert len(SPACES) >= 7
    assert len(NODES) >= 3
    assert MODELS


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_pin_everything_and_name_no_host(lock: Path) -> None:
    """Every line of a lock is a name and a version."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    odd = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+(\[[\w,-]+\])?==[\w.+!]+( ; .+)?", line)]
    assert not odd


def test_no_file_is_large() -> None:
    """The repository holds text; nothing of a megabyte belongs into it."""
    assert [path.name for path in tracked() if path.stat().st_size > 1_000_000] == []


def test_no_module_is_named_after_a_vendor() -> None:
    """Rooms and modules are named by what they do; who does it inside may change."""
    vendors = {"vllm", "ray", "optuna", "mlflow", "torch"}
    modules = [path.relative_to(ROOT) for path in tracked() if path.suffix == ".py"]
    words = {path: {word for part in path.with_suffix("").parts for word in part.split("_")} for path in modules}
    assert [str(path) for path, found in words.items() if found & vendors] == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_every_experiment_loads(path: Path) -> None:
    """Shipped experiments are valid, and what a simulated one names is there."""
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    if experiment.engine.node is not None:
        assert load_node(experiment.engine.node).gpus > 0
        assert load_model(experiment.model).layers > 0


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.name)
def test_every_search_space_loads_under_its_experiments(path: Path) -> None:
    """Shipped spaces fit the experiment they are used with when none is named."""
    names = {"cpu": ["local-cpu"], "two-gpus": ["2x-h200-p2p-off"], "two-gpus-nvlink": ["2x-h200-nvlink"]}
    for name in names.get(path.stem, ["simulated-8xpcie", "local-gpu"]):
        experiment = load_experiment(name)
        space = load_space(path, experiment, gpus={"local-cpu": None, "2x": 2}.get(name.split("-h200")[0], 8))
        assert space.knobs
        assert all(space.resolve(as_params(wished, space)) for wished in experiment.search.try_first)


@pytest.mark.parametrize("path", NODES, ids=lambda path: path.name)
def test_every_node_loads(path: Path) -> None:
    """Shipped nodes are valid."""
    assert load_node(str(path)).gpus > 0


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_every_model_loads(path: Path) -> None:
    """Shipped model descriptions are valid."""
    assert load_model(str(path)).layers > 0
