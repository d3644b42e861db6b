"""The load benchmark through HTTP sees what the cost model says, by token counts and by rate."""

from pathlib import Path

import pytest

from runner.node import Node
from runner.schema.experiment import Protocol
from runner.simulator.describe import load_model, load_node
from runner.simulator.expected import Load, expected
from tests.fakes.simulated import simulated_order

pytestmark = pytest.mark.alone

PROTOCOL = Protocol(warmup_min_s=1, warmup_max_s=2, window_s=4, windows=1, max_windows=1)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_client_measures_what_the_model_gives(tmp_path: Path, concurrency: int) -> None:
    """Equal within 10 % on a busy machine (3 % on a quiet one: tests/bench/simulator), counters and lengths exact."""
    order = simulated_order(tmp_path, protocol=PROTOCOL)
    node = Node(tmp_path / "node")
    node.start(order)
    measurement, _ = node.measure(concurrency)
    node.stop()
    load = Load(input_tokens=16, output_tokens=16, warmup_s=1, window_s=5)
    model = expected(order.config, load_node("2x-h200-nvlink"), load_model("qwen3-8b"), concurrency, load)
    assert measurement.valid, measurement.reason
    assert measurement.tokens_client == measurement.tokens_server
    assert measurement.output_tok_s == pytest.approx(model.output_tok_s, rel=0.10)
