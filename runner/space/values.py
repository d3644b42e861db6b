"""Single settings checked when a file is loaded: what can never be right, whatever the rest says.

Written from vLLM 0.24 to 0.33 and NCCL 2.28 to 2.30.
"""

import difflib
import re
from typing import Any

from runner.schema.space import Preset
from runner.space.collectives import check_variable
from runner.space.fields import misspelt
from runner.space.presets import PRESETS, presets_for
from runner.space.settings import Target, spoken

Complaint = tuple[str, str]
"""What is wrong, and what would be right."""

_OWNED_FLAGS = {
    "host": "the runner listens on loopback",
    "port": "the runner leases a port",
    "uds": "the runner leases a port",
    "served-model-name": "each trial has its own",
    "model": "it is the experiment's `model`",
    "device-ids": "the cluster leases GPUs",
    "api-key": "the load benchmark sends none",
    "config": "a second file of settings would not be recorded",
    "disable-log-stats": "without it the server's own counters are gone and no number can be checked",
    "max-num-queued-reqs": "a full queue answers 503 under load",
    "max-num-queued-tokens": "a full queue answers 503 under load",
}

_OWNED_ENV = {
    "CUDA_VISIBLE_DEVICES": "the cluster leases GPUs",
    "VLLM_PORT": "servers side by side would take each other's ports",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "a dead engine would look alive",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "`vllm serve` needs its engine in a process of its own",
    "VLLM_SERVER_DEV_MODE": "the runner sets it, on loopback",
    "SPT_NOENV": "vLLM's workers would lose the mark by which they are found",
}

_GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_COMPILE_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE", "0", "1", "2", "3")
_POSITIVE_FLAGS = frozenset(
    {
        "max-num-seqs",
        "max-num-batched-tokens",
        "max-num-active-seqs",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "decode-context-parallel-size",
        "block-size",
        "stream-interval",
        "max-cudagraph-capture-size",
        "api-server-count",
    }
)
_NAMED_FLAGS = {
    "optimization-level": ("0", "1", "2", "3"),
    "performance-mode": ("balanced", "interactivity", "throughput"),
    "dtype": ("auto", "bfloat16", "float16", "half", "float32", "float"),
    "distributed-executor-backend": ("mp", "uni", "external_launcher"),
}
_LOAD_FORMATS = (
    "auto",
    "dummy",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
    "sharded_state",
    "tensorizer",
    "bitsandbytes",
)
_ON_OFF_ENV = frozenset(
    {
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_ALLREDUCE_USE_FLASHINFER",
        "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
        "VLLM_USE_NCCL_SYMM_MEM",
        "VLLM_DISABLE_PYNCCL",
        "VLLM_SKIP_P2P_CHECK",
        "VLLM_BATCH_INVARIANT",
        "VLLM_USE_V2_MODEL_RUNNER",
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "VLLM_USE_FLASHINFER_SAMPLER",
    }
)
_METHODS = ("ngram", "ngram_gpu", "eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark", "suffix", "custom_class")
_SWITCHED_PASSES = ("fuse_", "enable_", "eliminate_")
_MODEL_LENGTH = re.compile(r"\d+(?:\.\d+)?[kKmMgG]?")


def check_setting(target: Target, value: Any) -> Complaint | None:
    """What is wrong with ``target`` set to ``value`` by itself; None when nothing is."""
    if isinstance(value, Preset):
        return _check_preset(target, value.preset)
    kind, name = target[0], target[1]
    if kind == "env":
        return _check_env(name, str(value))
    if kind == "flag":
        return _check_flag(name, value)
    return _check_field(target, value)


def _check_preset(target: Target, name: str) -> Complaint | None:
    fitting = presets_for(target)
    if name in fitting:
        return None
    problem = f"preset `{name}` is no value of {spoken(target)}" if name in PRESETS else f"no preset `{name}`"
    return problem, f"presets for it: {', '.join(fitting) or 'none'}"


def _check_env(name: str, value: str) -> Complaint | None:
    if name in _OWNED_ENV:
        return f"{name} is not for a configuration to set", _OWNED_ENV[name]
    if name.startswith("NCCL_"):
        return check_variable(name, value)
    if name in _ON_OFF_ENV and value not in ("0", "1"):
        return f"`{value}` is no value of {name}", "what would be right: 0 or 1"
    if name == "VLLM_FLASHINFER_ALLREDUCE_BACKEND" and value not in ("auto", "trtllm", "mnnvl"):
        return f"`{value}` is no value of {name}", "what would be right: auto, trtllm or mnnvl"
    if name == "VLLM_PP_LAYER_PARTITION" and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
        return f"`{value}` is no value of {name}", "layers of each stage, e.g. 19,17"
    return None


def _check_flag(name: str, value: Any) -> Complaint | None:
    if name in _OWNED_FLAGS or name.startswith("ssl-"):
        return f"--{name} is not for a configuration to set", _OWNED_FLAGS.get(name, "the runner speaks plain HTTP")
    if name in _POSITIVE_FLAGS and not (_whole(value) and value >= 1):
        return f"`{value}` is no value of --{name}", "a whole number from 1"
    if name in _NAMED_FLAGS and (isinstance(value, bool) or str(value) not in _NAMED_FLAGS[name]):
        return f"`{value}` is no value of --{name}", f"one of {', '.join(_NAMED_FLAGS[name])}"
    if name == "load-format" and value not in _LOAD_FORMATS:
        close = difflib.get_close_matches(str(value), _LOAD_FORMATS, n=1)
        return (f"`{value}` is no value of --{name}", f"did you mean {close[0]}?") if close else None
    if name == "gpu-memory-utilization" and not (_number(value) and 0 < value <= 1):
        return f"`{value}` is no value of --{name}", "a share above 0 and up to 1; up to 0.95 is safe"
    if name == "max-model-len" and not _is_length(value):
        return f"`{value}` is no value of --{name}", "tokens (4096, 4k), or auto for what fits"
    if name == "cudagraph-capture-sizes":
        return _check_sizes(value)
    return None


def _check_field(target: Target, value: Any) -> Complaint | None:
    flag, *keys = target[1:]
    dotted = ".".join(target[1:])
    wrong = misspelt(target[1:])
    if wrong is not None:
        return wrong
    if keys[-1] == "preset":
        return f"{dotted} would be taken literally", "write a preset as a choice of a knob, or in one of its bundles"
    if flag == "compilation-config":
        return _check_compilation(dotted, keys, value)
    return _check_speculation(keys[0], value) if flag == "speculative-config" else None


def _check_compilation(dotted: str, keys: list[str], value: Any) -> Complaint | None:
    problem = f"`{value}` is no value of {dotted}"
    if keys == ["cudagraph_mode"] and str(value).upper() not in _GRAPH_MODES:
        return problem, f"one of {', '.join(_GRAPH_MODES)}"
    if keys == ["mode"] and (isinstance(value, bool) or str(value).upper() not in _COMPILE_MODES):
        return problem, f"one of {', '.join(_COMPILE_MODES)}"
    if keys == ["cudagraph_capture_sizes"]:
        return _check_sizes(value)
    if keys == ["max_cudagraph_capture_size"] and not (_whole(value) and value >= 1):
        return problem, "a whole number from 1, in tokens"
    if keys[0] == "pass_config" and keys[-1].startswith(_SWITCHED_PASSES) and not isinstance(value, bool):
        return problem, "true or false, without quotes"
    return None


def _check_speculation(key: str, value: Any) -> Complaint | None:
    if key == "method" and value not in _METHODS:
        return f"`{value}` is no speculative method", f"one of {', '.join(_METHODS)}"
    if key == "tensor_parallel_size":
        return "speculative-config.tensor_parallel_size is refused at start", "write draft_tensor_parallel_size"
    if key in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min") and not (
        _whole(value) and value >= 1
    ):
        return f"`{value}` is no value of speculative-config.{key}", "a whole number from 1"
    return None


def _check_sizes(value: Any) -> Complaint | None:
    sizes = value if isinstance(value, list | tuple) else [value]
    if all(_whole(size) and size >= 1 for size in sizes):
        return None
    return f"`{value}` is no list of capture sizes", "whole numbers from 1, in tokens; or a preset, in requests"


def _is_length(value: Any) -> bool:
    if isinstance(value, str):
        return value == "auto" or _MODEL_LENGTH.fullmatch(value) is not None
    return _whole(value) and (value >= 1 or value == -1)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
