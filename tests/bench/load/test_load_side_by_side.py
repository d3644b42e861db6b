"""The side-by-side bench with its aims: a fraction of the peers' CPU, and the smallest error (``make bench-load``)."""

from pathlib import Path

import pytest

from tests.bench.load.side_by_side import Row, compare

PEERS = ("vllm bench serve", "guidellm")
RESULTS = Path(__file__).parents[3] / "results" / "bench"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], Row]:
    """All clients at all concurrencies; the table is left in ``results/bench``."""
    return {(row.client, row.concurrency): row for row in compare([1, 64, 256, 1024], RESULTS)}


@pytest.mark.bench
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("concurrency", [256, 1024])
def test_costs_at_most_half_of_the_better_peer(concurrency: int, rows: dict[tuple[str, int], Row]) -> None:
    """CPU seconds per million tokens, same protocol, same server, side by side."""
    ours = rows["runner.load (requests)", concurrency].cpu_s_per_mtok
    assert ours <= 0.5 * min(rows[peer, concurrency].cpu_s_per_mtok for peer in PEERS)


@pytest.mark.bench
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("concurrency", [64, 256, 1024])
def test_has_the_smallest_error(concurrency: int, rows: dict[tuple[str, int], Row]) -> None:
    """Reported tok/s against what C streams held without a gap give by the server's own times."""
    ours = abs(rows["runner.load (steady)", concurrency].error_percent)
    assert ours <= min(abs(rows[peer, concurrency].error_percent) for peer in PEERS)
