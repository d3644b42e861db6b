"""What the simulated engine is told about hardware and model (``experiments/nodes``, ``experiments/models``).

Nothing here is ever measured by this package; each YAML file says where its numbers come from.
"""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from runner.schema.base import Model

NcclProtocol = Literal["LL", "LL128", "Simple"]
P2pLevel = Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"]


class Gpu(Model):
    """One GPU.

    Attributes:
        name: As the driver prints it.
        capability: CUDA compute capability, e.g. ``9.0``.
        memory_gib: What a process may allocate.
        bandwidth_gb_s: Peak memory bandwidth, 10^9 bytes a second.
        tflops: Peak dense bf16 matrix throughput.
        graph_kernel_us: Time a small kernel takes inside a replayed CUDA graph, launch gap included.
    """

    name: str
    capability: str
    memory_gib: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    tflops: PositiveFloat
    graph_kernel_us: PositiveFloat


class Host(Model):
    """The CPU side of a step and of a request.

    Attributes:
        launch_us: One kernel launch from Python without a graph.
        step_ms: Scheduling, input preparation and output handling of one step.
        request_us: The same per running request.
        first_step_ms: Latency of a request outside the engine's steps (HTTP, queues, waking up); occupies no core.
        api_request_ms: API-server CPU time to take one request in.
        api_token_us: API-server CPU time per token (detokenising).
        api_chunk_us: API-server CPU time per streamed chunk (serialising, sending).
        api_backlog: Relative extra time per token while output messages queue up in front of the API server.
    """

    launch_us: PositiveFloat
    step_ms: NonNegativeFloat
    request_us: NonNegativeFloat
    first_step_ms: NonNegativeFloat
    api_request_ms: NonNegativeFloat
    api_token_us: NonNegativeFloat
    api_chunk_us: NonNegativeFloat
    api_backlog: NonNegativeFloat = 0.0


class ProtocolCost(Model):
    """What one NCCL protocol costs on one path: ``base + hops x hop + wire bytes / bandwidth``.

    Attributes:
        base_us: Fixed cost of a call in a tight loop of graph replays.
        hop_us: Per hop; an all-reduce over n GPUs makes 2 (n - 1) of them, ring or (within one node) tree.
        skew_us: What a call inside a model costs beyond the tight loop: ranks arrive apart, kernels start late.
        channel_gb_s: Payload one channel moves.
        efficiency: Payload share of the path's bandwidth (LL sends a flag with each 4 bytes: about one half).
    """

    base_us: NonNegativeFloat
    hop_us: NonNegativeFloat
    skew_us: NonNegativeFloat = 0.0
    channel_gb_s: PositiveFloat
    efficiency: float = Field(gt=0, le=1)


class Pick(Model):
    """NCCL's own choice when nothing is forced: ``protocol`` up to ``up_to_kib`` per rank (None: any size)."""

    protocol: NcclProtocol
    up_to_kib: PositiveInt | None = None


class Path(Model):
    """One way between the GPUs as NCCL drives it.

    Attributes:
        bandwidth_gb_s: What a ring moves per direction at large messages with protocol Simple.
        channels: Channels NCCL opens when nothing is set.
        picks: Its own protocol choice by size, in rising order.
    """

    bandwidth_gb_s: PositiveFloat
    channels: PositiveInt
    protocols: dict[NcclProtocol, ProtocolCost]
    picks: tuple[Pick, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if set(self.protocols) != {"LL", "LL128", "Simple"}:
            raise ValueError("give the cost of each protocol: LL, LL128, Simple")
        if not self.picks or self.picks[-1].up_to_kib is not None:
            raise ValueError("the last pick must have no `up_to_kib`: it is for all larger messages")
        return self


class OneShot(Model):
    """vLLM's own all-reduce over peer memory: ``base + bytes / bandwidth`` up to a size."""

    base_us: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    up_to_mib: PositiveFloat = 8.0


class Noise(Model):
    """Relative spread (one standard deviation, log-normal) between server starts, and slow drift.

    Attributes:
        start: Of the step time, one draw a start.
        api_start: Of the API server's speed, one draw a start.
        step: Of single steps.
        drift_per_hour: Relative growth of the step time with the node's age.
    """

    start: float = Field(default=0.007, ge=0)
    api_start: float = Field(default=0.07, ge=0)
    step: float = Field(default=0.01, ge=0)
    drift_per_hour: float = 0.0


class SimulatedNode(Model):
    """A described machine with GPUs.

    Attributes:
        link: What connects the GPUs; with PCIe, ``pcie_generation`` and ``pcie_lanes`` are for the reader.
        p2p_needs: The ``NCCL_P2P_LEVEL`` that the farthest hop of the ring needs.
        p2p: NCCL's path when peer access is allowed; None where the machine has none.
        shm: Its path through host memory (no peer access, or ``NCCL_P2P_DISABLE=1``).
        one_shot: vLLM's custom all-reduce where it works.
        flashinfer: Whether FlashInfer's all-reduce and its fusion with RMSNorm work here.
    """

    name: str
    source: str
    gpus: PositiveInt
    gpu: Gpu
    host: Host
    link: Literal["pcie", "nvlink"]
    pcie_generation: PositiveInt = 5
    pcie_lanes: PositiveInt = 16
    p2p_needs: P2pLevel = "SYS"
    p2p: Path | None = None
    shm: Path
    one_shot: OneShot | None = None
    flashinfer: bool = False
    noise: Noise = Noise()


class Experts(Model):
    """A mixture of experts.

    Attributes:
        total: Routed experts of a layer.
        active: Routed experts a token uses.
        intermediate: Width of one expert.
        shared: Experts each token uses besides.
        dense_layers: Layers at the front that are not mixtures.
        bandwidth_efficiency: Share of the peak memory bandwidth that the expert kernels reach.
        compute_efficiency: Share of the peak matrix throughput that they reach.
    """

    total: PositiveInt
    active: PositiveInt
    intermediate: PositiveInt
    shared: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0)
    bandwidth_efficiency: float = Field(gt=0, le=1)
    compute_efficiency: float = Field(gt=0, le=1)


class Acceptance(Model):
    """Chance that the i-th draft token is accepted given the ones before it were.

    Attributes:
        first: For the first draft token.
        decay: Factor per further position.
        repetitive: Added to ``first`` in proportion to how repetitive the prompt is (0..1).
    """

    first: float = Field(ge=0, le=1)
    decay: float = Field(gt=0, le=1)
    repetitive: float = Field(default=0.0, ge=0, le=1)


class SimulatedModel(Model):
    """A described model.

    Attributes:
        weight_bits: Bits per weight, scales included.
        kernels_per_layer: Kernels of one layer in one step without the all-reduces.
        latent_kv: Values per token and layer of a latent (MLA) KV cache; None: 2 x kv_heads x head_dim.
        bandwidth_efficiency: Share of the peak memory bandwidth that dense kernels reach.
        compute_efficiency: Share of the peak matrix throughput that dense kernels reach.
        ngram: Acceptance of n-gram drafts.
        mtp: Acceptance of the model's own draft layer; None: it has none.
    """

    name: str
    source: str = ""
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate: PositiveInt
    vocabulary: PositiveInt
    tied_embeddings: bool = False
    max_model_len: PositiveInt = 40960
    weight_bits: PositiveFloat = 16.0
    kernels_per_layer: PositiveInt = 12
    attention_weights: PositiveInt | None = None
    latent_kv: PositiveInt | None = None
    experts: Experts | None = None
    bandwidth_efficiency: float = Field(default=0.92, gt=0, le=1)
    compute_efficiency: float = Field(default=0.5, gt=0, le=1)
    ngram: Acceptance = Acceptance(first=0.25, decay=0.8, repetitive=0.6)
    mtp: Acceptance | None = None
