"""A launch configuration as the server resolved it: what the cost model and the scheduler work from."""

from dataclasses import dataclass, field

from runner.simulator.nccl import Nccl

BLOCK_SIZE = 16
"""Tokens of a KV-cache block, vLLM's default on CUDA."""


class Refused(Exception):
    """The server does not start.

    Args:
        message: As vLLM prints it, exception type first.
        where: Phase in which vLLM finds out: ``config`` (API server), ``worker`` (communicator), ``weights``,
            ``profile`` or ``capture``.
    """

    def __init__(self, message: str, where: str = "config") -> None:
        super().__init__(message)
        self.message = message
        self.where = where


@dataclass(frozen=True)
class Launch:
    """Flags, environment, node and model put together. Sizes in tokens unless said otherwise.

    Attributes:
        graph_mode: ``NONE``, ``PIECEWISE``, ``FULL``, ``FULL_DECODE_ONLY`` or ``FULL_AND_PIECEWISE``.
        capture_sizes: Token counts with a captured graph, rising.
        all_reduce: Active all-reduce backends in dispatch order, in vLLM's names.
        expert_parallel: Whether GPUs hold whole experts instead of slices of each.
        layer_partition: Layers of each pipeline stage; empty: as equal as can be.
        draft_method: ``ngram``, ``ngram_gpu``, ``mtp`` or None.
        draft_tokens: Draft tokens a step; 0 without speculation.
        lookup: Shortest and longest n-gram looked for; the model of acceptance does not know them.
        drafts_by_batch: ``(from, to, draft tokens)`` by running requests; empty: always ``draft_tokens``.
        synthetic_acceptance: Chance of each draft position when acceptance is synthetic, else None.
        runner: Model runner, ``V1`` or ``V2``.
        kv_cache_tokens: Size of the KV cache.
        weights_gib: Weights on one GPU.
        graphs_gib: Memory of the captured graphs on one GPU.
        cache_gib: KV cache on one GPU.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    block_size: int = BLOCK_SIZE
    prefix_caching: bool = True
    chunked_prefill: bool = True
    async_scheduling: bool = True
    stream_interval: int = 1
    api_servers: int = 1
    compiles: bool = True
    graph_mode: str = "FULL_AND_PIECEWISE"
    capture_sizes: tuple[int, ...] = ()
    all_reduce: tuple[str, ...] = ()
    nccl: Nccl = field(default_factory=Nccl)
    expert_parallel: bool = False
    layer_partition: tuple[int, ...] = ()
    draft_method: str | None = None
    draft_tokens: int = 0
    lookup: tuple[int, int] | None = None
    drafts_by_batch: tuple[tuple[int, int, int], ...] = ()
    synthetic_acceptance: tuple[float, ...] | None = None
    runner: str = "V2"
    kv_cache_tokens: int = 0
    weights_gib: float = 0.0
    graphs_gib: float = 0.0
    cache_gib: float = 0.0

    @property
    def custom_all_reduce(self) -> bool:
        """Whether vLLM's own all-reduce takes what fits it."""
        return "CUSTOM" in self.all_reduce

    @property
    def world(self) -> int:
        """GPUs in use."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def decode_tokens(self) -> int:
        """Query tokens of a decoding request in one step."""
        return 1 + self.draft_tokens
