"""Whoever owns a server is killed: everything of it is gone within 10 s, whatever the phase."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.serving.processes import leftovers, marked, reap_leftovers
from tests.fakes.trials import left_of, until

GONE_WITHIN_S = 10.0


def owner(folder: Path, fault: str, phase: str) -> tuple[subprocess.Popen[str], str]:
    """An owner that has come as far as ``phase``, and its trial's marker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.owner", str(folder), fault],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    marker = process.stdout.readline().strip()
    for line in process.stdout:
        if line.strip() == phase:
            return process, marker
    pytest.fail(f"the owner ended before phase {phase}")


@pytest.mark.parametrize("phase", ["process", "weights", "compile", "capture", "first token", "ready"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_killed_at_any_phase(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """The supervisor sees the end of its pipe and takes the whole server down."""
    process, marker = owner(tmp_path, "" if phase == "ready" else f"hang:{phase}", phase)
    assert until(lambda: left_of(marker) != [])
    begin = time.monotonic()
    process.send_signal(number)
    process.wait(10)
    assert until(lambda: left_of(marker) == [], GONE_WITHIN_S)
    assert time.monotonic() - begin < GONE_WITHIN_S


def test_a_killed_owner_of_a_deaf_server(tmp_path: Path) -> None:
    """A server that ignores SIGTERM is gone within the same time."""
    process, marker = owner(tmp_path, "deaf", "ready")
    process.kill()
    process.wait(10)
    assert until(lambda: left_of(marker) == [], GONE_WITHIN_S)


# Not beside a sweep, which would reap what is left before it is seen here.
@pytest.mark.alone
def test_owner_and_supervisor_killed_together(tmp_path: Path) -> None:
    """Nobody is left to clean up: the processes are leftovers, found by their marker and reaped; a live one is not."""
    process, marker = owner(tmp_path, "", "ready")
    (tmp_path / "other").mkdir()
    other, living = owner(tmp_path / "other", "", "ready")
    first = next(one for one in marked(marker) if one.marker == marker)
    assert first.owned
    supervisor = int(Path(f"/proc/{first.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    process.send_signal(signal.SIGSTOP)  # Or it would hear of its supervisor's end and clean up before its own.
    os.kill(supervisor, signal.SIGKILL)
    process.kill()
    process.wait(10)
    assert until(lambda: {one.marker for one in leftovers("test-")} >= {marker})
    assert living not in {one.marker for one in leftovers("test-")}
    assert reap_leftovers(marker) == ()
    assert left_of(marker) == []
    assert left_of(living) != []
    other.kill()
    other.wait(10)
    assert until(lambda: left_of(living) == [], GONE_WITHIN_S)
