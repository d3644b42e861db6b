"""Each known log line is recognised by its own entry, and an ordinary log by none. The wording here is our own."""

import pytest

from runner.errors import EngineDead, EnvironmentFault, Hang, InvalidConfig, OutOfMemory, ServerExited, TrialFailure
from runner.serving.judge import Observation, failure
from runner.serving.signatures import FATAL, SIGNATURES, find

EXAMPLES: dict[str, tuple[str, str]] = {
    "port_taken": ("OSError: [Errno 98] Address already in use", ""),
    "memory_held_by_others": (
        "Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.92)",
        "3.1/79.2 GiB",
    ),
    "memory_freed_while_profiling": ("AssertionError: Error in memory profiling. Before 3, now 5", ""),
    "disk_full": ("OSError: [Errno 28] No space left on device: '/cache/x'", ""),
    "device_broken": ("RuntimeError: Failed to infer device type, set a level to see more", ""),
    "too_many_files": ("OSError: [Errno 24] Too many open files: '/dev/null'", ""),
    "out_of_memory_warm_up": (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Lower things.",
        "1024 dummy requests",
    ),
    "out_of_memory": ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.5 GiB.", "2.5 GiB"),
    "no_memory_for_cache": ("ValueError: No available memory for the cache blocks. Raise the utilization.", ""),
    "cache_too_small": (
        "ValueError: here 9.5 GiB KV cache is needed, which is larger than the available KV cache memory (4)",
        "9.5 GiB",
    ),
    "host_memory": ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried 123 bytes", ""),
    "worker_killed": ("ERROR [e.py:1] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), closing", ""),
    "nccl_no_algorithm": ("NCCL WARN No algorithm/protocol available for function Broadcast with f8", "Broadcast"),
    "nccl_invalid_usage": ("RuntimeError: NCCL error: ncclInvalidUsage: this is not the way", ""),
    "nccl_system": ("RuntimeError: NCCL error: ncclSystemError: a call failed", ""),
    "unknown_flag": ("vllm serve: error: unrecognized arguments: --warp 9", "--warp 9"),
    "heads_not_divisible": (
        "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2).",
        "heads (9)",
    ),
    "not_divisible": ("ValueError: num_speculative_tokens: 3 must be divisible by n_predict: 2", "n_predict"),
    "block_size": ("ValueError: No common block size for 16 (FAKE: [MultipleOf(32)]).", "for 16"),
    "numa_binding": ("AssertionError: Not enough allowed NUMA nodes to bind threads of 2 workers", "of 2 workers"),
    "graph_sizes": ("ValueError: No valid cudagraph sizes after rounding to multiple of 8", "multiple of 8"),
    "mamba_blocks": ("ValueError: max_num_seqs (900) exceeds available Mamba cache blocks (512)", "512"),
    "graph_memory_access": ("RuntimeError: CUDA error: an illegal memory access was encountered", ""),
    "load_format": ("ValueError: Load format `fast` is not supported", "`fast`"),
    "model_runner": ("ValueError: Model Runner V2 does not yet support: suffix drafts", "suffix drafts"),
    "missing_package": ("ImportError: arctic_inference is needed for suffix drafts", "arctic_inference"),
    "validation": ("  Value error, these two exclude each other [type=value_error, input_value=1]", "exclude"),
    "value_error": ("ValueError: max_num_batched_tokens (8) is below max_num_seqs (16)", "below"),
    "engine_start_failed": ("(EngineCore pid=1) ERROR [core.py:1] EngineCore failed to start.", ""),
    "engine_dead": ("fake.EngineDeadError: see above", ""),
}

ORDINARY = (
    "(APIServer pid=1) INFO 01-01 00:00:00 [u.py:1] non-default args: {'model_tag': 'm', 'port': 1}",
    "WARNING [s.py:1] Found ulimit of 20000; this can cause errors like `OSError: [Errno 24] Too many open files`",
    "WARNING [v.py:1] Model Runner V2 requires Triton; using the V1 model runner instead.",
    "WARNING [v.py:1] Model Runner V2 does not yet support suffix; using the V1 model runner",
    "INFO [b.py:1] No available shared memory broadcast block found in 60 seconds. Something is slow.",
    "WARNING [t.py:1] Triton is not installed.",
    "FutureWarning: a thing is deprecated",
    "(Worker pid=2) INFO [l.py:1] Loading weights took 0.11 seconds",
)


def test_every_entry_has_an_example() -> None:
    """The table and its tests grow together."""
    assert {one.name for one in SIGNATURES} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_known_line_is_known(name: str) -> None:
    """The line is found among ordinary ones, by its own entry, with the server's own words in the message."""
    line, told = EXAMPLES[name]
    found = find([*ORDINARY, line, "Traceback (most recent call last):"])
    assert found is not None
    assert found.signature.name == name
    assert found.line == line.strip()
    assert told in found.message


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_means_nothing(line: str) -> None:
    """Warnings and progress prove no failure."""
    assert find([line]) is None
    assert not FATAL.search(line)


def test_the_cause_beats_what_it_drags_along() -> None:
    """The order of the table decides, not the order of the log."""
    found = find(
        ["RuntimeError: Engine core initialization failed. See above", "ValueError: x", EXAMPLES["out_of_memory"][0]]
    )
    assert found is not None
    assert found.signature.name == "out_of_memory"


def test_programmers_details_are_cut() -> None:
    """pydantic's input dump does not reach people."""
    found = find(["Value error, not this one [type=value_error, input_value=ArgsKwargs((), {'a': 1})]"])
    assert found is not None
    assert found.message.endswith("not this one")


def test_the_kernel_kills_for_want_of_memory() -> None:
    """A killed leader or worker is out of memory when the kernel's count rose meanwhile, and only then."""
    worker = EXAMPLES["worker_killed"][0]
    for line, code in ((worker, None), ("nobody knows this", -9)):
        for killed, kind in ((True, OutOfMemory), (False, ServerExited)):
            made = failure(Observation(ServerExited, "it ended", "x", 1.0, exit_code=code, oom_killed=killed), [line])
            assert type(made) is kind
    made = failure(Observation(ServerExited, "it ended", "x", 1.0, exit_code=1, oom_killed=True), ["a"])
    assert type(made) is ServerExited


@pytest.mark.parametrize(
    ("observed", "line", "starting", "kind"),
    [
        (ServerExited, EXAMPLES["unknown_flag"][0], True, InvalidConfig),
        (ServerExited, EXAMPLES["value_error"][0], False, ServerExited),
        (ServerExited, EXAMPLES["out_of_memory"][0], False, OutOfMemory),
        (ServerExited, EXAMPLES["port_taken"][0], True, EnvironmentFault),
        (ServerExited, EXAMPLES["engine_dead"][0], True, ServerExited),
        (EngineDead, EXAMPLES["out_of_memory"][0], False, OutOfMemory),
        (Hang, EXAMPLES["value_error"][0], True, Hang),
        (ServerExited, "nobody knows this", True, ServerExited),
    ],
)
def test_what_was_seen_and_what_the_log_proves(
    observed: type[TrialFailure], line: str, starting: bool, kind: type[TrialFailure]
) -> None:
    """A known cause overrules an exit; a silence stays one; a server that answered was not refused its settings."""
    made = failure(Observation(observed, "it ended", "x", 1.23, exit_code=1, starting=starting), [line])
    assert type(made) is kind
    assert made.phase == "x"
    assert made.waited_s == 1.2
    assert made.log_tail == (line,)
