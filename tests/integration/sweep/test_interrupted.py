"""A sweep that is interrupted or killed: nothing is lost, nothing is left, and the same command goes on."""

import signal
from pathlib import Path

import pytest

from tests.integration.sweep.conftest import STUDY, Start, records, sql, wait_until_gone


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_closes_the_trial_and_the_same_command_goes_on(
    folder: Path, start: Start, number: signal.Signals
) -> None:
    """Interrupted in mid-ladder: the server goes, the trial is closed as cancelled, and is tried once more later."""
    sweep = start()
    sweep.wait_for("trial 1")
    sweep.wait_for("C=   4")
    sweep.lines.append("--- interrupted")
    sweep.send(number)
    assert sweep.end() == 130, sweep.text
    wait_until_gone(STUDY)
    before = records(folder)
    assert "goes on where this left off" in sweep.text

    again = start()
    assert again.end() == 0, again.text
    after = records(folder)
    assert after[: len(before)] == before
    complete = [record for record in after if record["outcome"] == "complete"]
    assert len(complete) == 4
    cancelled = [record for record in before if record["outcome"] == "failed"]
    assert all(record["failure"]["kind"] == "cancelled" for record in cancelled)
    fingerprints = [record["fingerprint"] for record in complete]
    assert len(set(fingerprints)) == 4, "nothing finished is run twice"
    assert all(record["fingerprint"] in fingerprints for record in cancelled), "what was cut short is tried once more"


@pytest.mark.parametrize("at", ["  weights", "  C=4"])
def test_a_killed_driver_loses_nothing_and_leaves_nothing(folder: Path, start: Start, at: str) -> None:
    """SIGKILL of the driver: every process of the trial ends, and the next run closes the trial and goes on."""
    sweep = start()
    sweep.wait_for(at)
    sweep.kill()
    wait_until_gone(STUDY)

    again = start("--trials", "3")
    assert again.end() == 0, again.text
    found = records(folder)
    assert found[0]["failure"]["kind"] == "cancelled"
    assert [record["outcome"] for record in found[1:]] == ["complete"] * 3
    assert found[1]["fingerprint"] == found[0]["fingerprint"]
    results = folder / "results"
    assert "RUNNING" not in sql(results / "study.db", "select state from trials")
    assert "RUNNING" not in sql(results / "mlflow.db", "select status from runs")
