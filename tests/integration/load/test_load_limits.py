"""Where the client itself is the limit, it says so; it never passes its own slowness off as the server's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.load.measure import Bench, measure
from runner.schema.experiment import Workload
from tests.fakes.truth import QUICK, load_clients, nothing, serving

pytestmark = pytest.mark.alone

PATIENT = QUICK.model_copy(update={"drain_s": 90, "request_timeout_s": 120, "stall_s": 60})
WORKLOAD = Workload(input_tokens=8, output_tokens=160)

MUST_CARRY = 40_000
"""Chunks a second on one core up to which the client must not be the limit."""


def test_far_beyond_its_means_the_client_is_right_or_says_that_it_was_the_limit(tmp_path: Path) -> None:
    """128,000 chunks a second asked for, more than 40,000 sent: tok/s as the server sent them, or void."""
    with serving("--ttft-ms", "50", "--tpot-ms", "8") as served:
        found = measure(
            served.target,
            WORKLOAD,
            PATIENT,
            1024,
            5,
            on_phase=nothing,
            check=nothing,
            samples_path=tmp_path / "s.parquet",
        )
        truth = served.truth()
    assert found.tokens_client == truth.tokens
    if not found.valid:
        # The server runs out of its core too, and then requests lie unread in front of it.
        assert re.match("client_bound|C=1024 did not reach the server", found.reason or "")
        assert found.output_tok_s is None
        return
    assert found.output_tok_s == pytest.approx(truth.sent_tok_s(tmp_path / "s.parquet"), rel=0.02)


def test_a_starved_client_is_client_bound(tmp_path: Path) -> None:
    """Its core is taken by others: the event loop lags, and the level is void rather than slow."""
    burn = "import os; os.sched_setaffinity(0, {0})\nwhile True: pass"
    with serving("--ttft-ms", "20", "--tpot-ms", "10") as served, Bench(served.target, WORKLOAD) as bench:
        (client,) = load_clients()
        client.cpu_affinity([0])
        client.nice(10)
        burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2)]
        try:
            found = bench.measure(PATIENT, 256, 5, on_phase=nothing, check=nothing, samples_path=tmp_path / "s.parquet")
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
    assert not found.valid
    assert (found.reason or "").startswith("client_bound")
    assert found.output_tok_s is None


def test_forty_thousand_chunks_a_second_are_no_limit(tmp_path: Path) -> None:
    """1024 streams at 45 chunks/s, 46,000 asked for: a true number, for the client may give up only beyond 40,000.

    The server needs a core of its own to send that many; where others never leave it one, there is nothing to carry.
    """
    for _ in range(5):
        with serving("--ttft-ms", "50", "--tpot-ms", "22") as served:
            found = measure(
                served.target,
                WORKLOAD,
                QUICK,
                1024,
                5,
                on_phase=nothing,
                check=nothing,
                samples_path=tmp_path / "s.parquet",
            )
            truth = served.truth()
        assert found.tokens_client == truth.tokens
        sent = truth.sent_tok_s(tmp_path / "s.parquet")
        if found.valid and sent >= MUST_CARRY:
            break
    if sent < MUST_CARRY:
        pytest.skip(f"the machine is too busy: its server sent {sent:.0f} chunks/s")
    assert found.valid, found.reason
    assert found.output_tok_s == pytest.approx(sent, rel=0.05)
    assert found.client_cpu is not None
    assert found.client_cpu < 0.9
