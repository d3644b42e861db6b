"""The size of a model that nobody has loaded yet, and the deadlines that come of it."""

from pathlib import Path

import pytest

from runner.schema.experiment import Deadlines
from runner.schema.launch import LaunchConfig
from runner.serving.phases import PHASES, WEIGHTS, allowed
from runner.serving.weights import weights_gib

MIB = 2**20
NAME = "org/large"
PLAIN = LaunchConfig(model=NAME)


def sparse(path: Path, size: int) -> Path:
    """A file of a size that takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def cached(hub: Path, *names: str, commit: str = "c0ffee", ref: str = "main") -> Path:
    """A snapshot as the hub's library lays it out: 512 MiB a file, links into blobs."""
    repository = hub / "models--org--large"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    for name in names:
        (snapshot / name).symlink_to(sparse(repository / "blobs" / f"{commit}-{name}", 512 * MIB))
    (snapshot / "config.json").write_text("{}")
    return snapshot


PARTS = tuple(f"model-0000{part}-of-00004.safetensors" for part in range(1, 5))


def test_a_folder_of_weights(tmp_path: Path) -> None:
    """What lies in it counts; none at all is a model with dummy weights."""
    assert weights_gib(str(tmp_path), PLAIN, {}) == 0.0
    sparse(tmp_path / "model.safetensors", 256 * MIB)
    sparse(tmp_path / "notes.txt", 256 * MIB)
    assert weights_gib(str(tmp_path), PLAIN, {}) == 0.25


@pytest.mark.parametrize(
    ("where", "env"),
    [
        ("hub", {"HF_HUB_CACHE": "{}/hub"}),
        ("home/hub", {"HF_HOME": "{}/home"}),
        ("caches/huggingface/hub", {"XDG_CACHE_HOME": "{}/caches"}),
    ],
)
def test_a_model_in_the_hubs_cache(tmp_path: Path, where: str, env: dict[str, str]) -> None:
    """Its size is known wherever the server's environment puts the cache."""
    cached(tmp_path / where, *PARTS)
    assert weights_gib(NAME, PLAIN, {name: value.format(tmp_path) for name, value in env.items()}) == 2.0


def test_a_revision_and_a_folder_of_the_configurations_own(tmp_path: Path) -> None:
    """What the configuration says goes before the environment; a commit is its own reference."""
    cached(tmp_path / "own", "model.safetensors", commit="abc", ref="v2")
    for revision in ("v2", "abc"):
        config = LaunchConfig(model=NAME, flags={"download-dir": str(tmp_path / "own"), "revision": revision})
        assert weights_gib(NAME, config, {"HF_HUB_CACHE": str(tmp_path / "other")}) == 0.5
    assert weights_gib(NAME, PLAIN, {"HF_HUB_CACHE": str(tmp_path / "own")}) is None, "main is not there"


def test_what_is_not_there_in_full_is_unknown(tmp_path: Path) -> None:
    """No cache, a snapshot without weights, one with a part missing, or with a link to nothing."""
    env = {"HF_HUB_CACHE": str(tmp_path)}
    assert weights_gib(NAME, PLAIN, env) is None
    snapshot = cached(tmp_path)
    assert weights_gib(NAME, PLAIN, env) is None
    for name in PARTS[:3]:
        sparse(snapshot / name, MIB)
    assert weights_gib(NAME, PLAIN, env) is None
    (snapshot / PARTS[3]).symlink_to(tmp_path / "nowhere")
    assert weights_gib(NAME, PLAIN, env) is None


def test_unknown_weights_get_time_to_be_downloaded() -> None:
    """No phase gets less than a model of 300 GiB would, and silence still ends it before its deadline."""
    unknown, known = (allowed(Deadlines(), model_gib=gib, compiles=True) for gib in (None, 300.0))
    assert unknown.by_phase[WEIGHTS] == 7200
    assert all(unknown.by_phase[phase] >= known.by_phase[phase] for phase in PHASES)
    assert unknown.silence_s[WEIGHTS] < unknown.by_phase[WEIGHTS]
