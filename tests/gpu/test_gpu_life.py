"""A server on two real GPUs, killed in every way in mid-ladder: named, gone, and its memory back within 30 s.

Each test starts a server of its own, so each also shows that the next trial runs after the last one's end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from runner.errors import EngineDead, OutOfMemory, ServerExited, TrialFailure
from runner.node import Node
from runner.schema.launch import TrialOrder
from runner.serving import gpu
from runner.serving.processes import marked
from tests.fakes.trials import left_of, until
from tests.fakes.two_gpus import GPUS, QUICK, ROOT, order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(gpu.gpus()) < len(GPUS), reason="needs two GPUs"),
]

BACK_S = 30.0
"""Longest from the fault until no process is left and both GPUs are at their level."""

LEVEL_GIB = 1.0
"""Over the level before that counts as back."""

HOLD = (
    "import sys, torch\n"
    "free, _ = torch.cuda.mem_get_info(0)\n"
    "held = torch.empty(free - 300 * 2**20, dtype=torch.uint8, device='cuda:0')\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)
"""Takes what is left of the first GPU, as a neighbour would."""


def used_gib() -> list[float]:
    return [one.used_gib for one in gpu.gpus(GPUS)]


def is_back(before: list[float]) -> bool:
    return all(now <= then + LEVEL_GIB for now, then in zip(used_gib(), before, strict=True))


@pytest.fixture
def before() -> list[float]:
    """GPU memory before the test, GiB."""
    return used_gib()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "node", gpu_ids=GPUS)
    yield node
    node.stop()


def in_mid_ladder(node: Node, asked: TrialOrder, act: Callable[[], None]) -> TrialFailure:
    """Start, load with 64 streams, ``act`` after 3 s of that; returns how the level failed."""
    node.start(asked)
    timer = threading.Timer(3.0, act)
    timer.start()
    with pytest.raises(TrialFailure) as raised:
        node.measure(64)
    timer.join()
    return raised.value


@pytest.mark.parametrize("victim", ["VLLM::Worker_TP1", "EngineCore", "serve"])
def test_a_killed_part_ends_the_trial_and_frees_both_gpus(
    victim: str, tmp_path: Path, node: Node, before: list[float]
) -> None:
    """SIGKILL of a worker, of the engine core, of the API server: seen within seconds, all gone, memory back."""
    asked = order(tmp_path, **QUICK)
    killed: list[float] = []

    def kill() -> None:
        found = [one.pid for one in marked(asked.marker) if victim in one.command]
        assert found, [one.command for one in marked(asked.marker)]
        os.kill(min(found), signal.SIGKILL)
        killed.append(time.monotonic())

    failure = in_mid_ladder(node, asked, kill)
    seen_s = time.monotonic() - killed[0]
    report = node.stop()
    assert isinstance(failure, EngineDead | ServerExited), failure
    assert left_of(asked.marker) == []
    assert until(lambda: is_back(before), BACK_S)
    back_s = time.monotonic() - killed[0]
    print(f"{victim}: {type(failure).__name__} seen after {seen_s:.1f} s, all back after {back_s:.1f} s: {failure}")
    assert back_s < BACK_S
    assert report.quarantined == ()


def test_a_killed_owner_frees_both_gpus(tmp_path: Path, before: list[float]) -> None:
    """SIGKILL of the process that asked for the server: nothing left, memory back."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.two_gpus", str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    marker = owner.stdout.readline().strip()
    assert any(line.strip() == "ready" for line in owner.stdout)
    assert not is_back(before)
    owner.kill()
    owner.wait(10)
    killed_s = time.monotonic()
    assert until(lambda: left_of(marker) == [], 10)
    assert until(lambda: is_back(before), BACK_S)
    print(f"owner: all back after {time.monotonic() - killed_s:.1f} s")


def test_out_of_memory_at_start_names_its_phase(tmp_path: Path, node: Node, before: list[float]) -> None:
    """Weights that do not fit two GPUs: out of memory, in the phase that loads them."""
    with pytest.raises(TrialFailure) as raised:
        node.start(order(tmp_path, layers=2000, **QUICK))
    node.stop()
    print(f"{raised.value.kind} in phase {raised.value.phase}: {raised.value.message}")
    assert isinstance(raised.value, OutOfMemory)
    assert raised.value.phase == "weights"
    assert until(lambda: is_back(before), BACK_S)


def test_out_of_memory_under_load_is_told_apart(tmp_path: Path, node: Node, before: list[float]) -> None:
    """A neighbour takes the rest of a GPU, then a request needs more: out of memory, under load."""
    asked = order(tmp_path, **QUICK)

    def strike() -> None:
        server = node._server
        assert server is not None
        # Log probabilities of a whole prompt need its logits at once: 4,000 tokens x 32,000 words x 4 bytes.
        body = {"model": server.served_name, "prompt": [7] * 4000, "max_tokens": 1, "prompt_logprobs": 1}
        session = requests.Session()
        session.trust_env = False
        try:
            session.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
        except requests.RequestException as error:
            print(f"the request that broke it: {error}")

    node.start(asked)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline().strip() == "held"
        timer = threading.Timer(2.0, strike)
        timer.start()
        with pytest.raises(TrialFailure) as raised:
            node.measure(64)
        timer.join()
        neighbour.kill()
    node.stop()
    print(f"{raised.value.kind} in phase {raised.value.phase}: {raised.value.message}")
    assert isinstance(raised.value, OutOfMemory)
    assert raised.value.phase == "load"
    assert until(lambda: is_back(before), BACK_S)
