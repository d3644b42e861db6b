"""Ray's processes are killed: the server behind them is gone within 10 s, whichever it was and in whatever phase."""

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


class Driver:
    """A driver in a process of its own, with Ray and a server below it."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp")  # Ray's sockets want a short path.
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
        self.ray: list[psutil.Process] = []

    def await_line(self, wanted: str) -> None:
        assert self.process.stdout is not None
        if not any(line.strip() == wanted for line in self.process.stdout):
            pytest.fail(f"the driver ended before it said {wanted}")
        self.ray = psutil.Process(self.process.pid).children(recursive=True)

    def named(self, part: str) -> psutil.Process:
        """One of Ray's own processes below this driver."""
        return next(one for one in self.ray if part in " ".join(one.cmdline())[:200])

    def end(self) -> None:
        """Take down the driver and what Ray left; only processes this driver started."""
        for one in [*self.ray, psutil.Process(self.process.pid)] if self.process.poll() is None else self.ray:
            if one.is_running():
                one.kill()
        self.process.wait(10)
        self.folder.cleanup()


@pytest.mark.parametrize(
    ("who", "phase"),
    [("driver", "weights"), ("driver", "ready"), ("raylet", "ready"), ("actor", "weights"), ("ray.kill", "ready")],
)
def test_a_killed_part_of_ray(tmp_path: Path, who: str, phase: str) -> None:
    """SIGKILL of driver, raylet or actor process, and Ray's own kill of the actor."""
    driver = Driver(tmp_path, "" if phase == "ready" else f"hang:{phase}")
    try:
        driver.await_line(phase)
        assert until(lambda: left_of(driver.marker) != [])
        begin = time.monotonic()
        match who:
            case "driver":
                driver.process.send_signal(signal.SIGKILL)
            case "raylet":
                driver.named("raylet/raylet").kill()
            case "actor":
                driver.named("ray::").kill()
            case _:
                assert driver.process.stdin is not None
                driver.process.stdin.write("actor\n")
                driver.process.stdin.flush()
        assert until(lambda: left_of(driver.marker) == [], GONE_WITHIN_S)
        assert time.monotonic() - begin < GONE_WITHIN_S
    finally:
        driver.end()
