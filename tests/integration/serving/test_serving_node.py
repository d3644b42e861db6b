"""The node's calls from several threads, as an actor makes them, and what it hands over."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from runner.errors import Cancelled, TrialFailure
from runner.node import Node
from runner.serving.lease import node_folder
from runner.serving.server import Server
from tests.fakes.trials import SHORT, left_of, order, until


def test_the_phase_is_told_while_a_start_is_under_way(tmp_path: Path) -> None:
    """Another thread sees where it is and for how long; afterwards the node is idle again."""
    node = Node(tmp_path / "node")
    assert node.phase().name == "idle"
    trial = order(tmp_path, "hang:compile")
    failures: list[TrialFailure] = []

    def run() -> None:
        try:
            node.start(trial)
        except TrialFailure as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    assert until(lambda: node.phase().name == "compile")
    assert until(lambda: node.phase().elapsed_s > 0.2)
    thread.join(60)
    assert len(failures) == 1
    node.stop()
    assert node.phase().name == "idle"


def test_stopping_a_measurement_under_way(tmp_path: Path) -> None:
    """A stop from another thread ends the measurement as cancelled, within seconds."""
    node = Node(tmp_path / "node")
    trial = order(tmp_path, protocol=SHORT.model_copy(update={"window_s": 60.0}))
    node.start(trial)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            node.measure(1)
        except TrialFailure as failure:
            caught.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    assert until(lambda: node.phase().name.startswith("C=1"))
    time.sleep(1)
    begin = time.monotonic()
    node.stop()
    thread.join(30)
    assert [type(one) for one in caught] == [Cancelled]
    assert time.monotonic() - begin < 20
    assert left_of(trial.marker) == []


def test_a_new_trial_takes_down_the_old_one(tmp_path: Path) -> None:
    """One server at a time, whoever forgot to stop."""
    node = Node(tmp_path / "node")
    first, second = order(tmp_path), order(tmp_path, number=1)
    node.start(first)
    node.start(second)
    assert left_of(first.marker) == []
    assert left_of(second.marker) != []
    node.stop()
    assert node.stop().files == {}
    with pytest.raises(Cancelled):
        node.measure(1)


def test_what_a_stop_hands_over(tmp_path: Path) -> None:
    """The log without secrets, the seconds of each phase, and no folder left."""
    secret = "correct-horse-battery"
    node = Node(tmp_path / "node")
    told = f"tells:my token is {secret} and my store is db://me:{secret}@host"
    trial = order(tmp_path, told, env={"HF_TOKEN": secret})
    report = node.start(trial)
    assert secret not in str(report)
    assert report.env["HF_TOKEN"] == "***"
    stopped = node.stop()
    log = stopped.files["server.log"].decode()
    assert "my token is ***" in log
    assert secret not in log
    assert set(stopped.durations_s) == {"term", "kill", "memory"}
    assert not (tmp_path / "node").exists()


def test_folders_of_killed_nodes_go(tmp_path: Path) -> None:
    """A node that was killed could not clean up; the next one does, and leaves those of living ones alone."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, used = node_folder() / f"node-{gone.pid}", node_folder() / f"node-{os.getppid()}"
    for folder in (left, used):
        (folder / "trial-0").mkdir(parents=True)
    Node()
    assert not left.exists()
    assert used.exists()


def test_a_failed_start_hands_over_its_log(tmp_path: Path) -> None:
    """Nothing but the log tells why; it outlives the failure."""
    node = Node(tmp_path / "node")
    with pytest.raises(TrialFailure):
        node.start(order(tmp_path, "says:ValueError: this will not do"))
    assert b"this will not do" in node.stop().files["server.log"]


def test_files_are_the_users_own(tmp_path: Path) -> None:
    """Folder and log are readable by nobody else."""
    server = Server(order(tmp_path), tmp_path / "trial", (), lambda name, detail: None)
    server.start()
    assert (tmp_path / "trial").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "trial" / "server.log").stat().st_mode & 0o777 == 0o600
    server.stop()


def test_reaping_by_marker_says_what_it_found(tmp_path: Path) -> None:
    """Exactly the trial asked for, each process a line."""
    node = Node(tmp_path / "node")
    trial = order(tmp_path)
    node.start(trial)
    assert node.reap("no-such-trial") == []
    found = node.reap(trial.marker)
    assert any("fake_engine" in line for line in found)
    assert left_of(trial.marker) == []
    node.stop()


def test_two_nodes_start_in_turn_and_serve_side_by_side(tmp_path: Path) -> None:
    """Ports never clash, and both answer under their own names."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    nodes = {name: Node(tmp_path / name / "node") for name in "ab"}
    threads = [threading.Thread(target=node.start, args=(order(tmp_path / name),)) for name, node in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    names = [node._server.report.argv for node in nodes.values() if node._server and node._server.report]
    assert len(names) == 2
    assert len({argv[argv.index("--port") + 1] for argv in names}) == 2
    for node in nodes.values():
        node.stop()
