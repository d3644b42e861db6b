"""A stop that is quicker than the start it belongs to: no server comes up after it."""

import threading
from pathlib import Path

import pytest

from runner import node as node_module
from runner.errors import Cancelled
from runner.node import Node
from runner.serving.server import Server
from tests.fakes.trials import left_of, order


def test_a_stop_that_overtakes_its_start(tmp_path: Path) -> None:
    """The start is refused when it arrives at last; the next trial runs."""
    node = Node(tmp_path / "node")
    trial = order(tmp_path)
    assert node.stop(trial.marker).durations_s == {}
    with pytest.raises(Cancelled):
        node.start(trial)
    assert left_of(trial.marker) == []
    node.start(order(tmp_path, number=1))
    node.stop()


@pytest.mark.parametrize("marker_given", [True, False])
def test_a_stop_before_the_server_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker_given: bool) -> None:
    """A start under way that has nothing to stop yet ends as cancelled all the same, whatever ran before it."""
    node = Node(tmp_path / "node")
    node.start(order(tmp_path))
    trial = order(tmp_path, number=1)

    def late(*given: object, **named: object) -> Server:
        stop = threading.Thread(target=node.stop, args=[trial.marker] if marker_given else [])
        stop.start()
        stop.join(10)
        assert not stop.is_alive()
        return Server(*given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(node_module, "Server", late)
        with pytest.raises(Cancelled):
            node.start(trial)
    assert left_of(trial.marker) == []
    node.start(order(tmp_path, number=2))
    node.stop()
