"""What a dry run shows is what a trial would get."""

from pathlib import Path

import pytest

from runner.schema.launch import TrialOrder
from runner.space.surroundings import PROTECTIVE
from runner.sweep.dry import own_environment
from tests.fakes.trials import order


def shown(trial: TrialOrder, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in {
        "PATH": "/bin",
        "HOME": "/nowhere",
        "HF_TOKEN": "hf_0123456789abcdefghij",
        **PROTECTIVE,
    }.items():
        monkeypatch.setenv(name, value)
    return own_environment(trial)


def test_the_environment_of_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's protective variables, the configuration's own, the real limit of a start; no shell, no secret."""
    found = shown(order(tmp_path, env={"NCCL_PROTO": "LL"}), monkeypatch)
    assert found.items() >= {"NCCL_PROTO": "LL", "VLLM_SERVER_DEV_MODE": "1", **PROTECTIVE}.items()
    assert int(found["VLLM_ENGINE_READY_TIMEOUT_S"]) > 300
    assert not {"PATH", "HOME", "HF_TOKEN"} & found.keys()
