"""Phases, deadlines and progress, read from lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.schema.experiment import Deadlines
from runner.serving.phases import (
    CAPTURE,
    COMPILE,
    FIRST_TOKEN,
    PHASES,
    PROCESS,
    WEIGHTS,
    Allowed,
    Progress,
    allowed,
    information,
)

LIMITS = Allowed(dict.fromkeys(PHASES, 100.0), dict.fromkeys(PHASES, 10.0))
STUCK = "INFO [shm.py:1] No available shared memory broadcast block found in 60 seconds. Wait."


def test_a_start_goes_through_its_phases() -> None:
    """Landmarks of the log move a start on; each phase's seconds are kept."""
    progress = Progress(0.0)
    seen = [progress.phase]
    for at, line in enumerate(
        [
            "hello",
            "INFO Starting to load model m...",
            "INFO Loading weights took 3 seconds",
            "INFO GPU KV cache size: 1,024 tokens",
            "INFO:     Application startup complete.",
        ],
        start=1,
    ):
        progress.feed(line, float(at))
        seen.append(progress.phase)
    assert seen == [PROCESS, WEIGHTS, WEIGHTS, COMPILE, CAPTURE, FIRST_TOKEN]
    assert progress.finish(7.0) == {PROCESS: 1.0, WEIGHTS: 2.0, COMPILE: 1.0, CAPTURE: 1.0, FIRST_TOKEN: 2.0}


def test_the_world_exists_once_weights_load() -> None:
    """Until a worker loads, rendezvous ports are still being picked."""
    progress = Progress(0.0)
    progress.feed("INFO something", 1.0)
    assert not progress.world_ready
    progress.feed("INFO Starting to load model m...", 2.0)
    assert progress.world_ready


def test_phases_never_go_back() -> None:
    """A late line of an earlier phase changes nothing."""
    progress = Progress(0.0)
    progress.enter(CAPTURE, 1.0)
    progress.feed("INFO Loading weights took 3 seconds", 2.0)
    assert progress.phase == CAPTURE


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("(W pid=1) INFO 01-01 10:00:00 [a:1] waits 30 s", "(W pid=2) INFO 01-01 10:00:30 [a:1] waits 60 s", True),
        ("Loading shards:  10% | 1/10 [00:01<00:09]", "Loading shards:  20% | 2/10 [00:02<00:08]", False),
        ("INFO [a.py:1] loading layer", "INFO [a.py:2] loading experts", False),
        ("retry 1 at 0xdead", "retry 2 at 0xbeef", True),
    ],
)
def test_what_is_new(one: str, other: str, same: bool) -> None:
    """Times, pids and counts are not news; another message or another fraction is."""
    assert (information(one) == information(other)) is same


@given(st.text(max_size=200))
def test_any_line_can_be_read(line: str) -> None:
    """No line of a log can break the reader, and a line is never news twice."""
    progress = Progress(0.0)
    progress.feed(line, 1.0)
    progress.feed(line, 5.0)
    assert progress.last_news_s == 1.0


def test_silence() -> None:
    """Nothing new for longer than the limit is silence; anything new ends it."""
    progress = Progress(0.0)
    progress.feed("a", 1.0)
    assert progress.silent(LIMITS, 10.9) is None
    assert progress.silent(LIMITS, 11.5) == pytest.approx(10.5)
    progress.feed("b", 11.6)
    assert progress.silent(LIMITS, 11.7) is None


def test_workers_that_wait_twice_are_stuck_unless_they_compile() -> None:
    """The same warning twice with nothing between is a hang; a long compile says it too and is left alone."""
    for phase, stuck in ((CAPTURE, True), (COMPILE, False)):
        progress = Progress(0.0)
        progress.enter(phase, 1.0)
        progress.feed(STUCK, 2.0)
        assert progress.silent(LIMITS, 2.1) is None
        progress.feed(STUCK, 3.0)
        assert (progress.silent(LIMITS, 3.1) is not None) is stuck


def test_news_between_two_warnings_is_progress() -> None:
    """Slow is not stuck."""
    progress = Progress(0.0)
    progress.enter(CAPTURE, 1.0)
    for at, line in enumerate([STUCK, "capturing 1/10", STUCK.replace("60", "61"), "capturing 2/10"]):
        progress.feed(line, 2.0 + at)
    assert progress.silent(LIMITS, 6.0) is None


def test_given_deadlines_are_kept() -> None:
    """What the experiment says stands."""
    limits = allowed(Deadlines(weights_s=7, silence_s=3), model_gib=500, compiles=True)
    assert limits.by_phase[WEIGHTS] == 7
    assert set(limits.silence_s.values()) == {3}


@given(st.floats(0, 2000), st.floats(0, 2000))
def test_larger_models_get_more_time(one: float, other: float) -> None:
    """Deadlines never shrink with size, and silence is never longer than its phase."""
    small, large = (allowed(Deadlines(), model_gib=gib, compiles=True) for gib in sorted((one, other)))
    assert small.total_s <= large.total_s
    assert all(large.silence_s[phase] <= large.by_phase[phase] for phase in PHASES)
