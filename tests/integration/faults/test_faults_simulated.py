"""The simulated server goes wrong through its whole tree (API server, engine, workers): named rightly, nothing left."""

from pathlib import Path

import pytest

from runner.errors import FailureKind, TrialFailure
from runner.node import Node
from runner.serving import starting
from tests.fakes.simulated import simulated_order
from tests.fakes.trials import PATIENT, QUICK, left_of


def run(folder: Path, fault: str, number: int = 0) -> TrialFailure | None:
    """One trial of one level; its failure, if it failed. Nothing of it may be left."""
    node = Node(folder / "node")
    deadlines = QUICK if fault.startswith("hang_at") else PATIENT
    trial = simulated_order(folder, fault, number=number, deadlines=deadlines)
    failed: TrialFailure | None = None
    try:
        node.start(trial)
        measurement, _ = node.measure(2)
        assert measurement.requests_ok > 0
    except TrialFailure as failure:
        failed = failure
    report = node.stop()
    assert left_of(trial.marker) == []
    assert report.files.get("server.log", b"-") != b""
    return failed


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("hang_at:capture", {FailureKind.HANG}),
        (
            "crash_at:capture:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB",
            {FailureKind.OUT_OF_MEMORY},
        ),
        ("crash_at:config:ValueError: max_num_seqs is too large here", {FailureKind.INVALID_CONFIG}),
        ("engine_fails_at:weights:RuntimeError: something unknown", {FailureKind.ENGINE_DEAD}),
        ("engine_dead_after:40", {FailureKind.ENGINE_DEAD}),
        ("engine_stuck_after:40", {FailureKind.HANG}),
        ("engine_dead_after:40;green_health", {FailureKind.ENGINE_DEAD, FailureKind.LOAD_FAILED}),
        ("kill_worker_after:1", {FailureKind.ENGINE_DEAD}),
        ("exit0_after:1", {FailureKind.SERVER_EXITED}),
        ("stream_error_after:3", {FailureKind.ENGINE_DEAD, FailureKind.LOAD_FAILED}),
        ("truncate_after:3", {FailureKind.LOAD_FAILED}),
        ("wrong_model:another", {FailureKind.ENVIRONMENT}),
        ("short_output:2", {FailureKind.ENGINE_DEAD}),
    ],
)
def test_a_fault_and_the_trial_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, kinds: set[FailureKind]
) -> None:
    """The right kind, and the next trial is measured."""
    monkeypatch.setattr(starting, "_LAST_WORDS_S", 1.0)
    failure = run(tmp_path, fault)
    assert failure is not None
    assert failure.kind in kinds, failure
    assert failure.message


@pytest.mark.parametrize("fault", ["", "sigterm_deaf", "orphan", "double_fork", "log_flood:2000", "silent"])
def test_what_does_not_keep_a_trial_from_its_numbers(tmp_path: Path, fault: str) -> None:
    """Deaf to SIGTERM, stray descendants, a flood of log or none at all: measured, and gone afterwards."""
    assert run(tmp_path, fault) is None
