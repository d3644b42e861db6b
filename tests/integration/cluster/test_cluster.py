"""The node behind a real local Ray: leases, the end of an actor, quarantine, cancelling."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cluster import Cluster
from runner.errors import Cancelled, EnvironmentFault, FailureKind, Quarantined, TrialFailure
from runner.serving.processes import marked
from tests.fakes.trials import order


class Asked:
    """Somebody who may ask to stop."""

    def __init__(self) -> None:
        self.stop = False

    def check(self) -> None:
        if self.stop:
            raise Cancelled("asked")


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def cluster(asked: Asked) -> Iterator[Cluster]:
    """A local Ray that believes in four GPUs."""
    with Cluster(None, gpus=4, check_cancelled=asked.check) as connected:
        yield connected


def gone(marker: str, within_s: float = 12.0) -> bool:
    """Whether every process of the trial ends within the time."""
    deadline = time.monotonic() + within_s
    while marked(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_gpus_are_leased_and_given_back(cluster: Cluster) -> None:
    """A node holds what it asked for; one of another size replaces it; more than there are is refused at once."""
    assert cluster.gpus == 4
    assert cluster.node(2).gpus == 2
    assert cluster.node(2) is cluster.node(2), "an actor of the right size is used again"
    assert cluster.node(4).gpus == 4
    with pytest.raises(EnvironmentFault, match="5 GPUs are needed and 4"):
        cluster.node(5)


def test_a_failure_crosses_ray_with_its_kind_and_facts(cluster: Cluster, tmp_path: Path) -> None:
    """What the node raises is what the driver catches, type and facts."""
    node = cluster.node(0)
    given = order(tmp_path, "exit:weights,1")
    with pytest.raises(TrialFailure) as caught:
        node.start(given)
    assert caught.value.kind is not FailureKind.ENVIRONMENT
    assert caught.value.log_tail
    assert node.stop().files["server.log"]


def test_a_killed_actor_is_an_environment_failure_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """SIGKILL of the actor's process: the call ends with a failure, and the server goes with its owner."""
    node = cluster.node(0)
    given = order(tmp_path)
    node.start(given)
    assert marked(given.marker)
    os.kill(node.pid(), signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="actor"):
        node.measure(1)
    assert gone(given.marker)
    cluster.drop()
    assert cluster.node(0).phase().name == "idle"


def test_a_cancelled_start_is_stopped(cluster: Cluster, asked: Asked, tmp_path: Path) -> None:
    """Asking to stop ends the waiting at once; the stop that follows leaves nothing."""
    node = cluster.node(0)
    given = order(tmp_path, "hang:weights")
    asked.stop = True
    try:
        with pytest.raises(Cancelled):
            node.start(given)
    finally:
        asked.stop = False
    node.stop()
    assert gone(given.marker)


def test_quarantined_gpus_are_never_given_out_again(cluster: Cluster) -> None:
    """GPUs that did not let go of their memory stay leased; the others go on."""
    cluster.node(2)
    cluster.quarantine()
    with pytest.raises(Quarantined, match="4 GPUs are needed and 2 are usable"):
        cluster.node(4)
    with pytest.raises(EnvironmentFault, match="5 GPUs are needed and 2 are usable"):
        cluster.node(5)
    assert cluster.node(2).gpus == 2
