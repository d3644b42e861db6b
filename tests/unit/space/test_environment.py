"""The server's environment comes from a known base; what protects the host always comes along."""

from pathlib import Path
from typing import Any

import pytest

from runner.errors import UsageError
from runner.schema.experiment import Engine
from runner.space.environment import server_env, stray_files, stray_variables
from runner.space.surroundings import PROTECTIVE, Machine, protective_variables
from tests.spaces import NCCL_PATH, config_of, experiment_of, reasons, refusal, space_of

BASE = {
    "PATH": "/bin",
    "HOME": "/home/u",
    "LC_ALL": "C.UTF-8",
    "LD_LIBRARY_PATH": "/lib",
    "http_proxy": "http://proxy",
    "CUDA_VISIBLE_DEVICES": "2,3",
    "VLLM_CACHE_ROOT": "/cache",
    "OMP_NUM_THREADS": "1",
    "RAY_JOB_ID": "7",
    "NCCL_DEBUG": "INFO",
    "VLLM_USE_V1": "0",
    "CUDA_LAUNCH_BLOCKING": "1",
    "SECRET": "x",
}


def test_the_known_part_of_the_base_and_the_configuration_make_the_environment() -> None:
    """Paths, locale, proxies, caches and GPUs come along; what Ray or the shell left behind does not."""
    env = server_env(config_of(env={"NCCL_PROTO": "LL"}), BASE)
    assert env == {
        "PATH": "/bin",
        "HOME": "/home/u",
        "LC_ALL": "C.UTF-8",
        "LD_LIBRARY_PATH": "/lib",
        "http_proxy": "http://proxy",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "VLLM_CACHE_ROOT": "/cache",
        "NCCL_PROTO": "LL",
    }


def test_rays_thread_count_does_not_leak() -> None:
    """vLLM would obey it; only a configuration may set it."""
    assert "OMP_NUM_THREADS" not in server_env(config_of(), BASE)
    assert server_env(config_of(env={"OMP_NUM_THREADS": "4"}), BASE)["OMP_NUM_THREADS"] == "4"


def test_what_is_allowed_comes_along() -> None:
    """By exact name."""
    assert server_env(config_of(), BASE, allow=["VLLM_USE_V1"])["VLLM_USE_V1"] == "0"


@pytest.mark.parametrize(("name", "value"), PROTECTIVE.items())
def test_protective_variables_are_always_passed_through(name: str, value: str) -> None:
    """Where the host sets them, the server has them; where it does not, nobody invents them."""
    assert server_env(config_of(), {**BASE, name: value})[name] == value
    assert name not in server_env(config_of(), BASE)
    same = config_of(env={name: value})
    assert server_env(same, {**BASE, name: value})[name] == value


@pytest.mark.parametrize(("name", "value"), PROTECTIVE.items())
def test_contradicting_a_protective_variable_is_refused(tmp_path: Path, name: str, value: str) -> None:
    """By a space, by an experiment, and once more when the environment is made."""
    other = "1" if value == "0" else "0"
    with pytest.raises(UsageError, match="protect"):
        server_env(config_of(env={name: other}), {**BASE, name: value})
    guarded = Machine(protected={name: value})
    error = refusal(tmp_path, f"knobs:\n  x: {{env: {name}, choices: ['{other}']}}\n", machine=guarded)
    assert (error.line, "protect" in error.remedy) == (2, True)
    contrary = experiment_of(defaults={"env": {name: other}})
    assert "protect" in str(refusal(tmp_path, "knobs: {}\n", contrary, machine=guarded))


def test_a_value_kept_to_fail_does_not_lift_the_protection(tmp_path: Path) -> None:
    """Nothing does."""
    guarded = Machine(protected={"NCCL_NVLS_ENABLE": "0"})
    text = "knobs: {x: {env: NCCL_NVLS_ENABLE, choices: [{value: 1, keep_failing: on purpose}]}}\n"
    assert "contradicts" in str(refusal(tmp_path, text, machine=guarded))


def test_a_range_cannot_get_around_the_protection(tmp_path: Path) -> None:
    """Its numbers are values too."""
    guarded = Machine(protected={"NCCL_NVLS_ENABLE": "0"})
    text = "knobs: {x: {env: NCCL_NVLS_ENABLE, int: {low: 0, high: 2}}}\n"
    assert "contradicts" in str(refusal(tmp_path, text, machine=guarded))


def test_algorithms_that_need_what_the_host_forbids_leave_the_space(tmp_path: Path) -> None:
    """NVLS is multicast: where the host switches it off, it is no choice."""
    guarded = Machine(protected={"NCCL_NVLS_ENABLE": "0"})
    space = space_of(tmp_path, "knobs: {a: {env: NCCL_ALGO, choices: ['allreduce:nvls']}}\n", machine=guarded)
    assert "NVLS is switched off" in space.ruled_out[0].reason


MULTICAST = "this host switches NVLink multicast off"


@pytest.mark.parametrize(
    ("defaults", "version", "allowed"),
    [
        ({}, "0.24.0", False),  # fused by itself
        ({"json": NCCL_PATH["json"]}, "0.24.0", True),  # FlashInfer is off by itself there
        ({"json": NCCL_PATH["json"]}, "0.32.0", False),  # and on here
        ({"json": NCCL_PATH["json"]}, "0.28.0", False),  # not known: taken for on
        (NCCL_PATH, "0.33.0", True),
        ({"flags": {"enforce-eager": True}, "env": {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"}}, "0.33.0", True),
        ({"env": {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"}}, "0.33.0", False),
    ],
)
def test_multicast_by_flashinfer_is_ruled_out_on_a_protected_host(
    defaults: dict[str, Any], version: str, allowed: bool
) -> None:
    """No protective variable keeps FlashInfer from it, so neither its all-reduce nor the fused one may run."""
    wide = {**defaults, "flags": {**defaults.get("flags", {}), "tensor-parallel-size": 2}}
    guarded = Machine(protected={"NVSHMEM_DISABLE_NVLS": "1"})
    found = reasons(defaults=wide, version=version, machine=guarded)
    assert (found == ()) == allowed
    assert all(reason.startswith(MULTICAST) for reason in found)
    assert reasons(defaults=wide, version=version, machine=Machine()) == ()
    assert reasons(defaults=defaults, version=version, machine=guarded) == ()  # one GPU reduces nothing


def test_fusion_leaves_the_space_on_a_protected_host(tmp_path: Path) -> None:
    """Whoever asks for it is told why it is gone."""
    guarded = Machine(protected=PROTECTIVE)
    experiment = experiment_of(defaults={**NCCL_PATH, "flags": {"tensor-parallel-size": 2}, "json": {}})
    text = """
knobs:
  fusion:
    json: compilation-config.pass_config.fuse_allreduce_rms
    choices: [true, false]
    when: {x: a}
    required: true
  x: {choices: {off: {}, a: {env: {OTHER: "1"}}}}
"""
    space = space_of(tmp_path, text, experiment, machine=guarded)
    assert [(r.label, r.reason[: len(MULTICAST)]) for r in space.ruled_out] == [("true", MULTICAST)]


def test_a_simulated_node_needs_no_protection(tmp_path: Path) -> None:
    """No real GPU is touched."""
    simulated = experiment_of(defaults={"flags": {"tensor-parallel-size": 2}}).model_copy(
        update={"engine": Engine(kind="simulated", node="some-node")}
    )
    space = space_of(tmp_path, "knobs: {}\n", simulated, machine=Machine(protected=PROTECTIVE))
    assert space.baseline().gpus == 2


def test_only_the_protective_value_protects() -> None:
    """A host that sets the variable to something else protects nothing."""
    assert protective_variables({"NCCL_NVLS_ENABLE": "2", "NVSHMEM_DISABLE_NVLS": "1"}) == {"NVSHMEM_DISABLE_NVLS": "1"}


def test_strays_are_shown(tmp_path: Path) -> None:
    """Variables of NCCL, vLLM and CUDA that nobody chose for this study; caches and devices are none."""
    found = stray_variables({**BASE, "NCCL_NVLS_ENABLE": "0"})
    assert found == {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO", "VLLM_USE_V1": "0"}
    own = tmp_path / "my.conf"
    own.write_text("NCCL_PROTO=LL\n")
    assert stray_files({"NCCL_CONF_FILE": str(own)})[str(own)] == "NCCL_PROTO=LL\n"
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    assert str(tmp_path / ".nccl.conf") in stray_files({"HOME": str(tmp_path)})


def test_labels_of_a_container_image_are_no_settings() -> None:
    """NVIDIA's images say which CUDA and NCCL they carry; nothing reads that."""
    assert stray_variables({"CUDA_VERSION": "13.0", "NCCL_VERSION": "2.28"}) == {}


@pytest.mark.parametrize(
    ("text", "is_stray"),
    [("NCCL_NVLS_ENABLE=0\n", False), ("# host\nNCCL_NVLS_ENABLE = 0 # off\n", False), ("", False),
     ("NCCL_NVLS_ENABLE=0\nNCCL_PROTO=LL\n", True), ("NCCL_NVLS_ENABLE=1\n", True)],
)  # fmt: skip
def test_a_file_that_only_protects_the_host_is_none_of_a_studys_settings(
    tmp_path: Path, text: str, is_stray: bool
) -> None:
    """A host may protect itself by NCCL's file as well as by variables; anything else in there is stray."""
    path = tmp_path / "nccl.conf"
    path.write_text(text)
    assert (str(path) in stray_files({"NCCL_CONF_FILE": str(path)})) is is_stray
