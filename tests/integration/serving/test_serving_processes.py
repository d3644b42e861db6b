"""Processes found by their marker, with real ones."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runner.serving.evidence import evidence
from runner.serving.processes import (
    SUPERVISOR_VARIABLE,
    TRIAL_VARIABLE,
    command,
    descendants,
    group,
    identity,
    kill_all,
    leftovers,
    marked,
    reap,
)
from tests.fakes.trials import until

MARKER = f"processes-{os.getpid()}"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A marked process whose supervisor is this one, with a secret on its command line."""
    env = os.environ | {TRIAL_VARIABLE: MARKER, SUPERVISOR_VARIABLE: identity(os.getpid()) or ""}
    words = [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "s3cr3t-value"]
    with subprocess.Popen(words, env=env, start_new_session=True) as process:
        assert until(lambda: any(one.pid == process.pid for one in marked(MARKER)))
        yield process
        process.kill()


def test_a_marked_process_is_found(sleeper: subprocess.Popen[bytes]) -> None:
    """By prefix of its marker; owned while its supervisor lives, and therefore no leftover."""
    (found,) = marked(MARKER[:-1])
    assert found.pid == sleeper.pid
    assert found.owned
    assert leftovers(MARKER) == ()
    assert marked("another") == ()


def test_secrets_on_a_command_line_are_not_shown(sleeper: subprocess.Popen[bytes]) -> None:
    """Neither in the list nor in the stacks."""
    assert "s3cr3t-value" not in command(sleeper.pid)
    assert "time.sleep" in command(sleeper.pid)
    facts = evidence(MARKER, ())
    assert str(sleeper.pid) in str(facts)
    assert "s3cr3t-value" not in str(facts)


def test_descent_and_group(sleeper: subprocess.Popen[bytes]) -> None:
    """A child is below us, and leads its own group; a zombie counts no more."""
    assert sleeper.pid in descendants(os.getpid())
    assert group(sleeper.pid) == {sleeper.pid}
    os.kill(sleeper.pid, 9)
    assert until(lambda: identity(sleeper.pid) is None)
    assert sleeper.pid not in descendants(os.getpid())
    assert group(sleeper.pid) == set()


def test_reaping_takes_exactly_the_marker(sleeper: subprocess.Popen[bytes]) -> None:
    """A longer marker with the same beginning is another trial."""
    assert reap(MARKER[:-1]) == ()
    assert sleeper.poll() is None
    assert reap(MARKER) == ()
    assert sleeper.wait(10) == -9


def test_who_cannot_be_killed_is_named() -> None:
    """After its time, not never: a process that stays is returned."""
    assert kill_all(lambda: {2**22 + 1}, 0.2) == (2**22 + 1,)
