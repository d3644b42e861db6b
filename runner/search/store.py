"""``study.db``: Optuna's own SQLite file, for its dashboard and plots. A view of the records, only ever appended to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import optuna
import sqlalchemy.exc
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from runner.errors import StoreError
from runner.records import make_once

LOCK_TIMEOUT_S = 60
"""How long to wait for another study's driver, or a dashboard, that holds the file."""


REMEDY = "If the disk is not full, move this file away and run the same command again: it is rebuilt from the records."


class Store:
    """One study in the file.

    Args:
        path: The SQLite file; made when missing.
        study: Name of the study.
        directions: Optuna's, one per objective.
        trials: What it must hold; when it holds anything else it is rebuilt.

    Raises:
        StoreError: The file cannot be opened or written.
    """

    def __init__(
        self, path: Path, study: str, directions: Sequence[StudyDirection], trials: Sequence[FrozenTrial]
    ) -> None:
        self._path = path
        with self._failing():
            make_once(path, lambda new: _close(_storage(new)))
            self._storage = _storage(path)
            names = optuna.get_all_study_names(self._storage)
            if study in names and not self._holds(study, directions, trials):
                optuna.delete_study(study_name=study, storage=self._storage)
            self._study = optuna.create_study(
                study_name=study, storage=self._storage, directions=list(directions), load_if_exists=True
            )
            present = len(self._study.get_trials(deepcopy=False))
            self._study.add_trials(trials[present:])

    def add(self, trial: FrozenTrial) -> None:
        """Appends a finished trial.

        Raises:
            StoreError: It cannot be written.
        """
        with self._failing():
            self._study.add_trial(trial)

    def close(self) -> None:
        _close(self._storage)

    def _holds(self, study: str, directions: Sequence[StudyDirection], trials: Sequence[FrozenTrial]) -> bool:
        """Whether the store holds a beginning of ``trials`` and nothing else."""
        stored = optuna.load_study(study_name=study, storage=self._storage)
        if stored.directions != list(directions):
            return False
        present = stored.get_trials(deepcopy=False)
        return len(present) <= len(trials) and all(
            _essence(have) == _essence(want) for have, want in zip(present, trials, strict=False)
        )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise StoreError(f"the search's store cannot be used: {reason}", self._path, REMEDY) from error


def _storage(path: Path) -> RDBStorage:
    return RDBStorage(f"sqlite:///{path.absolute()}", engine_kwargs={"connect_args": {"timeout": LOCK_TIMEOUT_S}})


def _close(storage: RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()


def _essence(trial: FrozenTrial) -> tuple[TrialState, object, object, object]:
    return trial.state, trial.values, trial.params, trial.user_attrs.get("number")
