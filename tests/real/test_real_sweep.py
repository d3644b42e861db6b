"""Two trials of real vLLM on the CPU through every room: Optuna, Ray, the load, MLflow, the exported winner."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.best import read_profile
from runner.serving.processes import marked
from tests.fakes.trials import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

EXPERIMENT = """
engine: {kind: vllm, device: cpu}
model: bundled:smollm2-135m-instruct
workload: {prompts: text, input_tokens: 32, output_tokens: 16}
ladder: [1, 2]
protocol: {warmup_min_s: 1, warmup_max_s: 2, window_s: 3, windows: 1, max_windows: 1}
goal: {concurrency: 1, output_tok_s: 100}
budget: {trials: 2}
search: {baseline_starts: 1, finalists: 0}
defaults:
  flags: {max-model-len: 512, max-num-seqs: 8, enforce-eager: true}
  env: {VLLM_CPU_KVCACHE_SPACE: "1"}
"""

SPACE = """
knobs:
  prefix_caching: {flag: enable-prefix-caching, choices: [false]}
"""


def command(folder: Path, module: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """One of the project's commands, run in ``folder``."""
    return subprocess.run(
        [sys.executable, "-m", f"runner.{module}", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def tracked(folder: Path, query: str) -> set[Any]:
    with sqlite3.connect(folder / "results" / "mlflow.db") as store:
        return {row[0] for row in store.execute(query)}


def test_a_real_sweep_measures_records_tracks_and_exports(tmp_path: Path) -> None:
    """Both trials count real tokens, every store agrees, the profile loads back, and no process is left."""
    study = f"real-{os.getpid()}-space"
    (tmp_path / f"real-{os.getpid()}.yaml").write_text(EXPERIMENT)
    (tmp_path / "space.yaml").write_text(SPACE)
    swept = command(tmp_path, "sweep", "--space", "space.yaml", "--experiment", f"real-{os.getpid()}.yaml")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "simulated" not in swept.stdout.lower()
    records = [json.loads(line) for line in (tmp_path / "results" / study / "trials.jsonl").open()]
    assert [(record["role"], record["outcome"]) for record in records] == [
        ("baseline", "complete"),
        ("search", "complete"),
    ], swept.stdout
    for record in records:
        levels = record["measurements"]
        assert {m["concurrency"] for m in levels} == {1, 2}, swept.stdout
        # The engine takes every core of a small machine, and then a level may be void for want of a client.
        assert all(m["valid"] or m["limited_by"] == "client" for m in levels), swept.stdout
        assert all(m["tokens_client"] == m["tokens_server"] > 0 for m in levels)
        assert not record["simulated"]
    asked = [record["effective"]["settings"]["cache_config.enable_prefix_caching"] for record in records]
    assert asked == [True, False]

    keys = tracked(tmp_path, "select distinct key from metrics")
    assert {"output_tok_s", "duration_s.overhead", "best_so_far_tok_s", "percent_of_goal"} <= keys
    assert tracked(tmp_path, "select value from tags where key = 'engine'") == {"vllm"}
    exported = command(tmp_path, "best", "--export", "profile.yaml")
    assert exported.returncode == 0, exported.stderr
    profile = read_profile(tmp_path / "profile.yaml")
    assert profile.engine == "vllm"
    assert profile.fingerprint in {record["fingerprint"] for record in records}
    assert until(lambda: marked(study) == ())
