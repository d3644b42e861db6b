"""One study's folder: its description, its trials' lines, its trials' files, and the marks of trials under way."""

import difflib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from pydantic import ValidationError

from runner.errors import NOT_ITS_FAULT, FailureKind, StoreError, UsageError
from runner.records.files import append_line, lock, make_folder, sync_folder, write_beside
from runner.records.locate import COMMITTED, RECORDS
from runner.schema.study import Running, StudyDescription
from runner.schema.trial import Failure, Outcome, TrialRecord

log = logging.getLogger(__name__)

DESCRIPTION = "study.yaml"
RESERVE = ".reserve"
RESERVE_BYTES = 1 << 20
"""Held back on disk so that the record of the trial that filled it can still be written (a record is some 10 KiB)."""

FREE_TO_CHANGE = frozenset({"budget", "description"})
"""Of an experiment: what may differ when a study goes on (``TRIALS`` is a total that may be raised)."""

SAME_MACHINE = ("vllm", "torch", "gpus", "driver", "cpu")
"""Of the provenance: what figures depend on beside the experiment. A difference is told, not refused."""

COMPARABLE = ("engine", "model", "workload", "ladder", "protocol", "defaults", "pinned")
"""Of an experiment: what must be equal for its figures to mean the same in a fork."""


class StudyFiles:
    """A study that this process writes. Made by ``open_study``; holds its lock until closed.

    Attributes:
        folder: ``results/<study>``.
        description: As on disk.
    """

    def __init__(self, folder: Path, description: StudyDescription, lock_descriptor: int) -> None:
        self.folder = folder
        self.description = description
        self._lock: int | None = lock_descriptor
        self._records = _mend(folder / RECORDS)
        self._reserve()

    def records(self) -> tuple[TrialRecord, ...]:
        """All records, in the order they were appended."""
        return tuple(self._records)

    def begin(self, running: Running) -> None:
        """Marks a trial as under way; call before its server starts.

        Raises:
            StoreError: The mark cannot be written.
        """
        make_folder(self._trial_folder(running.number, running.config.fingerprint))
        write_beside(self._mark(running), running.model_dump_json(by_alias=True).encode())

    def half_run(self) -> tuple[Running, ...]:
        """Trials that were begun and have no record: their driver was killed. By number."""
        done = {record.number for record in self._records}
        found = [_running(path) for path in self.folder.glob("trials/*/running.json")]
        for running in found:
            if running.number in done:
                self._mark(running).unlink(missing_ok=True)
        return tuple(sorted((r for r in found if r.number not in done), key=lambda running: running.number))

    def close_half_run(self, running: Running, ended_at: datetime) -> TrialRecord:
        """Records a half-run trial as failed (``cancelled``); the search queues it once more.

        Raises:
            StoreError: The record cannot be written.
        """
        return self.finish(
            TrialRecord(
                study=self.description.study,
                number=running.number,
                role=running.role,
                repeat_of=running.repeat_of,
                params=running.params,
                config=running.config,
                fingerprint=running.config.fingerprint,
                outcome=Outcome.FAILED,
                failure=Failure(kind=FailureKind.CANCELLED, message="the driver ended in the middle of this trial"),
                simulated=self.description.experiment.engine.kind == "simulated",
                started_at=running.started_at,
                ended_at=ended_at,
            ),
            {},
        )

    def finish(self, record: TrialRecord, files: Mapping[str, bytes]) -> TrialRecord:
        """Writes a trial's files, then its line, then takes its mark away. Returns the record with its folder.

        Raises:
            StoreError: Something could not be written. The record itself is safe whenever the reserve allowed it:
                files that did not fit are left out first.
            ValueError: A record of this number is there already.
        """
        trouble: StoreError | None = None
        try:
            folder = self.write_files(record.number, record.fingerprint, files)
            record = record.model_copy(update={"folder": str(folder.relative_to(self.folder))})
        except StoreError as error:
            trouble = error
        self.append(record)
        (self._trial_folder(record.number, record.fingerprint) / "running.json").unlink(missing_ok=True)
        if trouble is not None:
            raise trouble
        return record

    def append(self, record: TrialRecord) -> None:
        """Appends one line to ``trials.jsonl`` and fsyncs it.

        Raises:
            StoreError: It cannot be written, not even into the reserve; the file is as it was.
            ValueError: A record of this number is there already.
        """
        if any(known.number == record.number for known in self._records):
            raise ValueError(f"trial {record.number} of {self.folder} has a record already")
        line = record.model_dump_json(by_alias=True).encode()
        try:
            append_line(self.folder / RECORDS, line)
        except StoreError:
            if not (self.folder / RESERVE).exists():
                raise
            (self.folder / RESERVE).unlink()
            append_line(self.folder / RECORDS, line)
            self._records.append(record)
            raise
        self._records.append(record)

    def write_files(self, number: int, fingerprint: str, files: Mapping[str, bytes]) -> Path:
        """Writes a trial's files into ``trials/<number>-<fingerprint>/``; returns that folder.

        Raises:
            StoreError: One cannot be written.
            ValueError: A name would leave the folder.
        """
        folder = self._trial_folder(number, fingerprint)
        make_folder(folder)
        for name, content in files.items():
            if Path(name).name != name or name.startswith("."):
                raise ValueError(f"{name!r} is no plain file name")
            write_beside(folder / name, content)
        return folder

    def close(self) -> None:
        """Lets go of the lock; may be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _trial_folder(self, number: int, fingerprint: str) -> Path:
        return self.folder / "trials" / f"{number}-{fingerprint}"

    def _mark(self, running: Running) -> Path:
        return self._trial_folder(running.number, running.config.fingerprint) / "running.json"

    def _reserve(self) -> None:
        reserve = self.folder / RESERVE
        if not reserve.exists():
            # Random bytes: a compressing file system would give zeros no room.
            write_beside(reserve, os.urandom(RESERVE_BYTES))


def open_study(folder: Path, description: StudyDescription) -> StudyFiles:
    """Opens or begins the study in ``folder``, locked for this process.

    Raises:
        UsageError: Another process writes it; or it was begun with another experiment or space (the message holds
            the difference); or its files cannot be read; or its name is one of the committed folders.
        StoreError: The folder cannot be written.
    """
    if folder.name in COMMITTED:
        raise UsageError(
            f"{folder.name!r} is where committed results lie, not a study", remedy="Give another STUDY=.", path=folder
        )
    make_folder(folder)
    path = folder / DESCRIPTION
    held = lock(folder / ".lock")
    with ExitStack() as on_failure:
        on_failure.callback(os.close, held)
        known = _read_description(path) if path.exists() else None
        if known is None:
            write_beside(path, _to_yaml(description.model_dump(mode="json", by_alias=True)).encode())
        else:
            _refuse_edited(known, description, path)
            _warn_of_another_machine(known, description)
        study = StudyFiles(folder, known or description, held)
        on_failure.pop_all()
    return study


def fork_study(old: Path, new: Path, description: StudyDescription) -> tuple[StudyFiles, str]:
    """Begins ``new`` with the finished trials of ``old``, and says in words what was taken over.

    Figures are only taken over when they mean the same: engine, model, workload, ladder, protocol, defaults and pinned
    settings are equal. Cancelled and environment failures stay behind: they say nothing of a configuration.

    Raises:
        UsageError: As ``open_study``, or ``new`` exists.
        StoreError: The folder cannot be written.
    """
    if (new / DESCRIPTION).exists():
        raise UsageError("this study exists already", remedy="Give the fork another name with STUDY=.", path=new)
    known, records = read_study(old)
    study = open_study(new, description.model_copy(update={"forked_from": known.study}))
    differing = [
        name for name in COMPARABLE if getattr(known.experiment, name) != getattr(description.experiment, name)
    ]
    if differing:
        return study, f"no trial of {known.study} was taken over: {', '.join(differing)} changed"
    taken = [record for record in records if _is_finished(record)]
    for record in taken:
        _link_files(old, new, record)
        study.append(record.model_copy(update={"study": description.study}))
    return study, f"{len(taken)} finished trials of {known.study} were taken over"


def read_study(folder: Path) -> tuple[StudyDescription, tuple[TrialRecord, ...]]:
    """Reads a study without a lock and without writing; a last line that is still being written is left out.

    Raises:
        UsageError: There is no study, or a line of it cannot be read.
    """
    if not (folder / DESCRIPTION).is_file():
        raise UsageError("no study is here (no study.yaml)", remedy="Name a folder under results/.", path=folder)
    records, _ = _parse(folder / RECORDS)
    return _read_description(folder / DESCRIPTION), tuple(records)


def _is_finished(record: TrialRecord) -> bool:
    return record.failure is None or record.failure.kind not in NOT_ITS_FAULT


def _link_files(old: Path, new: Path, record: TrialRecord) -> None:
    """Hard links: files of a trial are only ever replaced, never edited, so both studies may share them."""
    if record.folder is None or not (old / record.folder).is_dir():
        return
    make_folder((new / record.folder).parent)
    try:
        shutil.copytree(old / record.folder, new / record.folder, copy_function=os.link)
    except shutil.Error as error:
        raise StoreError(f"cannot take over the files of trial {record.number}: {error}", new) from error


def _refuse_edited(known: StudyDescription, given: StudyDescription, path: Path) -> None:
    before, after = _comparable_text(known), _comparable_text(given)
    if before == after:
        return
    difference = "\n".join(
        difflib.unified_diff(before.splitlines(), after.splitlines(), "as the study began", "as given now", lineterm="")
    )
    raise UsageError(
        f"study {known.study!r} was begun with another experiment or search space:\n{difference}",
        remedy=f"Undo the edit, or start a new study with its finished trials: --fork {known.study} --study NAME "
        f"(make: FORK={known.study} STUDY=NAME), or afresh: STUDY=NAME.",
        path=path,
    )


def _warn_of_another_machine(known: StudyDescription, given: StudyDescription) -> None:
    for name in SAME_MACHINE:
        before, now = getattr(known.provenance, name), getattr(given.provenance, name)
        if before and now and before != now:
            log.warning("study %s was begun on %s %s, this is %s: figures may differ", known.study, name, before, now)


def _comparable_text(description: StudyDescription) -> str:
    experiment = description.experiment.model_dump(mode="json", by_alias=True, exclude=set(FREE_TO_CHANGE))
    return _to_yaml({"experiment": experiment, "space": description.space_content})


def _to_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _read_description(path: Path) -> StudyDescription:
    try:
        return StudyDescription.model_validate_json(json.dumps(yaml.safe_load(path.read_text("utf-8")), default=str))
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot be read: {error}", remedy="Give another STUDY=, or restore the file.", path=path
        ) from error


def _running(path: Path) -> Running:
    try:
        return Running.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"cannot be read: {error}", remedy="Remove this file.", path=path) from error


def _parse(path: Path) -> tuple[list[TrialRecord], bytes]:
    """The whole lines of ``path`` as records, and what follows the last line feed."""
    if not path.exists():
        return [], b""
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for line_number, line in enumerate(lines, start=1):
        try:
            records.append(TrialRecord.model_validate_json(line))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise UsageError(
                f"is no trial record: {place}: {problem['msg']}",
                remedy="Restore the line, or move it away; a record of a newer version needs that version.",
                path=path,
                line=line_number,
            ) from error
    return records, tail


def _mend(path: Path) -> list[TrialRecord]:
    """Reads the records; a torn last line, left by a crash in the middle of writing it, is set aside in a file."""
    records, tail = _parse(path)
    if not tail:
        return records
    kept = len(path.read_bytes()) - len(tail)
    aside = path.with_name(f"{path.name}.torn-at-{kept}")
    write_beside(aside, tail)
    with path.open("r+b") as handle:
        handle.truncate(kept)
        os.fsync(handle.fileno())
    sync_folder(path.parent)
    log.warning("the last line of %s was not whole; it is kept in %s", path, aside.name)
    return records
