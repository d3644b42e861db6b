"""Orders for trials on the fake server, and a look at what is left of them."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runner.errors import TrialFailure
from runner.schema.experiment import Deadlines, Engine, Protocol, Workload
from runner.schema.launch import LaunchConfig, TrialOrder
from runner.serving.processes import marked
from runner.serving.server import Server

FAKE = Path(__file__).with_name("fake_engine.py")

QUICK = Deadlines(
    process_s=30,
    weights_s=30,
    compile_s=30,
    capture_s=30,
    first_token_s=6,
    silence_s=8.0,
    stop_s=2.0,
    memory_s=2.0,
)
"""Where silence is the fault: short enough for a test, long enough for a slow machine to start Python."""

PATIENT = QUICK.model_copy(update={"first_token_s": 60.0, "silence_s": 60.0})
"""Where silence is not the fault: a busy machine does not count as a hang."""

SILENT = ("hang", "repeats")
"""Faults that are noticed by silence."""

SHORT = Protocol(
    warmup_min_s=0.2,
    warmup_max_s=0.5,
    window_s=1.0,
    windows=1,
    max_windows=1,
    stall_s=20.0,
    request_timeout_s=20,
    drain_s=10,
)
"""A second of load, on a machine that may be busy for many."""

STALLING = SHORT.model_copy(update={"stall_s": 2.0})
"""Where the stall under load is the fault."""


def interpreter(folder: Path) -> str:
    """An executable that stands where the interpreter with vLLM would."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)


def order(
    folder: Path,
    fault: str = "",
    *,
    number: int = 0,
    deadlines: Deadlines | None = None,
    protocol: Protocol | None = None,
    gpus: int = 0,
    env: dict[str, str] | None = None,
) -> TrialOrder:
    """A trial on the fake server, with one fault; deadlines are as short as the fault needs."""
    return TrialOrder(
        study="faults",
        number=number,
        marker=f"test-{os.getpid()}-{folder.name}-{number}",
        engine=Engine(device="gpu" if gpus else "cpu"),
        model="fake/model",
        config=LaunchConfig(model="fake/model", env={"FAKE_FAULT": fault, **(env or {})}, gpus=gpus),
        workload=Workload(prompts="random_tokens", vocabulary=1000, input_tokens=8, output_tokens=16),
        protocol=protocol or (STALLING if fault == "stalls" else SHORT),
        deadlines=deadlines or (QUICK if fault.startswith(SILENT) else PATIENT),
        ladder=(1, 2),
        seed=1,
        python=interpreter(folder),
    )


def left_of(marker: str) -> list[str]:
    """Processes that still carry the marker."""
    return [f"{one.pid} {one.command}" for one in marked(marker) if one.marker == marker]


def until(holds: Callable[[], bool], wait_s: float = 15.0) -> bool:
    """Wait for a condition; whether it came to hold."""
    end = time.monotonic() + wait_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def noticed(server: Server, wait_s: float = 15.0) -> TrialFailure:
    """The failure that ``check`` comes to raise."""
    found: list[TrialFailure] = []

    def look() -> bool:
        try:
            server.check()
        except TrialFailure as failure:
            found.append(failure)
        return bool(found)

    assert until(look, wait_s), "the failure was not noticed"
    return found[0]
