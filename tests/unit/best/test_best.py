"""``python -m runner.best``: the table, the winner, and the profile that comes back the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.best import EXIT_NOTHING, EXIT_USAGE, main, read_profile, write_profile
from runner.errors import FailureKind, UsageError
from runner.records import open_study
from runner.schema.experiment import Experiment
from runner.schema.launch import LaunchConfig
from runner.schema.profile import Chosen, Profile
from runner.schema.trial import Role, TrialRecord
from tests.studies import description, experiment, record

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "profile"
LL = {"NCCL_PROTO": "LL"}

# Shaped like a box without peer-to-peer: what wins for one stream loses for many, and LL gains nothing over unset.
SURFACE = (
    record(0, {1: 229.0, 64: 6220.0, 256: 10363.0}, role=Role.BASELINE),
    record(1, {1: 25.0, 64: 2004.0, 256: 4876.0}, params={"eager": "true"}),
    record(2, {1: 229.4, 64: 4471.0, 256: 5428.0}, params=LL),
    record(3, {1: 175.0, 64: 6186.0, 256: 8849.0}, params={"NCCL_PROTO": "Simple"}),
    record(4, {1: 228.0, 64: 6123.0, 256: 9189.0}, role=Role.BASELINE, repeat_of=0),
    record(5, {1: 197.0, 64: 6625.0, 256: 14524.0}, params={"pipeline": 2}),
    record(6, {1: 320.0, 64: 3645.0, 256: 4110.0}, params={"drafts": 3}, synthetic_acceptance=2.5),
    record(7, {1: 228.6, 64: 6170.0, 256: 9800.0}, role=Role.BASELINE, repeat_of=0),
    record(8, None, params={"tensor": 16}, failure=FailureKind.OUT_OF_MEMORY),
)


def write(
    root: Path, records: tuple[TrialRecord, ...], given: Experiment | None = None, name: str = "tiny-space"
) -> Path:
    chosen = given or experiment(ladder=(1, 64, 256))
    with open_study(root / name, description(chosen, study=name)) as study:
        for one in records:
            study.append(one.model_copy(update={"study": name}))
    return root / name


@pytest.fixture
def surface(tmp_path: Path) -> Path:
    write(tmp_path, SURFACE)
    return tmp_path


def test_each_concurrency_has_its_own_winner(surface: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unset for one stream without drafts, drafts named as synthetic and apart, pipeline for many; LL never."""
    assert main(["--results", str(surface)]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = {line.split(":")[0]: line for line in lines if line.startswith("best at")}
    assert best["best at C=1"].startswith("best at C=1: baseline, 228.5 tok/s")
    assert "drafts=3, 320.0 tok/s" in best["best at C=1 (synthetic acceptance)"]
    assert "pipeline=2, 6625.0 tok/s" in best["best at C=64"]
    assert "pipeline=2, 14524.0 tok/s" in best["best at C=256"]
    assert not any("NCCL_PROTO=LL" in line for line in best.values())
    assert any("synthetic acceptance" in line for line in lines)


def test_the_exported_profile_is_the_golden_one(surface: Path) -> None:
    """Every line of it: engine first, configuration, each level beside the baseline's, how it was chosen."""
    out = surface / "profile.yaml"
    assert main(["--results", str(surface), "--concurrency", "256", "--export", str(out)]) == 0
    assert out.read_text() == (GOLDEN / "c256.yaml").read_text()
    assert out.read_text().startswith("engine: vllm\n")
    assert "loses 13.8 % against the baseline at C=1" in out.read_text()


def test_the_profile_loads_back_to_the_same_fingerprint(surface: Path) -> None:
    """What was measured is what will be served."""
    out = surface / "profile.yaml"
    main(["--results", str(surface), "--concurrency", "64", "--export", str(out)])
    profile = read_profile(out)
    assert profile.config == SURFACE[5].config
    assert profile.fingerprint == profile.config.fingerprint == SURFACE[5].fingerprint


def test_an_edited_profile_is_refused(surface: Path) -> None:
    """Its figures were measured with something else."""
    out = surface / "profile.yaml"
    main(["--results", str(surface), "--concurrency", "64", "--export", str(out)])
    out.write_text(out.read_text().replace("pipeline: 2", "pipeline: 4"))
    with pytest.raises(UsageError, match="configuration was edited"):
        read_profile(out)


def test_synthetic_acceptance_is_exported_only_when_asked_for(surface: Path) -> None:
    """And then says so twice."""
    out = surface / "profile.yaml"
    assert main(["--results", str(surface), "--synthetic", "--export", str(out)]) == 0
    profile = read_profile(out)
    assert profile.synthetic_acceptance == 2.5
    assert profile.note is not None
    assert "synthetic acceptance" in profile.note


def test_a_simulated_profile_says_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``engine: simulated`` is its first line; the table and the best lines say it too."""
    records = (record(0, 20.0, role=Role.BASELINE, simulated=True), record(1, 43.0, params={"a": 1}, simulated=True))
    write(tmp_path, records, experiment(simulated=True, ladder=(1,)))
    out = tmp_path / "profile.yaml"
    assert main(["--results", str(tmp_path), "--export", str(out)]) == 0
    assert out.read_text().startswith("engine: simulated\n")
    shown = capsys.readouterr().out
    assert "best at C=1 (simulated)" in shown
    assert all("simulated" in line for line in shown.splitlines() if "43.0" in line)


def test_nothing_measured_is_said_and_exits_non_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No table of nothing, and no profile."""
    write(tmp_path, (record(0, None, role=Role.BASELINE, failure=FailureKind.HANG),))
    out = tmp_path / "profile.yaml"
    assert main(["--results", str(tmp_path), "--export", str(out)]) == EXIT_NOTHING
    assert "nothing was measured (1 hang)" in capsys.readouterr().out
    assert not out.exists()


def test_no_study_at_all_is_said_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Committed ones do not count."""
    write(tmp_path / "recorded", SURFACE)
    assert main(["--results", str(tmp_path)]) == EXIT_USAGE
    assert "make sweep" in capsys.readouterr().err


def test_a_study_is_named_or_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name under the results folder, or by path; committed ones too; an unknown one lists those that are there."""
    write(tmp_path, SURFACE, name="mine")
    write(tmp_path / "recorded", SURFACE, name="theirs")
    for study in ("mine", "recorded/theirs", str(tmp_path / "recorded" / "theirs")):
        assert main(["--results", str(tmp_path), "--study", study]) == 0
    capsys.readouterr()
    assert main(["--results", str(tmp_path), "--study", "nobody's"]) == EXIT_USAGE
    assert "mine" in capsys.readouterr().err


def test_the_study_last_written_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When none is named."""
    for i, name in enumerate(("new", "old")):
        folder = write(tmp_path, SURFACE, name=name)
        os.utime(folder / "trials.jsonl", (2_000 - 1_000 * i,) * 2)
    assert main(["--results", str(tmp_path)]) == 0
    assert str(tmp_path / "new") in capsys.readouterr().out.replace("\n", "")


def test_a_concurrency_off_the_ladder_is_refused(surface: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the ladder."""
    out = surface / "p.yaml"
    assert main(["--results", str(surface), "--concurrency", "3", "--export", str(out)]) == EXIT_USAGE
    assert "1, 64, 256" in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_is_said_so(surface: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which path, and why."""
    assert main(["--results", str(surface), "--export", str(surface / "no" / "p.yaml")]) == EXIT_USAGE
    assert "No such file or directory" in capsys.readouterr().err


def test_neither_ray_nor_optuna_nor_mlflow_nor_an_engine_is_imported(surface: Path) -> None:
    """It works where none of them is installed."""
    script = (
        "import sys; from runner.best import main; code = main(sys.argv[1:])\n"
        "heavy = {'ray', 'optuna', 'mlflow', 'vllm', 'torch', 'plotly', 'sqlalchemy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    arguments = ["--results", str(surface), "--export", str(surface / "p.yaml")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
scalars = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
names = st.text("abcdefgh-_", min_size=1, max_size=8)
documents = st.recursive(
    scalars | st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)


@given(
    flags=st.dictionaries(names, scalars | st.lists(st.integers() | texts, max_size=3).map(tuple), max_size=4),
    structured=st.dictionaries(names, st.dictionaries(names, documents, max_size=3), max_size=2),
    env=st.dictionaries(
        names, texts | st.sampled_from(["1", "on", "1e3", "null", "~", "0x1", "1_0", "12:30"]), max_size=3
    ),
)
def test_every_configuration_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    flags: dict[str, bool | int | float | str | tuple[int | str, ...]],
    structured: dict[str, dict[str, object]],
    env: dict[str, str],
) -> None:
    """Whatever flags, JSON and variables it has: the fingerprint after reading is the one before writing."""
    config = LaunchConfig(model="m", flags=flags, structured=structured, env=env)
    profile = Profile(
        engine="vllm",
        fingerprint=config.fingerprint,
        config=config,
        goal_concurrency=1,
        goal_output_tok_s=100,
        chosen=Chosen(study="s", trial=0, rule="r", trials=1, starts=1),
    )
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    write_profile(profile, path)
    assert read_profile(path) == profile
