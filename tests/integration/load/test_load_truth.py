"""The figures against a server that keeps the time of each of its own sends."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from runner.load.measure import measure, recompute
from runner.schema.experiment import Protocol, Workload
from runner.schema.trial import Measurement
from tests.fakes.truth import QUICK, Served, Truth, nothing, serving, tried

pytestmark = pytest.mark.alone

LARGER_OF = (0.01, 0.2)
"""A median may be off by 1 % or 0.2 ms, whichever is larger."""


def level(served: Served, workload: Workload, protocol: Protocol, concurrency: int, folder: Path) -> Measurement:
    return measure(
        served.target,
        workload,
        protocol,
        concurrency,
        7,
        on_phase=nothing,
        check=nothing,
        samples_path=folder / "s.parquet",
    )


def beside_truth(
    pace: tuple[str, ...], concurrency: int, share: float, folder: Path, output_tokens: int = 49
) -> tuple[Measurement, Truth]:
    """Measure; again, up to twice, when another process on the machine got in between the two clocks.

    Counts are never tried again: they must be exact however busy the machine is.
    """
    protocol = QUICK.model_copy(update={"windows": 2, "max_windows": 2})

    def attempt() -> tuple[Measurement, Truth]:
        with serving(*pace) as served:
            found = level(served, Workload(input_tokens=32, output_tokens=output_tokens), protocol, concurrency, folder)
            truth = served.truth()
        assert found.tokens_client == truth.tokens
        return found, truth

    found, truth = tried(attempt, lambda pair: pair[0].valid and medians_close(*pair, share))
    assert found.valid, found.reason
    return found, truth


def medians_close(found: Measurement, truth: Truth, share: float) -> bool:
    """Whether TTFT and TPOT medians are within ``share`` or 0.2 ms of the server's own."""
    pairs = ((found.ttft_ms, np.median(truth.ttft_ms)), (found.tpot_ms, np.median(truth.tpot_ms)))
    return all(
        one is not None and one.p50 is not None and abs(one.p50 - true_ms) <= max(share * true_ms, LARGER_OF[1])
        for one, true_ms in pairs
    )


SIZES = (1, 2, 4, 8)
LEVELS = (1, 64, 256)

Grid = dict[tuple[int, int], tuple[Measurement, Truth]]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Every chunk size at every level; the light levels several at a time."""
    folder = tmp_path_factory.mktemp("truth")  # Before the threads: pytest's own folder must not be made by several.

    def case(key: tuple[int, int]) -> tuple[Measurement, Truth]:
        size, concurrency = key
        pace = ("--ttft-ms", "60", "--tpot-ms", str(20 / size), "--tokens-per-chunk", str(size))
        own = folder / f"{size}-{concurrency}"
        own.mkdir()
        # As many chunks whatever their size, or the server would be busy with requests and stamp their arrival late.
        return beside_truth(pace, concurrency, LARGER_OF[0], own, output_tokens=1 + 48 * size)

    found: Grid = {}
    for concurrency, workers in zip(LEVELS, (4, 2, 1), strict=True):
        keys = [(size, concurrency) for size in SIZES]
        with ThreadPoolExecutor(max_workers=workers) as pool:
            found |= dict(zip(keys, pool.map(case, keys), strict=True))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("concurrency", LEVELS)
def test_tokens_are_exact_and_medians_true(size: int, concurrency: int, grid: Grid) -> None:
    """With 1, 2, 4 or 8 tokens a chunk: no token lost or invented, TPOT and TTFT as the server stamped them."""
    found, truth = grid[size, concurrency]
    assert found.tokens_client == truth.tokens
    assert medians_close(found, truth, LARGER_OF[0]), (found, np.median(truth.ttft_ms), np.median(truth.tpot_ms))
    assert found.in_flight_mean == pytest.approx(concurrency, rel=0.02)
    assert truth.peak == concurrency


def test_many_streams_stay_true(tmp_path: Path) -> None:
    """1024 streams at 20 chunks/s each: medians and tok/s within 2 % of the server's own."""
    found, truth = beside_truth(("--ttft-ms", "100", "--tpot-ms", "50"), 1024, 0.02, tmp_path)
    assert medians_close(found, truth, 0.02), (found, np.median(truth.ttft_ms), np.median(truth.tpot_ms))
    assert found.output_tok_s == pytest.approx(truth.sent_tok_s(tmp_path / "s.parquet"), rel=0.02)


def test_tok_s_does_not_depend_on_where_the_window_starts(tmp_path: Path) -> None:
    """Equal lengths, one start: every 2-second window of the span gives the same tok/s within 2 %."""
    protocol = QUICK.model_copy(update={"windows": 8, "max_windows": 8})
    workload = Workload(input_tokens=32, output_tokens=40)
    with serving("--ttft-ms", "200", "--tpot-ms", "20") as served:
        found = level(served, workload, protocol, 64, tmp_path)
    assert found.valid, found.reason
    table = pq.read_table(tmp_path / "s.parquet")
    ns = table["chunk_ns"].combine_chunks().flatten().to_numpy()
    end = int(ns.max())
    starts = np.arange(int((found.warmup_s or 0) * 1e9), int((found.warmup_s or 0) * 1e9) + 6 * 10**9, 10**8)
    rates = np.array([((ns >= start) & (ns < start + 2 * 10**9)).sum() / 2 for start in starts])
    assert starts[-1] + 2 * 10**9 < end
    assert rates.max() / rates.min() - 1 < 0.02
    assert found.output_tok_s == pytest.approx(rates.mean(), rel=0.02)


def test_several_processes_share_exactly(tmp_path: Path) -> None:
    """Three processes hold 10 streams as 4, 3 and 3, whole cell long, and the figures are those of one process."""
    with serving("--ttft-ms", "20", "--tpot-ms", "10") as served:
        found = measure(
            served.target,
            Workload(input_tokens=16, output_tokens=32),
            QUICK,
            10,
            7,
            on_phase=nothing,
            check=nothing,
            samples_path=tmp_path / "s.parquet",
            processes=3,
        )
        truth = served.truth()
    assert found.valid, found.reason
    assert found.tokens_client == truth.tokens
    table = pq.read_table(tmp_path / "s.parquet", columns=["process", "stream"]).to_pydict()
    held = {(process, stream) for process, stream in zip(table["process"], table["stream"], strict=True)}
    assert sorted(held) == [(0, 0), (0, 3), (0, 6), (0, 9), (1, 1), (1, 4), (1, 7), (2, 2), (2, 5), (2, 8)]


def test_every_figure_comes_from_the_samples(tmp_path: Path) -> None:
    """Computing a level again from its file gives the same measurement, to the last digit."""
    with serving() as served:
        found = level(served, Workload(input_tokens=16, output_tokens=32), QUICK, 8, tmp_path)
    assert recompute(tmp_path / "s.parquet") == found


def test_naive_protocol_is_requests_over_wall(tmp_path: Path) -> None:
    """``requests``: exactly so many requests, tokens of all / wall from the first byte out to the last one in."""
    with serving("--ttft-ms", "20", "--tpot-ms", "5") as served:
        protocol = QUICK.model_copy(update={"requests": 24})
        found = level(served, Workload(input_tokens=16, output_tokens=33), protocol, 8, tmp_path)
        truth = served.truth()
    assert found.valid, found.reason
    assert (found.protocol, found.requests_ok, found.tokens_client) == ("requests", 24, 24 * 33)
    wall_s = (truth.chunk_ns.max() - truth.chunk_ns.min()) / 1e9 + 0.020
    assert found.output_tok_s == pytest.approx(24 * 33 / wall_s, rel=0.05)
    assert found.output_tok_s == found.naive_tok_s
