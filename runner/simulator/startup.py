"""The start, phase by phase, in vLLM's words; each phase takes a share of ``SIMULATED_START_S``.

Wordings: vLLM 0.32 (short fixed phrases that log readers look for).
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator import processes
from runner.simulator.api import VERSION
from runner.simulator.faults import Faults
from runner.simulator.info import nccl_log
from runner.simulator.launch import Launch, Refused

START_S = 1.0
"""Default of ``SIMULATED_START_S``: the whole start of a simulated server."""
SHARES = {"config": 0.1, "init": 0.15, "weights": 0.3, "compile": 0.2, "profile": 0.05, "capture": 0.2}
HANG_S = 10 * 365 * 24 * 3600.0
PHASE_OF = {"config": "config", "worker": "init", "weights": "weights", "profile": "profile", "capture": "capture"}
"""Start phase in which a refusal shows, by ``Refused.where``."""


class Log:
    """Writes lines as vLLM's logger does.

    Args:
        silent: Write nothing.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self.engine_pid = os.getpid()

    def line(self, text: str) -> None:
        """A bare line."""
        if not self._silent:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def say(self, who: str, pid: int, level: str, where: str, text: str) -> None:
        """A line of one process."""
        stamp = time.strftime("%m-%d %H:%M:%S")
        self.line(f"({who} pid={pid}) {level} {stamp} [{where}] {text}")

    def api(self, text: str, *, level: str = "INFO", where: str = "api_server.py:1") -> None:
        """A line of the API server."""
        self.say("APIServer", os.getpid(), level, where, text)

    def engine(self, text: str, *, level: str = "INFO", where: str = "core.py:1") -> None:
        """A line of the engine core."""
        self.say("EngineCore", self.engine_pid, level, where, text)


class EngineFailed(Exception):
    """The engine did not start; the API server lives on (a fault)."""


@dataclass(frozen=True)
class Start:
    """All that a start needs.

    Attributes:
        refused: Why vLLM would not start this, if so; told in its phase.
    """

    launch: Launch
    node: SimulatedNode
    model: SimulatedModel
    model_name: str
    env: Mapping[str, str]
    faults: Faults
    children: processes.Children
    refused: Refused | None
    warnings: tuple[str, ...]


async def run(start: Start, log: Log) -> None:
    """Go through the phases.

    Raises:
        Refused: The start failed; everything is told in the log already.
        EngineFailed: Only the engine failed.
    """
    total_s = float(start.env.get("SIMULATED_START_S", START_S))
    log.engine_pid = start.children.engine
    begun_s = time.monotonic()
    for phase, share in SHARES.items():
        await _trouble(phase, start, log)
        await asyncio.sleep(total_s * share)
        if phase == "weights" and start.faults.slow_start:
            await _slowly(start, log)
        for line in _words(phase, start, total_s * share):
            log.line(line)
    took_s = time.monotonic() - begun_s
    log.engine(f"init engine (profile, create kv cache, warmup model) took {took_s:.2f} s", where="core.py:402")


async def _trouble(phase: str, start: Start, log: Log) -> None:
    if start.faults.hangs(phase):
        await asyncio.sleep(HANG_S)
    message = start.faults.engine_failure(phase)
    if message is not None:
        engine_failed(log, message)
        raise EngineFailed(message)
    message = start.faults.crash(phase)
    if message is None and start.refused is not None and PHASE_OF[start.refused.where] == phase:
        message = start.refused.message
    if message is not None:
        refuse(log, phase, message)
        raise Refused(message, phase)


def refuse(log: Log, phase: str, message: str) -> None:
    """Tell why the start ends, as the process does that finds out."""
    if phase in ("process", "config"):
        log.api("Traceback (most recent call last):", level="ERROR", where="launcher.py:1")
        for line in message.splitlines():
            log.line(f"(APIServer pid={os.getpid()}) {line}")
        return
    engine_failed(log, message)
    log.line(
        f"(APIServer pid={os.getpid()}) RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore_DP0': 1}"
    )


def engine_failed(log: Log, message: str) -> None:
    """The engine core's own words when it cannot start."""
    log.engine("EngineCore failed to start.", level="ERROR", where="core.py:1100")
    log.engine("Traceback (most recent call last):", level="ERROR", where="core.py:1100")
    for line in message.splitlines():
        log.engine(line, level="ERROR", where="core.py:1100")


async def _slowly(start: Start, log: Log) -> None:
    left_s = start.faults.slow_start or 0.0
    shards = max(2, int(left_s * 2))
    for shard in range(shards):
        await asyncio.sleep(left_s / shards)
        log.line(f"Loading safetensors checkpoint shards: {100 * (shard + 1) // shards}% | {shard + 1}/{shards}")


def _words(phase: str, start: Start, took_s: float) -> list[str]:
    launch, stamp = start.launch, time.strftime("%m-%d %H:%M:%S")
    front = dict(zip(processes.worker_names(launch), start.children.workers, strict=False))
    name, pid = next(iter(front.items()), ("Worker", 0))
    worker = f"({name} pid={pid}) INFO {stamp} "
    engine = f"(EngineCore pid={start.children.engine}) INFO {stamp} "
    if phase == "config":
        config = f"model='{start.model_name}', tensor_parallel_size={launch.tensor_parallel}"
        return [
            *(f"(APIServer pid={os.getpid()}) WARNING {stamp} [vllm.py:1605] {text}" for text in start.warnings),
            f"{engine}[core.py:133] Initializing a V1 LLM engine (v{VERSION}) with config: {config}",
        ]
    if phase == "init":
        return _init_words(start, worker, pid)
    if phase == "weights":
        loaded = f"{launch.weights_gib:.2f} GiB memory and {took_s:.6f} seconds"
        return [
            f"{worker}[default_loader.py:502] Loading weights took {took_s:.2f} seconds",
            f"{worker}[model_runner.py:425] Model loading took {loaded}",
        ]
    if phase == "compile":
        return _compile_words(start, worker, took_s)
    if phase == "profile":
        return _profile_words(launch, worker, engine)
    return _capture_words(launch, worker, took_s)


def _profile_words(launch: Launch, worker: str, engine: str) -> list[str]:
    most = launch.kv_cache_tokens / launch.max_model_len
    return [
        f"{worker}[gpu_worker.py:760] Available KV cache memory: {launch.cache_gib:.2f} GiB",
        f"{engine}[kv_cache_utils.py:2327] GPU KV cache size: {launch.kv_cache_tokens:,} tokens, Maximum concurrency "
        f"for {launch.max_model_len:,} tokens per request: {most:.2f}x",
    ]


def _capture_words(launch: Launch, worker: str, took_s: float) -> list[str]:
    graphs = len(launch.capture_sizes)
    if not graphs:
        return []
    took = f"took {launch.graphs_gib:.2f} GiB"
    return [
        f"Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|##########| {graphs}/{graphs}",
        f"{worker}[model_runner.py:1128] Graph capturing finished in {took_s:.0f} secs, {took}",
    ]


def _init_words(start: Start, worker: str, pid: int) -> list[str]:
    launch = start.launch
    lines = []
    if launch.tensor_parallel > 1:
        backends = ", ".join(f"'{name}'" for name in launch.all_reduce)
        lines += [
            f"{worker}[pynccl.py:148] vLLM is using nccl==2.30.7",
            f"{worker}[cuda_communicator.py:354] Using [{backends}] all-reduce backends (in dispatch order) for group "
            "tp:0",
        ]
        lines += [f"host:{pid}:{pid} [0] {text}" for text in nccl_log(launch, start.node, dict(start.env))]
    runner = "Using V2 Model Runner" if launch.runner == "V2" else "Using the V1 model runner"
    return [
        *lines,
        f"{worker}[gpu_worker.py:518] {runner}",
        f"{worker}[model_runner.py:380] Starting to load model {start.model_name}...",
        f"{worker}[cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
    ]


def _compile_words(start: Start, worker: str, took_s: float) -> list[str]:
    if not start.launch.compiles:
        return []
    return [
        f"{worker}[backends.py:1167] Dynamo bytecode transform time: {took_s / 2:.2f} s",
        f"{worker}[monitor.py:20] torch.compile took {took_s:.2f} s in total",
    ]
