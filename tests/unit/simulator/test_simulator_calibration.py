"""The simulated nodes against measured figures: every row, the order of the rows, and where configurations cross."""

from itertools import combinations

import pytest

from runner.schema.launch import LaunchConfig
from runner.simulator import calibration
from runner.simulator.calibration import H200_REQUESTS, H200_ROWS, OFF, ON, Check, h200_figures, story_checks
from runner.simulator.costs import nccl_s
from runner.simulator.describe import load_model, load_node
from runner.simulator.expected import Figures, Load, expected

NOISE = {1: 0.02, 256: 0.12}
"""Start-to-start difference of one configuration, as measured: two rows closer than that have no order."""


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, int], Figures]:
    return h200_figures()


@pytest.fixture(scope="module")
def story() -> list[Check]:
    return story_checks()


def test_the_story(story: list[Check]) -> None:
    """20, 43, 57 tok/s, 42 % in all-reduces, C=2 and C=10, and the price of LL at C=256 and 1024, within tolerance."""
    assert len(story) == 12
    assert [check for check in story if not check.passes] == []


def test_every_measured_row(figures: dict[tuple[str, int], Figures]) -> None:
    """All 12 rows at C = 1, 10, 64 and 256 are within 15 %."""
    checks = calibration.h200_checks(figures)
    assert len(checks) == 48
    assert [check for check in checks if not check.passes] == []


@pytest.mark.parametrize("concurrency", [1, 256])
def test_the_order_of_the_rows(figures: dict[tuple[str, int], Figures], concurrency: int) -> None:
    """Rows of one node that differ by more than a restart does stand in the measured order."""
    column = list(H200_REQUESTS).index(concurrency)
    wrong = []
    compared = 0
    for first, second in combinations(H200_ROWS, 2):
        ratio = first.output_tok_s[column] / second.output_tok_s[column]
        if first.node != second.node or abs(ratio - 1) <= NOISE[concurrency]:
            continue
        compared += 1
        simulated = figures[first.name, concurrency].output_tok_s / figures[second.name, concurrency].output_tok_s
        if (ratio > 1) != (simulated > 1):
            wrong.append((first.name, second.name, ratio, simulated))
    assert compared > 20
    assert wrong == []


def change(figures: dict[tuple[str, int], Figures], row: str, base: str, concurrency: int) -> float:
    return figures[row, concurrency].output_tok_s / figures[base, concurrency].output_tok_s - 1


def test_the_crossings(figures: dict[tuple[str, int], Figures]) -> None:
    """Speculation, PP=2 and LL against the default: up at one end, down at the other, about as measured."""
    assert change(figures, "LL, n-gram K=3", "unset", 1) == pytest.approx(0.40, abs=0.10)
    assert change(figures, "LL, n-gram K=3", "unset", 256) == pytest.approx(-0.60, abs=0.10)
    assert change(figures, "PP=2", "unset", 1) == pytest.approx(-0.14, abs=0.05)
    assert change(figures, "PP=2", "unset", 256) == pytest.approx(0.40, abs=0.10)
    assert change(figures, "LL", "unset", 1) == pytest.approx(0.0, abs=0.02)
    assert change(figures, "LL", "unset", 256) == pytest.approx(-0.45, abs=0.10)


def test_the_cliff_behind_the_largest_graph(figures: dict[tuple[str, int], Figures]) -> None:
    """Capturing only up to 8: nothing lost at C=1, as slow as eager at C=10."""
    assert change(figures, "capture 1,2,4,8", "unset", 1) == pytest.approx(-0.05, abs=0.05)
    assert change(figures, "capture 1,2,4,8", "unset", 10) < -0.8
    assert change(figures, "capture 1,2,4,8", "eager", 10) == pytest.approx(0.0, abs=0.1)


def test_the_api_server_is_the_limit_at_256(figures: dict[tuple[str, int], Figures]) -> None:
    """With fast all-reduces its process is busy most of the time; PP=2 sends several tokens a chunk."""
    assert figures["custom all-reduce", 256].api_busy > 0.8
    assert figures["custom all-reduce", 1].api_busy < 0.1
    assert figures["PP=2", 256].tokens_per_chunk == pytest.approx(1.54, abs=0.2)
    assert figures["unset", 64].tokens_per_chunk < 1.05


MICRO_US = {
    (OFF, "LL", 4): {8: 10.8, 64: 15.5, 128: 21.9, 512: 63.9, 1024: 120, 4096: 465},
    (OFF, "LL", 16): {8: 10.6, 64: 13.2, 256: 24.6, 1024: 72.7, 4096: 260},
    (OFF, "Simple", 4): {8: 24.1, 128: 30.9, 512: 46.5, 2048: 97.9, 65536: 2375},
    (OFF, "Simple", 2): {512: 47.2, 2048: 108, 65536: 2803},
    (OFF, "LL128", 4): {8: 18.3, 128: 23.3, 512: 44.2, 4096: 238},
    (ON, "LL", 24): {8: 6.7, 128: 7.4, 512: 10.2, 2048: 22.2, 4096: 37.5},
    (ON, "Simple", 24): {8: 17.3, 128: 19.7, 2048: 26.9, 65536: 250},
}
"""Microseconds by KB per rank: replays of a graph of 20 all-reduces on two H200, by node, protocol and channels."""


@pytest.mark.parametrize(("node", "protocol", "channels"), list(MICRO_US))
def test_one_all_reduce(node: str, protocol: str, channels: int) -> None:
    """Within a quarter of the micro-benchmark over four decades of message size."""
    described = load_node(node)
    path = described.p2p or described.shm
    for kib, asked in MICRO_US[node, protocol, channels].items():
        assert 1e6 * nccl_s(path, protocol, 2, kib * 1024, channels) == pytest.approx(asked, rel=0.25), kib


def story_figures(
    concurrency: int,
    env: dict[str, str] | None = None,
    speculative: dict[str, object] | None = None,
    *,
    input_tokens: int = 32,
) -> float:
    config = LaunchConfig(
        model="glm5-744b-moe-4.5bit",
        flags={"tensor-parallel-size": 8, "max-num-seqs": 256, "max-model-len": 4096},
        structured={"speculative-config": speculative} if speculative else {},
        env=env or {},
        gpus=8,
    )
    load = Load(input_tokens=input_tokens, output_tokens=64, window_s=60 if input_tokens > 32 else 20)
    node, model = load_node("8x-rtx-pro-6000"), load_model("glm5-744b-moe-4.5bit")
    return expected(config, node, model, concurrency, load).output_tok_s


def test_public_figures_of_such_boxes() -> None:
    """MTP: from 35-50 to 70-105 tok/s at C=1, and a smaller gain at C=64. Peer access off: slower at C=1."""
    mtp: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 3}
    alone = story_figures(1, {"NCCL_PROTO": "LL"})
    with_mtp = story_figures(1, {"NCCL_PROTO": "LL"}, mtp)
    assert 70 <= with_mtp <= 105
    assert 1.3 <= with_mtp / alone <= 2.2
    gain_at_64 = story_figures(64, {"NCCL_PROTO": "LL"}, mtp) / story_figures(64, {"NCCL_PROTO": "LL"})
    assert 1.0 < gain_at_64 < with_mtp / alone
    off = {"NCCL_P2P_DISABLE": "1"}
    assert 0.6 <= story_figures(1, off) / story_figures(1) <= 0.9


def test_peer_access_off_pays_at_high_concurrency_with_many_channels() -> None:
    """Through host memory: much slower at C=1, faster at C=100 with long prompts, and only with many channels."""
    off = {"NCCL_P2P_DISABLE": "1"}
    many_channels = off | {"NCCL_MIN_NCHANNELS": "32"}
    assert story_figures(1, many_channels) < 0.8 * story_figures(1)
    on = story_figures(100, input_tokens=1024)
    assert story_figures(100, many_channels, input_tokens=1024) > 1.02 * on
    assert story_figures(100, off, input_tokens=1024) < on
