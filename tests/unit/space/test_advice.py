"""A space that tunes what changes nothing, or what is known to be trouble, says so; `explain` says the rest."""

from pathlib import Path
from typing import Any

import pytest

from runner.space.explain import explain
from runner.space.surroundings import Machine
from tests.spaces import NCCL_PATH, dense, experiment_of, space_of
from tests.unit.space.test_shipped import SPACES, shipped

TP2: dict[str, Any] = {"flags": {"tensor-parallel-size": 2}}
PROTOCOL = "knobs: {protocol: {env: NCCL_PROTO, choices: [LL, Simple]}}\n"


def test_nccl_knobs_off_its_path_are_inert(tmp_path: Path) -> None:
    """The warning says why, and what would make them act; disabling custom all-reduce alone is not enough."""
    bare = space_of(tmp_path, PROTOCOL, experiment_of(defaults=TP2))
    assert "hardly changes anything" in bare.warnings[0]
    assert "VLLM_ALLREDUCE_USE_FLASHINFER=0" in bare.warnings[0]
    half = {"flags": {**TP2["flags"], "disable-custom-all-reduce": True}}
    assert "hardly changes" in space_of(tmp_path, PROTOCOL, experiment_of(defaults=half)).warnings[0]
    whole = {**NCCL_PATH, "flags": {**NCCL_PATH["flags"], **TP2["flags"]}}
    assert space_of(tmp_path, PROTOCOL, experiment_of(defaults=whole)).warnings == ()


def test_the_path_to_nccl_depends_on_the_version(tmp_path: Path) -> None:
    """FlashInfer's all-reduce is off by itself in 0.24, on in 0.32."""
    defaults = {
        "flags": {**TP2["flags"], "disable-custom-all-reduce": True},
        "json": NCCL_PATH["json"],
        "env": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
    }
    assert space_of(tmp_path, PROTOCOL, experiment_of(defaults=defaults), version="0.24.0").warnings == ()
    assert space_of(tmp_path, PROTOCOL, experiment_of(defaults=defaults), version="0.32.0").warnings != ()


def test_fusion_by_itself_across_stages_is_said(tmp_path: Path) -> None:
    """TP and PP from two knobs, or from the experiment; not where it is off, eager, or one of the two is 1."""
    pinned = {"json": {"compilation-config": {"pass_config": {"fuse_allreduce_rms": False}}}}
    text = "knobs: {tp: {flag: tensor-parallel-size, choices: [2]}, pp: {flag: pipeline-parallel-size, choices: [2]}}\n"

    def said(text: str, **defaults: Any) -> bool:
        space = space_of(tmp_path, text, experiment_of(defaults=defaults))
        return any(warning.startswith("TP 2 x PP 2: all-reduce fusion") for warning in space.warnings)

    both = {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}
    assert said(text)
    assert said("knobs: {seqs: {flag: max-num-seqs, choices: [8]}}\n", flags=both)
    assert not said(text, **pinned)
    assert not said(text, flags={"enforce-eager": True})
    assert not said("knobs: {pp: {flag: pipeline-parallel-size, choices: [2]}}\n")


@pytest.mark.parametrize(
    ("text", "experiment", "words"),
    [
        (PROTOCOL, experiment_of(cpu=True), "there is no NCCL on a CPU"),
        (PROTOCOL, experiment_of(defaults=NCCL_PATH), "a single GPU has nobody to talk to"),
        (
            "knobs: {p2p: {env: NCCL_P2P_DISABLE, choices: ['1']}}",
            experiment_of(defaults=TP2),
            "does not stop vLLM's custom all-reduce",
        ),
        ("knobs: {o: {flag: optimization-level, choices: [1, 3]}}", None, "-O3 is the same as -O2"),
        ("knobs: {m: {flag: gpu-memory-utilization, choices: [0.97]}}", None, "run out of memory"),
        ("knobs: {m: {flag: gpu-memory-utilization, float: {low: 0.8, high: 0.98}}}", None, "run out of memory"),
        ("knobs: {s: {env: NCCL_SHM_DISABLE, choices: ['1']}}", None, "only sockets are left"),
        (
            "knobs: {}",
            experiment_of(ladder=(1, 1024)),
            "at concurrency 1024 a step has 1024 tokens, graphs end at 512",
        ),
        (
            "knobs: {}",
            experiment_of(
                defaults={
                    "flags": {"max-num-seqs": 8},
                    "json": {"compilation-config": {"cudagraph_capture_sizes": [8, 16]}},
                },
                ladder=(1, 8),
            ),
            "capture sizes above max-num-seqs (8)",
        ),
        ("knobs: {i: {flag: stream-interval, choices: [8]}}", None, "several tokens arrive at once"),
        ("knobs: {s: {flag: max-num-seqs, choices: [64, 512]}}", None, "max-num-seqs 64: below the ladder's highest"),
        (
            "knobs: {g: {json: compilation-config.cudagraph_mode, choices: [FULL]}}",
            experiment_of(defaults={"flags": {"enforce-eager": True}}),
            "enforce-eager, which wins",
        ),
    ],
)
def test_known_trouble_is_said(tmp_path: Path, text: str, experiment: Any, words: str) -> None:
    """One sentence each."""
    warnings = space_of(tmp_path, text + "\n", experiment).warnings
    assert any(words in warning for warning in warnings), warnings


def test_architectures_that_are_not_compiled_make_passes_inert(tmp_path: Path) -> None:
    """GLM-5's class is captured with breakable graphs from 0.32 on, unless switched off; not in 0.24."""
    text = "knobs: {fusion: {json: compilation-config.pass_config.fuse_allreduce_rms, choices: [true, false]}}\n"
    glm = dense(architectures=["GlmMoeDsaForCausalLM"])
    new = space_of(tmp_path, text, experiment_of(defaults=TP2), facts=glm, version="0.32.0")
    assert new.warnings == ("`fusion` changes nothing: vLLM does not compile GlmMoeDsaForCausalLM",)
    assert new.count() == 1
    old = space_of(tmp_path, text, experiment_of(defaults=TP2), facts=glm, version="0.24.0")
    assert (old.warnings, old.count()) == ((), 3)
    off = experiment_of(defaults={**TP2, "env": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}})
    assert space_of(tmp_path, text, off, facts=glm, version="0.32.0").count() == 3


def test_a_version_outside_the_covered_ones_is_said(tmp_path: Path) -> None:
    """The rules may be wrong there."""
    old = space_of(tmp_path, "knobs: {}\n", version="0.19.1")
    assert old.warnings == ("vLLM 0.19.1 is outside 0.24 to 0.33, which the rules were written for",)
    for covered in ("0.24.0", "0.32.0+cpu", "0.33.1"):
        assert space_of(tmp_path, "knobs: {}\n", version=covered).warnings == ()


@pytest.mark.parametrize("name", SPACES)
def test_every_shipped_space_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knob with its values and conditions; no GPU is needed."""
    monkeypatch.setattr("runner.space.space.COUNT_LIMIT", 1000)  # the counts themselves are tested elsewhere
    space = shipped(name)
    text = explain(space)
    for knob in space.knobs:
        assert f"  {knob.name}" in text
        assert all(label in text for label in knob.labels)
    assert text.startswith(f"Search space {name}\n")


def test_explain_says_what_is_ruled_out_kept_inert_and_how_many_there_are(tmp_path: Path) -> None:
    """Everything a user needs to trust the space, with reasons."""
    text = """
knobs:
  split: {choices: {one: {}, three: {flags: {tensor-parallel-size: 3}}, two: {flags: {tensor-parallel-size: 2}}}}
  layers: {env: VLLM_PP_LAYER_PARTITION, choices: ["18,18"]}
  threads: {env: NCCL_NTHREADS, choices: [64, {value: 100, keep_failing: to see it}], when: {split: two}}
  level: {flag: optimization-level, choices: [2, 1]}
constraints:
  - tensor_parallel_size <= gpus
"""
    shown = explain(space_of(tmp_path, text, facts=dense(), machine=Machine(gpu_memory_gib=80)))
    for line in (
        "on 8 GPUs of 80 GiB, vLLM 0.33.0",
        "model: 32 heads, 8 KV heads, 36 layers, 13.4 GiB of weights",
        "8 distinct configurations can run; 8 more are invalid or the same",
        "split = three: attention heads (32) must be divisible by tensor parallel size (3)",
        "level = 2: the same as leaving it unset",
        "threads = 100: to see it",
        "only when split is two",
        "tensor_parallel_size <= gpus",
        "layers = 18,18",
    ):
        assert line in shown, shown
