"""MLflow in one background thread, so that a trial never waits for it and the sweep never fails by it."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from runner.schema.study import StudyDescription
from runner.schema.trial import TrialRecord
from runner.tracking.runs import StudyRuns

log = logging.getLogger(__name__)


class Tracking:
    """The study's view in MLflow.

    Calls return at once and are done in order. One that fails is kept for ``problems`` and makes the later ones
    moot: what is missing is logged when the study is opened again.

    Args:
        root: Folder of all results (``mlflow.db`` and ``mlartifacts`` lie there).
        description: The study.
    """

    def __init__(self, root: Path, description: StudyDescription) -> None:
        self._root = root
        self._description = description
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._done: list[Future[None]] = []
        self._runs: StudyRuns | None = None
        self._closed = False

    def open(self, folder: Path, records: Sequence[TrialRecord]) -> None:
        """Makes or opens the stores (some seconds the first time) and logs what is missing of ``records``.

        Args:
            folder: The study's folder; the trials' files are taken from it.
            records: All of the study so far.
        """
        known = tuple(records)
        self._then(lambda: self._open(folder, known))

    def log(self, record: TrialRecord) -> None:
        """Logs a trial that has just been recorded."""
        self._then(lambda: self._opened().log(record))

    def close(self, *, finished: bool) -> None:
        """Ends the study's run, waits for all that was asked for, and warns of what went wrong. May be called twice.

        Args:
            finished: The study reached its end; else the same command will go on with it.
        """
        if self._closed:
            return
        self._closed = True
        self._then(lambda: self._opened().close(finished))
        self._thread.shutdown(wait=True)
        for problem in self.problems():
            log.warning("MLflow: %s (the records are complete; the next sweep of this study logs the rest)", problem)

    def problems(self) -> tuple[str, ...]:
        """What went wrong so far, in words."""
        errors = [future.exception() for future in self._done if future.done()]
        return tuple(f"{type(error).__name__}: {error}" for error in errors if error is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=False)

    def _open(self, folder: Path, records: Sequence[TrialRecord]) -> None:
        self._runs = StudyRuns(self._root, self._description, folder)
        self._runs.open(records)

    def _opened(self) -> StudyRuns:
        assert self._runs is not None
        return self._runs

    def _then(self, work: Callable[[], None]) -> None:
        def unless_failed() -> None:
            if not any(future.done() and future.exception() for future in earlier):
                work()

        earlier = tuple(self._done)
        self._done.append(self._thread.submit(unless_failed))
