"""NCCL's variables: what it would ignore or die on is refused, what means the same is spelt the same."""

from pathlib import Path

import pytest

from runner.space.collectives import allreduce_algorithms, allreduce_protocols, canonical, check_variable
from tests.spaces import NCCL_PATH, experiment_of, infeasible, reasons, refusal, space_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_PROTO", "LL"),
        ("NCCL_PROTO", "ll,Simple"),
        ("NCCL_PROTO", "^LL128"),
        ("NCCL_PROTO", "allreduce:LL"),
        ("NCCL_PROTO", "LL,Simple;allreduce:^LL"),
        ("NCCL_ALGO", "allreduce:tree"),
        ("NCCL_ALGO", "AllReduce:Tree"),
        ("NCCL_ALGO", "ring,tree;allreduce:tree"),
        ("NCCL_ALGO", "^nvls"),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_NTHREADS", "96"),
        ("NCCL_NTHREADS", "512"),
        ("NCCL_LL128_NTHREADS", "640"),
        ("NCCL_MIN_NCHANNELS", "64"),
        ("NCCL_BUFFSIZE", "8388608"),
        ("NCCL_P2P_LEVEL", "NVL"),
        ("NCCL_P2P_LEVEL", "SYS"),
        ("NCCL_P2P_LEVEL", "3"),
        ("NCCL_CTA_POLICY", "EFFICIENCY|DEFAULT"),
        ("NCCL_GRAPH_MIXING_SUPPORT", "1"),
        ("NCCL_IB_HCA", "mlx5"),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ],
)
def test_what_nccl_takes_is_taken(name: str, value: str) -> None:
    """Every form of its grammar that acts as written."""
    assert check_variable(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("NCCL_PROTO", "fast", "a list of LL, LL128, Simple"),
        ("NCCL_PROTO", "LL,^Simple", "at the start of a list"),
        ("NCCL_PROTO", "sendrecv:LL", "functions are"),
        ("NCCL_PROTO", "LL;Simple", "only the first"),
        ("NCCL_PROTO", "", "a list of LL"),
        ("NCCL_PROTO", "^LL,LL128,Simple", "forbids everything"),
        ("NCCL_ALGO", "Tree", "ring,tree;allreduce:tree"),
        ("NCCL_ALGO", "NVLS", "keep ring for the other functions"),
        ("NCCL_ALGO", "NVLSTree", "keep ring for the other functions"),
        ("NCCL_ALGO", "^ring", "keep ring for the other functions"),
        ("NCCL_ALGO", "broadcast:tree", "broadcast exists as ring only"),
        ("NCCL_ALGO", "allreduce:pat", "PAT has no all-reduce"),
        ("NCCL_ALGO", "allreduce:nvlstree", "disabled on a single node"),
        ("NCCL_ALGO", "allreduce:collnetdirect", "CollNet"),
        ("NCCL_ALGO", "allreduce=tree", "a list of tree"),
        ("NCCL_NTHREADS", "100", "multiple of 32"),
        ("NCCL_NTHREADS", "65", "multiple of 32"),
        ("NCCL_NTHREADS", "0512", "multiple of 32"),  # octal to NCCL: 330, so 512 by its fallback, but 0100 is 64
        ("NCCL_MIN_NCHANNELS", "010", "whole number 1..64"),
        ("NCCL_NTHREADS", "1024", "multiple of 32"),
        ("NCCL_NTHREADS", "32", "multiple of 32"),
        ("NCCL_LL128_NTHREADS", "128", "multiple of 32"),
        ("NCCL_MAX_NCHANNELS", "0", "whole number 1..64"),
        ("NCCL_MIN_NCHANNELS", "65", "whole number 1..64"),
        ("NCCL_MIN_CTAS", "-1", "whole number 1..64"),
        ("NCCL_MIN_NRINGS", "4", "write NCCL_MIN_NCHANNELS"),
        ("NCCL_BUFFSIZE", "3000000", "power of two"),
        ("NCCL_BUFFSIZE", "4MiB", "power of two"),
        ("NCCL_P2P_LEVEL", "nvl", "in upper case"),
        ("NCCL_P2P_LEVEL", "NVLINK", "in upper case"),
        ("NCCL_P2P_LEVEL", "6", "in upper case"),
        ("NCCL_P2P_LEVEL", "12", "in upper case"),
        ("NCCL_P2P_LEVEL", "", "in upper case"),
        ("NCCL_P2P_DISABLE", "true", "one of 0, 1"),
        ("NCCL_NVLS_ENABLE", "3", "one of 0, 1, 2"),
        ("NCCL_CTA_POLICY", "ZERO|EFFICIENCY", "not together"),
        ("NCCL_CTA_POLICY", "FAST", "DEFAULT, EFFICIENCY or ZERO"),
        ("NCCL_GRAPH_MIXING_SUPPORT", "0", "unsafe"),
        ("NCCL_DEBUG", "INFO", "evidence starts only"),
    ],
)
def test_what_nccl_ignores_or_dies_on_is_refused(name: str, value: str, right: str) -> None:
    """Each row of its table of wrong values, with what would be right."""
    complaint = check_variable(name, value)
    assert complaint is not None
    assert right in " ".join(complaint)


@pytest.mark.parametrize(
    ("name", "value", "spelt"),
    [
        ("NCCL_ALGO", "allreduce:tree", "ring,tree;allreduce:tree"),
        ("NCCL_ALGO", "AllReduce:NVLS", "ring,tree;allreduce:nvls"),
        ("NCCL_ALGO", "Tree,Ring;AllReduce:Tree", "ring,tree;allreduce:tree"),
        ("NCCL_PROTO", "simple,ll", "LL,Simple"),
        ("NCCL_PROTO", "^ll128", "LL,Simple"),
        ("NCCL_PROTO", "LL;allreduce:^simple", "LL;allreduce:LL,LL128"),
        ("NCCL_PROTO", "AllReduce:ll", "allreduce:LL"),
        ("NCCL_NTHREADS", "64", "64"),
        ("NCCL_P2P_LEVEL", "0", "LOC"),
        ("NCCL_P2P_LEVEL", "3", "PHB"),
        ("NCCL_P2P_LEVEL", "NVL", "NVL"),
    ],
)
def test_one_meaning_has_one_spelling(name: str, value: str, spelt: str) -> None:
    """Case and order do not make two configurations; the algorithm is always in the two-part form."""
    assert canonical(name, value) == spelt
    assert check_variable(name, spelt) is None
    assert canonical(name, spelt) == spelt


def test_what_is_left_to_all_reduce() -> None:
    """A group of its own wins over the general one."""
    assert allreduce_algorithms("ring,tree;allreduce:nvls") == ["nvls"]
    assert allreduce_algorithms("^nvls,nvlstree,pat,collnetdirect,collnetchain") == ["tree", "ring"]
    assert allreduce_protocols("LL;broadcast:Simple") == ["ll"]
    assert allreduce_protocols(None) == ["ll", "ll128", "simple"]


D2 = """
knobs:
  allreduce:
    choices:
      default: {}
      nccl:
        flags: {disable-custom-all-reduce: true}
        json: {compilation-config: {pass_config: {fuse_allreduce_rms: false}}}
        env: {VLLM_ALLREDUCE_USE_SYMM_MEM: "0", VLLM_ALLREDUCE_USE_FLASHINFER: "0"}
  algorithm: {env: NCCL_ALGO, choices: ["allreduce:Tree", "allreduce:NVLS"], when: {allreduce: nccl}}
  protocol: {env: NCCL_PROTO, choices: ["^LL128"], when: {allreduce: nccl}}
  threads: {env: NCCL_NTHREADS, choices: [64, 96, %s512], when: {allreduce: nccl}}
"""


def test_encoding_of_a_space_over_nccl(tmp_path: Path) -> None:
    """Nothing of NCCL is sampled on the default path; on NCCL's own the switches, and ring for other functions."""
    space = space_of(tmp_path, D2 % "")
    nccl_knobs = [knob for knob in space.knobs if knob.name != "allreduce"]
    assert not any(space.is_active(knob, {}) for knob in nccl_knobs)
    assert all(space.is_active(knob, {"allreduce": "nccl"}) for knob in nccl_knobs)
    choice = {"allreduce": "nccl", "algorithm": "allreduce:Tree", "protocol": "^LL128", "threads": "96"}
    config = space.resolve(choice)
    assert config.env == {
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "NCCL_ALGO": "ring,tree;allreduce:tree",
        "NCCL_PROTO": "LL,Simple",
        "NCCL_NTHREADS": "96",
    }
    assert config.flags == {"disable-custom-all-reduce": True}
    assert config.structured == {"compilation-config": {"pass_config": {"fuse_allreduce_rms": False}}}
    assert not any("NCCL" in name for name in space.baseline().env)


def test_wrong_nccl_values_are_refused_at_load(tmp_path: Path) -> None:
    """With file, line and column of the value itself."""
    error = refusal(tmp_path, D2 % "100, ")
    assert (error.line, error.problem) == (12, "`100` is no value of NCCL_NTHREADS")
    assert "multiple of 32" in error.remedy
    level = refusal(tmp_path, "knobs:\n  level: {env: NCCL_P2P_LEVEL, choices: [NVL, nvl]}\n")
    assert (level.line, level.column) == (2, 47)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "8"}, "NCCL_MIN_NCHANNELS (16) is above"),
        ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "8"}, "NCCL_MIN_CTAS (16) is above"),
        ({"NCCL_MIN_P2P_NCHANNELS": "4", "NCCL_MAX_P2P_NCHANNELS": "2"}, "NCCL_MIN_P2P_NCHANNELS (4) is above"),
        ({"NCCL_MIN_CTAS": "4", "NCCL_MAX_NCHANNELS": "8"}, "steer the same thing"),
        ({"NCCL_ALGO": "allreduce:nvls", "NCCL_PROTO": "LL"}, "NVLS speaks Simple only"),
        ({"NCCL_ALGO": "allreduce:nvls", "NCCL_NVLS_ENABLE": "0"}, "NVLS is switched off"),
        ({"NCCL_ALGO": "allreduce:nvls", "NCCL_CUMEM_ENABLE": "0"}, "NVLS needs NCCL_CUMEM_ENABLE"),
        ({"VLLM_BATCH_INVARIANT": "1", "NCCL_PROTO": "LL"}, "VLLM_BATCH_INVARIANT=1 overrides NCCL_PROTO"),
    ],
)
def test_variables_that_exclude_each_other_are_pruned(env: dict[str, str], reason: str) -> None:
    """Combinations that NCCL would die on, or silently bend, never reach a server."""
    found = reasons(defaults={**NCCL_PATH, "env": {**NCCL_PATH["env"], **env}})
    assert len(found) == 1
    assert reason in found[0]


def test_least_above_most_between_two_knobs_is_pruned(tmp_path: Path) -> None:
    """Both ends may be knobs; the pair is judged together, with the experiment's defaults."""
    text = """
knobs:
  least: {env: NCCL_MIN_NCHANNELS, choices: [2, 16]}
  most: {env: NCCL_MAX_NCHANNELS, choices: [8, 32]}
"""
    space = space_of(tmp_path, text)
    assert infeasible(space, {"least": "16", "most": "8"}) == "NCCL_MIN_NCHANNELS (16) is above NCCL_MAX_NCHANNELS (8)"
    assert space.resolve({"least": "16", "most": "32"}).env["NCCL_MIN_NCHANNELS"] == "16"
    fixed = space_of(tmp_path, text, experiment_of(defaults={"env": {"NCCL_MAX_NCHANNELS": "8"}}))
    assert "is above" in infeasible(fixed, {"least": "16"})
