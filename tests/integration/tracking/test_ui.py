"""``make ui``: MLflow's server on the stores, and a quiet end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import requests

from runner.serving.lease import lease_port
from runner.tracking.runs import DATABASE
from tests.fakes.trials import until


def answers(port: int) -> bool:
    """Whether MLflow serves its page there."""
    try:
        return requests.get(f"http://127.0.0.1:{port}/", timeout=10).ok
    except requests.RequestException:
        return False


def test_ctrl_c_ends_the_ui_without_a_traceback(tmp_path: Path) -> None:
    """As a terminal sends it, to everybody in the foreground: exit code 0, no traceback, no process left."""
    (tmp_path / DATABASE).touch()
    lease = lease_port()
    lease.release()
    log = tmp_path / "log"
    with log.open("wb") as said:
        ui = subprocess.Popen(
            [sys.executable, "-m", "runner.tracking", "--results", str(tmp_path), "--port", str(lease.port)],
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    assert until(lambda: answers(lease.port), 200), log.read_text()
    below = psutil.Process(ui.pid).children(recursive=True)
    os.killpg(ui.pid, signal.SIGINT)
    assert ui.wait(60) == 0
    assert "Traceback" not in log.read_text()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []
