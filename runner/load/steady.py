"""When a warm-up is over and when enough windows were measured. Pure decisions over token counts seen so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runner.load.figures import interval95
from runner.schema.experiment import Protocol

NS_PER_S = 1_000_000_000

LEAST_SLICE_S = 1.0
"""Shortest slice that tok/s is compared over."""

STREAMS_THAT_SMOOTH = 4
"""With fewer streams a slice covers a whole request: prefill pauses of single streams show in shorter ones."""


@dataclass(slots=True)
class History:
    """What one client process had counted by when; times in ns on the common clock, rising."""

    t_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def tokens_at(histories: Sequence[History], t_ns: float) -> float:
    """Tokens of all processes by ``t_ns``, interpolated between what they told."""
    return float(sum(np.interp(t_ns, history.t_ns, history.tokens) for history in histories))


def cpu_cores(histories: Sequence[History], span_ns: tuple[int, int]) -> float | None:
    """Cores the busiest process used inside the span."""
    seconds = (span_ns[1] - span_ns[0]) / NS_PER_S
    used = [
        np.interp(span_ns[1], h.t_ns, h.cpu_s) - np.interp(span_ns[0], h.t_ns, h.cpu_s) for h in histories if h.t_ns
    ]
    return float(max(used) / seconds) if used and seconds > 0 else None


def slice_s(request_s: float, concurrency: int) -> float:
    """Length of the slices whose tok/s are compared, for requests that take ``request_s``."""
    return max(LEAST_SLICE_S, request_s * min(1.0, STREAMS_THAT_SMOOTH / concurrency))


def is_steady(histories: Sequence[History], since_ns: int, length_s: float, tolerance: float) -> bool:
    """Whether tok/s of the last two slices, both after ``since_ns``, differ by at most ``tolerance``."""
    if not histories or not all(history.t_ns for history in histories):
        return False
    now = min(history.t_ns[-1] for history in histories)
    length = length_s * NS_PER_S
    if now - 2 * length < since_ns:
        return False
    marks = [tokens_at(histories, now - back * length) for back in (2, 1, 0)]
    older, newer = marks[1] - marks[0], marks[2] - marks[1]
    return newer > 0 and abs(newer - older) <= tolerance * newer


def interval_reached(histories: Sequence[History], start_ns: int, window_ns: int, windows: int, wanted: float) -> bool:
    """Whether the 95 % interval over the windows so far reaches at most ``wanted`` of the mean to each side."""
    marks = np.array([tokens_at(histories, start_ns + window_ns * n) for n in range(windows + 1)])
    rates = np.diff(marks) / (window_ns / NS_PER_S)
    found = interval95(rates)
    return found is not None and rates.mean() > 0 and (found[1] - found[0]) / 2 <= wanted * rates.mean()


def windows_wanted(protocol: Protocol, measured: int, reached: bool) -> bool:
    """Whether one more window is to be measured after ``measured`` ones."""
    if measured < protocol.windows:
        return True
    return protocol.interval is not None and not reached and measured < protocol.max_windows
