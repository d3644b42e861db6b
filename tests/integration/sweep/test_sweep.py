"""The whole loop on the simulated engine: real processes, a local Ray, real SQLite stores."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runner.sweep.__main__ import main
from tests.integration.sweep.conftest import EXPERIMENT, ROOT, SPACE, STUDY, Start, records, sql, wait_until_gone

pytestmark = pytest.mark.timeout(900)
"""A sweep of a few trials takes a minute, and several on a busy machine."""


def swept(
    folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and output of a sweep that is to start nothing, in this process."""
    monkeypatch.chdir(folder)
    before = os.umask(0o022)
    try:
        code = main(["--space", "space.yaml", "--experiment", "small.yaml", *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os.umask(before)
    told = capsys.readouterr()
    return code, told.out + told.err


def test_a_sweep_measures_records_tracks_and_exports(folder: Path, start: Start) -> None:
    """One command: every store agrees, every number is called simulated, and the winner exports."""
    sweep = start()
    assert sweep.end() == 0, sweep.text
    found = records(folder)
    levels = [m for record in found for m in record["measurements"]]
    # A busy machine may keep the client from keeping up; nothing else may make a level void.
    bound = [m for m in levels if not m["valid"]]
    assert all(m["limited_by"] == "client" for m in bound), sweep.text
    if not all(any(m["valid"] for m in record["measurements"]) for record in found if record["measurements"]):
        pytest.skip("this machine was too busy: the client was the limit at every level of a trial")
    assert [record["number"] for record in found] == [0, 1, 2, 3]
    assert found[0]["role"] == "baseline"
    assert found[0]["params"] == {}
    assert all(record["simulated"] for record in found)
    assert [m["concurrency"] for m in levels] == [1, 4] * 4
    assert "SIMULATED" in sweep.text
    measured = [line for line in sweep.lines if " ok (" in line and "client" not in line]
    assert len(measured) == len(levels) - len(bound), sweep.text
    bests = [line for line in sweep.lines if "; best " in line]
    rows = [line for line in sweep.lines if re.match(r" *│.*│ +\d", line)]
    assert len(bests) == len(rows) == 4, sweep.text
    without_figure = "best none yet" if bound else "(every trial has one)"
    told = [line for line in (*measured, *bests, *rows) if without_figure not in line]
    assert all("simulated" in line for line in told), sweep.text

    results = folder / "results"
    states = sql(results / "study.db", "select state from trials")
    assert sorted(states) == ["COMPLETE"] * 4
    assert set(sql(results / "mlflow.db", "select status from runs")) == {"FINISHED"}
    keys = set(sql(results / "mlflow.db", "select distinct key from metrics"))
    assert {"output_tok_s", "output_tok_s_c1", "output_tok_s_c4", "best_so_far_tok_s", "percent_of_goal"} <= keys
    trial = results / STUDY / found[1]["folder"]
    assert {"server.log", "asked.json", "effective.json", "samples-c1.parquet"} <= {p.name for p in trial.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in results.rglob("*")), "files are the user's own"
    wait_until_gone(STUDY)

    best = [sys.executable, "-m", "runner.best", "--export", "profile.yaml"]
    done = subprocess.run(best, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    profile = (folder / "profile.yaml").read_text()
    assert profile.lstrip("# \n").startswith("engine: simulated"), profile
    assert yaml.safe_load(profile)["chosen"]["study"] == STUDY

    again = start()
    assert again.end() == 0
    assert records(folder) == found, "a finished study prints its table and runs nothing"
    assert "trial 0" not in again.text


def test_an_edited_space_is_refused_and_can_be_forked(folder: Path, start: Start) -> None:
    """A changed space stops with the difference; a fork takes the finished trials over and runs only what is new.

    What NCCL chose is asked by a start of its own, once for the same environment, and known from the records then.
    """
    first = start("--trials", "2", "--evidence")
    assert first.end() == 0, first.text
    assert first.text.count("evidence start") == 1, first.text
    (folder / "space.yaml").write_text(SPACE.replace("[1, 2, 64]", "[1, 2, 64, 128]"))
    refused = start("--trials", "3")
    assert refused.end() == 2
    assert "- 64" in refused.text
    assert "--fork" in refused.text

    forked = start("--trials", "3", "--study", "wider", "--fork", STUDY, "--evidence")
    assert forked.end() == 0, forked.text
    lines = (folder / "results" / "wider" / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    assert [json.loads(line)["fingerprint"] for line in lines[:2]] == [r["fingerprint"] for r in records(folder)]
    assert "trial 2" in forked.text
    assert "trial 1 " not in forked.text
    assert "evidence start" not in forked.text
    choices = [json.loads(line)["effective"]["nccl_choice"] for line in lines]
    assert choices[0]
    assert choices == [choices[0]] * 3


@pytest.mark.parametrize(
    ("file", "text", "words", "telling"),
    [
        ("space.yaml", SPACE, ("--space", "nowhere"), ["no search space `nowhere`", "nccl.yaml"]),
        ("space.yaml", SPACE, ("--experiment", "nowhere"), ["no experiment `nowhere`", "local-cpu.yaml"]),
        ("space.yaml", "knobs: {a: {flag: x, choices: [1}", (), ["space.yaml:1"]),
        ("space.yaml", SPACE + "unknown_key: 1\n", (), ["space.yaml:5:1", "unknown_key"]),
        ("space.yaml", SPACE.replace("[true]", "7"), (), ["space.yaml:4", "eager"]),
        ("small.yaml", EXPERIMENT.replace("[1, 4]", "[4, 1]"), (), ["small.yaml:6", "ladder"]),
        ("small.yaml", EXPERIMENT.replace("window_s: 2", "window_s: -2"), (), ["small.yaml:7", "-2"]),
        ("small.yaml", EXPERIMENT.replace("qwen3-8b", "nowhere"), (), ["nowhere"]),
        ("small.yaml", EXPERIMENT, ("--model", "./nowhere"), ["nowhere"]),
        ("small.yaml", EXPERIMENT, ("--trials", "0"), ["--trials 0"]),
        ("small.yaml", EXPERIMENT, ("--serve=--port 8000",), ["port"]),
        ("small.yaml", EXPERIMENT, ("--serve=max-model-len",), ["begins with"]),
        ("small.yaml", EXPERIMENT, ("--serve=--api-key abc",), ["api-key sets a secret"]),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    folder: Path,
    file: str,
    text: str,
    words: tuple[str, ...],
    telling: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, a message that names file, line and value, and no results folder."""
    (folder / file).write_text(text)
    code, said = swept(folder, words, monkeypatch, capsys)
    assert code == 2, said
    for words_told in telling:
        assert words_told in said
    assert "Traceback" not in said
    assert not (folder / "results").exists()


def test_a_dry_run_shows_everything_and_starts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resolved experiment, the knobs, the exact command line; no results folder."""
    code, said = swept(folder, ("--dry-run",), monkeypatch, capsys)
    assert code == 0
    for words in ("window_s: 2.0", "max_seqs", "--tensor-parallel-size 2", "SIMULATED_NODE=", "nothing was started"):
        assert words in said
    assert not (folder / "results").exists()
