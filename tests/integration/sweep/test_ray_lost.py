"""Ray's daemon is killed under a sweep: one trial fails by the environment, and the same command goes on."""

from pathlib import Path

import psutil
import pytest

from tests.integration.sweep.conftest import STUDY, Start, records, wait_until_gone


@pytest.mark.parametrize("at", ["  weights", "  C=4"])
def test_a_killed_raylet_is_charged_to_no_configuration(folder: Path, start: Start, at: str) -> None:
    """The sweep ends with one message instead of failing trial after trial; the budget is there for the next run."""
    sweep = start()
    sweep.wait_for(at)
    below = psutil.Process(sweep._process.pid).children(recursive=True)
    next(process for process in below if process.name() == "raylet").kill()
    assert sweep.end() == 1, sweep.text
    assert "Ray is gone" in sweep.text
    assert "the same command goes on" in sweep.text
    wait_until_gone(STUDY)
    assert psutil.wait_procs(below, timeout=30)[1] == []
    assert [record["failure"]["kind"] for record in records(folder)] == ["environment"]
    assert "raylet" in records(folder)[0]["failure"]["message"]

    again = start("--trials", "2")
    assert again.end() == 0, again.text
    assert [record["outcome"] for record in records(folder)] == ["failed", *["complete"] * 2]
    wait_until_gone(STUDY)
