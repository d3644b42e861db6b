"""When a cell is void: one rule, one test, on both sides of its line."""

import pytest

from runner.load.checks import judge
from runner.load.samples import Facts
from runner.schema.trial import Distribution, Measurement

GOOD = Measurement(
    concurrency=8,
    valid=True,
    output_tok_s=100.0,
    per_user_tok_s=12.5,
    windows_tok_s=(100.0,),
    requests_ok=10,
    tokens_client=1000,
    tokens_server=1000,
    in_flight_mean=7.99,
    server_in_flight_mean=8.0,
    prefix_hit_rate=0.0,
    e2el_ms=Distribution(n=10, p50=1000.0),
)
FACTS = Facts(
    concurrency=8, protocol="steady", seed=0, processes=1, in_flight=(8, 8, 8), reset_asked=True, cache_reset=True
)


def judged(
    found: dict[str, object] | None = None, facts: dict[str, object] | None = None, peak: int = 8
) -> Measurement:
    """GOOD and FACTS with changes."""
    return judge(GOOD.model_copy(update=found or {}), FACTS.model_copy(update=facts or {}), in_flight_peak=peak)


def test_nothing_wrong() -> None:
    """Valid, everything checked, no limit."""
    found = judged()
    assert (found.valid, found.reason, found.unchecked, found.limited_by) == (True, None, (), None)


@pytest.mark.parametrize(
    ("found", "facts", "reason"),
    [
        ({"tokens_server": 1006}, {}, "the server counted 1006"),
        ({"tokens_server": 994}, {}, "the server counted 994"),
        ({"in_flight_mean": 7.5}, {}, "was not held"),
        ({}, {"in_flight": (4, 4, 4)}, "did not reach the server"),
        ({}, {"in_flight": (8, 0, 0)}, "did not reach the server"),
        ({"prefix_hit_rate": 0.02}, {}, "prefix cache"),
        ({"prefix_hit_rate": 0.22, "input_tokens_mean": 120.0}, {"template_tokens": 24}, "template explains 20.0%"),
        ({"prefix_hit_rate": 0.02}, {"template_tokens": 24}, "prefix cache"),
        ({}, {"cache_reset": False}, "refused to reset"),
        ({"client_cpu": 0.95}, {"client_cpu": 0.95}, "client_bound"),
        ({}, {"lag_mean_ms": 11.0}, "client_bound"),
        ({"output_tok_s": None}, {}, "no token arrived inside the window"),
        ({"requests_ok": 0}, {}, "no request succeeded"),
        ({"tokens_client": None}, {}, "does not say how many tokens"),
    ],
)
def test_void(found: dict[str, object], facts: dict[str, object], reason: str) -> None:
    """The reason names the rule; no figure is left to rank by; counts stay for the reader."""
    void = judged(found, facts)
    assert not void.valid
    assert reason in (void.reason or "")
    assert (void.output_tok_s, void.per_user_tok_s, void.interval_tok_s) == (None, None, None)
    assert void.windows_tok_s == ()


def test_a_concurrency_never_reached_is_void() -> None:
    """Also in the naive protocol, where the mean says little."""
    assert "never reached" in (judged({"protocol": "requests"}, peak=7).reason or "")


@pytest.mark.parametrize(
    ("in_flight", "valid", "checked"),
    [((0, 8), True, True), ((4, 4), True, False), ((4, 4, 4), False, True), ((0, 4, 8), True, True)],
)
def test_a_naive_level_is_proved_by_its_peak(in_flight: tuple[int, ...], valid: bool, checked: bool) -> None:
    """One poll that shows C is enough; too few that do not are said to prove nothing."""
    found = judged({"protocol": "requests"}, {"in_flight": in_flight})
    assert (found.valid, "server_in_flight" not in found.unchecked) == (valid, checked)


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        ({"tokens_server": 1005}, {}),
        ({"in_flight_mean": 7.85}, {}),
        ({}, {"in_flight": (8, 7, 8)}),
        ({"prefix_hit_rate": 0.009}, {}),
        ({"prefix_hit_rate": 0.5}, {"fresh_prompts": False}),
        ({"prefix_hit_rate": 0.209, "input_tokens_mean": 120.0}, {"template_tokens": 24}),
        ({}, {"lag_mean_ms": 9.0, "client_cpu": 0.8}),
    ],
)
def test_inside_the_line(found: dict[str, object], facts: dict[str, object]) -> None:
    """Just good enough is good."""
    assert judged(found, facts).valid


def test_what_cannot_be_checked_is_said() -> None:
    """A server without counters: valid, and marked."""
    found = judged({"tokens_server": None, "prefix_hit_rate": None}, {"in_flight": (), "cache_reset": None})
    assert found.valid
    assert found.unchecked == ("server_counter", "server_in_flight", "prefix_cache", "prefix_cache_reset")


def test_a_full_front_end_is_named_and_stays_valid() -> None:
    """It is a real server's real speed; the reader must know that the engine was not the limit."""
    found = judged({"server_cpu": 0.99}, {"server_cpu": 0.99, "in_flight": (4, 4, 4)})
    assert (found.valid, found.limited_by) == (True, "api_server")


@pytest.mark.parametrize(
    ("cores", "in_flight", "limit"),
    [
        (0.86, (8, 6, 6), "api_server"),
        (0.86, (8, 8, 8), None),
        (0.53, (8, 6, 6), None),
        (0.96, (8, 8, 8), "api_server"),
    ],
)
def test_a_busy_front_end_that_starves_its_engine_is_named(
    cores: float, in_flight: tuple[int, ...], limit: str | None
) -> None:
    """Short of a full core, it takes both: a busy front end, and requests that wait in front of the engine."""
    found = judged({"server_cpu": cores}, {"server_cpu": cores, "in_flight": in_flight})
    assert (found.valid, found.limited_by) == (True, limit)
