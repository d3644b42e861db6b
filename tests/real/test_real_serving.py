"""Real vLLM on the CPU with the bundled model: started, answered, watched, killed, gone."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from runner.errors import EngineDead, InvalidConfig, ServerExited, TrialFailure
from runner.schema.launch import LaunchConfig, StartReport
from runner.serving.processes import marked
from runner.serving.server import Server
from tests.fakes.real import real_order
from tests.fakes.trials import left_of, noticed, until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server that is ready; it is stopped by the last test, or here."""
    folder = Path(tempfile.mkdtemp(prefix="real-"))
    server = Server(real_order(folder), folder / "trial", (), lambda name, detail: None)
    server.start()
    yield server
    server.stop()


def report_of(server: Server) -> StartReport:
    assert server.report is not None
    return server.report


def complete(server: Server, prompt: str, tokens: int) -> str:
    """A greedy completion."""
    session = requests.Session()
    session.trust_env = False
    body = {"model": server.served_name, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
    reply = session.post(f"{server.base_url}/v1/completions", json=body | {"ignore_eos": True}, timeout=120)
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["text"])


def test_the_bundled_model_knows_a_capital(served: Server) -> None:
    """The converted weights and tokenizer are right: the greedy completion names Paris."""
    assert "Paris" in complete(served, "The capital of France is", 16)


def test_the_bundled_model_does_not_stammer(served: Server) -> None:
    """Over 64 tokens more than half of the words differ."""
    prompt = "The river Thames rises in the Cotswold hills and flows to the sea. On its way it"
    words = complete(served, prompt, 64).split()
    assert len(set(words)) > len(words) / 2


def test_every_process_carries_the_marker(served: Server) -> None:
    """Engine core and worker keep it although they rename themselves."""
    commands = [one.command for one in marked(served._order.marker)]
    assert len(commands) >= 3
    assert any("EngineCore" in command for command in commands)
    assert any("Worker" in command for command in commands)
    assert served.pid is not None
    below = {child.pid for child in psutil.Process(served.pid).children(recursive=True)}
    assert below <= {one.pid for one in marked(served._order.marker)}


def test_the_effective_configuration_is_read_back(served: Server) -> None:
    """What was asked for is what runs, by the server's own word."""
    effective = report_of(served).effective
    assert effective.version
    assert effective.settings["scheduler_config.max_num_seqs"] == 16
    assert effective.settings["model_config.enforce_eager"] is True
    assert effective.graph_mode == "NONE"
    assert effective.runner in ("V1", "V2")
    assert effective.kv_cache_tokens
    assert not any("served_model_name" in key or "instance_id" in key for key in effective.settings)


def test_the_server_gets_its_own_thread_count(served: Server) -> None:
    """Ray's OMP_NUM_THREADS does not reach it, and its phases were timed."""
    assert "OMP_NUM_THREADS" not in report_of(served).env
    phases = ["queued", "process", "weights", "compile", "capture", "first token", "settings"]
    assert list(report_of(served).durations_s) == phases


def test_a_dead_engine_is_noticed_and_nothing_stays(served: Server) -> None:
    """SIGKILL of the engine core ends the trial within seconds, and its worker, which vLLM would leave, goes too."""
    engine = next(one.pid for one in marked(served._order.marker) if "EngineCore" in one.command)
    os.kill(engine, signal.SIGKILL)
    assert isinstance(noticed(served, 20), EngineDead | ServerExited)
    served.stop()
    assert left_of(served._order.marker) == []


@pytest.mark.parametrize(
    ("changes", "env", "kind", "told"),
    [
        ({"block-size": 16}, {}, InvalidConfig, "block size"),
        ({"pipeline-parallel-size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, EngineDead, "first completion"),
    ],
)
def test_a_configuration_that_fails(
    tmp_path: Path, changes: dict[str, int], env: dict[str, str], kind: type[TrialFailure], told: str
) -> None:
    """Block size 16 is refused at start; two stages answer /health and die on the first request."""
    order = real_order(tmp_path)
    config = order.config
    changed = LaunchConfig(model=config.model, flags=config.flags | changes, env=config.env | env)
    server = Server(order.model_copy(update={"config": changed}), tmp_path / "trial", (), lambda name, detail: None)
    with pytest.raises(TrialFailure) as raised:
        server.start()
    server.stop()
    assert type(raised.value) is kind
    assert told in raised.value.message
    assert raised.value.line
    assert left_of(order.marker) == []


@pytest.mark.parametrize("phase", ["weights", "ready"])
def test_real_vllm_goes_with_its_killed_owner(tmp_path: Path, phase: str) -> None:
    """SIGKILL of the owner: engine and worker are gone within 10 s, which vLLM alone does not do."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.real", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    marker = owner.stdout.readline().strip()
    assert any(line.strip() == phase for line in owner.stdout)
    if phase == "weights":
        assert until(lambda: len(left_of(marker)) > 1, 60)
    owner.kill()
    owner.wait(10)
    begin = time.monotonic()
    assert until(lambda: left_of(marker) == [], 10)
    assert time.monotonic() - begin < 10
