"""What every number means. Pure: samples in, figures out; the one place where a definition stands.

Latency names are vLLM's own (https://docs.vllm.ai/en/stable/benchmarking/, ``vllm bench serve``), with two sharper
points where chunks carry several tokens: TPOT leaves out all tokens of the first chunk, and ITL is per token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from runner.load.checks import judge
from runner.load.samples import Cell, Ints
from runner.load.server import Counters
from runner.schema.experiment import Slo
from runner.schema.trial import Distribution, Measurement

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

LEAST_WINDOWS = 3
"""Fewest windows that make an interval: with two, the t quantile is 12.7 and says nothing."""

FIRST_ERRORS = 5
"""Error texts quoted."""

_NONE = -1
"""Stands for null in the integer columns below."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The samples as flat columns: ``(n_requests,)``, and ``(n_chunks,)`` ordered by request, then time.

    Attributes:
        good: Exactly what was asked for came.
        dephasing: First request of its stream, of drawn length.
        per_chunk: Its tokens are known chunk by chunk.
        first_ns: Arrival of the first chunk with a token; ``last_ns`` of the last one. -1: none came.
        first_tokens: Tokens in the first chunk; 1 where only the final count is known.
        owner: Row of the request a chunk belongs to.
    """

    good: Bools
    dephasing: Bools
    per_chunk: Bools
    tokens: Ints
    prompt_tokens: Ints
    sent_ns: Ints
    end_ns: Ints
    first_ns: Ints
    last_ns: Ints
    first_tokens: Ints
    owner: Ints
    chunk_ns: Ints
    chunk_tokens: Ints


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds; requests in one order for ``ttft_ms``, ``tpot_ms`` (NaN with one token) and ``e2el_ms``."""

    ttft_ms: Floats
    tpot_ms: Floats
    e2el_ms: Floats


def columns(cell: Cell) -> Columns:
    """Flatten a cell's table."""
    table = cell.requests

    def ints(name: str) -> Ints:
        return np.asarray(table[name].fill_null(_NONE).to_numpy(), np.int64)

    lists = table["chunk_ns"].combine_chunks()
    chunk_ns = np.asarray(lists.flatten(), np.int64)
    chunk_tokens = np.asarray(table["chunk_tokens"].combine_chunks().flatten(), np.int64)
    counts = np.asarray(lists.value_lengths().fill_null(0), np.int64)
    ends = np.cumsum(counts)
    has = counts > 0
    per_chunk = np.asarray(table["counted"].to_numpy() == "chunk", np.bool_)
    first_ns = np.full(len(counts), _NONE, np.int64)
    last_ns, first_tokens = first_ns.copy(), np.ones(len(counts), np.int64)
    first_ns[has] = chunk_ns[(ends - counts)[has]]
    last_ns[has] = chunk_ns[ends[has] - 1]
    known = has & per_chunk
    first_tokens[known] = chunk_tokens[(ends - counts)[known]]
    return Columns(
        good=np.asarray(table["error"].is_null().to_numpy(), np.bool_),
        dephasing=np.asarray(table["first"].to_numpy(), np.bool_),
        per_chunk=per_chunk,
        tokens=ints("tokens"),
        prompt_tokens=ints("prompt_tokens"),
        sent_ns=ints("sent_ns"),
        end_ns=ints("end_ns"),
        first_ns=first_ns,
        last_ns=last_ns,
        first_tokens=first_tokens,
        owner=np.repeat(np.arange(len(counts)), counts),
        chunk_ns=chunk_ns,
        chunk_tokens=chunk_tokens,
    )


def window_rates(c: Columns, span_ns: tuple[int, int], windows: int) -> Floats:
    """Output tok/s of each window: tokens whose chunk arrived in it / its length, all streams. ``(windows,)``.

    The span is whole seconds long and so is each window; ramp, warm-up and drain lie outside of it.
    """
    window_ns = (span_ns[1] - span_ns[0]) // windows
    inside = (c.chunk_ns >= span_ns[0]) & (c.chunk_ns < span_ns[1])
    window = (c.chunk_ns[inside] - span_ns[0]) // window_ns
    tokens = np.bincount(window, weights=c.chunk_tokens[inside], minlength=windows)
    return np.asarray(tokens / (window_ns / NS_PER_S), np.float64)


def interval95(values: Floats) -> tuple[float, float] | None:
    """95 % interval of the mean, Student's t over windows; None with fewer than three.

    Source: mean ± t(0.975, n - 1) · s / sqrt(n). It tells how steady one start was, nothing about other starts.
    """
    n = len(values)
    if n < LEAST_WINDOWS:
        return None
    half = float(stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n))
    return float(values.mean()) - half, float(values.mean()) + half


def latencies(c: Columns, which: Bools) -> Latencies:
    """TTFT, TPOT and E2EL of the requests in ``which`` (all of which have a token).

    TTFT = first chunk with a token - request written. E2EL = last chunk with a token - request written.
    TPOT = (last chunk - first chunk) / (tokens - tokens of the first chunk).

    Source: vLLM's ``calculate_metrics``: TPOT = (latency - TTFT) / (n - 1); the same where the first chunk has one
    token. Where it bundles several, n - 1 counts gaps that nobody waited for (ai-dynamo/aiperf#1279).
    """
    later = (c.tokens - c.first_tokens)[which]
    decode_ns = (c.last_ns - c.first_ns)[which]
    tpot = np.divide(decode_ns, later, out=np.full(len(later), np.nan), where=later > 0)
    return Latencies(
        ttft_ms=(c.first_ns - c.sent_ns)[which] / NS_PER_MS,
        tpot_ms=tpot / NS_PER_MS,
        e2el_ms=(c.last_ns - c.sent_ns)[which] / NS_PER_MS,
    )


def partial_tpot_ms(c: Columns, span_ns: tuple[int, int]) -> Floats:
    """TPOT of the part of each stream inside the span, for answers longer than the span. Milliseconds.

    (last - first chunk inside) / tokens after the first chunk inside.
    """
    inside = (c.chunk_ns >= span_ns[0]) & (c.chunk_ns < span_ns[1]) & c.per_chunk[c.owner]
    if not inside.any():
        return np.zeros(0)
    _, starts = np.unique(c.owner[inside], return_index=True)
    ns, tokens = c.chunk_ns[inside], c.chunk_tokens[inside]
    ends = np.append(starts[1:], len(ns)) - 1
    later = np.add.reduceat(tokens, starts) - tokens[starts]
    some = later > 0
    return np.asarray((ns[ends] - ns[starts])[some] / later[some] / NS_PER_MS, np.float64)


def inter_token_ms(c: Columns, span_ns: tuple[int, int]) -> Floats:
    """ITL: time since the stream's chunk before / tokens of this chunk, once for each of its tokens. Milliseconds.

    Source: vLLM's ITL is one gap a chunk, which several tokens a chunk inflate (vllm-project/vllm#42661).
    """
    gaps = np.diff(c.chunk_ns, prepend=0)
    same = np.diff(c.owner, prepend=-1) == 0
    inside = same & (c.chunk_ns >= span_ns[0]) & (c.chunk_ns < span_ns[1]) & c.per_chunk[c.owner] & (c.chunk_tokens > 0)
    tokens = c.chunk_tokens[inside]
    return np.asarray(np.repeat(gaps[inside] / tokens, tokens) / NS_PER_MS, np.float64)


def in_flight_mean(c: Columns, span_ns: tuple[int, int]) -> float | None:
    """Mean requests in flight (written, not yet over) inside the span, time-weighted."""
    start, end = span_ns
    if end <= start:
        return None
    over = np.where(c.end_ns == _NONE, end, c.end_ns)
    held = np.clip(over, start, end) - np.clip(c.sent_ns, start, end)
    return float(held.sum() / (end - start))


def distribution(values: Floats) -> Distribution | None:
    """Mean and percentiles, each percentile only with one sample expected beyond it (p90: 10, p99: 100).

    Percentiles interpolate linearly, as ``vllm bench serve`` does.
    """
    values = values[~np.isnan(values)]
    n = len(values)
    if n == 0:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Distribution(
        n=n, mean=float(values.mean()), p50=p50, p90=p90 if n >= 10 else None, p99=p99 if n >= 100 else None
    )


def goodput_per_s(found: Latencies, slo: Slo, seconds: float) -> float:
    """Requests a second that met every bound given.

    Source: DistServe (https://arxiv.org/abs/2401.09670). A request of one token has no TPOT and meets its bound.
    """
    met = np.ones(len(found.ttft_ms), np.bool_)
    for values, bound in ((found.ttft_ms, slo.ttft_ms), (found.tpot_ms, slo.tpot_ms), (found.e2el_ms, slo.e2el_ms)):
        if bound is not None:
            met &= ~(values > bound)
    return float(met.sum() / seconds)


def measurement(cell: Cell) -> Measurement:
    """Every figure of a cell, and whether it counts."""
    facts, c = cell.facts, columns(cell)
    whole = (0, int(max(c.end_ns.max(initial=0), c.last_ns.max(initial=0))) + 1)
    good = c.good & (c.first_ns != _NONE) & (c.tokens > 0)
    naive = float(c.tokens[good].sum() / (whole[1] / NS_PER_S)) if good.any() else None
    steady = facts.span_ns is not None and not (~c.per_chunk & (c.tokens != _NONE)).any()
    span = facts.span_ns if steady and facts.span_ns is not None else whole
    seconds = (span[1] - span[0]) / NS_PER_S
    rates = window_rates(c, span, facts.windows) if steady else np.zeros(0)
    ended = good & ~c.dephasing & (c.last_ns >= span[0]) & (c.last_ns < span[1])
    begun = good & (c.first_ns >= span[0]) & (c.first_ns < span[1])
    of_ended = latencies(c, ended)
    tpot = distribution(of_ended.tpot_ms) or (distribution(partial_tpot_ms(c, span)) if steady else None)
    told = c.tokens[c.tokens != _NONE]
    prompts = c.prompt_tokens[c.prompt_tokens != _NONE]
    found = Measurement(
        concurrency=facts.concurrency,
        valid=True,
        protocol="steady" if steady else "requests",
        output_tok_s=float(rates.mean()) if steady else naive,
        interval_tok_s=interval95(rates),
        windows_tok_s=tuple(rates.tolist()),
        naive_tok_s=naive,
        per_user_tok_s=1000 / tpot.p50 if tpot and tpot.p50 else None,
        request_per_s=float(ended.sum() / seconds),
        goodput_per_s=goodput_per_s(of_ended, facts.slo, seconds) if facts.slo else None,
        requests_ok=int(c.good.sum()),
        requests_failed=int((~c.good).sum()),
        errors=_first_errors(cell),
        wall_s=whole[1] / NS_PER_S,
        warmup_s=facts.warmup_s,
        window_s=seconds / facts.windows if steady else None,
        ttft_ms=distribution(latencies(c, begun).ttft_ms),
        tpot_ms=tpot,
        itl_ms=distribution(inter_token_ms(c, span)),
        e2el_ms=distribution(of_ended.e2el_ms),
        in_flight_mean=in_flight_mean(c, span),
        server_in_flight_mean=float(np.mean(facts.in_flight)) if facts.in_flight else None,
        tokens_client=int(told.sum()) if len(told) else None,
        chunks=len(c.chunk_ns),
        input_tokens_mean=float(prompts.mean()) if len(prompts) else None,
        client_lag_p99_ms=facts.lag_p99_ms,
        client_cpu=facts.client_cpu,
        server_cpu=facts.server_cpu,
        seed=facts.seed,
        **_server_side(facts.before, facts.after),
    )
    return judge(found, facts, in_flight_peak=_in_flight_peak(c))


def _first_errors(cell: Cell) -> tuple[str, ...]:
    errors = cell.requests["error"].drop_null().to_pylist()
    return tuple(dict.fromkeys(errors))[:FIRST_ERRORS]


def _in_flight_peak(c: Columns) -> int:
    edges = np.concatenate((c.sent_ns, c.end_ns[c.end_ns != _NONE]))
    steps = np.concatenate((np.ones(len(c.sent_ns), np.int64), -np.ones(len(edges) - len(c.sent_ns), np.int64)))
    # An end and a beginning at the same instant: the end comes first.
    return int(np.cumsum(steps[np.lexsort((steps, edges))]).max(initial=0))


def _server_side(before: Counters | None, after: Counters | None) -> dict[str, float | int | None]:
    """Figures from the server's counters over the cell; absent where a counter is, or where nothing was counted."""
    if before is None or after is None:
        return {}

    def grown(name: str) -> float | None:
        start, end = getattr(before, name), getattr(after, name)
        return None if start is None or end is None else float(end - start)

    def ratio(part: str, whole: str) -> float | None:
        top, bottom = grown(part), grown(whole)
        return None if top is None or not bottom else top / bottom

    generated, preempted = grown("generation_tokens"), grown("preemptions")
    per_draft = ratio("accepted_tokens", "drafts")
    return {
        "tokens_server": None if generated is None else round(generated),
        "preemptions": None if preempted is None else round(preempted),
        "acceptance_rate": ratio("accepted_tokens", "draft_tokens"),
        "acceptance_length": None if per_draft is None else 1 + per_draft,
        "prefix_hit_rate": ratio("prefix_cache_hits", "prefix_cache_queries"),
    }
