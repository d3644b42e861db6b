"""What a started server really runs, from its log and ``/server_info``. Pure; what it does not tell stays None."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from runner.schema.base import FlagValue
from runner.schema.launch import Effective

_VERSION = re.compile(r"Initializing a V1 LLM engine \(v(?P<value>[^)]+)\)")
_ALL_REDUCE = re.compile(r"Using \[(?P<value>[^\]]*)\] all-reduce backends")
_NCCL = re.compile(r"vLLM is using nccl==(?P<value>[\w.]+)")
_RUNNER = re.compile(r"using the (?P<value>V[12]) model runner|Using (?P<other>V2) Model Runner", re.I)
_ATTENTION = re.compile(r"Using (?P<value>\w+) (attention )?backend\b|Using (?P<other>[\w ]+) backend on V1 engine")
_NCCL_CHOICE = re.compile(r"NCCL INFO (?P<call>\w+): (?P<size>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)")
"""NCCL's tuning log (src/enqueue.cc, NCCL_DEBUG_SUBSYS=TUNING); numbers before 2.24, names since."""

_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""nccl/src/include/nccl_common.h, in the order of their numbers."""

_CACHE = re.compile(r"(GPU|CPU) KV cache size: (?P<value>[\d,]+) tokens")
_DEGRADED = re.compile(
    r"Truncating max_cudagraph_capture_size|is overridden by config|is not compatible with compilation mode"
    r"|is not supported with spec-decode|skipping allreduce fusion pass|Unknown vLLM environment variable"
    r"|[Aa]sync(hronous)? scheduling (is|will be) disabled|Disabling asynchronous scheduling"
)
"""Signs that something asked for was taken back (vllm/config, vllm/compilation, vllm/distributed)."""

_GRAPH_MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL", (2, 0): "FULL_DECODE_ONLY", (2, 1): "FULL_AND_PIECEWISE"}
"""vllm/config/compilation.py, CUDAGraphMode; pairs are (decode, mixed)."""

_LEFT_OUT = re.compile(
    r"instance_id|served_model_name|hf_token|_port$|_ip$|_addr|cache_dir|debug_dump_path|torch_profiler_dir"
    r"|compilation_time|traced_files|num_gpu_blocks$|num_cpu_blocks|kv_cache_size_tokens|kv_cache_max_concurrency"
    r"|\._|^model_config\.(model|tokenizer|hf_config_path)$|profiler_config|placement_group"
)
"""Differs between two starts of the same configuration, or is a secret, or a path."""


def effective(lines: Sequence[str], server_info: Mapping[str, Any] | None) -> Effective:
    """Put together what the server told.

    Args:
        lines: Its log up to the first completion.
        server_info: ``/server_info?config_format=json``, parsed; None when it was not to be had.
    """
    config = (server_info or {}).get("vllm_config")
    settings = settings_of(config if isinstance(config, Mapping) else {})
    backends = _first(_ALL_REDUCE, lines)
    cache = _first(_CACHE, lines)
    scheduling = settings.get("scheduler_config.async_scheduling")
    return Effective(
        version=_first(_VERSION, lines),
        all_reduce=tuple(re.findall(r"\w+", backends)) if backends else None,
        graph_mode=graph_mode(settings.get("compilation_config.cudagraph_mode")),
        capture_sizes=_sizes(settings.get("compilation_config.cudagraph_capture_sizes")),
        runner=_runner(lines),
        async_scheduling=scheduling if isinstance(scheduling, bool) else None,
        nccl_version=_first(_NCCL, lines),
        nccl_choice=nccl_choice(lines),
        attention=_first(_ATTENTION, lines),
        kv_cache_tokens=int(cache.replace(",", "")) if cache else None,
        settings=settings,
        degraded=tuple(dict.fromkeys(line.strip() for line in lines if _DEGRADED.search(line))),
    )


def settings_of(config: Mapping[str, Any]) -> dict[str, FlagValue | None]:
    """The resolved configuration as dotted keys, without what differs from start to start."""
    return {key: value for key, value in _flat(config) if not _LEFT_OUT.search(key)}


def graph_mode(value: FlagValue | None) -> str | None:
    """The name of a CUDA-graph mode, which the server gives as a number or a pair."""
    key = value if not isinstance(value, tuple) else tuple(int(part) for part in value)
    if isinstance(key, str):
        return key.removeprefix("CUDAGraphMode.")
    return _GRAPH_MODES.get(key) if isinstance(key, int | tuple) else None


def nccl_choice(lines: Iterable[str]) -> dict[str, str] | None:
    """NCCL's own choice by operation and bytes, e.g. ``AllReduce 16384`` -> ``RING/LL``; None when it did not tell."""
    found = {}
    for match in filter(None, map(_NCCL_CHOICE.search, lines)):
        algorithm, protocol = _named(match["algo"], _ALGORITHMS), _named(match["proto"], _PROTOCOLS)
        found[f"{match['call']} {match['size']}"] = f"{algorithm}/{protocol}"
    return found or None


def _named(told: str, names: Sequence[str]) -> str:
    return names[int(told)] if told.isdigit() and int(told) < len(names) else told


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, FlagValue | None]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{key}.")
        elif isinstance(inner, list) and all(isinstance(item, int | str) for item in inner):
            yield key, tuple(inner)
        elif inner is None or isinstance(inner, bool | int | float | str):
            yield key, inner
        else:
            yield key, json.dumps(inner, sort_keys=True)


def _sizes(value: FlagValue | None) -> tuple[int, ...] | None:
    return tuple(int(size) for size in value) if isinstance(value, tuple) else None


def _runner(lines: Iterable[str]) -> str | None:
    found = _first(_RUNNER, lines)
    return found.upper() if found else None


def _first(pattern: re.Pattern[str], lines: Iterable[str]) -> str | None:
    for line in lines:
        if match := pattern.search(line):
            return next(group for group in match.groupdict().values() if group is not None)
    return None
