"""Records outlive the process that writes them, and a full disk, with real processes and a real full disk."""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.errors import FailureKind
from runner.records import open_study, read_study
from tests.studies import description, experiment

ROOT = Path(__file__).parents[3]
WRITER = [sys.executable, "-m", "tests.integration.records.writer"]


def test_a_killed_driver_loses_no_finished_trial(tmp_path: Path) -> None:
    """SIGKILL at random moments: every number it printed has its record, once; at most one more trial was under way."""
    folder = tmp_path / "tiny-space"
    chance = random.Random(0)
    acknowledged: list[int] = []
    for _ in range(6):
        driver = subprocess.Popen(
            [*WRITER, str(folder), "0", "100000", "1000"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert driver.stdout is not None
        acknowledged.append(int(driver.stdout.readline()))
        time.sleep(chance.uniform(0, 0.3))
        driver.kill()
        acknowledged += [int(line) for line in driver.stdout.read().split()]
        driver.wait()
    with open_study(folder, description(experiment())) as study:
        for running in study.half_run():
            study.close_half_run(running, running.started_at)
        numbers = [r.number for r in study.records()]
        assert numbers == list(range(len(numbers)))
        cut = [r.number for r in study.records() if r.failure and r.failure.kind is FailureKind.CANCELLED]
        assert len(cut) <= 6
        assert set(acknowledged) == set(numbers) - set(cut) - unacknowledged(numbers, acknowledged)
        assert not list(folder.glob("trials/*/running.json"))


def unacknowledged(numbers: list[int], acknowledged: list[int]) -> set[int]:
    """Finished, but killed before it could be printed: at most one per kill."""
    found = set(numbers) - set(acknowledged)
    assert len(found) <= 6
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """Words that run a command with a disk of 4 MiB at ``tmp_path/disk``, which it copies away at its end."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: a small disk cannot be mounted here")
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o size=4m tmpfs {tmp_path}/disk && "$@"; cp -r {tmp_path}/disk {tmp_path}/copy'
    words = ["unshare", "-rm", "sh", "-c", script, "sh"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted by this user")
    shutil.rmtree(tmp_path / "copy")
    return words


def test_a_full_disk_ends_the_driver_and_loses_no_record(tmp_path: Path, small_disk: list[str]) -> None:
    """The log that does not fit is left out, its trial's record is written into the reserve, and it is said."""
    command = [*small_disk, *WRITER, str(tmp_path / "disk" / "tiny-space"), "0", "1000", "200000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    *written, last = ended.stdout.splitlines()
    assert last == "full cannot be written: the disk is full"
    _, records = read_study(tmp_path / "copy" / "tiny-space")
    assert [r.number for r in records] == list(range(len(written) + 1))
    assert len(written) > 5
    assert records[-1].folder is None
    assert not list((tmp_path / "copy").rglob("*.tmp"))


def test_an_unwritable_folder_is_said_so(tmp_path: Path) -> None:
    """A file stands where the study's folder should be."""
    (tmp_path / "results").write_text("")
    command = [*WRITER, str(tmp_path / "results" / "tiny-space"), "0", "1", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "StoreError" in ended.stderr
    assert "Not a directory" in ended.stderr
