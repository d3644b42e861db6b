"""When to stop warming up and when to stop measuring."""

import pytest

from runner.load.steady import History, interval_reached, is_steady, slice_s, tokens_at, windows_wanted
from runner.schema.experiment import Protocol

S = 1_000_000_000


def history(rates: list[float]) -> History:
    """One process that tells once a second; ``rates`` are tokens in each second."""
    found, total = History(), 0.0
    for second, rate in enumerate([0.0, *rates]):
        total += rate
        found.t_ns.append(second * S)
        found.tokens.append(round(total))
        found.cpu_s.append(0.0)
    return found


def test_counts_are_interpolated_and_summed_over_processes() -> None:
    """Half way between two words, half of the tokens between them."""
    assert tokens_at([history([10, 30]), history([0, 100])], 1.5 * S) == 10 + 15 + 50


@pytest.mark.parametrize(
    ("rates", "steady"),
    [([10, 50, 100, 100], True), ([10, 50, 80, 100], False), ([100], False), ([0, 0, 0], False), ([100, 96], True)],
)
def test_steady_when_the_last_two_slices_agree(rates: list[float], steady: bool) -> None:
    """Within 5 %; two whole slices must have passed; nothing arriving is not steady."""
    assert is_steady([history(rates)], 0, 1.0, 0.05) is steady


def test_a_process_that_has_not_spoken_is_not_steady() -> None:
    """Its share of the streams would be missing."""
    assert not is_steady([history([100, 100]), History()], 0, 1.0, 0.05)


def test_few_streams_need_slices_of_a_whole_request() -> None:
    """C=1: one request a slice; C=64: a second is smooth already."""
    assert slice_s(5.0, 1) == 5.0
    assert slice_s(5.0, 64) == 1.0


def test_more_windows_until_the_interval_is_narrow() -> None:
    """At least ``windows``, at most ``max_windows``, in between until reached."""
    protocol = Protocol(windows=3, max_windows=5, interval=0.02)
    assert [windows_wanted(protocol, n, False) for n in range(6)] == [True, True, True, True, True, False]
    assert not windows_wanted(protocol, 3, True)
    assert not windows_wanted(Protocol(windows=3, max_windows=5), 3, False)


def test_interval_reached() -> None:
    """Equal windows are narrow, unequal ones are not, two are never enough."""
    assert interval_reached([history([100, 100, 100])], 0, S, 3, 0.02)
    assert not interval_reached([history([80, 100, 120])], 0, S, 3, 0.02)
    assert not interval_reached([history([100, 100])], 0, S, 2, 0.02)
