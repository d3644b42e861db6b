"""A server taken down because an owner beside its node is gone: the environment's failure, and never its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.errors import EnvironmentFault
from runner.node import Node
from runner.serving.server import Server
from tests.fakes.trials import SHORT, left_of, noticed, order, until

NAME = "the test's daemon"


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns servers beside their node."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)


@pytest.mark.parametrize("phase", ["process", "weights", "first token"])
def test_an_owner_lost_during_the_start(tmp_path: Path, daemon: subprocess.Popen[bytes], phase: str) -> None:
    """SIGTERM from its own supervisor is not an exit by itself; the failure names who is gone."""
    trial = order(tmp_path, f"hang:{phase}")

    def lose(name: str, detail: str) -> None:
        if name == phase:
            daemon.kill()

    server = Server(trial, tmp_path / "trial", (), lose, owners={NAME: daemon.pid})
    with pytest.raises(EnvironmentFault, match=NAME):
        server.start()
    server.stop()
    assert left_of(trial.marker) == []


@pytest.mark.parametrize("fault", ["", "deaf"])
def test_an_owner_lost_under_load(tmp_path: Path, daemon: subprocess.Popen[bytes], fault: str) -> None:
    """Failed requests, a hang or an exit that follow from it do not come before it."""
    node = Node(tmp_path / "node", owners={NAME: daemon.pid})
    trial = order(tmp_path, fault, protocol=SHORT.model_copy(update={"window_s": 60.0}))
    node.start(trial)
    node.check()
    server = node._server
    assert server is not None
    entered = server._on_phase

    def lose(name: str, detail: str) -> None:
        entered(name, detail)
        if "warm-up" in name:
            daemon.kill()

    node._enter = lose  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match=NAME):
        node.measure(1)
    node.stop()
    assert left_of(trial.marker) == []
    with pytest.raises(EnvironmentFault, match=NAME):
        node.check()


def test_an_owner_that_is_gone_already(tmp_path: Path, daemon: subprocess.Popen[bytes]) -> None:
    """No server is started for it at all."""
    daemon.kill()
    daemon.wait(10)
    trial = order(tmp_path)
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None, owners={NAME: daemon.pid})
    with pytest.raises(EnvironmentFault, match=NAME):
        server.start()
    assert server.pid is None
    server.stop()


def test_an_owner_lost_before_its_supervisor_looks(
    tmp_path: Path, daemon: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor itself refuses when the owner went after the node looked."""
    monkeypatch.setattr("runner.serving.server.first_gone", lambda owners: None)
    daemon.kill()
    daemon.wait(10)
    trial = order(tmp_path)
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None, owners={NAME: daemon.pid})
    with pytest.raises(EnvironmentFault, match=f"{NAME} is gone"):
        server.start()
    server.stop()
    assert left_of(trial.marker) == []


def test_a_supervisor_that_is_told_to_end(tmp_path: Path) -> None:
    """A signal to the supervisor ends its server, which is blamed for nothing."""
    trial = order(tmp_path)
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)
    server.start()
    assert server._process is not None
    os.kill(server._process.supervisor_pid, signal.SIGTERM)
    failure = noticed(server)
    assert isinstance(failure, EnvironmentFault)
    assert "SIGTERM" in failure.message
    assert until(lambda: server._watch is not None and isinstance(server._watch.failure, EnvironmentFault))
    server.stop()
    assert left_of(trial.marker) == []
