"""The MLflow calls: one SQLite store, one folder of artefacts, one parent run per study, one child per trial."""

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunStatus, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from runner.errors import FailureKind
from runner.records import make_once
from runner.schema.study import StudyDescription
from runner.schema.trial import Outcome, TrialRecord
from runner.tracking.charts import page
from runner.tracking.entries import Entries, Point, entries, trial_entries
from runner.verdict import best_so_far

DATABASE = "mlflow.db"
ARTEFACTS = "mlartifacts"
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 500
"""Limits of MLflow's ``log_batch`` are 100 params and 1000 metrics, and 1000 entities in all."""

PROGRESS = "best_so_far_tok_s"

NOT_LOGGED = ("running.json",)
NOT_LOGGED_SUFFIXES = (".parquet",)
"""Raw samples stay in the trial's folder: they are large and MLflow shows nothing of them."""


class StudyRuns:
    """The runs of one study. Every call blocks; only one thread may use it.

    Args:
        root: Folder of all results; holds the database and the artefacts.
        description: The study.
        folder: The study's own folder, which the trials' files are taken from.
    """

    def __init__(self, root: Path, description: StudyDescription, folder: Path) -> None:
        self._description = description
        self._folder = folder
        self._records: list[TrialRecord] = []
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        database, artefacts = root / DATABASE, root / ARTEFACTS
        artefacts.mkdir(mode=0o700, exist_ok=True)
        make_once(database, lambda path: _make_store(path, artefacts))
        # Absolute, explicit: MLflow's default would depend on the current folder and on what lies in it.
        self._client = MlflowClient(tracking_uri=f"sqlite:///{database.absolute()}")
        self._experiment = self._experiment_id(artefacts.absolute())
        self._parent = self._parent_id()

    def open(self, records: Sequence[TrialRecord]) -> None:
        """Logs every record that has no closed run yet; runs that a killed driver left open are made anew."""
        logged = set()
        for run in self._children():
            number = run.data.tags.get("trial", "")
            if run.info.status == RunStatus.to_string(RunStatus.RUNNING) or number in logged:
                self._client.delete_run(run.info.run_id)
            else:
                logged.add(number)
        self._client.update_run(self._parent, status=RunStatus.to_string(RunStatus.RUNNING))
        shown = {point.step for point in self._client.get_metric_history(self._parent, PROGRESS)}
        progress = []
        for record in records:
            self._records.append(record)
            if str(record.number) not in logged:
                self._log_child(record)
            if record.number not in shown:
                progress += self._progress(record)
        self._write(self._parent, entries({}, progress, self._standing_tags()))

    def log(self, record: TrialRecord) -> None:
        """One trial: a child run, and the study's progress on the parent."""
        self._records.append(record)
        self._log_child(record)
        self._write(self._parent, entries({}, self._progress(record), self._standing_tags()))

    def close(self, finished: bool) -> None:
        """Puts the charts onto the parent run and ends it."""
        title = self._parent_name()
        self._client.log_text(
            self._parent, page(tuple(self._records), self._description.experiment, title), "study.html"
        )
        self._client.set_terminated(
            self._parent, RunStatus.to_string(RunStatus.FINISHED if finished else RunStatus.KILLED)
        )

    def _experiment_id(self, artefacts: Path) -> str:
        name = self._marked(self._description.experiment.name)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=(artefacts / name).as_uri()))
            except MlflowException:
                # Another study of this experiment, begun at the same moment, was first.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _parent_id(self) -> str:
        """The study's run. What identifies it is written with it; the rest again each time, lest a kill left it out."""
        study = self._description.study
        found = self._client.search_runs(
            [self._experiment], f"tags.kind = 'study' and tags.study = '{study}'", ViewType.ACTIVE_ONLY, 1
        )
        run = (
            found[0]
            if found
            else self._client.create_run(
                self._experiment,
                start_time=_ms(self._description.created_at),
                tags={"kind": "study", "study": study},
                run_name=self._parent_name(),
            )
        )
        self._write(run.info.run_id, self._about())
        return str(run.info.run_id)

    def _about(self) -> Entries:
        experiment = self._description.experiment
        fixed = experiment.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        params = {"space": self._description.space, **{f"experiment.{key}": value for key, value in fixed.items()}}
        tags = {
            "engine": experiment.engine.kind,
            "simulated": experiment.engine.kind == "simulated",
            "goal": f"{experiment.goal.output_tok_s:g} tok/s at C={experiment.goal.concurrency}",
        }
        return entries(params, (), tags)

    def _children(self) -> Iterable[Run]:
        token = None
        while True:
            page_of_runs = self._client.search_runs(
                [self._experiment],
                f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{self._parent}'",
                ViewType.ACTIVE_ONLY,
                1000,
                page_token=token,
            )
            yield from page_of_runs
            token = page_of_runs.token
            if not token:
                return

    def _log_child(self, record: TrialRecord) -> None:
        run = self._client.create_run(
            self._experiment,
            start_time=_ms(record.started_at),
            tags={MLFLOW_PARENT_RUN_ID: self._parent, "trial": str(record.number)},
            run_name=self._marked(f"trial {record.number}"),
        )
        run_id = run.info.run_id
        found = trial_entries(record, self._description.experiment)
        self._write(run_id, found, at=_ms(record.ended_at))
        self._client.log_text(run_id, record.model_dump_json(by_alias=True, indent=2), "record.json")
        for file in self._files(record):
            self._client.log_artifact(run_id, str(file))
        # Last: a run that is still open when the driver is killed is known to be incomplete.
        self._client.set_terminated(run_id, _status(record), end_time=_ms(record.ended_at))

    def _files(self, record: TrialRecord) -> list[Path]:
        if record.folder is None:
            return []
        files = (self._folder / record.folder).glob("[!.]*")
        return sorted(
            file
            for file in files
            if file.is_file() and file.name not in NOT_LOGGED and not file.name.endswith(NOT_LOGGED_SUFFIXES)
        )

    def _progress(self, record: TrialRecord) -> list[Point]:
        experiment = self._description.experiment
        upto = [known for known in self._records if known.number <= record.number]
        best = best_so_far(upto, experiment)
        if best is None:
            return []
        return [
            Point(PROGRESS, best, record.number),
            Point("percent_of_goal", 100 * best / experiment.goal.output_tok_s, record.number),
            Point("goal_tok_s", experiment.goal.output_tok_s, record.number),
        ]

    def _standing_tags(self) -> dict[str, object]:
        failed = sum(record.outcome is Outcome.FAILED for record in self._records)
        pruned = sum(record.outcome is Outcome.PRUNED for record in self._records)
        return {"trials": len(self._records), "trials_failed": failed, "trials_pruned": pruned}

    def _write(self, run_id: str, given: Entries, at: int | None = None) -> None:
        """Writes in batches. A param that is there already stays: MLflow refuses another value."""
        stamp = at or int(time.time() * 1000)
        present = self._client.get_run(run_id).data.params if given.params else {}
        params = [Param(key, value) for key, value in given.params.items() if key not in present]
        metrics = [Metric(point.key, point.value, stamp, point.step) for point in given.metrics]
        tags = [RunTag(key, value) for key, value in given.tags.items()]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_BATCH])
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_BATCH])
        self._client.log_batch(run_id, tags=tags)
        for file, content in given.texts.items():
            self._client.log_text(run_id, content, file)

    def _parent_name(self) -> str:
        return self._marked(self._description.study)

    def _marked(self, name: str) -> str:
        return f"simulated {name}" if self._description.experiment.engine.kind == "simulated" else name


def _make_store(database: Path, artefacts: Path) -> None:
    store = SqlAlchemyStore(f"sqlite:///{database.absolute()}", artefacts.absolute().as_uri())
    # MLflow makes an experiment of its own, "Default"; nothing ever goes there.
    store.delete_experiment(SqlAlchemyStore.DEFAULT_EXPERIMENT_ID)
    store.engine.dispose()


def _status(record: TrialRecord) -> str:
    if record.failure is not None and record.failure.kind is FailureKind.CANCELLED:
        return str(RunStatus.to_string(RunStatus.KILLED))
    return str(RunStatus.to_string(RunStatus.FAILED if record.outcome is Outcome.FAILED else RunStatus.FINISHED))


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
