"""What a server really runs, put together from log lines and a resolved configuration. Own wording around landmarks."""

import pytest

from runner.serving.effective import effective, graph_mode, nccl_choice, settings_of

CONFIG = {
    "model_config": {
        "model": "/somewhere/m",
        "served_model_name": "trial-1",
        "dtype": "torch.bfloat16",
        "hf_token": "x",
    },
    "cache_config": {"block_size": 128, "num_gpu_blocks": 364, "kv_cache_size_tokens": 46592},
    "parallel_config": {"tensor_parallel_size": 2, "master_port": 29501, "_api_process_rank": 0},
    "scheduler_config": {"max_num_seqs": 64, "async_scheduling": True},
    "compilation_config": {
        "cudagraph_mode": [2, 1],
        "cudagraph_capture_sizes": [1, 2, 4],
        "pass_config": {"fuse_allreduce_rms": True},
        "compilation_time": 3.2,
        "cache_dir": "/tmp/x",
    },
    "speculative_config": None,
    "instance_id": "17",
}

LOG = (
    "(EngineCore pid=1) INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: fake",
    "(Worker pid=2) INFO [c.py:1] Using ['FLASHINFER', 'CUSTOM', 'SYMM_MEM', 'PYNCCL'] all-reduce backends (in order)",
    "(Worker pid=2) INFO [p.py:1] vLLM is using nccl==2.30.7",
    "WARNING [v.py:1] V2 needs something; using the V1 model runner instead.",
    "(Worker pid=2) INFO [c.py:1] Using FLASH_ATTN attention backend out of many",
    "INFO [k.py:1] GPU KV cache size: 123,456 tokens",
    "WARNING [c.py:1] Truncating max_cudagraph_capture_size to 40",
    "WARNING [c.py:1] Truncating max_cudagraph_capture_size to 40",
)


def test_everything_told_is_kept() -> None:
    """Each field from its own landmark; a sign of degradation once."""
    found = effective(LOG, {"vllm_config": CONFIG})
    assert found.version == "0.33.0"
    assert found.all_reduce == ("FLASHINFER", "CUSTOM", "SYMM_MEM", "PYNCCL")
    assert found.nccl_version == "2.30.7"
    assert found.runner == "V1"
    assert found.attention == "FLASH_ATTN"
    assert found.kv_cache_tokens == 123456
    assert found.graph_mode == "FULL_AND_PIECEWISE"
    assert found.capture_sizes == (1, 2, 4)
    assert found.async_scheduling is True
    assert len(found.degraded) == 1


def test_nothing_told_is_none() -> None:
    """A server that tells nothing has no effective values, never defaults."""
    found = effective((), None)
    assert found.model_dump(exclude={"settings", "degraded"}, exclude_none=True) == {}
    assert found.settings == {}


def test_two_starts_of_one_configuration_look_the_same() -> None:
    """Names, ports, sizes found by profiling, paths and secrets do not count."""
    other = {
        **CONFIG,
        "model_config": {**CONFIG["model_config"], "served_model_name": "trial-2", "hf_token": "y"},  # type: ignore[dict-item]
        "cache_config": {"block_size": 128, "num_gpu_blocks": 365, "kv_cache_size_tokens": 46720},
        "parallel_config": {"tensor_parallel_size": 2, "master_port": 29777, "_api_process_rank": 0},
        "instance_id": "18",
    }
    assert settings_of(CONFIG) == settings_of(other)
    assert settings_of(CONFIG)["parallel_config.tensor_parallel_size"] == 2
    assert settings_of(CONFIG)["compilation_config.pass_config.fuse_allreduce_rms"] is True
    assert "x" not in settings_of(CONFIG).values()


def test_a_real_difference_shows() -> None:
    """Another value of a knob is another configuration."""
    other = {**CONFIG, "scheduler_config": {"max_num_seqs": 128, "async_scheduling": True}}
    assert settings_of(CONFIG) != settings_of(other)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (0, "NONE"),
        (1, "PIECEWISE"),
        (2, "FULL"),
        ((2, 0), "FULL_DECODE_ONLY"),
        ("CUDAGraphMode.FULL", "FULL"),
        (None, None),
    ],
)
def test_graph_modes(told: int | tuple[int, ...] | str | None, name: str | None) -> None:
    """Numbers, pairs and names of the enum."""
    assert graph_mode(told) == name


def test_nccl_choices_are_named() -> None:
    """NCCL's tuning log, with numbers as older versions write them and with names."""
    lines = (
        "h:1:2 [0] NCCL INFO AllReduce: 16384 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..7}",
        "h:1:2 [0] NCCL INFO AllGather: 512 Bytes -> Algo 1 proto 2 time 12.3",
        "h:1:2 [0] NCCL INFO something else",
    )
    assert nccl_choice(lines) == {"AllReduce 16384": "RING/LL", "AllGather 512": "RING/SIMPLE"}
    assert nccl_choice(()) is None
