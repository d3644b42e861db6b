"""A server that is killed the moment it is ready leaves no more behind than a later one."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from runner.serving.server import Server
from runner.serving.supervised import Supervised
from tests.fakes.trials import left_of, order


def test_shared_memory_of_a_server_killed_right_after_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start returns when the supervisor has looked, however slow it is: here it is frozen until it is asked to."""
    segment = Path(f"/dev/shm/test-{os.getpid()}-{tmp_path.name}-ready")
    trial = order(tmp_path, f"shared_memory:{segment}")
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)

    def freeze(name: str, detail: str) -> None:
        if name == "first token" and server._process is not None:
            os.kill(server._process.supervisor_pid, signal.SIGSTOP)

    def ask(process: Supervised, message: dict[str, Any]) -> None:
        asked(process, message)
        if "ready" in message:
            threading.Timer(0.5, os.kill, (process.supervisor_pid, signal.SIGCONT)).start()

    server._on_phase = freeze
    asked = Supervised._send
    monkeypatch.setattr(Supervised, "_send", ask)
    server.start()
    assert segment.exists()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    assert left_of(trial.marker) == []
    assert not segment.exists()
