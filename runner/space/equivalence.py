"""Which configurations vLLM's own rules already tell to be the same one, so that only one of them is launched.

Only what is certain from vLLM 0.24 to 0.33 counts here. What merely is likely to change nothing is a warning.
"""

import json
from collections.abc import Callable
from typing import Any

from runner.schema.launch import LaunchConfig
from runner.space.architectures import breakable_graphs
from runner.space.defaults import defaults, same_value
from runner.space.model_facts import ModelFacts
from runner.space.settings import State, flattened
from runner.space.surroundings import (
    COVERED_VERSIONS,
    LAST_COVERED,
    Machine,
    Reading,
    Surroundings,
    Version,
    whole_numbers,
)

_COMPILE_MODES = {"0": "NONE", "1": "STOCK_TORCH_COMPILE", "2": "DYNAMO_TRACE_ONCE", "3": "VLLM_COMPILE"}
_DTYPES = {"half": "float16", "float": "float32"}
_LATER_THAN_ANY: Version = (99, 0, 0)


def equivalent_key(
    config: LaunchConfig, version: Version = COVERED_VERSIONS[1], facts: ModelFacts | None = None
) -> str:
    """A text that is equal for configurations that are the same to vLLM ``version``, and only for those.

    Args:
        config: The configuration.
        version: vLLM's.
        facts: Of the model: some architectures make more knobs inert.
    """
    state: State = {target: value for target, value, _ in flattened(config.flags, config.structured, config.env)}
    device = "gpu" if config.gpus else "cpu"
    reading = Reading(state, Surroundings(device, version, Machine(), facts=facts))
    for simplify, since, until in _SIMPLIFICATIONS:
        if since <= version <= until:
            simplify(state, reading)  # which sees what the ones before it changed
    listed = sorted(("/".join(target), _plain(value)) for target, value in state.items())
    return json.dumps([config.model, config.gpus, listed], separators=(",", ":"))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _drop(state: State, keep: Callable[[tuple[str, ...]], bool]) -> None:
    for target in [target for target in state if not keep(target)]:
        del state[target]


def _levels(state: State, config: Reading) -> None:
    """-O3 is -O2 to this day."""
    if config.flag("optimization-level") == 3:
        state["flag", "optimization-level"] = 2


def _names(state: State, config: Reading) -> None:
    mode = config.field("compilation-config", "mode")
    if mode is not None:
        state["json", "compilation-config", "mode"] = _COMPILE_MODES.get(str(mode), str(mode).upper())
    graphs = config.field("compilation-config", "cudagraph_mode")
    if graphs is not None:
        state["json", "compilation-config", "cudagraph_mode"] = str(graphs).upper()
    dtype = config.flag("dtype")
    if dtype in _DTYPES:
        state["flag", "dtype"] = _DTYPES[dtype]


def _one_place(state: State, config: Reading) -> None:
    """Capture sizes may stand in a flag or inside the compilation config; they are sorted, and each counts once."""
    for flag, key in (
        ("cudagraph-capture-sizes", "cudagraph_capture_sizes"),
        ("max-cudagraph-capture-size", "max_cudagraph_capture_size"),
    ):
        value = state.pop(("flag", flag), None)
        if value is not None:
            state["json", "compilation-config", key] = value
    target = ("json", "compilation-config", "cudagraph_capture_sizes")
    if target in state:
        sizes, limit = whole_numbers(state[target]), config.count("max-num-batched-tokens")
        if sizes is not None:
            state[target] = sorted({size for size in sizes if limit is None or size <= limit})


def _eager(state: State, config: Reading) -> None:
    """Eager wins over everything that compiles or captures."""
    if config.eager:
        _drop(state, lambda target: target[1] not in ("compilation-config", "optimization-level", "performance-mode"))


def _no_graphs(state: State, config: Reading) -> None:
    """Without graphs their sizes mean nothing."""
    if config.field("compilation-config", "cudagraph_mode") == "NONE" or config.flag("optimization-level") == 0:
        for key in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            if config.field("compilation-config", "cudagraph_mode") in (None, "NONE"):
                state.pop(("json", "compilation-config", key), None)


def _breakable(state: State, config: Reading) -> None:
    """Breakable graphs turn compilation off, whatever mode and passes are asked for."""
    if breakable_graphs(config):
        _drop(state, lambda target: target[1:2] != ("compilation-config",) or target[2] not in ("mode", "pass_config"))
        state["env", "VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"


def _downgrades(state: State, config: Reading) -> None:
    """Piecewise graphs need vLLM's own compilation, split at attention; else vLLM takes what is left of the mode.

    Source: CompilationConfig.set_splitting_ops_for_v1 and VllmConfig of vLLM 0.24 and 0.32.
    """
    graphs = config.field("compilation-config", "cudagraph_mode")
    if graphs not in ("PIECEWISE", "FULL_AND_PIECEWISE") or breakable_graphs(config):
        return
    target = ("json", "compilation-config", "cudagraph_mode")
    if config.field("compilation-config", "mode") not in (None, "VLLM_COMPILE"):
        state[target] = "NONE" if graphs == "PIECEWISE" else "FULL_DECODE_ONLY"
        return
    if config.field("compilation-config", "use_inductor_graph_partition") is True:
        return
    splits = config.field("compilation-config", "splitting_ops")
    if splits is None and config.field("compilation-config", "pass_config", "fuse_attn_quant") is True:
        state[target] = "FULL"
    elif splits == []:
        state[target] = "NONE" if graphs == "PIECEWISE" else "FULL"


def _one_device(state: State, config: Reading) -> None:
    """What steers communication means nothing where nobody communicates."""
    if config.world == 1:
        _drop(state, lambda target: not (target[0] == "env" and target[1].startswith("NCCL_")))
    if config.tensor_parallel == 1:
        inert = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_USE_NCCL_SYMM_MEM")
        allreduce = (*inert, "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "VLLM_FLASHINFER_ALLREDUCE_BACKEND")
        fusion = ("fuse_allreduce_rms", "fi_allreduce_fusion_max_size_mb")
        _drop(state, lambda t: t[1] not in (*allreduce, "disable-custom-all-reduce") and t[-1] not in fusion)
    if config.pipeline_parallel == 1:
        state.pop(("env", "VLLM_PP_LAYER_PARTITION"), None)


def _point_to_point(state: State, config: Reading) -> None:
    """NCCL_P2P_DISABLE wins over the level."""
    if config.env("NCCL_P2P_DISABLE") == "1":
        state.pop(("env", "NCCL_P2P_LEVEL"), None)


def _lookup_window(state: State, config: Reading) -> None:
    """N-gram lookup: one end given, the other equals it; none given, both are 5."""
    if config.speculative_method in ("ngram", "ngram_gpu"):
        low = config.field("speculative-config", "prompt_lookup_min")
        high = config.field("speculative-config", "prompt_lookup_max")
        state["json", "speculative-config", "prompt_lookup_min"] = low or high or 5
        state["json", "speculative-config", "prompt_lookup_max"] = high or low or 5


def _defaults(state: State, config: Reading) -> None:
    for target, value in defaults(config.around.version).items():
        if target in state and same_value(state[target], value):
            del state[target]


_Simplification = tuple[Callable[[State, Reading], None], Version, Version]

_SIMPLIFICATIONS: tuple[_Simplification, ...] = (
    (_names, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_levels, COVERED_VERSIONS[0], LAST_COVERED),
    (_one_place, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_breakable, COVERED_VERSIONS[0], LAST_COVERED),
    (_downgrades, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_no_graphs, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_eager, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_one_device, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_point_to_point, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_lookup_window, COVERED_VERSIONS[0], _LATER_THAN_ANY),
    (_defaults, COVERED_VERSIONS[0], LAST_COVERED),
)
