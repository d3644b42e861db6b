"""Every definition against numbers worked out by hand, and against an independent few lines."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.load import figures
from runner.load.samples import Cell, Facts, gather
from runner.load.server import Counters
from runner.load.wire import RequestRow, Samples
from runner.schema.experiment import Slo

MS = 1_000_000
S = 1_000 * MS

Request = tuple[int, list[tuple[int, int]]]
"""When it was sent (ms), and its chunks: when (ms), tokens."""


def cell(requests: list[Request], *, dephasing: int = 0, **facts: object) -> Cell:
    """A cell of good requests, counted per chunk; the first ``dephasing`` of them out of phase."""
    rows, owner, ns, tokens = [], [], [], []
    for index, (sent, chunks) in enumerate(requests):
        count = sum(size for _, size in chunks)
        row = RequestRow(index, index < dephasing, count, sent * MS, chunks[-1][0] * MS, count, "chunk", 10, "length")
        rows.append(row)
        owner += [index] * len(chunks)
        ns += [at * MS for at, _ in chunks]
        tokens += [size for _, size in chunks]
    part = Samples(
        chunk_request=np.array(owner, np.uint32).tobytes(),
        chunk_ns=np.array(ns, np.int64).tobytes(),
        chunk_tokens=np.array(tokens, np.uint32).tobytes(),
        requests=rows,
        lag_ns=b"",
    )
    table, _ = gather([part])
    base = {"concurrency": 1, "protocol": "requests", "seed": 0, "processes": 1}
    return Cell(Facts.model_validate(base | facts), table)


D6 = cell([(0, [(100, 1), (140, 4), (170, 3), (180, 1), (230, 5)])])


def test_latencies_of_the_multi_token_stream() -> None:
    """D-6: 14 tokens in 5 chunks, TTFT at the first, TPOT = (last - first) / 13, ITL per token, E2EL to the last."""
    found = figures.measurement(D6)
    assert found.ttft_ms is not None
    assert found.tpot_ms is not None
    assert found.itl_ms is not None
    assert found.e2el_ms is not None
    assert (found.tokens_client, found.chunks) == (14, 5)
    assert found.ttft_ms.p50 == 100
    assert found.tpot_ms.p50 == pytest.approx(130 / 13)
    assert found.e2el_ms.p50 == 230
    assert found.itl_ms.n == 13
    assert found.itl_ms.mean == pytest.approx(130 / 13)
    assert found.itl_ms.p50 == 10  # 4 x 10, 3 x 10, 1 x 10, 5 x 10
    assert found.per_user_tok_s == pytest.approx(100)


def test_a_bundled_first_chunk_does_not_flatter_tpot() -> None:
    """3 tokens at once, then one a 10 ms: TPOT is 10 ms, not 10 * 2 / 4."""
    found = figures.measurement(cell([(0, [(50, 3), (60, 1), (70, 1)])]))
    assert found.tpot_ms is not None
    assert found.tpot_ms.p50 == 10


def test_one_token_has_no_tpot() -> None:
    """Absent, not zero."""
    found = figures.measurement(cell([(0, [(50, 1)])]))
    assert found.tpot_ms is None
    assert found.per_user_tok_s is None
    assert found.itl_ms is None


def test_naive_is_all_good_tokens_over_the_whole_wall() -> None:
    """Two requests of 10 tokens in 2 s."""
    requests: list[Request] = [(0, [(500, 10)]), (500, [(2000, 10)])]
    found = figures.measurement(cell(requests))
    assert found.naive_tok_s == pytest.approx(10, rel=1e-6)
    assert found.output_tok_s == found.naive_tok_s


def test_only_the_span_counts() -> None:
    """One token each 100 ms from 0 to 10 s, three 1-second windows from 2 s: 10 tok/s each, ramp and drain out."""
    stream = [(100 * n, 1) for n in range(1, 100)]
    found = figures.measurement(cell([(0, stream)], protocol="steady", span_ns=(2 * S, 5 * S), windows=3))
    assert found.protocol == "steady"
    assert found.windows_tok_s == (10, 10, 10)
    assert found.interval_tok_s == (10, 10)
    assert found.in_flight_mean == 1
    # The answer is longer than the span: its part inside still tells the decode rate.
    assert found.tpot_ms is not None
    assert found.tpot_ms.p50 == 100


def test_dephasing_requests_stay_out_of_the_latencies() -> None:
    """A first request of drawn length is no sample of E2EL or TPOT."""
    requests: list[Request] = [(0, [(100, 1), (900, 1)]), (1000, [(1100, 1), (1110, 1)])]
    found = figures.measurement(cell(requests, dephasing=1))
    assert found.e2el_ms is not None
    assert (found.e2el_ms.n, found.e2el_ms.p50) == (1, 110)


def test_in_flight_is_weighted_by_time() -> None:
    """One request for 3 s of 4, another for 1 s of 4: one in the mean."""
    requests: list[Request] = [(0, [(3000, 1)]), (3000, [(4000, 1)])]
    c = figures.columns(cell(requests))
    assert figures.in_flight_mean(c, (0, 4 * S)) == 1
    assert figures.in_flight_mean(c, (0, 8 * S)) == 0.5


def test_percentiles_need_samples() -> None:
    """p90 from 10, p99 from 100."""
    few, some, many = (figures.distribution(np.arange(n, dtype=float)) for n in (9, 10, 100))
    assert few is not None
    assert some is not None
    assert many is not None
    assert (few.p50, few.p90, few.p99) == (4, None, None)
    assert some.p90 == pytest.approx(8.1)
    assert some.p99 is None
    assert many.p99 == pytest.approx(98.01)
    assert figures.distribution(np.zeros(0)) is None


def test_interval_is_students_t() -> None:
    """9, 10, 11: mean 10, s 1, t(0.975, 2) = 4.302653: 10 ± 2.484."""
    assert figures.interval95(np.array([9.0, 10.0, 11.0])) == pytest.approx((7.5159, 12.4841), abs=1e-4)
    assert figures.interval95(np.array([9.0, 11.0])) is None


def test_goodput_counts_requests_that_met_every_bound() -> None:
    """TTFT 100 and 300 ms against a bound of 200: one of two in 1 s; bounds not given bind nothing."""
    requests: list[Request] = [(0, [(100, 1), (110, 1)]), (0, [(300, 1), (1000, 1)])]
    found = figures.measurement(cell(requests, slo=Slo(ttft_ms=200)))
    assert found.goodput_per_s == pytest.approx(1, rel=1e-6)
    assert figures.measurement(cell(requests, slo=Slo(e2el_ms=2000))).goodput_per_s == pytest.approx(2, rel=1e-6)
    assert figures.measurement(cell(requests)).goodput_per_s is None


def test_the_servers_counters_make_rates_or_nothing() -> None:
    """Acceptance = accepted / drafted, length = 1 + accepted / drafts, hits / queries; no drafts: absent, not 0."""
    before = Counters(generation_tokens=100, draft_tokens=0, accepted_tokens=0, drafts=0, prefix_cache_queries=0)
    after = Counters(generation_tokens=114, draft_tokens=8, accepted_tokens=6, drafts=4, prefix_cache_queries=0)
    found = figures.measurement(Cell(D6.facts.model_copy(update={"before": before, "after": after}), D6.requests))
    assert found.tokens_server == 14
    assert found.acceptance_rate == 0.75
    assert found.acceptance_length == 2.5
    assert found.prefix_hit_rate is None
    assert found.valid


def test_a_cell_without_any_request_is_void() -> None:
    """Nothing sent, nothing claimed."""
    empty = Samples(chunk_request=b"", chunk_ns=b"", chunk_tokens=b"", requests=[], lag_ns=b"")
    table, _ = gather([empty])
    found = figures.measurement(Cell(D6.facts, table))
    assert not found.valid
    assert found.output_tok_s is None
    assert isinstance(table, pa.Table)


STREAMS = st.lists(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8)), min_size=2, max_size=20), min_size=1, max_size=10
)


@given(STREAMS)
def test_identities(streams: list[list[tuple[int, int]]]) -> None:
    """TTFT + TPOT x (tokens after the first chunk) = E2EL; ITL's samples sum to the decode time; percentiles rise."""
    requests: list[Request] = []
    for gaps in streams:
        at = np.cumsum([gap for gap, _ in gaps])
        requests.append((0, [(int(when), size) for when, (_, size) in zip(at, gaps, strict=True)]))
    c = figures.columns(cell(requests))
    found = figures.latencies(c, c.good)
    later = c.tokens - c.first_tokens
    assert np.allclose(found.ttft_ms + found.tpot_ms * later, found.e2el_ms)
    itl = figures.inter_token_ms(c, (0, 10**18))
    assert len(itl) == later.sum()
    assert itl.sum() == pytest.approx((found.e2el_ms - found.ttft_ms).sum())
    spread = figures.distribution(np.concatenate((itl, itl)))
    assert spread is not None
    known = [value for value in (spread.p50, spread.p90, spread.p99) if value is not None]
    assert known == sorted(known)
