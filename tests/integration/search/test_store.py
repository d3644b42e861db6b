"""``study.db``: a view of the records that is rebuilt whenever it disagrees with them."""

import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from runner.errors import FailureKind, StoreError
from runner.schema.trial import TrialRecord
from runner.search import Searcher
from tests.studies import experiment, record_of, space

ROOT = Path(__file__).parents[3]
GIVEN = experiment(trials=12)


def run(folder: Path, records: tuple[TrialRecord, ...] = (), *, trials: int = 12) -> list[TrialRecord]:
    """Goes on with the study for at most ``trials`` trials."""
    searcher = Searcher(space(folder, GIVEN), GIVEN, study="s", storage=folder / "study.db", records=records)
    told: list[TrialRecord] = []
    while len(told) < trials and (proposal := searcher.ask()) is not None:
        told.append(record_of(proposal, {1: 50.0 + proposal.number, 8: 400.0}))
        searcher.tell(told[-1])
    searcher.close()
    return told


def stored(folder: Path, study: str = "s") -> list[tuple[object, ...]]:
    study_of = optuna.load_study(study_name=study, storage=f"sqlite:///{folder}/study.db")
    return [(t.state.name, t.values, t.params, t.constraints, t.user_attrs["number"]) for t in study_of.trials]


def test_every_told_trial_is_in_the_store_and_none_is_running(tmp_path: Path) -> None:
    """Finished trials only, with their number, for Optuna's dashboard."""
    run(tmp_path)
    assert [row[-1] for row in stored(tmp_path)] == list(range(12))
    assert {row[0] for row in stored(tmp_path)} == {"COMPLETE"}
    assert stat.S_IMODE((tmp_path / "study.db").stat().st_mode) == 0o600


def test_a_lost_store_is_rebuilt_from_the_records(tmp_path: Path) -> None:
    """The same trials as before, and the study goes on as if nothing had happened."""
    begun = run(tmp_path, trials=7)
    before = stored(tmp_path)
    (tmp_path / "study.db").unlink()
    run(tmp_path, tuple(begun), trials=0)
    assert stored(tmp_path) == before


@pytest.mark.parametrize("known", [0, 3, 7])
def test_a_store_that_lags_behind_catches_up(tmp_path: Path, known: int) -> None:
    """The driver was killed between a record and the store."""
    begun = run(tmp_path, trials=7)
    whole = stored(tmp_path)
    (tmp_path / "study.db").unlink()
    run(tmp_path, tuple(begun[:known]), trials=0)
    assert len(stored(tmp_path)) == known
    run(tmp_path, tuple(begun), trials=0)
    assert stored(tmp_path) == whole


def test_a_store_that_disagrees_is_rebuilt(tmp_path: Path) -> None:
    """A study of the same name that was deleted and begun anew leaves nothing of the old one."""
    run(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    other = tuple(slower(r) for r in run(tmp_path / "elsewhere", trials=3))
    run(tmp_path, other, trials=0)
    assert [row[1] for row in stored(tmp_path)] == [[1.0]] * 3


def slower(record: TrialRecord) -> TrialRecord:
    measured = record.measurements[0].model_copy(update={"output_tok_s": 1.0})
    return record.model_copy(update={"measurements": (measured,)})


def test_two_studies_share_the_file(tmp_path: Path) -> None:
    """One results folder, one study.db; neither touches the other."""
    run(tmp_path, trials=3)
    searcher = Searcher(space(tmp_path, GIVEN), GIVEN, study="other", storage=tmp_path / "study.db")
    proposal = searcher.ask()
    assert proposal is not None
    searcher.tell(record_of(proposal, failure=FailureKind.HANG))
    searcher.close()
    assert len(stored(tmp_path)) == 3
    assert len(stored(tmp_path, "other")) == 1


def test_a_killed_driver_leaves_no_trial_running(tmp_path: Path) -> None:
    """SIGKILL while a trial is under way: the store holds what was told, and the study goes on from there."""
    script = (
        "import sys; from pathlib import Path; from tests.integration.search.test_store import *\n"
        "folder = Path(sys.argv[1])\n"
        "s = Searcher(space(folder, GIVEN), GIVEN, study='s', storage=folder / 'study.db')\n"
        "for _ in range(3):\n"
        "    p = s.ask(); s.tell(record_of(p, {1: 50.0 + p.number, 8: 400.0}))\n"
        "s.ask(); print('asked', flush=True); __import__('time').sleep(60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"asked\n"
    driver.kill()
    driver.wait()
    assert [row[0] for row in stored(tmp_path)] == ["COMPLETE"] * 3


def test_a_driver_killed_while_the_store_is_made_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    """Making it takes many transactions; half of them would be a file that nobody can open."""
    script = (
        "import sys; from pathlib import Path; from tests.integration.search.test_store import *\n"
        "folder = Path(sys.argv[1]); print('begun', flush=True); run(folder, trials=1)\n"
    )
    for wait_s in (0.05, 0.1, 0.2, 0.3):
        driver = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
        assert driver.stdout is not None
        driver.stdout.readline()
        time.sleep(wait_s)
        driver.kill()
        driver.wait()
    run(tmp_path, trials=3)
    assert len(stored(tmp_path)) == 3


def test_a_file_that_is_no_database_is_said_so(tmp_path: Path) -> None:
    """Which file, and what to do."""
    (tmp_path / "study.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match=r"study.db: the search's store cannot be used") as raised:
        run(tmp_path)
    assert "rebuilt" in str(raised.value)


def test_a_reader_that_holds_the_file_for_a_moment_only_delays(tmp_path: Path) -> None:
    """A dashboard, or another study's driver."""
    begun = run(tmp_path, trials=2)
    script = (
        "import sqlite3, sys, time\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('BEGIN EXCLUSIVE'); print('held', flush=True)\n"
        "time.sleep(1.5); c.execute('ROLLBACK')\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "study.db")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert holder.poll() is None
    run(tmp_path, tuple(begun), trials=1)
    assert holder.wait(timeout=10) == 0
    assert len(stored(tmp_path)) == 3


def test_the_store_is_optunas_own_format(tmp_path: Path) -> None:
    """A copy opens with plain sqlite3 and with Optuna: nothing of ours is needed to read it."""
    run(tmp_path, trials=2)
    shutil.copy(tmp_path / "study.db", tmp_path / "copy.db")
    with sqlite3.connect(tmp_path / "copy.db") as connection:
        assert connection.execute("select count(*) from trials where state = 'COMPLETE'").fetchone() == (2,)
