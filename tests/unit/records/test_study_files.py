"""A study's folder: what is written, what is refused, what is set aside."""

import json
import logging
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import FailureKind, UsageError
from runner.records import StudyFiles, fork_study, open_study, read_study
from runner.schema.experiment import Experiment, Settings, Workload
from runner.schema.study import Running
from runner.schema.trial import Outcome, Provenance, Role
from tests.studies import BEGAN, config, description, experiment, record

GOLDEN = Path(__file__).parents[2] / "golden" / "records"
NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def study(tmp_path: Path) -> Iterator[StudyFiles]:
    with open_study(tmp_path / "tiny-space", description(experiment())) as opened:
        yield opened


def reopened(study: StudyFiles, given: Experiment | None = None, values: tuple[int, ...] = (128, 256)) -> StudyFiles:
    study.close()
    return open_study(study.folder, description(given or experiment(), values=values))


def running(number: int) -> Running:
    return Running(
        number=number, role=Role.SEARCH, params={"a": 1}, config=config({"a": 1}), marker="m", started_at=BEGAN
    )


def test_what_was_appended_is_read_again(study: StudyFiles) -> None:
    """Every field, in order, after a restart and by a reader."""
    records = [record(0, {1: 5.0, 8: 30.0}, role=Role.BASELINE), record(1, None, failure=FailureKind.HANG)]
    for one in records:
        study.append(one)
    with reopened(study) as again:
        assert list(again.records()) == records
    described, found = read_study(study.folder)
    assert list(found) == records
    assert described == description(experiment())


def test_a_number_is_written_once(study: StudyFiles) -> None:
    """A second record of a trial would be a second truth."""
    study.append(record(0, 5.0))
    with pytest.raises(ValueError, match="has a record already"):
        study.append(record(0, 6.0))


def test_files_lie_in_the_trials_own_folder_and_belong_to_the_user(study: StudyFiles) -> None:
    """Log and asked configuration beside each other, readable by nobody else; the record says where."""
    written = study.finish(record(3, 5.0, params={"a": 1}), {"server.log": b"hello", "asked.json": b"{}"})
    assert written.folder == f"trials/3-{written.fingerprint}"
    folder = study.folder / written.folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"server.log": b"hello", "asked.json": b"{}"}
    for path in [study.folder, *study.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert study.records()[-1].folder == written.folder


@pytest.mark.parametrize("name", ["../escape", "a/b", "/etc/x", ".hidden", ".."])
def test_a_file_cannot_leave_its_folder(study: StudyFiles, name: str) -> None:
    """Names come from a node."""
    with pytest.raises(ValueError, match="no plain file name"):
        study.write_files(0, "f", {name: b""})


def test_a_trial_under_way_is_known_until_its_record_is_there(study: StudyFiles) -> None:
    """The mark is what a killed driver leaves behind."""
    study.begin(running(4))
    assert study.half_run() == (running(4),)
    study.finish(record(4, 5.0, params={"a": 1}), {})
    assert study.half_run() == ()


def test_a_half_run_trial_is_closed_as_cancelled(study: StudyFiles) -> None:
    """With its own number, params and configuration; and only once."""
    study.begin(running(4))
    with reopened(study) as again:
        (left,) = again.half_run()
        closed = again.close_half_run(left, NOW)
        assert closed.failure is not None
        assert (closed.number, closed.params, closed.outcome) == (4, {"a": 1}, Outcome.FAILED)
        assert closed.failure.kind is FailureKind.CANCELLED
        assert again.half_run() == ()
        assert again.records() == (closed,)


def test_a_mark_whose_record_was_written_is_only_swept_up(study: StudyFiles) -> None:
    """The driver was killed between the two."""
    study.begin(running(4))
    study.append(record(4, 5.0, params={"a": 1}))
    assert study.half_run() == ()
    assert list(study.folder.glob("trials/*/running.json")) == []


def test_two_drivers_never_write_one_study(study: StudyFiles) -> None:
    """The second is told who holds it."""
    with pytest.raises(UsageError, match="another sweep"):
        open_study(study.folder, description(experiment()))
    study.close()
    study.close()
    with open_study(study.folder, description(experiment())):
        pass


def test_an_edited_space_is_refused_with_the_difference(study: StudyFiles) -> None:
    """And with the way out; the study is not touched and its lock is free again."""
    before = (study.folder / "study.yaml").read_bytes()
    with pytest.raises(UsageError) as refused:
        reopened(study, values=(128, 256, 512))
    message = str(refused.value)
    assert "+      - 512" in message
    assert "--fork" in message
    assert (study.folder / "study.yaml").read_bytes() == before
    with reopened(study):
        pass


@pytest.mark.parametrize(
    ("edited", "line"),
    [
        (experiment(ladder=(1, 4, 8)), "+  - 4"),
        (experiment(goal_tok_s=50.0), "+    output_tok_s: 50.0"),
        (experiment(simulated=True), "+    kind: simulated"),
    ],
)
def test_an_edited_experiment_is_refused_with_the_difference(study: StudyFiles, edited: Experiment, line: str) -> None:
    """Whatever makes its figures or its search mean something else."""
    with pytest.raises(UsageError) as refused:
        reopened(study, edited)
    assert line in str(refused.value)


def test_more_trials_are_no_edit(study: StudyFiles) -> None:
    """TRIALS is a total that may be raised."""
    with reopened(study, experiment(trials=99)) as again:
        assert again.records() == ()


def test_another_engine_version_is_told_but_not_refused(study: StudyFiles, caplog: pytest.LogCaptureFixture) -> None:
    """Its figures may differ, and somebody may know that they do not. What nobody knows is no difference."""
    study.close()
    (study.folder / "study.yaml").unlink()
    known = description(experiment())
    at = {version: known.model_copy(update={"provenance": Provenance(vllm=version)}) for version in ("0.32", "0.33")}
    with open_study(study.folder, at["0.32"]):
        pass
    with caplog.at_level(logging.WARNING), open_study(study.folder, at["0.33"]):
        assert "begun on vllm 0.32, this is 0.33" in caplog.text
    caplog.clear()
    with open_study(study.folder, known):
        assert caplog.text == ""


@pytest.mark.parametrize("name", ["recorded", "bench"])
def test_a_study_cannot_take_the_committed_folders_names(tmp_path: Path, name: str) -> None:
    """They would mix with what came with the project."""
    with pytest.raises(UsageError, match="committed"):
        open_study(tmp_path / name, description(experiment()))


def test_a_torn_last_line_is_set_aside_at_every_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut anywhere in its last line, the file gives all earlier records, and the rest is kept beside it."""
    with open_study(tmp_path / "s", description(experiment())) as study:
        for number in range(3):
            study.append(record(number, 5.0))
    path = tmp_path / "s" / "trials.jsonl"
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in {start + 1, start + 2, start + 100, len(whole) - 2, len(whole) - 1}:
        path.write_bytes(whole[:cut])
        _, readable = read_study(tmp_path / "s")
        assert [r.number for r in readable] == [0, 1]
        with (
            caplog.at_level(logging.WARNING),
            open_study(tmp_path / "s", description(experiment())) as study,
        ):
            assert [r.number for r in study.records()] == [0, 1]
            assert "was not whole" in caplog.text
            aside = tmp_path / "s" / f"trials.jsonl.torn-at-{start}"
            assert aside.read_bytes() == whole[start:cut]
            study.append(record(2, 6.0))
        assert [r.number for r in read_study(tmp_path / "s")[1]] == [0, 1, 2]
        aside.unlink()


def test_a_broken_line_in_the_middle_is_named_not_skipped(study: StudyFiles) -> None:
    """A lost record is never silent."""
    study.append(record(0, 5.0))
    study.close()
    path = study.folder / "trials.jsonl"
    path.write_bytes(b'{"not": "a record"}\n' + path.read_bytes())
    with pytest.raises(UsageError, match=r"trials.jsonl:1: is no trial record"):
        open_study(study.folder, description(experiment()))


def test_no_study_is_said_so(tmp_path: Path) -> None:
    """A reader is told what it can name instead."""
    with pytest.raises(UsageError, match="no study is here"):
        read_study(tmp_path)


def test_a_broken_description_is_said_so(study: StudyFiles) -> None:
    """And not overwritten."""
    study.close()
    (study.folder / "study.yaml").write_text("study: [")
    with pytest.raises(UsageError, match=r"study.yaml: cannot be read"):
        open_study(study.folder, description(experiment()))
    assert (study.folder / "study.yaml").read_text() == "study: ["


def test_a_fork_takes_over_the_finished_trials(study: StudyFiles) -> None:
    """D-8: four finished trials and one cut short; the new study has the four, under its own name, with their files."""
    for number in range(4):
        study.finish(record(number, 5.0 + number, params={"a": number}), {"server.log": b"log"})
    study.begin(running(4))
    left = study.half_run()[0]
    study.close_half_run(left, NOW)
    study.close()
    new = study.folder.with_name("forked")
    forked, said = fork_study(study.folder, new, description(experiment(), study="forked", values=(128, 256, 512)))
    with forked:
        assert [(r.number, r.study) for r in forked.records()] == [(n, "forked") for n in range(4)]
        assert forked.description.forked_from == "tiny-space"
        folder = forked.records()[2].folder
        assert folder is not None
        assert (new / folder / "server.log").read_bytes() == b"log"
    assert said == "4 finished trials of tiny-space were taken over"
    assert len(read_study(study.folder)[1]) == 5


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"workload": Workload(output_tokens=7)}, "workload"),
        ({"defaults": Settings(flags={"enforce-eager": True})}, "defaults"),
        ({"model": "another"}, "model"),
    ],
)
def test_a_fork_takes_over_no_figure_that_means_something_else(
    study: StudyFiles, update: dict[str, object], word: str
) -> None:
    """Other load, other defaults, other model: the old tok/s are not the new ones."""
    study.append(record(0, 5.0))
    study.close()
    edited = description(experiment().model_copy(update=update), study="forked")
    forked, said = fork_study(study.folder, study.folder.with_name("forked"), edited)
    with forked:
        assert forked.records() == ()
    assert word in said


def test_a_fork_never_writes_into_a_study_that_exists(study: StudyFiles) -> None:
    """Not even its own."""
    with pytest.raises(UsageError, match="exists already"):
        fork_study(study.folder, study.folder, description(experiment()))


def test_records_of_every_earlier_version_stay_readable() -> None:
    """Files kept for ever, written by the version they are named after; there is one for each."""
    files = sorted(GOLDEN.glob("v*.jsonl"))
    assert [path.stem for path in files] == ["v1"]
    for path in files:
        lines = path.read_text().splitlines()
        folder_records = [json.loads(line) for line in lines]
        assert {found["schema_version"] for found in folder_records} == {int(path.stem[1:])}


def test_the_first_version_reads_as_it_was_written(tmp_path: Path) -> None:
    """Figures, failure, roles and links of a small study."""
    (tmp_path / "trials.jsonl").write_bytes((GOLDEN / "v1.jsonl").read_bytes())
    (tmp_path / "study.yaml").write_bytes((GOLDEN / "v1.study.yaml").read_bytes())
    described, records = read_study(tmp_path)
    assert described.study == "tiny-space"
    assert [(r.number, str(r.role), str(r.outcome)) for r in records] == [
        (0, "baseline", "complete"),
        (1, "search", "failed"),
        (2, "search", "complete"),
    ]
    assert records[1].failure is not None
    assert records[1].failure.kind is FailureKind.OUT_OF_MEMORY
    best = records[2].at(1)
    assert best is not None
    assert best.output_tok_s == 57.0
    assert best.ttft_ms is not None
    assert (best.ttft_ms.p50, best.ttft_ms.p99) == (41.5, None)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(), number=st.integers(0, 10**6), tok_s=st.floats(min_value=0, max_value=1e9))
def test_any_text_and_any_figure_comes_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: int, tok_s: float
) -> None:
    """Line feeds and odd characters in a server's message do not break a line."""
    folder = tmp_path_factory.mktemp("any") / "s"
    written = record(number, tok_s, params={"a": text}, failure=FailureKind.HANG)
    assert written.failure is not None
    written = written.model_copy(update={"failure": written.failure.model_copy(update={"message": text})})
    with open_study(folder, description(experiment())) as study:
        study.append(written)
    assert read_study(folder)[1] == (written,)
