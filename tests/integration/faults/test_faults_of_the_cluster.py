"""Ray's processes are killed: the server behind them is gone within 10 s, whichever it was and in whatever phase."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.trials import left_of, until

GONE_WITHIN_S = 10.0
STARTING, LOADED = "weights", "C=1 warm-up"


class Driver:
    """A driver in a process of its own, with Ray and a server below it."""

    def __init__(self, folder: Path, fault: str) -> None:
        # Ray's sockets want a short path, and what is being killed may still write there.
        self.folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.driver", str(folder), fault],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
            env=os.environ | {"TMPDIR": self.folder.name},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.marker = self.process.stdout.readline().strip()
        self.below: list[psutil.Process] = []

    def await_line(self, wanted: str) -> None:
        assert self.process.stdout is not None
        if not any(line.strip() == wanted for line in self.process.stdout):
            pytest.fail(f"the driver ended before it said {wanted}")

    def look(self) -> None:
        """Remember what runs below the driver: the killed cannot be asked for their children."""
        self.below = psutil.Process(self.process.pid).children(recursive=True)

    def named(self, part: str) -> psutil.Process:
        """The one process below this driver that is called so."""
        (found,) = (one for one in self.below if part in words(one))
        return found

    def kill(self, who: str) -> None:
        if who == "driver":
            self.process.send_signal(signal.SIGKILL)
        elif who == "ray.kill":
            assert self.process.stdin is not None
            self.process.stdin.write("actor\n")
            self.process.stdin.flush()
        else:
            self.named({"raylet": "raylet/raylet", "actor": "ray::_NodeActor"}[who]).kill()

    def end(self) -> None:
        """Take down the driver and what Ray left; only processes this driver started."""
        self.process.kill()
        for one in self.below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(10)
        self.folder.cleanup()


def words(process: psutil.Process) -> str:
    """What a process is called; empty when it has just gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())[:200]
    return ""


@pytest.mark.parametrize("phase", [STARTING, LOADED])
@pytest.mark.parametrize("who", ["driver", "raylet", "actor", "ray.kill"])
def test_a_killed_part_of_ray(tmp_path: Path, who: str, phase: str) -> None:
    """SIGKILL of driver, raylet or actor, or Ray's own kill of the actor: nothing stays, and no configuration's fault.

    What runs below the actor are the clients of the load benchmark; the server has left its tree.
    """
    driver = Driver(tmp_path, "" if phase == LOADED else f"hang:{phase}")
    try:
        driver.await_line(phase)
        assert until(lambda: left_of(driver.marker) != [])
        driver.look()
        clients = driver.named("ray::_NodeActor").children(recursive=True)
        assert clients or phase == STARTING
        begin = time.monotonic()
        driver.kill(who)
        assert until(lambda: left_of(driver.marker) == [], GONE_WITHIN_S)
        assert time.monotonic() - begin < GONE_WITHIN_S
        if who != "driver":
            driver.await_line("environment")
        assert psutil.wait_procs(clients, timeout=GONE_WITHIN_S)[1] == []
    finally:
        driver.end()
