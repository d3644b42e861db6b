"""How much one core carries, and how close HTTP comes to the model: absolute, so for a quiet machine, not gating."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
import yaml

from runner.node import Node
from runner.schema.experiment import Engine, Protocol, Workload
from runner.schema.launch import LaunchConfig
from runner.simulator.describe import EXPERIMENTS, load_model, load_node
from runner.simulator.expected import Load, expected
from tests.fakes.simulated import simulated_order

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
STREAMS = 2000
SECONDS = 20.0


@pytest.fixture
def slow_server(tmp_path: Path) -> Iterator[tuple[psutil.Process, int]]:
    """A server whose steps take about 0.1 s with 2,000 requests, and an API server that is no limit."""
    node = yaml.safe_load((EXPERIMENTS / "nodes" / "2x-h200-nvlink.yaml").read_text(encoding="utf-8"))
    node["gpu"]["graph_kernel_us"] = 137
    node["host"] |= {"api_token_us": 5, "api_chunk_us": 40, "api_request_ms": 0.2, "step_ms": 0.1, "request_us": 1}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(node), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "runner.simulator", "serve", "qwen3-8b", "-tp", "2", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-num-seqs", "2048", "--cudagraph-capture-sizes", "2048"]
    process = subprocess.Popen(
        [*command, "--max-model-len", "4096"],
        cwd=ROOT,
        env=os.environ | {"SIMULATED_NODE": str(path)},
        stdout=subprocess.DEVNULL,
    )
    time.sleep(3)
    yield psutil.Process(process.pid), port
    process.terminate()
    process.wait(20)


def test_two_thousand_streams_on_one_core(slow_server: tuple[psutil.Process, int]) -> None:
    """2,000 streams at 10 chunks a second each: at most one core, chunks sent within 10 ms of their time (p99)."""
    server, port = slow_server
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.streams", str(port), str(STREAMS), str(SECONDS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(SECONDS / 2)
    server.cpu_percent()
    time.sleep(SECONDS / 4)
    cores = server.cpu_percent() / 100
    text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    chunks_s = float(client.communicate(timeout=60)[0])
    found = re.search(r'send_lateness_seconds\{quantile="0.99"\} (\S+)', text)
    assert found is not None
    lateness_ms = 1e3 * float(found[1])
    print(f"{chunks_s:.0f} chunks/s, {cores:.2f} cores, lateness p99 {lateness_ms:.1f} ms")
    assert chunks_s > 0.9 * STREAMS * 10
    assert cores < 1.0
    assert lateness_ms < 10.0


def test_http_equals_the_model(tmp_path: Path) -> None:
    """The load benchmark's figures are the cost model's within 3 % at C = 1, 10, 64 and 256."""
    config = LaunchConfig(
        model="experiments/models/qwen3-8b.yaml",
        flags={"tensor-parallel-size": 2, "disable-custom-all-reduce": True, "max-model-len": 4096},
        gpus=2,
    )
    order = simulated_order(
        tmp_path, protocol=Protocol(warmup_min_s=3, warmup_max_s=4, window_s=10, windows=1, max_windows=1)
    ).model_copy(
        update={
            "config": config,
            "engine": Engine(kind="simulated", node="2x-h200-p2p-off"),
            "workload": Workload(prompts="random_tokens", vocabulary=32000),
            "ladder": (1, 10, 64, 256),
        }
    )
    node = Node(tmp_path / "node")
    node.start(order)
    wrong = {}
    for concurrency in order.ladder:
        measurement, _ = node.measure(concurrency)
        assert measurement.valid, measurement.reason
        assert measurement.output_tok_s is not None
        model = expected(config, load_node("2x-h200-p2p-off"), load_model("qwen3-8b"), concurrency, Load(window_s=20))
        error = measurement.output_tok_s / model.output_tok_s - 1
        print(
            f"C={concurrency}: {measurement.output_tok_s:.1f} of {model.output_tok_s:.1f} tok/s, {100 * error:+.1f} %"
        )
        if abs(error) > 0.03:
            wrong[concurrency] = error
    node.stop()
    assert wrong == {}
