"""GPU memory by arithmetic: weights, activations, graphs, NCCL buffers, and what is left for the KV cache. Pure.

Estimates with the constants below; exact enough to say which configurations cannot fit, not to plan a margin of a GiB.
"""

import argparse
from dataclasses import replace

from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator.costs import kv_bytes_per_token, kv_share, total_weights
from runner.simulator.launch import Launch, Refused

GIB = 2**30
CONTEXT_GIB = 0.6
"""CUDA context and library work spaces of one process (about what an idle vLLM worker holds on an H200)."""
GRAPH_GIB = 0.012
"""One captured graph, its private pool shared between sizes (8-11 GiB per thousand graphs in vLLM's logs)."""
ACTIVATIONS = 16
"""Live activations of a step, in units of tokens x hidden x 2 bytes (attention and MLP intermediates)."""


def place(launch: Launch, options: argparse.Namespace, node: SimulatedNode, model: SimulatedModel) -> Launch:
    """Fill in the sizes on one GPU.

    Raises:
        Refused: With the message PyTorch or vLLM gives.
    """
    utilization = options.gpu_memory_utilization
    if not 0 < utilization <= 1:
        raise Refused("Value error, gpu_memory_utilization must be in (0, 1]", "config")
    total = node.gpu.memory_gib
    weights = total_weights(model) * model.weight_bits / 8 / launch.world / GIB
    if weights + CONTEXT_GIB > total:
        raise Refused(_torch_message(weights / model.layers * launch.pipeline_parallel, total), "weights")
    graphs = GRAPH_GIB * len(launch.capture_sizes) * (2 if launch.graph_mode == "FULL_AND_PIECEWISE" else 1)
    outside = CONTEXT_GIB + 2 * launch.nccl.buffer_mib / 1024 * launch.nccl.channels(launch.nccl.path(node))
    activations = launch.max_num_batched_tokens * model.hidden * 2 * ACTIVATIONS / launch.tensor_parallel / GIB
    logits = launch.max_num_seqs * launch.decode_tokens * model.vocabulary * 4 / GIB
    cache = utilization * total - weights - activations - logits - graphs
    if options.kv_cache_memory_bytes is not None:
        cache = options.kv_cache_memory_bytes / GIB
    _check_cache(cache, launch, model)
    if weights + activations + logits + graphs + outside + cache > total:
        raise Refused(_torch_message(graphs, total), "capture")
    blocks = int(cache * GIB / _bytes_per_token(launch, model)) // launch.block_size
    tokens = (options.num_gpu_blocks_override or blocks) * launch.block_size
    return replace(launch, weights_gib=weights, graphs_gib=graphs, cache_gib=cache, kv_cache_tokens=tokens)


def _bytes_per_token(launch: Launch, model: SimulatedModel) -> float:
    return kv_bytes_per_token(model) * kv_share(launch, model) / launch.pipeline_parallel


def _check_cache(cache: float, launch: Launch, model: SimulatedModel) -> None:
    if cache <= 0:
        raise Refused(
            "ValueError: No available memory for the cache blocks. "
            "Try increasing `gpu_memory_utilization` when initializing the engine.",
            "profile",
        )
    needed = launch.max_model_len * _bytes_per_token(launch, model) / GIB
    if needed > cache:
        raise Refused(
            f"ValueError: To serve at least one request with the model's max seq len ({launch.max_model_len}), "
            f"({needed:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({cache:.2f} GiB).",
            "profile",
        )


def _torch_message(wanted_gib: float, total_gib: float) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted_gib:.2f} GiB. "
        f"GPU 0 has a total capacity of {total_gib:.2f} GiB of which 0.00 GiB is free."
    )
