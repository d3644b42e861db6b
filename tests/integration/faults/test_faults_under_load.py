"""A server that fails once it is ready: noticed within seconds, named rightly, and nothing of it left."""

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runner.errors import EngineDead, Hang, OutOfMemory, ServerExited, TrialFailure
from runner.node import Node
from runner.schema.launch import TrialOrder
from runner.serving.server import Server
from tests.fakes.trials import PATIENT, SHORT, STALLING, left_of, noticed, order, until


def ready(trial: TrialOrder, folder: Path, gpu_ids: tuple[str, ...] = ()) -> Server:
    server = Server(trial, folder / "trial", gpu_ids, lambda name, detail: None)
    server.start()
    return server


def pids(marker: str) -> list[int]:
    return [int(line.split()[0]) for line in left_of(marker)]


def test_a_leader_that_leaves_its_grandchildren(tmp_path: Path) -> None:
    """The leader ends with code 0 and two grandchildren that ignore SIGHUP stay: they go, nobody else does."""
    leave = tmp_path / "leave"
    trial = order(tmp_path, f"leader_leaves:{leave}")
    server = ready(trial, tmp_path)
    bystander = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    leave.touch()
    failure = noticed(server)
    assert isinstance(failure, ServerExited)
    assert failure.exit_code == 0
    assert until(lambda: left_of(trial.marker) == [])
    server.stop()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait(10)


def test_a_child_that_left_session_and_marker(tmp_path: Path) -> None:
    """A double-forked descendant without the marker is found by descent."""
    trial = order(tmp_path, f"double_fork:{tmp_path}")
    server = ready(trial, tmp_path)

    def orphans() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (entry / "environ").exists():
                try:
                    found += (
                        [entry.name] if f"FAKE_ORPHAN={tmp_path}".encode() in (entry / "environ").read_bytes() else []
                    )
                except OSError:
                    continue
        return found

    assert until(lambda: len(orphans()) == 1)
    server.stop()
    assert orphans() == []


def test_shared_memory_of_a_killed_server(tmp_path: Path) -> None:
    """Segments that only the dead server had mapped go; one that somebody else has mapped stays."""
    its_own, shared = (Path(f"/dev/shm/test-{os.getpid()}-{tmp_path.name}-{name}") for name in ("own", "shared"))
    server = ready(order(tmp_path, f"shared_memory:{its_own},{shared}"), tmp_path)
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        noticed(server)
        server.stop()
        assert not its_own.exists()
        assert shared.exists()
    shared.unlink()


def test_a_server_that_is_deaf_to_sigterm(tmp_path: Path) -> None:
    """It is killed once its time is up, not later."""
    trial = order(tmp_path, "deaf")
    server = ready(trial, tmp_path)
    report = server.stop()
    # Its time runs from the request, the duration from SIGTERM, which comes a little later.
    assert trial.deadlines.stop_s - 0.5 <= report.durations_s["term"] < trial.deadlines.stop_s + 8
    assert left_of(trial.marker) == []


def test_a_killed_server_is_noticed(tmp_path: Path) -> None:
    """SIGKILL of the leader while ready."""
    trial = order(tmp_path)
    server = ready(trial, tmp_path)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    failure = noticed(server)
    assert isinstance(failure, ServerExited)
    assert failure.exit_code == -signal.SIGKILL
    server.stop()
    assert left_of(trial.marker) == []


def test_a_killed_supervisor_is_noticed(tmp_path: Path) -> None:
    """SIGKILL of the supervisor while ready: the node reaps by marker, at once and not only when asked to stop."""
    trial = order(tmp_path)
    server = ready(trial, tmp_path)
    assert server._process is not None
    os.kill(server._process.supervisor_pid, signal.SIGKILL)
    assert isinstance(noticed(server), ServerExited)
    assert until(lambda: left_of(trial.marker) == [])
    server.stop()


def test_a_stopped_process_is_a_hang(tmp_path: Path) -> None:
    """A server that gives no answer at all, though its process lives."""
    trial = order(tmp_path, protocol=STALLING)
    server = ready(trial, tmp_path)
    for pid in pids(trial.marker):
        os.kill(pid, signal.SIGSTOP)
    failure = noticed(server, 30)
    assert isinstance(failure, Hang)
    server.stop()
    assert left_of(trial.marker) == []


def measured(node: Node, trial: TrialOrder) -> TrialFailure:
    """Start a trial and measure it; the failure that must come of it."""
    node.start(trial)
    with pytest.raises(TrialFailure) as raised:
        node.measure(2)
    node.stop()
    assert left_of(trial.marker) == []
    return raised.value


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("stalls", (Hang,)),
        ("dead_under_load", (EngineDead,)),
        ("dies_under_load:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB", (OutOfMemory,)),
        ("dies_under_load:RuntimeError: something nobody knows", (ServerExited,)),
    ],
)
def test_a_server_that_fails_under_load(tmp_path: Path, fault: str, kinds: tuple[type[TrialFailure], ...]) -> None:
    """Whether its stream stops, holds an error inside HTTP 200, or its process dies: the right kind, within seconds."""
    node = Node(tmp_path / "node")
    begin = time.monotonic()
    failure = measured(node, order(tmp_path, fault))
    assert type(failure) in kinds
    assert time.monotonic() - begin < 40
    good = order(tmp_path, number=1)
    node.start(good)
    measurement, samples = node.measure(1)
    report = node.stop()
    assert measurement.requests_ok > 0
    assert samples
    assert b"fake engine" in report.files["server.log"]
    assert left_of(good.marker) == []


def fake_driver(folder: Path, used_gib: float, ids: tuple[str, ...] = ("0", "1")) -> Path:
    path, new = folder / "nvml.json", folder / "nvml.json.new"
    new.write_text(json.dumps({one: {"used_gib": used_gib, "total_gib": 80.0} for one in ids}))
    return new.replace(path)  # In one step: it is read meanwhile.


def test_memory_that_comes_back_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop waits until every GPU is back at its level, and says how long that took."""
    path = fake_driver(tmp_path, 0.6)
    monkeypatch.setenv("TOK100_FAKE_NVML", str(path))
    patient = PATIENT.model_copy(update={"memory_s": 20.0})
    trial = order(tmp_path, deadlines=patient, gpus=2, env={"TOK100_FAKE_NVML": str(path)})
    server = ready(trial, tmp_path, ("0", "1"))
    assert server._memory is not None
    assert server._memory.now_gib() == {"0": 40.0, "1": 40.0}

    release = server._memory.await_release

    def late() -> tuple[str, ...]:
        threading.Timer(0.7, lambda: fake_driver(tmp_path, 0.7)).start()
        return release()

    monkeypatch.setattr(server._memory, "await_release", late)
    report = server.stop()
    assert report.quarantined == ()
    assert report.durations_s["memory"] >= 0.5
    assert report.gpu_memory_gib == {"0": 0.7, "1": 0.7}


def test_memory_that_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole set is quarantined when one of its GPUs keeps memory."""
    path = fake_driver(tmp_path, 0.6)
    monkeypatch.setenv("TOK100_FAKE_NVML", str(path))
    server = ready(order(tmp_path, gpus=2, env={"TOK100_FAKE_NVML": str(path)}), tmp_path, ("0", "1"))
    report = server.stop()
    assert report.quarantined == ("0", "1")
    assert report.gpu_memory_gib == {"0": 40.0, "1": 40.0}


def test_memory_held_by_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial does not start on a GPU that others hold; that is the environment's fault."""
    monkeypatch.setenv("TOK100_FAKE_NVML", str(fake_driver(tmp_path, 30.0)))
    server = Server(order(tmp_path, gpus=2), tmp_path / "trial", ("0", "1"), lambda name, detail: None)
    with pytest.raises(TrialFailure) as raised:
        server.start()
    assert raised.value.kind == "environment"
    server.stop()


def test_a_lease_that_is_too_small(tmp_path: Path) -> None:
    """A configuration for two GPUs is never started on one."""
    server = Server(order(tmp_path, gpus=2), tmp_path / "trial", ("0",), lambda name, detail: None)
    with pytest.raises(TrialFailure, match="2 GPUs are needed and 1 were leased"):
        server.start()
    server.stop()


def test_a_request_longer_than_the_stall_limit_is_no_hang(tmp_path: Path) -> None:
    """Slow tokens are tokens: a stream that lasts longer than the stall limit, but moves, is left alone."""
    node = Node(tmp_path / "node")
    slow = SHORT.model_copy(update={"stall_s": 5.0, "drain_s": 60, "request_timeout_s": 60})
    trial = order(tmp_path, protocol=slow, env={"FAKE_TOKEN_S": "0.5"})
    node.start(trial)
    measurement, _ = node.measure(1)
    node.stop()
    assert measurement.requests_failed == 0
