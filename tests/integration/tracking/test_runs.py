"""The study in a real MLflow store, read back with MLflow's own client."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.entities import Run, ViewType
from mlflow.tracking import MlflowClient

from runner.errors import FailureKind
from runner.records import open_study
from runner.schema.experiment import Experiment
from runner.schema.study import StudyDescription
from runner.schema.trial import Role, TrialRecord
from runner.tracking import Tracking
from runner.tracking.entries import Point, entries
from runner.tracking.runs import StudyRuns
from tests.studies import description, experiment, record

ROOT = Path(__file__).parents[3]
RECORDS = (
    record(0, {1: 43.0, 8: 300.0}, role=Role.BASELINE),
    record(1, None, params={"seqs": 2}, failure=FailureKind.OUT_OF_MEMORY),
    record(2, {1: 57.0, 8: 310.0}, params={"seqs": 16}),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with the three records, tracked and closed. The stores take a second or two to make."""
    root = tmp_path_factory.mktemp("results")
    given = description(experiment())
    with open_study(root / "tiny-space", given) as study:
        for one in RECORDS:
            study.finish(one, {"server.log": b"ready\n", "asked.json": b"{}", "samples.parquet": b"big"})
        track(root, given, study.records())
    return root


def track(root: Path, given: StudyDescription, records: tuple[TrialRecord, ...], *, finished: bool = True) -> Tracking:
    with Tracking(root, given) as tracking:
        tracking.open(root / given.study, records)
        tracking.close(finished=finished)
    assert tracking.problems() == ()
    return tracking


def client(root: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")


def runs(root: Path, kind: str, name: str = "tiny") -> list[Run]:
    found = client(root).get_experiment_by_name(name)
    assert found is not None
    every = client(root).search_runs([found.experiment_id], f"tags.kind = '{kind}'", ViewType.ACTIVE_ONLY, 1000)
    return sorted(every, key=lambda run: int(run.data.tags.get("trial", -1)))


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    (tmp_path / "tiny-space").mkdir()
    return tmp_path


def test_one_parent_per_study_one_child_per_trial(made: Path) -> None:
    """Named, nested, closed, with the trial's own times."""
    (parent,) = runs(made, "study")
    children = runs(made, "trial")
    assert [run.data.tags["mlflow.parentRunId"] for run in children] == [parent.info.run_id] * 3
    assert [run.info.status for run in children] == ["FINISHED", "FAILED", "FINISHED"]
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "tiny-space")
    assert children[2].info.start_time == int(RECORDS[2].started_at.timestamp() * 1000)
    assert children[2].info.end_time == int(RECORDS[2].ended_at.timestamp() * 1000)


def test_the_speed_at_each_concurrency_is_a_curve_and_a_column(made: Path) -> None:
    """Step = concurrency, and a key per concurrency."""
    run = runs(made, "trial")[2]
    history = client(made).get_metric_history(run.info.run_id, "output_tok_s")
    assert {(metric.step, metric.value) for metric in history} == {(1, 57.0), (8, 310.0)}
    assert run.data.metrics["output_tok_s_c1"] == 57.0
    assert run.data.metrics["output_tok_s_c8"] == 310.0
    assert run.data.params["seqs"] == "16"


def test_the_parent_shows_the_way_to_the_goal(made: Path) -> None:
    """Best so far and percent of the goal against the trial's number."""
    (parent,) = runs(made, "study")
    best = client(made).get_metric_history(parent.info.run_id, "best_so_far_tok_s")
    assert [(metric.step, metric.value) for metric in best] == [(0, 43.0), (1, 43.0), (2, 57.0)]
    assert parent.data.metrics["percent_of_goal"] == pytest.approx(57.0)
    assert parent.data.tags["trials_failed"] == "1"


def test_the_log_and_the_asked_configuration_are_artefacts(made: Path) -> None:
    """Raw samples stay in the trial's folder."""
    run = runs(made, "trial")[0]
    files = {file.path for file in client(made).list_artifacts(run.info.run_id)}
    assert files == {"server.log", "asked.json", "record.json"}
    (parent,) = runs(made, "study")
    assert {file.path for file in client(made).list_artifacts(parent.info.run_id)} == {"study.html"}
    assert run.info.artifact_uri.startswith((made / "mlartifacts").as_uri())


def test_the_page_of_charts_needs_no_network(made: Path) -> None:
    """Plotly's script is in it, and the goal."""
    page = next((made / "mlartifacts").rglob("study.html")).read_text()
    assert "<script src=" not in page
    assert "best so far" in page
    assert "C=8" in page


def test_the_stores_belong_to_the_user(made: Path) -> None:
    """Nobody else reads them."""
    assert stat.S_IMODE((made / "mlflow.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((made / "mlartifacts").stat().st_mode) == 0o700


def test_mlflow_is_not_told_to_report_and_leaves_no_folder(made: Path) -> None:
    """Usage statistics are off; no ``mlruns`` appears; MLflow's own empty experiment does not show."""
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert not (ROOT / "mlruns").exists()
    assert [e.name for e in client(made).search_experiments()] == ["tiny"]


def test_logging_what_is_there_changes_nothing(fresh: Path) -> None:
    """The same study opened again: no second parent, no second child."""
    given = description(experiment())
    track(fresh, given, RECORDS[:2], finished=False)
    (parent,) = runs(fresh, "study")
    assert parent.info.status == "KILLED"
    track(fresh, given, RECORDS)
    assert [run.data.tags["trial"] for run in runs(fresh, "trial")] == ["0", "1", "2"]
    (again,) = runs(fresh, "study")
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")


def test_the_store_is_rebuilt_from_the_records(made: Path, fresh: Path) -> None:
    """Without mlflow.db everything comes back as it was."""
    track(fresh, description(experiment()), tuple(r.model_copy(update={"folder": None}) for r in RECORDS))

    def essence(root: Path) -> list[object]:
        return [(run.data.metrics, run.data.params, run.info.status) for run in runs(root, "trial")]

    assert essence(fresh) == essence(made)
    assert runs(fresh, "study")[0].data.metrics == runs(made, "study")[0].data.metrics


@pytest.mark.timeout(900)
def test_a_driver_killed_at_any_moment_leaves_nothing_broken(fresh: Path) -> None:
    """SIGKILL while the store is made, the study's run is begun, trials are logged: then each has one closed run."""
    script = (
        "import sys; from pathlib import Path; from tests.studies import *; from runner.tracking import Tracking\n"
        "root = Path(sys.argv[1]); t = Tracking(root, description(experiment())); print('begun', flush=True)\n"
        "t.open(root / 'tiny-space', ())\n"
        "for n in range(5000): t.log(record(n, 5.0))\n"
        "t.close(finished=True)\n"
    )
    for wait_s in (0.4, 1.0, 1.3, 1.6, 0.0):
        driver = subprocess.Popen([sys.executable, "-c", script, str(fresh)], cwd=ROOT, stdout=subprocess.PIPE)
        assert driver.stdout is not None
        driver.stdout.readline()
        until = time.monotonic() + 180
        while not wait_s and len(list(fresh.rglob("record.json"))) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(wait_s)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    numbers = range(max(int(run.data.tags["trial"]) for run in runs(fresh, "trial")) + 2)
    track(fresh, description(experiment()), tuple(record(n, 5.0) for n in numbers))
    found = client(fresh)
    open_runs = [
        run
        for e in found.search_experiments()
        for run in found.search_runs([e.experiment_id], "attributes.status = 'RUNNING'", ViewType.ACTIVE_ONLY)
    ]
    assert open_runs == []
    assert [int(run.data.tags["trial"]) for run in runs(fresh, "trial")] == list(numbers)
    (parent,) = runs(fresh, "study")
    assert parent.data.params["experiment.model"] == "bundled:tiny"
    history = found.get_metric_history(parent.info.run_id, "best_so_far_tok_s")
    assert {metric.step for metric in history} == set(numbers)


def test_a_simulated_study_is_called_simulated_everywhere(fresh: Path) -> None:
    """Experiment, runs and tags."""
    given = description(experiment(simulated=True))
    track(fresh, given, (record(0, 43.0, role=Role.BASELINE, simulated=True),))
    name = "simulated tiny"
    assert runs(fresh, "study", name)[0].info.run_name == "simulated tiny-space"
    (child,) = runs(fresh, "trial", name)
    assert child.info.run_name == "simulated trial 0"
    assert (child.data.tags["engine"], child.data.tags["simulated"]) == ("simulated", "true")


def test_d9_the_limits_of_mlflow(fresh: Path) -> None:
    """Through the real store: a long param, 2048 sizes, odd names, NaN; and the same param in another spelling."""
    given: Experiment = experiment()
    made_runs = StudyRuns(fresh, description(given), fresh / "tiny-space")
    made_runs.open(())
    (parent,) = runs(fresh, "study")
    params: dict[str, object] = {"cmdline": "x" * 9000, "sizes": list(range(1, 2049)), "n": 1}
    points = [Point("tput@1024", 1.0), Point("itl_p99%", float("nan")), Point("ttft", float("inf"))]
    made_runs._write(parent.info.run_id, entries(params, points, {}))
    made_runs._write(parent.info.run_id, entries({"n": "1.0"}, (), {}))
    run = client(fresh).get_run(parent.info.run_id)
    assert run.data.params["n"] == "1"
    assert run.data.params["cmdline"].startswith("sha256:")
    assert run.data.metrics == {"tput_at_1024": 1.0}
    assert run.data.tags["nonfinite_metrics"] == "itl_p99%, ttft"
    files = {file.path for file in client(fresh).list_artifacts(parent.info.run_id, "params")}
    assert files == {"params/cmdline.txt", "params/sizes.txt"}


def test_a_broken_store_never_fails_the_sweep(fresh: Path) -> None:
    """The calls return, the problem is told, the records are untouched."""
    (fresh / "mlflow.db").write_bytes(b"this is no database" * 100)
    with Tracking(fresh, description(experiment())) as tracking:
        tracking.open(fresh / "tiny-space", ())
        tracking.log(RECORDS[0])
        tracking.close(finished=True)
    (problem,) = tracking.problems()
    assert "database" in problem


def test_two_studies_of_one_experiment_may_begin_at_once(fresh: Path) -> None:
    """Two drivers, one results folder: one database, one experiment, two studies."""
    script = (
        "import sys; from pathlib import Path; from tests.studies import *; from runner.tracking import Tracking\n"
        "root = Path(sys.argv[1]); t = Tracking(root, description(experiment(), study=sys.argv[2]))\n"
        "t.open(root / sys.argv[2], [record(0, 5.0)]); t.close(finished=True); sys.exit('; '.join(t.problems()) or 0)\n"
    )
    drivers = [
        subprocess.Popen([sys.executable, "-c", script, str(fresh), name], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two", "three")
    ]
    # What MLflow warns of on a busy machine is no problem; those that are make the exit code.
    told = [driver.communicate()[1] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * 3, told
    assert sorted(run.data.tags["study"] for run in runs(fresh, "study")) == ["one", "three", "two"]
    assert len(runs(fresh, "trial")) == 3
