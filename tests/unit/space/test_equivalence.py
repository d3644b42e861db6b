"""Configurations that vLLM's rules tell to be the same have one key, all others have their own."""

from typing import Any

import pytest

from runner.space.equivalence import equivalent_key
from tests.spaces import NCCL_PATH, config_of

COMPILATION = "compilation-config"


def key(settings: dict[str, Any], gpus: int = 2) -> str:
    return equivalent_key(config_of(gpus=gpus, **settings), (0, 33, 0))


VERSIONS = ((0, 24, 0), (0, 28, 0), (0, 32, 0))

TP2: dict[str, Any] = {"flags": {"tensor-parallel-size": 2}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"flags": {"optimization-level": 3}}, {"flags": {"optimization-level": 2}}),
        ({"flags": {"optimization-level": 3}}, {}),
        ({"flags": {"tensor-parallel-size": 1, "stream-interval": 1}}, {}),
        ({"flags": {"enforce-eager": False}}, {}),
        (
            {"flags": {"enforce-eager": True}, "json": {COMPILATION: {"cudagraph_mode": "FULL"}}},
            {"flags": {"enforce-eager": True, "optimization-level": 1}},
        ),
        ({"json": {COMPILATION: {"cudagraph_mode": "full"}}}, {"json": {COMPILATION: {"cudagraph_mode": "FULL"}}}),
        ({"json": {COMPILATION: {"mode": 3}}}, {"json": {COMPILATION: {"mode": "vllm_compile"}}}),
        (
            {"json": {COMPILATION: {"mode": 0, "cudagraph_mode": "PIECEWISE"}}},
            {"json": {COMPILATION: {"mode": "NONE", "cudagraph_mode": "NONE"}}},
        ),
        (
            {"json": {COMPILATION: {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}}},
            {"json": {COMPILATION: {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}},
        ),
        (
            {"json": {COMPILATION: {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [1, 2]}}},
            {"json": {COMPILATION: {"cudagraph_mode": "NONE"}}},
        ),
        (
            {"json": {COMPILATION: {"cudagraph_capture_sizes": [2, 1, 2]}}},
            {"flags": {"cudagraph-capture-sizes": [1, 2]}},
        ),
        (
            {"flags": {"max-num-batched-tokens": 8}, "json": {COMPILATION: {"cudagraph_capture_sizes": [4, 16]}}},
            {"flags": {"max-num-batched-tokens": 8}, "json": {COMPILATION: {"cudagraph_capture_sizes": [4]}}},
        ),
        (
            {"json": {COMPILATION: {"cudagraph_mode": "PIECEWISE", "splitting_ops": []}}},
            {"json": {COMPILATION: {"cudagraph_mode": "NONE", "splitting_ops": []}}},
        ),
        (
            {"json": {COMPILATION: {"cudagraph_mode": "FULL_AND_PIECEWISE", "splitting_ops": []}}},
            {"json": {COMPILATION: {"cudagraph_mode": "FULL", "splitting_ops": []}}},
        ),
        (
            {"json": {COMPILATION: {"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse_attn_quant": True}}}},
            {"json": {COMPILATION: {"cudagraph_mode": "FULL", "pass_config": {"fuse_attn_quant": True}}}},
        ),
        ({"env": {"NCCL_PROTO": "LL", "NCCL_NTHREADS": "64"}}, {}),  # one device
        ({**NCCL_PATH}, {}),  # one device: no all-reduce to steer
        ({"flags": {}, "env": {"VLLM_PP_LAYER_PARTITION": "1,1"}}, {}),
        (
            {**TP2, "env": {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}},
            {**TP2, "env": {"NCCL_P2P_DISABLE": "1"}},
        ),
        ({**TP2, "env": {"NCCL_P2P_DISABLE": "0"}}, TP2),
        ({**TP2, "env": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"}}, TP2),
        (
            {"json": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}},
            {
                "json": {
                    "speculative-config": {
                        "method": "ngram",
                        "num_speculative_tokens": 3,
                        "prompt_lookup_min": 5,
                        "prompt_lookup_max": 5,
                    }
                }
            },
        ),
        (
            {"json": {"speculative-config": {"method": "ngram", "prompt_lookup_max": 4}}},
            {"json": {"speculative-config": {"method": "ngram", "prompt_lookup_min": 4}}},
        ),
        ({"flags": {"dtype": "half"}}, {"flags": {"dtype": "float16"}}),
        ({"flags": {"dtype": "float"}}, {"flags": {"dtype": "float32"}}),
    ],
)
def test_the_same_to_vllm_has_one_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    """-O3 is -O2, eager wins over graphs, inert knobs, defaults written out."""
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"flags": {"optimization-level": 1}}, {}),
        ({"flags": {"optimization-level": 0}}, {"flags": {"enforce-eager": True}}),
        ({"flags": {"max-num-seqs": 64}}, {"flags": {"max-num-seqs": 65}}),
        ({"flags": {"max-num-seqs": 64}}, {}),
        ({**TP2, "env": {"NCCL_PROTO": "LL"}}, TP2),
        # On another all-reduce path NCCL still gathers the logits: hardly anything, but not nothing.
        ({**TP2, "env": {"NCCL_NTHREADS": "64"}}, {**TP2, "env": {"NCCL_NTHREADS": "128"}}),
        ({**TP2, **{"json": {COMPILATION: {"pass_config": {"fuse_allreduce_rms": False}}}}}, TP2),
        (
            {"flags": {"pipeline-parallel-size": 2}, "env": {"NCCL_MIN_P2P_NCHANNELS": "4"}},
            {"flags": {"pipeline-parallel-size": 2}},
        ),
        (
            {
                "flags": {"optimization-level": 0},
                "json": {COMPILATION: {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1]}},
            },
            {"flags": {"optimization-level": 0}, "json": {COMPILATION: {"cudagraph_mode": "FULL"}}},
        ),
        (
            {
                "json": {
                    COMPILATION: {
                        "cudagraph_mode": "PIECEWISE",
                        "splitting_ops": [],
                        "use_inductor_graph_partition": True,
                    }
                }
            },
            {
                "json": {
                    COMPILATION: {
                        "cudagraph_mode": "NONE",
                        "splitting_ops": [],
                        "use_inductor_graph_partition": True,
                    }
                }
            },
        ),
        ({"flags": {"enable-prefix-caching": True}}, {"flags": {"enable-prefix-caching": False}}),
        ({"flags": {"gpu-memory-utilization": 1}}, {"flags": {"gpu-memory-utilization": 0.9}}),
    ],
)
def test_what_differs_keeps_its_own_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Nothing is taken to be inert that only mostly is."""
    assert key(one) != key(other)


def test_model_and_gpus_are_part_of_the_key() -> None:
    """The same flags on another model, or on another number of GPUs, are another configuration."""
    assert key({}, gpus=1) != key({}, gpus=2)
    other = config_of().model_copy(update={"model": "other"})
    assert equivalent_key(other) != equivalent_key(config_of())


def test_a_default_counts_in_the_versions_it_is_known_for() -> None:
    """FlashInfer's all-reduce is off by itself in 0.24 and on in 0.32; between them nothing is taken for granted."""
    on = config_of(flags={"tensor-parallel-size": 2}, env={"VLLM_ALLREDUCE_USE_FLASHINFER": "1"})
    off = config_of(flags={"tensor-parallel-size": 2}, env={"VLLM_ALLREDUCE_USE_FLASHINFER": "0"})
    unset = config_of(flags={"tensor-parallel-size": 2})
    keys = {version: [equivalent_key(c, version) for c in (on, off, unset)] for version in VERSIONS}
    assert keys[0, 24, 0][1] == keys[0, 24, 0][2] != keys[0, 24, 0][0]
    assert keys[0, 32, 0][0] == keys[0, 32, 0][2] != keys[0, 32, 0][1]
    assert len(set(keys[0, 28, 0])) == 3


def test_a_version_beyond_the_covered_ones_is_trusted_less() -> None:
    """That -O3 is -O2 is known up to 0.33 only."""
    three, two = config_of(flags={"optimization-level": 3}), config_of(flags={"optimization-level": 2})
    assert equivalent_key(three, (0, 24, 0)) == equivalent_key(two, (0, 24, 0))
    assert equivalent_key(three, (0, 34, 0)) != equivalent_key(two, (0, 34, 0))
