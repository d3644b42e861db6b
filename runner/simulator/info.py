"""What ``/server_info`` and NCCL's debug log tell about a resolved launch. Pure."""

from typing import Any

from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator.launch import Launch

_GRAPH_MODES: dict[str, object] = {
    "NONE": 0,
    "PIECEWISE": 1,
    "FULL": 2,
    "FULL_DECODE_ONLY": [2, 0],
    "FULL_AND_PIECEWISE": [2, 1],
}
"""vllm/config/compilation.py, CUDAGraphMode; pairs are (decode, mixed)."""


def server_info(
    launch: Launch, options: dict[str, Any], env: dict[str, str], node: SimulatedNode, model: SimulatedModel
) -> dict[str, Any]:
    """The reply of ``/server_info?config_format=json``; the keys of vLLM 0.32 that this server has a value for."""
    config = {
        "model_config": {
            "model": options.get("model") or options.get("model_tag"),
            "max_model_len": launch.max_model_len,
            "enforce_eager": bool(options.get("enforce_eager")),
            "dtype": "torch.bfloat16",
        },
        "cache_config": {
            "block_size": launch.block_size,
            "gpu_memory_utilization": options.get("gpu_memory_utilization"),
            "enable_prefix_caching": launch.prefix_caching,
            "num_gpu_blocks": launch.kv_cache_tokens // launch.block_size,
            "kv_cache_size_tokens": launch.kv_cache_tokens,
        },
        "parallel_config": _parallel(launch),
        "scheduler_config": {
            "max_num_batched_tokens": launch.max_num_batched_tokens,
            "max_num_seqs": launch.max_num_seqs,
            "enable_chunked_prefill": launch.chunked_prefill,
            "async_scheduling": launch.async_scheduling,
            "stream_interval": launch.stream_interval,
        },
        "compilation_config": _compilation(launch, options.get("compilation_config") or {}, node),
        "speculative_config": _speculation(launch),
        "optimization_level": options.get("optimization_level"),
        "performance_mode": options.get("performance_mode"),
    }
    named = {name: value for name, value in sorted(env.items()) if name.startswith(("VLLM_", "NCCL_"))}
    return {
        "simulated": True,
        "vllm_config": config,
        "vllm_env": named,
        "system_env": {"simulated_node": node.name, "simulated_model": model.name, "is_cuda_available": "False"},
    }


def _parallel(launch: Launch) -> dict[str, Any]:
    return {
        "tensor_parallel_size": launch.tensor_parallel,
        "pipeline_parallel_size": launch.pipeline_parallel,
        "world_size": launch.world,
        "disable_custom_all_reduce": not launch.custom_all_reduce,
        "enable_expert_parallel": launch.expert_parallel,
        "distributed_executor_backend": "uni" if launch.world == 1 else "mp",
    }


def _compilation(launch: Launch, asked: dict[str, Any], node: SimulatedNode) -> dict[str, Any]:
    passes = {"fuse_allreduce_rms": False, **(asked.get("pass_config") or {})}
    if not node.flashinfer:
        passes["fuse_allreduce_rms"] = False
    return {
        "mode": 3 if launch.compiles else 0,
        "cudagraph_mode": _GRAPH_MODES[launch.graph_mode],
        "cudagraph_capture_sizes": list(launch.capture_sizes),
        "max_cudagraph_capture_size": launch.capture_sizes[-1] if launch.capture_sizes else None,
        "pass_config": passes,
    }


def _speculation(launch: Launch) -> dict[str, Any] | None:
    if launch.draft_method is None:
        return None
    shortest, longest = launch.lookup or (None, None)
    return {
        "method": launch.draft_method,
        "num_speculative_tokens": launch.draft_tokens,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
        "num_speculative_tokens_per_batch_size": [list(each) for each in launch.drafts_by_batch] or None,
    }


def nccl_log(launch: Launch, node: SimulatedNode, env: dict[str, str]) -> list[str]:
    """NCCL's own words about its choice by size, as its TUNING log gives them; empty unless it is asked for."""
    if env.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE") or launch.tensor_parallel == 1:
        return []
    path = launch.nccl.path(node)
    algorithm = "TREE" if launch.nccl.algorithms == ("Tree",) else "RING"
    highest = launch.nccl.channels(path) - 1
    lines = [f"NCCL INFO {name} set by environment to {env[name]}." for name in sorted(env) if name.startswith("NCCL_")]
    for kib in (8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 65536):
        protocol = launch.nccl.protocol(path, kib * 1024).upper()
        lines.append(
            f"NCCL INFO AllReduce: {kib * 1024} Bytes -> Algo {algorithm} proto {protocol} "
            f"channel{{Lo..Hi}}={{0..{highest}}}"
        )
    return lines
