"""A small simulated study, and a sweep as a process that can be watched, interrupted and killed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.serving.processes import marked

ROOT = Path(__file__).parents[3]

EXPERIMENT = """
name: small
engine: {kind: simulated, node: 2x-h200-p2p-off}
model: qwen3-8b
workload: {prompts: random_tokens, vocabulary: 30000, input_tokens: 16, output_tokens: 64}
ladder: [1, 4]
protocol: {warmup_min_s: 0.5, warmup_max_s: 1, window_s: 2, windows: 1, max_windows: 1}
goal: {concurrency: 1, output_tok_s: 100}
budget: {trials: 4}
search: {baseline_starts: 1, finalists: 0}
defaults:
  flags: {tensor-parallel-size: 2, max-model-len: 4096}
"""

NAME = f"small-{os.getpid()}"
"""Of the experiment: other tests run at the same time, and processes are told apart by the study they belong to."""

STUDY = f"{NAME}-space"

SPACE = """
knobs:
  max_seqs: {flag: max-num-seqs, choices: [1, 2, 64]}
  eager: {flag: enforce-eager, choices: [true]}
"""


class Sweep:
    """One ``python -m runner.sweep``; its lines are read as they come."""

    def __init__(self, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runner.sweep", "--space", "space.yaml", "--experiment", "small.yaml", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, within_s: float = 300.0, *, after: str = "") -> None:
        """Waits until a line holds ``words``; with ``after``, one that comes after the first line that holds that."""
        deadline = time.monotonic() + within_s
        while not self._said(words, after):
            if time.monotonic() > deadline or (self._process.poll() is not None and not self._reader.is_alive()):
                pytest.fail(f"no line said {words!r}:\n{self.text}")
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, within_s: float = 600.0) -> int:
        """Waits for the end; returns the exit code."""
        code = self._process.wait(within_s)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _said(self, words: str, after: str) -> bool:
        lines = self.lines[:]
        begin = next((number for number, line in enumerate(lines) if after in line), len(lines))
        return any(words in line for line in lines[begin:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))


def records(folder: Path) -> list[dict[str, Any]]:
    """The study's records."""
    text = (folder / "results" / STUDY / "trials.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def sql(path: Path, query: str) -> list[Any]:
    """First column of a query."""
    with sqlite3.connect(path) as store:
        return [row[0] for row in store.execute(query)]


def wait_until_gone(prefix: str, within_s: float = 15.0) -> None:
    """Every process of the study ends by itself within the time."""
    deadline = time.monotonic() + within_s
    while left := marked(prefix):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the small study's two files."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT.replace("name: small", f"name: {NAME}"))
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


Start = Callable[..., Sweep]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a sweep in the folder; one that still runs when the test ends, however it ends, is killed."""
    started: list[Sweep] = []

    def begin(*words: str, env: Mapping[str, str] | None = None) -> Sweep:
        started.append(Sweep(folder, *words, env=env))
        return started[-1]

    yield begin
    for sweep in started:
        sweep.kill()
