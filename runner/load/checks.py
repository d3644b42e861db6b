"""When a cell is void, and what was the limit. Pure rules over figures; each with the number it draws the line at."""

from collections.abc import Sequence
from statistics import fmean

from runner.load.samples import Facts
from runner.schema.trial import Measurement

COUNT_TOLERANCE = 0.005
"""Client's tokens against the server's counter over the drained cell."""

CLIENT_IN_FLIGHT = 0.98
"""Least mean of requests in flight at the client, as a share of C (a stream is between two requests for under 1 %)."""

SERVER_IN_FLIGHT_PEAK = 0.95
SERVER_IN_FLIGHT_MEAN = 0.5
"""Least running + waiting at the server as a share of C. A server that admits too few never shows the peak; the mean,
polled a few times, may fall between two requests at small C and only guards against a peak that was a moment's.
"""

LEAST_POLLS = 3
"""Fewest polls of the server that refute a concurrency, or prove that it was held."""

PREFIX_HITS = 0.01
"""Most prefix-cache hits of a workload without common prefixes. Source: vllm-project/vllm#52884.

A chat template opens every prompt alike, so its tokens may be found in the cache on top.
"""

CLIENT_CPU = 0.9
"""Cores a client process (one thread) may use before it is the limit."""

CLIENT_LAG = 0.01
"""Mean event-loop lag as a share of the median E2EL: what the closed loop loses by the client's own slowness."""

LEAST_LAG_MS = 5.0
"""Mean lag that any shared machine shows and that is no bottleneck, however short the requests."""

API_SERVER_CPU = 0.95
"""Cores of one front-end process from which it, not the engine, is the limit."""

BUSY_API_SERVER_CPU = 0.7
ENGINE_IN_FLIGHT = 0.9
"""A front end this busy is the limit too when the engine holds fewer than this share of C: the rest waits in front of
it. Source: an 8B model on two H200s at C=256 keeps the one API server at 0.86 cores and the engine at 0.77 of C; with
slower all-reduces, where the engine is the limit, 0.53 cores and 0.98.
"""

_WITHDRAWN: dict[str, tuple[()] | None] = {
    "output_tok_s": None,
    "interval_tok_s": None,
    "windows_tok_s": (),
    "naive_tok_s": None,
    "per_user_tok_s": None,
    "request_per_s": None,
    "goodput_per_s": None,
}


def reached(shown: Sequence[float], concurrency: int) -> bool:
    """Whether one of the polls showed the concurrency at the server."""
    return any(value >= SERVER_IN_FLIGHT_PEAK * concurrency for value in shown)


def judge(found: Measurement, facts: Facts, *, in_flight_peak: int) -> Measurement:
    """The measurement with what could not be checked, what was the limit, and void if a rule is broken.

    A void one keeps what explains it (errors, counts, load) and loses the figures somebody could rank by.
    """
    limit = limited_by(found, facts)
    reason = void_reason(found, facts, limit, in_flight_peak)
    found = found.model_copy(update={"unchecked": unchecked(found, facts), "limited_by": limit, "reason": reason})
    if reason is None:
        return found
    return found.model_copy(update={"valid": False, **_WITHDRAWN})


def unchecked(found: Measurement, facts: Facts) -> tuple[str, ...]:
    """What the server gives no means to check."""
    means = {
        "server_counter": found.tokens_server is not None,
        "server_in_flight": _polled(found, facts),
        "prefix_cache": found.prefix_hit_rate is not None,
        "prefix_cache_reset": facts.cache_reset is not None or not facts.reset_asked,
    }
    return tuple(name for name, there in means.items() if not there)


def limited_by(found: Measurement, facts: Facts) -> str | None:
    """What held the level back, if not the engine."""
    request_ms = found.e2el_ms.p50 if found.e2el_ms is not None else None
    bearable_ms = max(LEAST_LAG_MS, CLIENT_LAG * (request_ms or 0))
    if (facts.client_cpu or 0) >= CLIENT_CPU or (facts.lag_mean_ms or 0) > bearable_ms:
        return "client"
    cores = facts.server_cpu or 0.0
    starved = len(facts.in_flight) >= LEAST_POLLS and fmean(facts.in_flight) < ENGINE_IN_FLIGHT * facts.concurrency
    return "api_server" if cores >= (BUSY_API_SERVER_CPU if starved else API_SERVER_CPU) else None


def _polled(found: Measurement, facts: Facts) -> bool:
    """Whether the polls can tell; in the naive protocol the peak is all that is asked for, and one poll may show it."""
    shown_once = found.protocol == "requests" and reached(facts.in_flight, facts.concurrency)
    return shown_once or len(facts.in_flight) >= LEAST_POLLS


def void_reason(found: Measurement, facts: Facts, limit: str | None, in_flight_peak: int) -> str | None:
    """Why the numbers do not count; None when they do. The first broken rule speaks."""
    if found.tokens_client is None and found.requests_ok:
        return "the server does not say how many tokens it generated (no usage, no token ids)"
    return (
        (None if found.requests_ok else "no request succeeded")
        or (_client(found, facts) if limit == "client" else None)
        or _counts(found)
        or _concurrency(found, facts, limit, in_flight_peak)
        or _prefix_hits(found, facts)
        or (None if found.output_tok_s else "no token arrived inside the window")
    )


def _counts(found: Measurement) -> str | None:
    client, server = found.tokens_client, found.tokens_server
    if client is None or server is None or abs(client - server) <= COUNT_TOLERANCE * max(client, server):
        return None
    return f"the streams carried {client} tokens, the server counted {server} (more than {COUNT_TOLERANCE:.1%} apart)"


def _concurrency(found: Measurement, facts: Facts, limit: str | None, in_flight_peak: int) -> str | None:
    c = facts.concurrency
    if in_flight_peak < c:
        return f"C={c} was never reached: at most {in_flight_peak} requests in flight at the client"
    steady = found.protocol == "steady"
    if steady and found.in_flight_mean is not None and found.in_flight_mean < CLIENT_IN_FLIGHT * c:
        return f"C={c} was not held: {found.in_flight_mean:.1f} requests in flight at the client"
    if not _polled(found, facts) or (facts.server_cpu or 0.0) >= API_SERVER_CPU:
        return None  # a full front end holds requests that it has not counted yet
    mean = fmean(facts.in_flight)
    if reached(facts.in_flight, c) and (mean >= SERVER_IN_FLIGHT_MEAN * c or not steady):
        return None
    peak = max(facts.in_flight)
    return f"C={c} did not reach the server: {mean:.1f} running and waiting there, {peak:g} at most"


def _prefix_hits(found: Measurement, facts: Facts) -> str | None:
    if facts.cache_reset is False:
        return "the server refused to reset its prefix cache"
    template = facts.template_tokens / found.input_tokens_mean if found.input_tokens_mean else 0.0
    if not facts.fresh_prompts or found.prefix_hit_rate is None or found.prefix_hit_rate <= PREFIX_HITS + template:
        return None
    explained = f" (the chat template explains {template:.1%})" if template else ""
    return (
        f"{found.prefix_hit_rate:.1%} of the prompt tokens came from the prefix cache although every prompt is fresh"
        + explained
    )


def _client(found: Measurement, facts: Facts) -> str:
    lag = "" if facts.lag_mean_ms is None else f", event-loop lag {facts.lag_mean_ms:.1f} ms"
    return f"client_bound: the client was the limit (busiest process {found.client_cpu or 0:.2f} cores{lag})"
