"""Names of environment variables: a wrong one would change nothing, without a word from anybody."""

from pathlib import Path

import pytest

from runner.space.variables import misspelt
from tests.spaces import experiment_of, refusal, space_of


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_PROTOCOL", "did you mean NCCL_PROTO"),
        ("NCCL_NTHREAD", "did you mean NCCL_NTHREADS"),
        ("nccl_proto", "did you mean NCCL_PROTO"),
        ("NCCL_FOO", "NCCL never complains"),
        ("VLLM_ALLREDUCE_USE_FLASHINFR", "did you mean VLLM_ALLREDUCE_USE_FLASHINFER?"),
        ("vllm_skip_p2p_check", "did you mean VLLM_SKIP_P2P_CHECK?"),
        ("VLLM_CPU_KV_CACHE_SPACE", "did you mean VLLM_CPU_KVCACHE_SPACE?"),
    ],
)
def test_a_misspelt_variable_is_refused(tmp_path: Path, name: str, meant: str) -> None:
    """In a space and in an experiment, with what may be meant; `allow_env` is the way out."""
    text = f"knobs:\n  a: {{env: {name}, choices: ['1']}}\n"
    error = refusal(tmp_path, text)
    assert error.line == 2
    assert f"`{name}`" in error.problem
    assert meant in error.remedy
    assert f"allow_env: [{name}]" in error.remedy
    assert name in str(refusal(tmp_path, "knobs: {}\n", experiment_of(defaults={"env": {name: "1"}})))
    allowed = experiment_of().model_copy(update={"allow_env": (name,)})
    assert space_of(tmp_path, text, allowed).resolve({"a": "1"}).env == {name: "1"}


@pytest.mark.parametrize(
    "name",
    ["NCCL_PROTO", "NCCL_IB_SOME_DAY", "NCCL_P2P_NET_CHUNKSIZE", "VLLM_USE_AOT_COMPILE", "VLLM_OF_ANOTHER_TIME", "NO"],
)
def test_a_name_that_may_be_right_is_taken(name: str) -> None:
    """Those that NCCL and vLLM read, NCCL's families for networks, and what resembles no name of vLLM's."""
    assert misspelt(name) is None


def test_allowing_a_name_allows_no_wrong_value(tmp_path: Path) -> None:
    """`allow_env` is about names; NCCL's grammar stays."""
    allowed = experiment_of().model_copy(update={"allow_env": ("NCCL_NTHREADS",)})
    assert "no value of NCCL_NTHREADS" in str(
        refusal(tmp_path, "knobs: {a: {env: NCCL_NTHREADS, choices: [100]}}\n", allowed)
    )


def test_a_name_that_vllm_does_not_list_is_said(tmp_path: Path) -> None:
    """It may be read by another version, or by none."""
    text = "knobs: {a: {env: VLLM_OF_ANOTHER_TIME, choices: ['1']}}\n"
    assert any("VLLM_OF_ANOTHER_TIME is none" in warning for warning in space_of(tmp_path, text).warnings)
    listed = "knobs: {a: {env: VLLM_USE_AOT_COMPILE, choices: ['0']}}\n"
    assert not any("is none of" in warning for warning in space_of(tmp_path, listed).warnings)
