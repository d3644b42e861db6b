"""What is known of a server that failed: how long it was watched, what the kernel killed meanwhile, and what a
process that does not move was doing (Python stacks by py-spy, GPU use and power; bounded in time)."""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.errors import TrialFailure
from runner.serving import gpu
from runner.serving.judge import Observation, failure
from runner.serving.processes import command, marked, oom_kills, words
from runner.serving.redaction import redact, secrets

_MOST_PROCESSES = 6
_DUMP_S = 5.0
_LONGEST = 8000
"""Of one process's stacks, characters."""


class Witness:
    """Makes failures of one server, from the moment it is made on."""

    def __init__(self) -> None:
        self.since_s = time.monotonic()
        self._oom_kills = oom_kills()

    def failure(
        self,
        kind: type[TrialFailure],
        message: str,
        lines: Sequence[str],
        *,
        phase: str,
        starting: bool = False,
        exit_code: int | None = None,
        abandoned: str | None = None,
        facts: dict[str, Any] | None = None,
    ) -> TrialFailure:
        """The failure that the log's ``lines`` prove, else the one that was seen; see ``judge``."""
        seen = Observation(
            kind,
            message,
            phase=phase,
            waited_s=time.monotonic() - self.since_s,
            exit_code=exit_code,
            evidence=facts,
            starting=starting,
            abandoned=abandoned,
            oom_killed=oom_kills() > self._oom_kills,
        )
        return failure(seen, lines)


def evidence(marker: str, gpu_ids: Sequence[str]) -> dict[str, Any]:
    """Stacks of the trial's processes and the state of its GPUs, as far as they can be had."""
    processes = [process for process in marked(marker) if process.marker == marker]
    found: dict[str, Any] = {"processes": [f"{process.pid} {process.command[:200]}" for process in processes]}
    tool = py_spy()
    if tool is not None:
        found["stacks"] = {str(process.pid): _stack(tool, process.pid) for process in processes[:_MOST_PROCESSES]}
    busy = {
        one.id: {"used_gib": one.used_gib, "utilisation_percent": one.utilisation_percent, "power_w": one.power_w}
        for one in gpu.gpus(gpu_ids)
    }
    return found | ({"gpus": busy} if busy else {})


def py_spy() -> str | None:
    """Path of py-spy, beside this interpreter or on the PATH; None without it."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _stack(tool: str, pid: int) -> str:
    """The Python stacks of one process, or why there are none."""
    try:
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_DUMP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"py-spy gave no answer within {_DUMP_S:.0f} s ({command(pid)[:80]})"
    hidden = secrets({}, words(pid))  # The dump begins with the command line.
    return redact(done.stdout or done.stderr, hidden)[:_LONGEST]
