"""Where results lie, and which study was written last."""

import os
from pathlib import Path

import pytest

from runner.records import latest_study, results_root, studies


def study(root: Path, name: str, written_s: int) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trials.jsonl").write_text("")
    os.utime(folder / "trials.jsonl", (written_s, written_s))
    return folder


def test_what_is_given_wins_over_the_variable_over_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Always absolute, so that no store depends on where a command was typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOK100_RESULTS", raising=False)
    assert results_root(None) == tmp_path / "results"
    monkeypatch.setenv("TOK100_RESULTS", "elsewhere")
    assert results_root(None) == tmp_path / "elsewhere"
    assert results_root("given") == tmp_path / "given"


def test_the_study_last_written_is_the_latest(tmp_path: Path) -> None:
    """By the time of its last record, not by its name."""
    old, new = study(tmp_path, "z-old", 1_000), study(tmp_path, "a-new", 2_000)
    assert studies(tmp_path) == (new, old)
    assert latest_study(tmp_path) == new


def test_committed_studies_never_count(tmp_path: Path) -> None:
    """Those under results/recorded came with the project; nobody ran them here."""
    study(tmp_path, "recorded/h200", 9_000)
    study(tmp_path, "recorded", 9_000)
    assert latest_study(tmp_path) is None
    assert latest_study(tmp_path / "nowhere") is None
