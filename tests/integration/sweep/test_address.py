"""A Ray cluster that is there already: used by its address, left as it was; a wrong address is said."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.serving.lease import lease_port
from tests.integration.sweep.conftest import STUDY, Start

pytestmark = pytest.mark.timeout(900)
"""A sweep of a few trials takes a minute, and several on a busy machine."""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other test gets; the kernel hands it to nobody either."""
    lease = lease_port()
    yield lease.port
    lease.release()


@pytest.fixture
def head(port: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a head node of its own, and what a driver needs to be let in; ended by its own process group."""
    env = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": "token"}
    words = ["start", "--head", f"--port={port}", "--num-gpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    words += ["--min-worker-port=0", "--max-worker-port=0"]  # Its workers' usual ports are those of other tests here.
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), *words, "--block"],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "runtime started" in line:
            break
    else:
        pytest.fail("".join(said))
    yield f"{socket.gethostbyname(socket.gethostname())}:{port}", env
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(200)  # Ray itself waits half a minute for its processes.


def test_a_running_cluster_is_used_and_left_running(
    head: tuple[str, dict[str, str]], folder: Path, start: Start
) -> None:
    """The trial runs there, GPUs leased from it, with this driver's code; a second sweep finds it still running."""
    address, env = head
    for trials in ("1", "2"):
        sweep = start("--address", address, "--trials", trials, env=env)
        assert sweep.end() == 0, sweep.text
    lines = (folder / "results" / STUDY / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["complete"] * 2


def test_no_cluster_at_an_address_is_the_users_to_mend(port: int, folder: Path, start: Start) -> None:
    """A wrong address is one clear message and exit code 2."""
    sweep = start("--address", f"127.0.0.1:{port}")
    assert sweep.end() == 2, sweep.text
    assert "no Ray cluster answers" in sweep.text
    assert not (folder / "results").exists()
