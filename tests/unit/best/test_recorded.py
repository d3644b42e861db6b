"""The study measured on two H200s, read as a user of a laptop reads it."""

from pathlib import Path

import pytest
import yaml

from runner import best

STUDY = Path(__file__).parents[3] / "results" / "recorded" / "2x-h200-p2p-off"


def test_the_winners_at_each_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    """Unset at C=1, pipeline parallel from C=64 on; drafts at a set acceptance apart; LL never over unset."""
    assert best.main(["--study", str(STUDY)]) == 0
    said = capsys.readouterr().out
    lines = {line.split(":")[0]: line for line in said.splitlines() if line.startswith("best at")}
    assert "baseline" in lines["best at C=1"]
    assert "protocol=LL speculation=ngram_synthetic" in lines["best at C=1 (synthetic acceptance)"]
    assert " channels=at_least_16," in lines["best at C=10"]
    assert " split=pp2," in lines["best at C=64"]
    assert " split=pp2 stream_interval=8," in lines["best at C=256"]
    assert not any("protocol=LL" in line for name, line in lines.items() if "synthetic" not in name)
    assert "* limited by the server's API process, not by the engine" in said


def test_a_profile_of_it_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The winner at C=256 loses at every lower concurrency, and stands beside a baseline that its front end limits."""
    path = tmp_path / "profile.yaml"
    assert best.main(["--study", str(STUDY), "--concurrency", "256", "--export", str(path)]) == 0
    profile = yaml.safe_load(path.read_text())
    assert profile["config"]["flags"]["pipeline-parallel-size"] == 2
    assert "loses 16.0 % against the baseline at C=1" in profile["note"]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"wrote {path}: trial 19")
