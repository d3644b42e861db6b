"""Two hundred trials on the fake server, a fifth of them faulty: nothing accumulates. Run by ``make soak``.

Prints what the closing figures need: seconds from the end of a failed trial to the next server that is ready, and what
the process holds before and after.
"""

import gc
import random
import statistics
import time
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


def held() -> dict[str, float]:
    """Children, descriptors, threads and memory of this process."""
    gc.collect()
    me = psutil.Process()
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
