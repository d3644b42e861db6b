"""Known lines of vLLM 0.24 to 0.33, PyTorch and NCCL, and what each means for a trial. Pure data and one search.

The order is the priority: a log that holds several of them is judged by the first in this table, because one cause
drags generic lines after it. A line no entry knows leaves the judgement to what was observed (exit, silence, health).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.errors import EngineDead, EnvironmentFault, InvalidConfig, OutOfMemory, TrialFailure

_LONGEST = 400
"""Of the server's own message inside ours, characters."""


_DETAILS = re.compile(r"\s*\[type=\w+, input_value=.*$")
"""What pydantic adds to a message for programmers."""


@dataclass(frozen=True)
class Signature:
    """One known line.

    Attributes:
        name: What it is called in records and tests.
        failure: The kind of failure it proves.
        pattern: Searched in each line; its named groups hold the server's own message when there is one.
        meaning: One sentence for people.
    """

    name: str
    failure: type[TrialFailure]
    pattern: re.Pattern[str]
    meaning: str


@dataclass(frozen=True)
class Finding:
    """A known line that was found in a log."""

    signature: Signature
    line: str

    @property
    def message(self) -> str:
        """The meaning, and the server's own words where it gave a reason."""
        match = self.signature.pattern.search(self.line)
        said = [words for words in match.groupdict().values() if words] if match else []
        words = _DETAILS.sub("", said[0]).strip()[:_LONGEST] if said else ""
        return f"{self.signature.meaning}: {words}" if words else self.signature.meaning


def _of(name: str, failure: type[TrialFailure], pattern: str, meaning: str) -> Signature:
    return Signature(name, failure, re.compile(pattern), meaning)


SIGNATURES: tuple[Signature, ...] = (
    # Not the configuration's fault: retried once, never charged to it.
    _of(
        "port_taken",
        EnvironmentFault,
        r"[Aa]ddress already in use|EADDRINUSE",
        "a port the server needs is taken",
    ),
    _of(
        "memory_held_by_others",
        EnvironmentFault,
        r"(?P<says>Free memory on device .* is less than desired GPU memory utilization[^.]*)",
        "GPU memory is held by something else",
    ),
    _of(
        "memory_freed_while_profiling",
        EnvironmentFault,
        r"Error in memory profiling",
        "another process freed GPU memory while the server was profiling it",
    ),
    _of("disk_full", EnvironmentFault, r"No space left on device|\bENOSPC\b", "the disk is full"),
    _of(
        "device_broken",
        EnvironmentFault,
        r"uncorrectable ECC error|no CUDA-capable device|Failed to infer device type"
        r"|CUDA driver version is insufficient|NVIDIA driver .* is too old",
        "no usable device for this build of vLLM",
    ),
    _of(
        "too_many_files",
        EnvironmentFault,
        r"^(?!.*ulimit).*Too many open files",
        "the limit of open files is too low",
    ),
    # Memory.
    _of(
        "out_of_memory_warm_up",
        OutOfMemory,
        r"out of memory occurred when warming up sampler with (?P<says>\d+ dummy requests)",
        "out of GPU memory while warming up the sampler (max-num-seqs or gpu-memory-utilization is too high)",
    ),
    _of(
        "out_of_memory",
        OutOfMemory,
        r"OutOfMemoryError: (?P<says>.*)|(?P<says2>(CUDA|HIP) out of memory.*)"
        r"|OutOfMemoryError|cudaErrorMemoryAllocation",
        "out of GPU memory",
    ),
    _of(
        "no_memory_for_cache",
        OutOfMemory,
        r"No available memory for the cache blocks",
        "nothing is left for the KV cache after weights and graphs",
    ),
    _of(
        "cache_too_small",
        OutOfMemory,
        r"(?P<says>[\d.]+ GiB (of )?KV cache is needed, which is larger than the available KV cache memory.*)",
        "the KV cache cannot hold one request of max-model-len",
    ),
    _of(
        "host_memory",
        OutOfMemory,
        r"(^|\s)MemoryError\b|Cannot allocate memory|DefaultCPUAllocator: can't allocate memory|std::bad_alloc",
        "out of host memory",
    ),
    # Communication.
    _of(
        "nccl_no_algorithm",
        InvalidConfig,
        r"(?P<says>[Nn]o algorithm/protocol available for function.*)",
        "NCCL_ALGO and NCCL_PROTO leave nothing for an operation",
    ),
    _of(
        "nccl_invalid_usage",
        InvalidConfig,
        r"ncclInvalidUsage|ncclInvalidArgument",
        "NCCL refused its environment or arguments",
    ),
    _of(
        "nccl_system",
        EnvironmentFault,
        r"ncclSystemError|ncclRemoteError",
        "NCCL failed in the system (shared memory, network)",
    ),
    # The configuration.
    _of(
        "unknown_flag",
        InvalidConfig,
        r"error: (?P<says>unrecognized arguments: .*|argument .*|ambiguous option: .*|the following arguments.*)",
        "the command line was refused",
    ),
    _of(
        "heads_not_divisible",
        InvalidConfig,
        r"(?P<says>[Tt]otal number of attention heads \(\d+\) must be divisible by tensor parallel size[^\n]*)",
        "the attention heads do not divide by the tensor parallel size",
    ),
    _of(
        "not_divisible",
        InvalidConfig,
        r"Error: (?P<says>.*(must be|is not) divisible by.*)",
        "a size does not divide as it must",
    ),
    _of(
        "block_size",
        InvalidConfig,
        r"(?P<says>No common block size for .*)",
        "no attention backend takes this block size",
    ),
    _of(
        "numa_binding",
        InvalidConfig,
        r"(?P<says>Not enough allowed NUMA nodes to bind threads.*)",
        "the CPUs cannot be shared among so many workers (VLLM_CPU_OMP_THREADS_BIND)",
    ),
    _of(
        "graph_sizes",
        InvalidConfig,
        r"Error: (?P<says>.*(No valid cudagraph sizes|max_cudagraph_capture_size.*should be consistent).*)",
        "the capture sizes contradict each other",
    ),
    _of(
        "mamba_blocks",
        InvalidConfig,
        r"Error: (?P<says>.*exceeds available Mamba cache blocks.*)",
        "max-num-seqs is above the number of state blocks",
    ),
    _of(
        "graph_memory_access",
        EngineDead,
        r"CUDA error: an illegal memory access",
        "the GPU code read outside its memory (often capture sizes that do not fit the draft length)",
    ),
    _of(
        "load_format",
        InvalidConfig,
        r"(?P<says>Load format .* is not supported.*)",
        "unknown load format",
    ),
    _of(
        "model_runner",
        InvalidConfig,
        r"(?P<says>Model Runner V2 does not yet support: .*|Model Runner V1 does not support: .*)",
        "the forced model runner cannot do this",
    ),
    _of(
        "missing_package",
        InvalidConfig,
        r"(ImportError|ModuleNotFoundError): (?P<says>.*)",
        "the server lacks a package that this configuration needs",
    ),
    _of(
        "validation",
        InvalidConfig,
        r"^\s*(\(\S+ pid=\d+\) *)?(Value error|Input should be|Assertion failed), *(?P<says>.*?)(\s*\[type=.*)?$"
        r"|^\s*(\(\S+ pid=\d+\) *)?(?P<says2>Input should be .*?)(\s*\[type=.*)?$",
        "the configuration was refused",
    ),
    _of(
        "value_error",
        InvalidConfig,
        r"\b(ValueError|KeyError|NotImplementedError|AssertionError|TypeError|HFValidationError): (?P<says>\S.*)",
        "the server met an error",
    ),
    # The engine.
    _of(
        "engine_start_failed",
        EngineDead,
        r"EngineCore failed to start|Engine core initialization failed|WorkerProc initialization failed",
        "the engine failed to start",
    ),
    _of(
        "worker_killed",
        EngineDead,
        r"Worker proc \S+ died unexpectedly \(exit code: -9\)",
        "a worker was killed from outside",
    ),
    _of(
        "engine_dead",
        EngineDead,
        r"EngineDeadError|EngineCore encountered (a fatal error|an issue)|Worker proc \S+ died unexpectedly",
        "the engine died",
    ),
)

FATAL = re.compile(r"EngineCore failed to start|Engine core initialization failed|EngineCore encountered a fatal error")
"""After one of these the API server has nothing to serve, whether it ends or not."""


def find(lines: Sequence[str], among: Iterable[Signature] = SIGNATURES) -> Finding | None:
    """The most telling line of a log, by the table's order and then the first in the log; None when none is known."""
    for signature in among:
        for line in lines:
            if signature.pattern.search(line):
                return Finding(signature, line.strip())
    return None
