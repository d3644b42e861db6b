"""Starts ``truth_server.py`` and reads back what it sent; shared by the tests and the side-by-side bench."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import requests

from runner.load.samples import read
from runner.load.server import Target
from runner.schema.experiment import Protocol
from runner.schema.trial import Measurement
from tests.fakes.trials import until

SERVER = Path(__file__).with_name("truth_server.py")

QUICK = Protocol(
    warmup_min_s=0.2, warmup_max_s=3, window_s=1, windows=3, max_windows=3, stall_s=20, drain_s=10, request_timeout_s=20
)
"""Short enough for a test, long enough for whole-second bins."""


ATTEMPTS = 5

Found = TypeVar("Found")


def tried(attempt: Callable[[], Found], good: Callable[[Found], bool]) -> Found:
    """The first of five attempts that is good, else the last: another process on the machine may spoil one."""
    for _ in range(ATTEMPTS - 1):
        if good(found := attempt()):
            return found
    return attempt()


def disturbed(reason: str) -> bool:
    """Whether a level is void because the client's core was taken, or its reason says so among other text."""
    return "client_bound" in reason or "was not held" in reason


def undisturbed(attempt: Callable[[], Measurement]) -> Measurement:
    """A level that is not void for the business of this machine."""
    return tried(attempt, lambda found: not disturbed(found.reason or ""))


def load_clients() -> list[psutil.Process]:
    """The client processes of this test; waited for, since a process that has just begun shows no command yet."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [one for one in psutil.Process().children() if "runner.load.worker" in one.cmdline()]
        return found != []

    assert until(look), "no client process"
    return found


@dataclass(frozen=True, slots=True)
class Truth:
    """What the server did by its own clock. Milliseconds; one entry a request."""

    tokens: int
    peak: int
    cpu_s: float
    ttft_ms: Any
    tpot_ms: Any
    chunk_ns: Any
    chunk_tokens: Any
    received_ns: Any
    last_ns: Any
    tokens_of: Any

    def sent_tok_s(self, samples: Path) -> float:
        """Tokens per second this server sent inside the steady span of the client's samples, by its own stamps."""
        facts = read(samples).facts
        assert facts.span_ns is not None
        start, end = (facts.origin_ns + edge for edge in facts.span_ns)
        inside = (self.chunk_ns >= start) & (self.chunk_ns < end)
        return float(self.chunk_tokens[inside].sum() / ((end - start) / 1e9))

    def mean_in_flight(self) -> float:
        """Requests between arrival and last send, averaged over the whole run."""
        return float((self.last_ns - self.received_ns).sum() / (self.last_ns.max() - self.received_ns.min()))

    def held_tok_s(self, concurrency: int, output_tokens: int) -> float:
        """What exactly ``concurrency`` streams held without a gap give: C x tokens / mean time a request was here.

        From the server's own times of the requests of full length; no client can honestly report more.
        """
        full = self.tokens_of == output_tokens
        return float(concurrency * output_tokens / ((self.last_ns - self.received_ns)[full].mean() / 1e9))


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    base_url: str
    process: "subprocess.Popen[str]"

    @property
    def target(self) -> Target:
        """As the load benchmark takes it."""
        return Target(base_url=self.base_url, model="truth", vocabulary=32000)

    def truth(self) -> Truth:
        """What was sent so far, finished requests only."""
        facts = requests.get(f"{self.base_url}/truth", timeout=60).json()
        rows = [(received, np.array(ns), np.array(tokens)) for received, ns, tokens in facts["requests"] if ns]
        several = [(ns, tokens) for _, ns, tokens in rows if tokens[1:].sum() > 0]
        return Truth(
            tokens=facts["tokens"],
            peak=facts["peak"],
            cpu_s=facts["cpu_s"],
            ttft_ms=np.array([ns[0] - received for received, ns, _ in rows]) / 1e6,
            tpot_ms=np.array([(ns[-1] - ns[0]) / tokens[1:].sum() for ns, tokens in several]) / 1e6,
            chunk_ns=np.concatenate([ns for _, ns, _ in rows]),
            chunk_tokens=np.concatenate([tokens for _, _, tokens in rows]),
            received_ns=np.array([received for received, _, _ in rows]),
            last_ns=np.array([ns[-1] for _, ns, _ in rows]),
            tokens_of=np.array([tokens.sum() for _, _, tokens in rows]),
        )


@contextmanager
def serving(*switches: str, prefix: tuple[str, ...] = ()) -> Iterator[Served]:
    """A truth server for the time of the block.

    Args:
        switches: Of ``truth_server.py``.
        prefix: Command to run it under (``taskset -c 0``).
    """
    command = [*prefix, sys.executable, str(SERVER), *switches]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Served(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def nothing(phase: str = "") -> None:
    """Neither a phase to show nor a process to check."""


def raising(error: Exception) -> Callable[[], None]:
    """A ``check`` that finds the server gone."""

    def check() -> None:
        raise error

    return check
