"""A sweep that is interrupted or killed: nothing is lost, nothing is left, and the same command goes on."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.sweep.conftest import STUDY, Start, records, sql, wait_until_gone

pytestmark = pytest.mark.timeout(900)
"""A sweep of a few trials takes a minute, and several on a busy machine."""


def interrupted(folder: Path, start: Start, number: signal.Signals) -> list[dict[str, Any]]:
    """The records after a signal in mid-ladder: the server goes, and the exit code is that of Ctrl-C."""
    sweep = start("--trials", "3")
    sweep.wait_for("trial 1 ")
    sweep.wait_for("C=   1", after="trial 1 ")
    sweep.lines.append("--- interrupted")
    sweep.send(number)
    assert sweep.end() == 130, sweep.text
    wait_until_gone(STUDY)
    assert "goes on where this left off" in sweep.text
    return records(folder)


def test_sigterm_closes_the_trial(folder: Path, start: Start) -> None:
    """As Ctrl-C does, with Ray in the process, which would take the signal for a crash."""
    before = interrupted(folder, start, signal.SIGTERM)
    assert [record["failure"]["kind"] for record in before if record["outcome"] == "failed"] in ([], ["cancelled"])


def test_ctrl_c_closes_the_trial_and_the_same_command_goes_on(folder: Path, start: Start) -> None:
    """The trial that was cut short is closed as cancelled, and is tried once more later."""
    before = interrupted(folder, start, signal.SIGINT)
    again = start("--trials", "3")
    assert again.end() == 0, again.text
    after = records(folder)
    assert after[: len(before)] == before
    complete = [record for record in after if record["outcome"] == "complete"]
    assert len(complete) == 3
    cancelled = [record for record in before if record["outcome"] == "failed"]
    assert all(record["failure"]["kind"] == "cancelled" for record in cancelled)
    fingerprints = [record["fingerprint"] for record in complete]
    assert len(set(fingerprints)) == 3, "nothing finished is run twice"
    assert all(record["fingerprint"] in fingerprints for record in cancelled), "what was cut short is tried once more"


# What is waited for is shown only if a look at the node falls into it, and the kill must come before it is over.
@pytest.mark.parametrize(
    ("at", "env", "window_s"), [("  weights", {"SIMULATED_FAULT": "hang_at:weights"}, 2), ("  C=4", {}, 6)]
)
def test_a_killed_driver_loses_nothing_and_leaves_nothing(
    folder: Path, start: Start, at: str, env: dict[str, str], window_s: int
) -> None:
    """SIGKILL of the driver: every process of the trial ends, and the next run closes the trial and goes on."""
    experiment = (folder / "small.yaml").read_text().replace("window_s: 2", f"window_s: {window_s}")
    (folder / "small.yaml").write_text(experiment + "allow_env: [SIMULATED_FAULT]\n")
    sweep = start(env=env)
    sweep.wait_for(at)
    sweep.kill()
    wait_until_gone(STUDY)

    again = start("--trials", "1")
    assert again.end() == 0, again.text
    found = records(folder)
    assert found[0]["failure"]["kind"] == "cancelled"
    assert [record["outcome"] for record in found[1:]] == ["complete"]
    assert found[1]["fingerprint"] == found[0]["fingerprint"]
    results = folder / "results"
    assert "RUNNING" not in sql(results / "study.db", "select state from trials")
    assert "RUNNING" not in sql(results / "mlflow.db", "select status from runs")
