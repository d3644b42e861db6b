"""Parts of Ray are killed under a sweep: one trial fails by the environment, and the study goes on."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from runner.serving.processes import SUPERVISOR_VARIABLE, TRIAL_VARIABLE
from tests.fakes.trials import until
from tests.integration.sweep.conftest import STUDY, Start, records, wait_until_gone


def test_a_killed_raylet_is_charged_to_no_configuration(folder: Path, start: Start) -> None:
    """The sweep ends with one message instead of failing trial after trial; the budget is there for the next run."""
    sweep = start()
    sweep.wait_for("  C=4")
    below = psutil.Process(sweep._process.pid).children(recursive=True)
    next(process for process in below if process.name() == "raylet").kill()
    assert sweep.end() == 1, sweep.text
    assert "Ray is gone" in sweep.text, sweep.text
    assert "the same command goes on" in sweep.text
    wait_until_gone(STUDY)
    assert psutil.wait_procs(below, timeout=30)[1] == []
    assert [record["failure"]["kind"] for record in records(folder)] == ["environment"]
    assert "raylet" in records(folder)[0]["failure"]["message"]

    again = start("--trials", "2")
    assert again.end() == 0, again.text
    assert [record["outcome"] for record in records(folder)] == ["failed", *["complete"] * 2]
    wait_until_gone(STUDY)


def test_a_lost_actor_is_replaced_by_a_node_that_looks_around(folder: Path, start: Start) -> None:
    """The sweep goes on with another node; that one ends what it finds of crashed sweeps, and shows it.

    The driver has long looked around on its own machine by then, which need not be the node's.
    """
    marker = f"{STUDY}-crashed/0/c0ffee"
    sweep = start("--trials", "1")
    sweep.wait_for("  C=4")
    below = psutil.Process(sweep._process.pid).children(recursive=True)
    left = [left_behind(marker)]
    next(process for process in below if "ray::_NodeActor" in " ".join(process.cmdline())).kill()

    def shown() -> bool:
        if left[-1].poll() is not None:  # Another test's sweep may have found it first.
            left.append(left_behind(marker))
        return f"left behind by {marker}" in sweep.text

    try:
        assert until(shown, 60), sweep.text
        assert sweep.end() == 0, sweep.text
    finally:
        for process in left:
            process.kill()
            process.wait(10)
    assert [record["failure"] and record["failure"]["kind"] for record in records(folder)] == ["environment", None]
    wait_until_gone(STUDY)


def left_behind(marker: str) -> subprocess.Popen[bytes]:
    """A process of a trial whose supervisor is gone."""
    env = {**os.environ, TRIAL_VARIABLE: marker, SUPERVISOR_VARIABLE: "1-0"}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
