"""What vLLM or NCCL refuse, crash on or hang on, found without a launch. Each rule with the versions it holds for.

A rule looks at a configuration through ``Reading`` and gives the reason why it cannot run, or None. Single values
are checked in ``values``; what merely changes nothing is in ``equivalence``.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runner.space import speculation_rules as speculation
from runner.space.allreduce import fuses_across_stages, fuses_allreduce, uses_flashinfer
from runner.space.collectives import allreduce_algorithms, allreduce_protocols
from runner.space.model_facts import GIB
from runner.space.settings import Target
from runner.space.surroundings import COVERED_VERSIONS, Machine, Reading, Surroundings, Version, whole_numbers

Reason = str | None

_UTILISATION = 0.92
"""``--gpu-memory-utilization`` of vLLM 0.24 to 0.33 where nobody sets it."""

_MEMORY_BESIDE_WEIGHTS = 0.98
"""Share of a GPU's memory that weights could fill at the very most; beyond it nothing could run."""


@dataclass(frozen=True)
class Rule:
    """A check and the first and last version of vLLM that it holds for.

    Attributes:
        final: What breaks it breaks it whatever else is set, on every node and with every model.
    """

    check: Callable[[Reading], Reason]
    since: Version = COVERED_VERSIONS[0]
    until: Version = (99, 0, 0)
    final: bool = False


def broken_rules(config: Reading) -> Iterator[str]:
    """The reason of each rule that ``config`` breaks."""
    for rule in RULES:
        if rule.since <= config.around.version <= rule.until:
            reason = rule.check(config)
            if reason is not None:
                yield reason


def contradiction(settings: Mapping[Target, Any]) -> Reason:
    """Why ``settings`` can never hold together, whatever else is set; None when they may."""
    config = Reading(settings, Surroundings("gpu", COVERED_VERSIONS[1], Machine()))
    reasons = (rule.check(config) for rule in RULES if rule.final)
    return next((reason for reason in reasons if reason is not None), None)


def _gpus(config: Reading) -> Reason:
    gpus = config.around.gpus
    if config.around.device != "gpu" or gpus is None or config.world <= gpus:
        return None
    return f"TP x PP x DP takes {config.world} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"


def _heads(config: Reading) -> Reason:
    facts, tp = config.around.facts, config.tensor_parallel
    if facts is None or facts.heads % tp == 0:
        return None
    return f"attention heads ({facts.heads}) must be divisible by tensor parallel size ({tp})"


def _kv_heads(config: Reading) -> Reason:
    facts, tp = config.around.facts, config.tensor_parallel
    if facts is None or facts.kv_heads % tp == 0 or tp % facts.kv_heads == 0:
        return None
    return f"KV heads ({facts.kv_heads}) and tensor parallel size ({tp}) do not divide each other"


def _intermediate(config: Reading) -> Reason:
    facts, tp = config.around.facts, config.tensor_parallel
    width = facts and facts.intermediate
    return (
        f"the feed-forward width ({width}) must be divisible by tensor parallel size ({tp})"
        if width and width % tp
        else None
    )


def _stages(config: Reading) -> Reason:
    facts, pp = config.around.facts, config.pipeline_parallel
    if facts is None or pp <= facts.layers:
        return None
    return f"pipeline parallel size ({pp}) exceeds the layers ({facts.layers})"


def _layer_partition(config: Reading) -> Reason:
    partition, pp = config.env("VLLM_PP_LAYER_PARTITION"), config.pipeline_parallel
    if partition is None or pp == 1 or not re.fullmatch(r"\d+(,\d+)*", partition):
        return None
    counts = [int(part) for part in partition.split(",")]
    if len(counts) != pp:
        return f"VLLM_PP_LAYER_PARTITION names {len(counts)} stages, pipeline parallel size is {pp}"
    facts = config.around.facts
    if facts is not None and sum(counts) != facts.layers:
        return f"VLLM_PP_LAYER_PARTITION sums to {sum(counts)} layers, the model has {facts.layers}"
    return None


def _weights_fit(config: Reading) -> Reason:
    facts, memory = config.around.facts, config.around.machine.gpu_memory_gib
    if facts is None or memory is None or config.around.device != "gpu":
        return None
    share = facts.weight_bytes / (config.tensor_parallel * config.pipeline_parallel) / GIB
    asked = config.flag("gpu-memory-utilization")
    usable = memory * min(_MEMORY_BESIDE_WEIGHTS, asked if isinstance(asked, int | float) else _UTILISATION)
    if share <= usable:
        return None
    return f"weights take {share:.1f} GiB of each GPU, usable are {usable:.1f} GiB"


def _experts(config: Reading) -> Reason:
    facts = config.around.facts
    if config.flag("enable-expert-parallel") is True and facts is not None and not facts.experts:
        return "expert parallelism needs a mixture-of-experts model"
    return None


def _context_parallel(config: Reading) -> Reason:
    size = config.count("decode-context-parallel-size") or 1
    if config.tensor_parallel % size:
        return f"decode context parallel size ({size}) must divide tensor parallel size ({config.tensor_parallel})"
    return None


def _batched_tokens(config: Reading) -> Reason:
    tokens = config.count("max-num-batched-tokens")
    if tokens is None:
        return None
    seqs = config.max_seqs
    if seqs is not None and tokens < seqs:
        return f"max-num-batched-tokens ({tokens}) is below max-num-seqs ({seqs})"
    length = config.count("max-model-len")
    if config.flag("enable-chunked-prefill") is False and length is not None and tokens < length:
        return f"without chunked prefill max-num-batched-tokens ({tokens}) must reach max-model-len ({length})"
    if config.draft_tokens and tokens <= config.draft_tokens + 1:
        return f"max-num-batched-tokens ({tokens}) has no slots for {config.draft_tokens} draft tokens"
    return None


def _active_seqs(config: Reading) -> Reason:
    active, seqs = config.count("max-num-active-seqs"), config.max_seqs
    if active is None or seqs is None or active <= seqs:
        return None
    return f"max-num-active-seqs ({active}) is above max-num-seqs ({seqs})"


def _capture_lists(config: Reading) -> Reason:
    inner = config.field("compilation-config", "cudagraph_capture_sizes")
    outer = config.flag("cudagraph-capture-sizes")
    if inner is not None and outer is not None:
        return "capture sizes are given both as a flag and inside compilation-config: mutually exclusive"
    inner_max = config.count("compilation-config", "max_cudagraph_capture_size")
    outer_max = config.count("max-cudagraph-capture-size")
    if inner_max is not None and outer_max is not None:
        return "the largest capture size is given both as a flag and inside compilation-config: mutually exclusive"
    if config.eager:
        return None
    largest = inner_max or outer_max
    if inner is None and outer is None:
        return _bare_maximum(config, largest)
    listed = whole_numbers(inner if inner is not None else outer)
    return None if listed is None else _sizes_reason(config, listed, largest)


def _sizes_reason(config: Reading, listed: list[int], largest: int | None) -> Reason:
    mode = str(config.field("compilation-config", "cudagraph_mode") or "").upper()
    if not listed:
        return None if mode == "NONE" else "the list of capture sizes is empty while graphs are on"
    limit = config.batched_tokens
    kept = [size for size in listed if limit is None or size <= limit]
    if largest is not None and kept and largest != max(kept):
        return f"the largest capture size is said to be {largest}, the list's own is {max(kept)}"
    lengths = [1 + draft_tokens for _, _, draft_tokens in config.draft_tiers]
    off = [size for size in listed if all(size % length for length in lengths)]
    if off:
        shown = " or ".join(map(str, lengths))
        return f"capture size {off[0]} is no multiple of 1 + draft tokens ({shown}): illegal memory access"
    return None


def _bare_maximum(config: Reading, largest: int | None) -> Reason:
    """vLLM makes its own list up to a maximum, and takes the list's last size for it.

    Source: VllmConfig._set_cudagraph_sizes of vLLM 0.24 and 0.32.
    """
    if largest is None:
        return None
    dense = config.flag("performance-mode") == "interactivity"
    own = {*range(1, 33)} if dense else {1, 2, 4}
    own |= {*range(8, 256, 8), *range(256, largest + 1, 16), config.batched_tokens or 1}
    reached = max(size for size in own if size <= largest)
    if reached != largest:
        return f"a bare largest capture size of {largest} is truncated to {reached}: give the sizes themselves"
    off = largest % (1 + config.draft_tokens)
    return f"the largest capture size ({largest}) is no multiple of 1 + draft tokens: give the sizes" if off else None


def _fusion_across_stages(config: Reading) -> Reason:
    """Asked for, it is refused. On by itself it depends on the GPU whether it is: that is a warning of ``advice``."""
    asked = config.field("compilation-config", "pass_config", "fuse_allreduce_rms")
    if asked is True and fuses_across_stages(config):
        return "all-reduce fusion with TP and PP both above 1 hangs at warm-up"
    return None


def _sequence_passes(config: Reading) -> Reason:
    for key in ("enable_sp", "fuse_gemm_comms"):
        if config.field("compilation-config", "pass_config", key) is not None:
            return f"compilation-config.pass_config.{key} is gone from this vLLM: refused at start"
    return None


def _channels(config: Reading) -> Reason:
    pairs = [
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
        ("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"),
    ]
    for low, high in pairs:
        least, most = config.number(low), config.number(high)
        if least is not None and most is not None and least > most:
            return f"{low} ({least}) is above {high} ({most})"
    ctas = config.set_among([("env", name) for name in pairs[1]])
    channels = config.set_among([("env", name) for name in pairs[0]])
    if ctas and channels:
        return f"{ctas[0][1]} and {channels[0][1]} steer the same thing: use one pair"
    return None


def _algorithm_protocol(config: Reading) -> Reason:
    algorithm, protocol = config.env("NCCL_ALGO"), config.env("NCCL_PROTO")
    algorithms, protocols = allreduce_algorithms(algorithm), allreduce_protocols(protocol)
    if algorithm is None or algorithms != ["nvls"]:
        return None
    if "simple" not in protocols:
        return f"NVLS speaks Simple only, NCCL_PROTO={protocol} forbids it: no algorithm is left"
    if config.env("NCCL_NVLS_ENABLE") == "0" or config.around.machine.protected.get("NCCL_NVLS_ENABLE") == "0":
        return "NVLS is switched off (NCCL_NVLS_ENABLE=0): no algorithm is left for all-reduce"
    if config.env("NCCL_CUMEM_ENABLE") == "0":
        return "NVLS needs NCCL_CUMEM_ENABLE, which is 0"
    return None


def _multicast(config: Reading) -> Reason:
    """FlashInfer's all-reduce makes its own NVLink multicast memory, which no protective variable keeps it from.

    Source: flashinfer_all_reduce of vLLM 0.24 and 0.32: its backend ``mnnvl``, the first choice on one node.
    """
    around = config.around
    if not around.machine.protected or around.simulated or around.device == "cpu" or config.tensor_parallel == 1:
        return None
    if not fuses_allreduce(config) and not uses_flashinfer(config):
        return None
    return (
        "this host switches NVLink multicast off to protect itself and others, and FlashInfer's all-reduce would use "
        "it: set VLLM_ALLREDUCE_USE_FLASHINFER=0 and compilation-config.pass_config.fuse_allreduce_rms: false"
    )


def _batch_invariant(config: Reading) -> Reason:
    if config.env("VLLM_BATCH_INVARIANT") != "1":
        return None
    names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NVLS_ENABLE")
    clash = config.set_among([("env", name) for name in names])
    return f"VLLM_BATCH_INVARIANT=1 overrides {clash[0][1]} by itself" if clash else None


RULES: tuple[Rule, ...] = (
    Rule(_gpus),
    Rule(_heads),
    Rule(_kv_heads),
    Rule(_intermediate),
    Rule(_stages),
    Rule(_layer_partition),
    Rule(_weights_fit),
    Rule(_experts),
    Rule(_context_parallel),
    Rule(_batched_tokens, final=True),
    Rule(_active_seqs, final=True),
    Rule(_capture_lists),
    Rule(_fusion_across_stages),
    Rule(_sequence_passes, since=(0, 32, 0)),
    Rule(_channels, final=True),
    Rule(_algorithm_protocol, final=True),
    Rule(_multicast),
    Rule(_batch_invariant, final=True),
    Rule(speculation.draft_length),
    Rule(speculation.draft_source),
    Rule(speculation.lookup_window, final=True),
    Rule(speculation.draft_parallel),
    Rule(speculation.synthetic_acceptance),
    Rule(speculation.said_twice, final=True),
    Rule(speculation.adaptive_verification),
    Rule(speculation.async_without_gpu_drafts, until=(0, 32, 99)),
    Rule(speculation.async_on_old_runner, since=(0, 32, 0)),
)
