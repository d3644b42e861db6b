"""From command line, environment, node and model to a resolved ``Launch``; refuses what vLLM refuses. Pure.

Rules and defaults are those of vLLM 0.32 to 0.33 as its source states them (``vllm/config`` and
``vllm/engine/arg_utils.py``); where the measured 0.24 differs in a way that the calibration needs, the rule says so.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator import memory
from runner.simulator.arguments import LOAD_FORMATS
from runner.simulator.launch import BLOCK_SIZE, Launch, Refused
from runner.simulator.nccl import InvalidUsage, read_nccl
from runner.space.fields import KEYS

GRAPH_CEILING = 512
"""Largest captured size by default, tokens; 1024 on sm100 (vllm/config/vllm.py)."""
MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
PASSES = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "eliminate_noops",
    "fuse_allreduce_rms",
    "enable_qk_norm_rope_fusion",
    "fuse_rope_kvcache_cat_mla",
    "fuse_act_padding",
    "fuse_mla_dual_rms_norm",
    "fuse_rope_kvcache",
    "fuse_qk_norm_rope_kvcache",
    "rope_kvcache_fusion_max_token_num",
    "fi_allreduce_fusion_max_size_mb",
)
DRAFTERS = ("ngram", "ngram_gpu", "mtp")
"""Drafters with a cost here; others of vLLM need a draft checkpoint that a simulated node does not have."""


@dataclass(frozen=True)
class Resolved:
    """The launch and what the server logs about it on the way."""

    launch: Launch
    warnings: tuple[str, ...] = ()


def resolve(
    options: argparse.Namespace, env: Mapping[str, str], node: SimulatedNode, model: SimulatedModel
) -> Resolved:
    """Put everything together.

    Raises:
        Refused: When vLLM would not start, with its own kind of message.
    """
    warnings: list[str] = []
    launch = _parallel(options, node, model)
    launch = _stages(launch, env, model)
    launch = _scheduler(launch, options, node, model)
    launch = _speculation(launch, options, env, model, warnings)
    launch = _graphs(launch, options, node, warnings)
    launch = _communication(launch, options, env, node, warnings)
    launch = memory.place(launch, options, node, model)
    return Resolved(launch, tuple(warnings))


def _parallel(options: argparse.Namespace, node: SimulatedNode, model: SimulatedModel) -> Launch:
    tensor, pipeline = options.tensor_parallel_size, options.pipeline_parallel_size
    if tensor < 1 or pipeline < 1:
        raise Refused("pydantic_core._pydantic_core.ValidationError: Input should be greater than or equal to 1")
    if model.heads % tensor:
        raise Refused(
            f"Value error, Total number of attention heads ({model.heads}) must be divisible by "
            f"tensor parallel size ({tensor})."
        )
    if options.load_format.lower() not in LOAD_FORMATS:
        raise Refused(f"ValueError: Load format `{options.load_format}` is not supported.", "worker")
    if pipeline > model.layers:
        raise Refused(f"ValueError: pipeline parallel size ({pipeline}) is above the number of layers", "worker")
    if options.data_parallel_size != 1 or options.decode_context_parallel_size != 1:
        raise Refused("ValueError: the simulated engine knows tensor, pipeline and expert parallelism only.")
    if tensor * pipeline > node.gpus:
        raise Refused(
            f"Value error, World size ({tensor * pipeline}) is larger than the number of available GPUs "
            f"({node.gpus}) in this node."
        )
    if max(tensor, model.kv_heads) % min(tensor, model.kv_heads):
        raise Refused(f"AssertionError: {model.kv_heads} is not divisible by {tensor}", "weights")
    if model.intermediate % tensor:
        raise Refused(f"AssertionError: {model.intermediate} is not divisible by {tensor}", "weights")
    if options.enable_expert_parallel and model.experts is None:
        raise Refused("ValueError: Number of experts in the model must be greater than 0 when expert parallelism is on")
    return Launch(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=bool(options.enable_expert_parallel),
        api_servers=max(1, options.api_server_count),
    )


def _stages(launch: Launch, env: Mapping[str, str], model: SimulatedModel) -> Launch:
    """``VLLM_PP_LAYER_PARTITION``: one count a stage, all layers in all."""
    text = env.get("VLLM_PP_LAYER_PARTITION")
    if not text or launch.pipeline_parallel == 1:
        return launch
    if not all(word.strip().isdigit() for word in text.split(",")):
        raise Refused(f"ValueError: Invalid partition string: {text}", "weights")
    layers = tuple(int(word) for word in text.split(","))
    if len(layers) != launch.pipeline_parallel:
        raise Refused(f"ValueError: len(partitions)={len(layers)} does not match pp_size.", "weights")
    if sum(layers) != model.layers:
        raise Refused(f"ValueError: sum(partitions)={sum(layers)} does not match num_hidden_layers.", "weights")
    return replace(launch, layer_partition=layers)


def _scheduler(launch: Launch, options: argparse.Namespace, node: SimulatedNode, model: SimulatedModel) -> Launch:
    seqs, batched = _batch_defaults(options, node)
    length = options.max_model_len or model.max_model_len
    if length > model.max_model_len:
        raise Refused(
            f"Value error, User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"(max_position_embeddings={model.max_model_len})."
        )
    chunked = options.enable_chunked_prefill is not False
    batched = max(batched, length) if not chunked and options.max_num_batched_tokens is None else batched
    if batched < length and not chunked:
        raise Refused(
            f"Value error, max_num_batched_tokens ({batched}) is smaller than max_model_len ({length}). "
            "This effectively limits the maximum sequence length to max_num_batched_tokens."
        )
    if batched < seqs:
        if options.max_num_seqs is not None and options.max_num_batched_tokens is not None:
            raise Refused(
                f"Value error, max_num_batched_tokens ({batched}) must be greater than or equal to "
                f"max_num_seqs ({seqs})."
            )
        seqs, batched = (batched, batched) if options.max_num_seqs is None else (seqs, seqs)
    if min(seqs, batched) < 1 or options.stream_interval < 1:
        raise Refused("pydantic_core._pydantic_core.ValidationError: Input should be greater than or equal to 1")
    return replace(
        launch,
        max_num_seqs=min(seqs, options.max_num_active_seqs or seqs),
        max_num_batched_tokens=batched,
        max_model_len=length,
        block_size=options.block_size or BLOCK_SIZE,
        prefix_caching=options.enable_prefix_caching is not False,
        chunked_prefill=chunked,
        async_scheduling=options.async_scheduling is not False,
        stream_interval=options.stream_interval,
    )


def _batch_defaults(options: argparse.Namespace, node: SimulatedNode) -> tuple[int, int]:
    """``max_num_seqs`` and ``max_num_batched_tokens`` as given, else by GPU memory (get_batch_defaults)."""
    large = node.gpu.memory_gib >= 70 and "a100" not in node.gpu.name.lower()
    seqs, batched = (1024, 8192) if large else (256, 2048)
    if node.gpu.memory_gib >= 160:
        batched = 16384
    if options.performance_mode == "throughput":
        seqs, batched = 2 * seqs, 2 * batched
    return (
        seqs if options.max_num_seqs is None else options.max_num_seqs,
        batched if options.max_num_batched_tokens is None else options.max_num_batched_tokens,
    )


def _speculation(
    launch: Launch, options: argparse.Namespace, env: Mapping[str, str], model: SimulatedModel, warnings: list[str]
) -> Launch:
    launch = replace(launch, runner="V1" if env.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "V2")
    asked = options.speculative_config
    if asked is None:
        return launch
    spec = {key.replace("-", "_"): value for key, value in asked.items()}
    _refuse_unknown("speculative-config", spec)
    method = spec.get("method") or ("ngram" if spec.get("model") == "ngram" else "draft_model")
    draft_tokens = spec.get("num_speculative_tokens") or (1 if method == "mtp" else None)
    if method not in DRAFTERS or (method == "mtp" and model.mtp is None):
        raise Refused(f"ValueError: Unsupported speculative method: '{method}' for this model.")
    if not isinstance(draft_tokens, int) or draft_tokens < 1:
        raise Refused("ValueError: num_speculative_tokens must be provided with speculative_config and be at least 1.")
    lookup = _lookup(spec)
    if launch.max_num_batched_tokens <= draft_tokens:
        raise Refused("Value error, VllmConfig does not have enough slots to schedule a token and its drafts.")
    if method == "ngram":
        launch = _cpu_drafting(launch, options, warnings)
    return replace(
        launch,
        draft_method=method,
        draft_tokens=draft_tokens,
        lookup=lookup if method.startswith("ngram") else None,
        drafts_by_batch=tuple(tuple(each) for each in spec.get("num_speculative_tokens_per_batch_size") or ()),
        synthetic_acceptance=_synthetic(spec, draft_tokens),
    )


def _refuse_unknown(flag: str, fields: Mapping[str, Any]) -> None:
    """vLLM's configurations take no key that they do not know (``extra="forbid"`` in vllm/config/utils.py)."""
    unknown = sorted(set(fields) - KEYS[flag,])
    if unknown:
        raise Refused(f"pydantic ValidationError: {flag.replace('-', '_')}.{unknown[0]}: Unexpected keyword argument")


def _cpu_drafting(launch: Launch, options: argparse.Namespace, warnings: list[str]) -> Launch:
    """``ngram`` moves to the V1 runner and turns async scheduling off, with two warnings (measured, 0.24)."""
    if options.async_scheduling:
        raise Refused("Value error, Async scheduling is not supported with ngram-based speculative decoding.")
    warnings.append("Async scheduling not supported with ngram-based speculative decoding and will be disabled.")
    warnings.append("Model Runner V2 does not support speculative method ngram; using the V1 model runner instead.")
    return replace(launch, runner="V1", async_scheduling=False)


def _lookup(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Shortest and longest n-gram; 5 where neither is given (vllm/config/speculative.py)."""
    lowest, highest = spec.get("prompt_lookup_min"), spec.get("prompt_lookup_max")
    lowest, highest = lowest or highest or 5, highest or lowest or 5
    if lowest > highest:
        raise Refused(f"ValueError: prompt_lookup_min={lowest} must be <= prompt_lookup_max={highest}.")
    return lowest, highest


def _synthetic(spec: Mapping[str, Any], draft_tokens: int) -> tuple[float, ...] | None:
    """Chances per position. A length L means ``L - 1`` accepted tokens: whole positions first (measured, 0.24)."""
    if spec.get("rejection_sample_method") != "synthetic":
        return None
    length: Any = spec.get("synthetic_acceptance_length")
    rates: Any = spec.get("synthetic_acceptance_rates")
    if (length is None) == (rates is None):
        raise Refused("ValueError: give exactly one of synthetic_acceptance_length and synthetic_acceptance_rates.")
    if rates is not None:
        if len(rates) != draft_tokens or list(rates) != sorted(rates, reverse=True):
            raise Refused("ValueError: synthetic_acceptance_rates must be non-increasing, one per draft token.")
        return tuple(float(rate) for rate in rates)
    if not 1 <= length <= draft_tokens + 1:
        raise Refused(f"ValueError: synthetic_acceptance_length must be in [1, {draft_tokens + 1}].")
    return tuple(min(max(length - 1.0 - position, 0.0), 1.0) for position in range(draft_tokens))


def _graphs(launch: Launch, options: argparse.Namespace, node: SimulatedNode, warnings: list[str]) -> Launch:
    config = options.compilation_config or {}
    _refuse_unknown("compilation-config", config)
    unknown = set(config.get("pass_config") or {}) - set(PASSES)
    if unknown:
        raise Refused(f"pydantic ValidationError: pass_config.{sorted(unknown)[0]}: Unexpected keyword argument")
    if options.cudagraph_capture_sizes and config.get("cudagraph_capture_sizes"):
        raise Refused("ValueError: cudagraph_capture_sizes and compilation_config's are mutually exclusive.")
    level = options.optimization_level
    compile_mode = _named(config.get("mode", 3 if level else 0), MODES, "Invalid compilation mode")
    default = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")[level]
    mode = _named(config.get("cudagraph_mode", default), GRAPH_MODES, "KeyError")
    if options.enforce_eager:
        warnings.append("Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.")
        return replace(launch, graph_mode="NONE", capture_sizes=(), compiles=False)
    if "PIECEWISE" in mode and compile_mode != "VLLM_COMPILE":
        lowered = "NONE" if mode == "PIECEWISE" else "FULL_DECODE_ONLY"
        warnings.append(
            f"Cudagraph mode {mode} is not compatible with compilation mode {compile_mode}. Overriding to {lowered}."
        )
        mode = lowered
    if mode == "FULL":
        warnings.append("CUDAGraphMode.FULL is not supported with this attention backend; using FULL_AND_PIECEWISE.")
        mode = "FULL_AND_PIECEWISE" if compile_mode == "VLLM_COMPILE" else "FULL_DECODE_ONLY"
    sizes = () if mode == "NONE" else _sizes(launch, options, config, node, warnings)
    return replace(launch, graph_mode=mode, capture_sizes=sizes, compiles=compile_mode != "NONE")


def _named(value: object, names: tuple[str, ...], problem: str) -> str:
    text = names[value] if isinstance(value, int) and 0 <= value < len(names) else str(value).upper()
    if text not in names:
        raise Refused(f"ValueError: {problem}: {value!r}" if problem != "KeyError" else f"KeyError: {value!r}")
    return text


def _sizes(
    launch: Launch,
    options: argparse.Namespace,
    config: Mapping[str, Any],
    node: SimulatedNode,
    warnings: list[str],
) -> tuple[int, ...]:
    given = options.cudagraph_capture_sizes or config.get("cudagraph_capture_sizes")
    largest = options.max_cudagraph_capture_size or config.get("max_cudagraph_capture_size")
    if given is not None and not given:
        raise Refused("AssertionError: cudagraph_capture_sizes should contain at least one element")
    if given:
        kept = sorted({size for size in given if size <= launch.max_num_batched_tokens})
        if len(kept) < len(set(given)):
            warnings.append(f"cudagraph_capture_sizes overridden by config {kept}")
        if not kept or (largest and largest != kept[-1]):
            raise Refused(
                f"ValueError: max_cudagraph_capture_size={largest} should be consistent with the max value of "
                f"cudagraph_capture_sizes={kept[-1] if kept else 0}"
            )
        return _multiples(launch, tuple(kept))
    ceiling = 2 * GRAPH_CEILING if node.gpu.capability.startswith("10.") else GRAPH_CEILING
    uniform = launch.max_num_seqs * launch.decode_tokens
    top = min(largest or min(2 * uniform, ceiling), launch.max_num_batched_tokens)
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8), *range(272, top + 1, 16)) if size <= top]
    if largest and sizes[-1] != largest:
        warnings.append(f"Truncating max_cudagraph_capture_size to {sizes[-1]}")
    if not launch.draft_tokens and launch.max_num_seqs <= top:
        sizes.append(launch.max_num_seqs)
    return _multiples(launch, tuple(sorted(set(sizes))))


def _multiples(launch: Launch, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The V1 runner rounds sizes up to multiples of 1 + draft tokens and drops those above the largest."""
    if launch.runner == "V2" or not launch.draft_tokens:
        return sizes
    step = launch.decode_tokens
    kept = sorted({-(-size // step) * step for size in sizes if -(-size // step) * step <= sizes[-1]})
    if not kept:
        raise Refused("ValueError: No valid cudagraph sizes after rounding to multiple of 1 + num_speculative_tokens")
    return tuple(kept)


def _communication(
    launch: Launch, options: argparse.Namespace, env: Mapping[str, str], node: SimulatedNode, warnings: list[str]
) -> Launch:
    try:
        nccl = read_nccl(env)
    except InvalidUsage as error:
        raise Refused(f"RuntimeError: NCCL error: ncclInvalidUsage: {error}", "worker") from None
    if launch.tensor_parallel == 1:
        return replace(launch, nccl=nccl)
    backends = ["PYNCCL"]
    if not options.disable_custom_all_reduce:
        if node.one_shot is not None:
            backends.insert(0, "CUSTOM")
        elif launch.tensor_parallel > 2:
            warnings.append(
                "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. "
                "To silence this warning, specify disable_custom_all_reduce=True explicitly."
            )
    passes = (options.compilation_config or {}).get("pass_config") or {}
    if passes.get("fuse_allreduce_rms") and not node.flashinfer:
        warnings.append("Flashinfer allreduce is not available on this platform; skipping allreduce fusion pass")
    return replace(launch, nccl=nccl, all_reduce=tuple(backends))
