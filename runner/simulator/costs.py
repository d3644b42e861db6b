"""The cost model: how long one engine step takes on a described node. Pure; seconds in, seconds out.

First principles, each with few parameters that stand in the node's and the model's YAML beside their source:

* matrix work is a smooth roofline: bytes of weights over memory bandwidth, and floating-point operations over
  throughput, joined as ``sqrt(memory^2 + compute^2)``. Under tensor parallelism each GPU holds its share;
* a mixture of experts reads the experts its tokens hit: ``E (1 - (1 - k/E)^tokens)`` of E on average for uniform
  routing. Padded tokens of a graph are routed too. With whole experts on each GPU the fullest one is waited for (the
  largest of n Poisson numbers of mean m is about ``m + sqrt(2 m ln n)``);
* attention reads the KV cache of the running requests;
* every kernel costs its place in the graph (replay), or a launch from the host (eager): then the step lasts as long as
  the longer of host and GPU. The host does not launch past a collective that is still running, so what of it exceeds
  one launch shows;
* two all-reduces a layer plus one of the embedding, ``base + hops x hop + bytes 2(n-1)/n / bandwidth`` each; NCCL's LL
  protocol has short hops and half the bandwidth, Simple long hops and all of it. Bandwidth is the smaller of what the
  channels and what the link carry (joined smoothly);
* a batch larger than the largest captured graph runs without one;
* pipeline stages hold a part of the layers each and pass the activations on.

What it does not know: cache effects, clock changes, unbalanced experts, sequence-length effects of attention kernels.

Sources: the LL/LL128/Simple description in NCCL's documentation and tuning model (latency + bytes / bandwidth);
per-node calibration in ``experiments/nodes``; ``runner/simulator/calibration.py`` holds the measured figures.
"""

from dataclasses import dataclass
from math import hypot, log, sqrt

from runner.schema.node import Path, SimulatedModel, SimulatedNode
from runner.simulator.launch import Launch

ACTIVATION_BYTES = 2
"""bf16 activations and KV cache."""
FIXED_KERNELS = 20
"""Embedding, final norm, logits and sampler: kernels of a step outside its layers."""
PIECEWISE_LAUNCHES = 2
"""Host launches a layer with piecewise graphs: one graph piece, one attention call."""
LAUNCH_SKEW = 0.5
"""Without a graph ranks launch each all-reduce by themselves, so it waits for the latest: half a launch (an estimate;
127-135 us were profiled eager where 114 explain the step with graphs)."""
FULL_THREADS = 256
"""Threads of a channel beyond which more change nothing (512 against the default: no difference on two H200); below,
a channel is taken to move less by the square root (a guess: half the threads still overlap most of the copying)."""
P2P_SEND_US = 20.0
"""Handing the activations to the next pipeline stage, latency. An estimate; PP=2 on two H200 fits within 7 %."""


@dataclass(frozen=True)
class Batch:
    """What one step works on.

    Attributes:
        requests: Requests scheduled.
        tokens: Tokens scheduled, drafts included.
        decode_only: Whether each request has exactly one query of the uniform decode length.
        context_tokens: KV-cache tokens read, summed over requests.
        drafted: Requests for which drafts are made in this step.
    """

    requests: int
    tokens: int
    decode_only: bool
    context_tokens: int
    drafted: int = 0


@dataclass(frozen=True)
class StepTime:
    """Durations of one step, in seconds.

    Attributes:
        stages_s: GPU (or launch-bound worker) time of each pipeline stage.
        launch_s: Time of all stages' workers that the host needs to launch kernels.
        host_s: Scheduling and output handling in the engine process; async scheduling hides it behind the GPU.
        all_reduce_s: All-reduces within the whole step, for the share of the step.
        graph: ``FULL``, ``PIECEWISE`` or ``NONE``.
    """

    stages_s: tuple[float, ...]
    launch_s: float
    host_s: float
    all_reduce_s: float
    graph: str


def step_time(launch: Launch, node: SimulatedNode, model: SimulatedModel, batch: Batch) -> StepTime:
    """How long ``batch`` takes with this launch configuration."""
    graph, tokens = graph_of(launch, batch)
    late_s = node.host.launch_us * LAUNCH_SKEW * 1e-6 if graph == "NONE" else 0.0
    one_reduce_s = all_reduce_s(launch, node, tokens * model.hidden * ACTIVATION_BYTES) + late_s
    reduce_s = all_reduces(launch, model) * one_reduce_s
    body_s = gpu_compute_s(launch, node, model, tokens, batch.context_tokens) + reduce_s
    head_s = _head_s(launch, node, model, tokens) + draft_s(launch, node, model, batch)
    launch_s = launches(launch, model, graph) * node.host.launch_us * 1e-6
    if graph == "NONE":
        shown_s = max(0.0, one_reduce_s - late_s - node.host.launch_us * 1e-6)
        launch_s += all_reduces(launch, model) * shown_s
    hand_over_s = 0.0 if launch.pipeline_parallel == 1 else P2P_SEND_US * 1e-6
    shares = stage_shares(launch, model)
    gpu_s = [body_s * share for share in shares[:-1]] + [body_s * shares[-1] + head_s]
    return StepTime(
        stages_s=tuple(
            max(on_gpu, launch_s * share) + hand_over_s for on_gpu, share in zip(gpu_s, shares, strict=True)
        ),
        launch_s=launch_s,
        host_s=host_s(launch, node, batch),
        all_reduce_s=reduce_s,
        graph=graph,
    )


def stage_shares(launch: Launch, model: SimulatedModel) -> list[float]:
    """Each pipeline stage's share of the layers."""
    layers = launch.layer_partition or (model.layers / launch.pipeline_parallel,) * launch.pipeline_parallel
    return [count / model.layers for count in layers]


def graph_of(launch: Launch, batch: Batch) -> tuple[str, int]:
    """The graph a batch replays, and the tokens it is padded to."""
    fitting = [size for size in launch.capture_sizes if size >= batch.tokens]
    if launch.graph_mode == "NONE" or not fitting:
        return "NONE", batch.tokens
    full = launch.graph_mode == "FULL" or (batch.decode_only and launch.graph_mode.startswith("FULL"))
    if full:
        return "FULL", min(fitting)
    return ("NONE", batch.tokens) if launch.graph_mode == "FULL_DECODE_ONLY" else ("PIECEWISE", min(fitting))


def launches(launch: Launch, model: SimulatedModel, graph: str) -> int:
    """Kernels (or graph pieces) the host launches in one step."""
    if graph == "FULL":
        return 1
    if graph == "PIECEWISE":
        return model.layers * PIECEWISE_LAUNCHES + FIXED_KERNELS
    return model.layers * model.kernels_per_layer + all_reduces(launch, model) + FIXED_KERNELS


def host_s(launch: Launch, node: SimulatedNode, batch: Batch) -> float:
    """Engine-process time of a step; CPU n-gram drafting costs as much again per drafted request."""
    own = node.host.step_ms * 1e-3 + batch.requests * node.host.request_us * 1e-6
    if launch.draft_method != "ngram" or not batch.drafted:
        return own
    return own + node.host.step_ms * 1e-3 + batch.drafted * node.host.request_us * 1e-6


def gpu_compute_s(
    launch: Launch, node: SimulatedNode, model: SimulatedModel, tokens: int, context_tokens: int
) -> float:
    """Kernels, matrix work and KV reads of all layers on one GPU's share (all pipeline stages together)."""
    share = 1.0 / launch.tensor_parallel
    kernels_s = model.layers * model.kernels_per_layer * node.gpu.graph_kernel_us * 1e-6
    kv_s = context_tokens * kv_bytes_per_token(model) * kv_share(launch, model) / (node.gpu.bandwidth_gb_s * 1e9)
    dense_s = _dense_s(node, model, dense_weights(model), tokens)
    return kernels_s + (dense_s + _experts_s(launch, node, model, tokens)) * share + kv_s


def _head_s(launch: Launch, node: SimulatedNode, model: SimulatedModel, tokens: int) -> float:
    """What only the last pipeline stage does: final norm, logits and sampling."""
    logits_s = _dense_s(node, model, model.hidden * model.vocabulary, tokens) / launch.tensor_parallel
    return logits_s + FIXED_KERNELS * node.gpu.graph_kernel_us * 1e-6


def _roofline(node: SimulatedNode, weight_bytes: float, flop: float, bandwidth: float, throughput: float) -> float:
    memory_s = weight_bytes / (node.gpu.bandwidth_gb_s * 1e9 * bandwidth)
    compute_s = flop / (node.gpu.tflops * 1e12 * throughput)
    return hypot(memory_s, compute_s)


def _dense_s(node: SimulatedNode, model: SimulatedModel, weights: float, tokens: int) -> float:
    return _roofline(
        node,
        weights * model.weight_bits / 8,
        2.0 * weights * tokens,
        model.bandwidth_efficiency,
        model.compute_efficiency,
    )


def _experts_s(launch: Launch, node: SimulatedNode, model: SimulatedModel, tokens: int) -> float:
    """All experts hit, read and multiplied by one GPU; whole experts a GPU wait for the one with the most hits."""
    experts = model.experts
    if experts is None:
        return 0.0
    expert_weights = 3.0 * model.hidden * experts.intermediate * (model.layers - experts.dense_layers)
    hit = experts.total * (1.0 - (1.0 - experts.active / experts.total) ** tokens)
    uneven = 1.0
    if launch.expert_parallel and launch.tensor_parallel > 1:
        uneven += sqrt(2.0 * log(launch.tensor_parallel) * launch.tensor_parallel / hit)
    return uneven * _roofline(
        node,
        hit * expert_weights * model.weight_bits / 8,
        2.0 * expert_weights * experts.active * tokens,
        experts.bandwidth_efficiency,
        experts.compute_efficiency,
    )


def dense_weights(model: SimulatedModel) -> float:
    """Weights every token uses, without embedding, logits and routed experts."""
    attention = model.attention_weights or model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    experts = model.experts
    if experts is None:
        return model.layers * (attention + 3.0 * model.hidden * model.intermediate)
    shared = 3.0 * model.hidden * experts.intermediate * experts.shared * (model.layers - experts.dense_layers)
    return model.layers * attention + experts.dense_layers * 3.0 * model.hidden * model.intermediate + shared


def total_weights(model: SimulatedModel) -> float:
    """All weights of the model."""
    routed = 0.0
    if model.experts is not None:
        layers = model.layers - model.experts.dense_layers
        routed = 3.0 * model.hidden * model.experts.intermediate * model.experts.total * layers
    tables = 1 if model.tied_embeddings else 2
    return dense_weights(model) + routed + tables * model.hidden * model.vocabulary


def kv_bytes_per_token(model: SimulatedModel) -> float:
    """KV-cache bytes of one token over all layers."""
    return model.layers * (model.latent_kv or 2 * model.kv_heads * model.head_dim) * ACTIVATION_BYTES


def kv_share(launch: Launch, model: SimulatedModel) -> float:
    """Share of a token's KV cache on one GPU of a stage; a latent cache is not split, few heads are repeated."""
    return 1.0 if model.latent_kv else 1.0 / min(launch.tensor_parallel, model.kv_heads)


def draft_s(launch: Launch, node: SimulatedNode, model: SimulatedModel, batch: Batch) -> float:
    """GPU time of drafting: MTP runs one more layer and the logits per draft token; n-gram lookup is nearly free."""
    if launch.draft_method != "mtp" or not batch.drafted:
        return 0.0
    one_layer = gpu_compute_s(launch, node, model, batch.drafted, 0) / model.layers
    logits = model.hidden * model.vocabulary * model.weight_bits / 8 / (node.gpu.bandwidth_gb_s * 1e9)
    reduce_s = 3 * all_reduce_s(launch, node, batch.drafted * model.hidden * ACTIVATION_BYTES)
    return launch.draft_tokens * (one_layer + logits / launch.tensor_parallel + reduce_s)


def all_reduces(launch: Launch, model: SimulatedModel) -> int:
    """All-reduces of one step: two a layer and the vocabulary-parallel embedding (counted in vLLM's source)."""
    return 0 if launch.tensor_parallel == 1 else 2 * model.layers + 1


def all_reduce_s(launch: Launch, node: SimulatedNode, message_bytes: float) -> float:
    """One all-reduce of ``message_bytes`` per rank inside a model step."""
    if launch.tensor_parallel == 1:
        return 0.0
    own = node.one_shot
    if launch.custom_all_reduce and own is not None and message_bytes <= own.up_to_mib * 2**20:
        return own.base_us * 1e-6 + message_bytes / (own.bandwidth_gb_s * 1e9)
    path = launch.nccl.path(node)
    protocol = launch.nccl.protocol(path, message_bytes)
    channels = launch.nccl.channels(path) * min(1.0, sqrt((launch.nccl.threads or FULL_THREADS) / FULL_THREADS))
    in_loop = nccl_s(path, protocol, launch.tensor_parallel, message_bytes, channels, tree(launch))
    return in_loop + path.protocols[protocol].skew_us * 1e-6


def tree(launch: Launch) -> bool:
    """Whether all-reduces are forced onto NCCL's tree."""
    return launch.nccl.algorithms == ("Tree",)


def nccl_s(
    path: Path, protocol: str, ranks: int, message_bytes: float, channels: float, on_tree: bool = False
) -> float:
    """One NCCL all-reduce in a tight loop of graph replays.

    Within one node NCCL's tree is a chain: as many hops as the ring, a fifth slower each, and the data goes up and
    down in full, so LL pays each byte twice there (measured on two H200: 0.23 against 0.11 us per KB).
    """
    cost = next(value for name, value in path.protocols.items() if name == protocol)
    wire_bytes = message_bytes * 2.0 * (ranks - 1) / ranks
    per_byte = _either(1.0 / (channels * cost.channel_gb_s), 1.0 / (path.bandwidth_gb_s * cost.efficiency)) * 1e-9
    latency_s = (cost.base_us + 2 * (ranks - 1) * cost.hop_us) * 1e-6
    if on_tree:
        latency_s *= 1.2
        per_byte *= 2.0 if protocol == "LL" else 1.0
    return latency_s + wire_bytes * per_byte


def _either(first: float, second: float) -> float:
    """The larger of two inverse bandwidths with a soft corner (cubic norm)."""
    return float((first**3 + second**3) ** (1 / 3))
