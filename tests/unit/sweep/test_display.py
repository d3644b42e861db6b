"""How long a sweep still takes, as its last lines say: the clock may end it before the trials do."""

import io
import time
from datetime import UTC, datetime

import pytest
from rich.console import Console

from runner.schema.experiment import Budget
from runner.schema.launch import LaunchConfig
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.sweep.display import Display

TRIAL_S = 100.0


@pytest.mark.parametrize(
    ("wall_s", "owed", "told"), [(None, 0, "15:00 left"), (600.0, 2, "11:40 left"), (9000.0, 2, "15:00 left")]
)
def test_the_time_left_ends_with_the_clock(
    wall_s: float | None, owed: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine trials of 100 s are left; a clock of 600 s has 500 s left, and lets two owed repeats run."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    out = io.StringIO()
    budget = Budget(trials=10, wall_s=wall_s)
    with Display(Console(file=out, width=120), budget=budget, simulated=False) as display:
        display._spent_s.append(TRIAL_S)
        now_s[0] = TRIAL_S
        display.stands(done=1, owed=owed, best="none yet")
        display.ended(finished())
    assert told in out.getvalue()


def finished() -> TrialRecord:
    """A trial that is over."""
    config = LaunchConfig(model="m")
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return TrialRecord(
        study="s",
        number=0,
        role=Role.BASELINE,
        params={},
        config=config,
        fingerprint=config.fingerprint,
        outcome=Outcome.COMPLETE,
        started_at=at,
        ended_at=at,
    )
