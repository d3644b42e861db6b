"""Two hundred trials on the fake server, a fifth of them faulty: nothing accumulates. Run by ``make soak``.

Once on a bare node, once as a whole sweep (Optuna, Ray, MLflow, records). Prints what the closing figures need: seconds
from the end of a failed trial to the next server that is ready, and what the process holds before and after.
"""

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from runner.errors import FailureKind, TrialFailure
from runner.node import Node
from runner.schema.launch import TrialOrder
from runner.serving.processes import marked
from tests.fakes.trials import order

TRIALS = 200
SHARE_OF_FAULTS = 0.2
WARM_UP = 20
MEASURED_EVERY = 8

FAULTS = {
    "hang:weights": FailureKind.HANG,
    "hang:capture": FailureKind.HANG,
    "exit:compile,0": FailureKind.SERVER_EXITED,
    "exit:weights,1": FailureKind.SERVER_EXITED,
    "says:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": FailureKind.OUT_OF_MEMORY,
    "says:vllm serve: error: unrecognized arguments: --warp": FailureKind.INVALID_CONFIG,
    "kill:capture": FailureKind.SERVER_EXITED,
    "error_in_200": FailureKind.ENGINE_DEAD,
    "short": FailureKind.ENGINE_DEAD,
    "wrong_model": FailureKind.ENVIRONMENT,
}


ROOT = Path(__file__).parents[3]

EXPERIMENT = """
engine: {kind: vllm, device: cpu}
model: fake/model
workload: {prompts: random_tokens, vocabulary: 1000, input_tokens: 8, output_tokens: 16}
ladder: [1]
protocol: {warmup_min_s: 0.2, warmup_max_s: 0.5, window_s: 1, windows: 1, max_windows: 1, stall_s: 2, drain_s: 10}
deadlines: {weights_s: 6, capture_s: 6, silence_s: 4, first_token_s: 4, stop_s: 2}
budget: {trials: 200}
search: {sampler: random, baseline_starts: 3}
"""

SPACE = """
knobs:
  shade: {env: FAKE_SHADE, int: {low: 1, high: 100000}}
  side:
    choices:
      a: {}
      b: {env: {FAKE_SIDE: b}}
      c: {env: {FAKE_SIDE: c}}
      d: {env: {FAKE_SIDE: d}}
      faulty: {env: {FAKE_SIDE: faulty}}
  fault:
    env: FAKE_FAULT
    choices: %s
    required: true
    when: {side: faulty}
"""
"""One side in five brings a fault along."""


def held(pid: int | None = None) -> dict[str, float]:
    """Children, descriptors, threads and memory of a process, this one if none is given."""
    gc.collect()
    me = psutil.Process(pid)
    return {
        "children": len(me.children(recursive=True)),
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "rss_mib": me.memory_info().rss / 2**20,
    }


def one_trial(node: Node, trial: TrialOrder, *, measured: bool) -> FailureKind | None:
    """Start and perhaps measure; the kind of failure, if it failed."""
    try:
        node.start(trial)
        if measured:
            assert node.measure(1)[0].requests_ok > 0
    except TrialFailure as failure:
        return failure.kind
    return None


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_trials_leave_nothing(tmp_path: Path) -> None:
    """Kinds are right, nothing is left, and children, descriptors, threads and memory stay flat."""
    dice = random.Random(20)
    node = Node(tmp_path / "node")
    before: dict[str, float] = {}
    recoveries_s: list[float] = []
    failed_at: float | None = None
    faults = 0
    for number in range(TRIALS):
        if number == WARM_UP:
            before = held()
        fault = dice.choice(list(FAULTS)) if dice.random() < SHARE_OF_FAULTS else ""
        faults += bool(fault)
        trial = order(tmp_path, fault, number=number)
        kind = one_trial(node, trial, measured=number % MEASURED_EVERY == 0)
        assert kind == FAULTS.get(fault), fault
        if kind is not None:
            failed_at = failed_at or time.monotonic()
        elif failed_at is not None:
            recoveries_s.append(time.monotonic() - failed_at)
            failed_at = None
        node.stop()
        assert [one for one in marked(trial.marker) if one.marker == trial.marker] == []
    after = held()
    print(f"\n{TRIALS} trials, {faults} faults, all named rightly and cleaned")
    print(
        f"fault to next ready server: median {statistics.median(recoveries_s):.2f} s, worst {max(recoveries_s):.2f} s"
    )
    print(f"before {before}\nafter  {after}")
    assert after["children"] <= before["children"] + 1
    assert after["descriptors"] <= before["descriptors"] + 2
    assert after["threads"] <= before["threads"] + 2
    assert after["rss_mib"] <= before["rss_mib"] + 20


def interpreter(folder: Path) -> str:
    """An interpreter whose servers are fakes, and which is a real one for everything else."""
    fake = ROOT / "tests" / "fakes" / "fake_engine.py"
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--port*) exec {sys.executable} {fake} "$@";; *) exec {sys.executable} "$@";; esac\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_sweep_of_two_hundred_trials_stays_flat(tmp_path: Path) -> None:
    """The driver's children, descriptors, threads and memory; every fault has its kind, and nothing is left."""
    by_search = {name: kind for name, kind in FAULTS.items() if kind is not FailureKind.ENVIRONMENT}
    (tmp_path / "soak.yaml").write_text(SPACE % json.dumps(list(by_search)))
    (tmp_path / "fake.yaml").write_text(EXPERIMENT)
    command = [
        *(sys.executable, "-m", "runner.sweep", "--space", str(tmp_path / "soak.yaml")),
        *("--experiment", str(tmp_path / "fake.yaml"), "--results", str(tmp_path / "results"), "--study", "soak"),
    ]
    lines = tmp_path / "results" / "soak" / "trials.jsonl"
    samples: list[tuple[int, dict[str, float]]] = []
    with (tmp_path / "sweep.log").open("w") as log:
        sweep = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | {"TOK100_PYTHON": interpreter(tmp_path)}
        )
        while sweep.poll() is None:
            done = len(lines.read_text().splitlines()) if lines.is_file() else 0
            if done >= WARM_UP and (not samples or done >= samples[-1][0] + WARM_UP):
                samples.append((done, held(sweep.pid)))
            time.sleep(0.5)
    assert sweep.returncode == 0, (tmp_path / "sweep.log").read_text()[-3000:]
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    faults = [record for record in records if "fault" in record["params"]]
    for record in faults:
        assert record["failure"] is not None, record["params"]
        assert record["failure"]["kind"] == by_search[record["params"]["fault"]], record["params"]
    healthy = [record for record in records if "fault" not in record["params"]]
    assert [(one["params"], one["failure"]["message"]) for one in healthy if one["failure"] is not None] == []
    print(f"\n{len(records)} trials, {dict(Counter(record['params']['fault'] for record in faults))}")
    for done, state in samples:
        print(f"after {done}: {state}")
    assert marked("soak/") == ()
    first, last = samples[0][1], samples[-1][1]
    assert last["children"] <= first["children"] + 1
    assert last["descriptors"] <= first["descriptors"] + 2
    assert last["threads"] <= first["threads"] + 2
    assert last["rss_mib"] <= first["rss_mib"] + 40
