"""What NVML says about this node's GPUs: names, memory, power, who holds them. No CUDA context is made.

``TOK100_FAKE_NVML`` names a JSON file that stands in for the driver, so that tests can have GPUs that are slow to let
go of their memory: ``{"0": {"used_gib": 0.6, "total_gib": 80.0}}``.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

FAKE_VARIABLE = "TOK100_FAKE_NVML"

_GIB = 2**30

_PATHS = {0: "internal", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t (nvml.h) in the words of ``nvidia-smi topo -m``."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as it is now. ``used_gib`` holds the driver's own reserve, about 0.6 GiB on an idle H200."""

    id: str
    name: str
    used_gib: float
    total_gib: float
    utilisation_percent: float | None = None
    power_w: float | None = None
    pids: tuple[int, ...] = ()


def gpus(ids: Sequence[str] | None = None) -> tuple[Gpu, ...]:
    """The GPUs named (by number or UUID), or all of the node; none when there is no driver."""
    fake = os.environ.get(FAKE_VARIABLE)
    if fake:
        return _faked(Path(fake), ids)
    with _nvml() as there:
        if not there:
            return ()
        wanted = ids if ids is not None else [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_read(gpu_id) for gpu_id in wanted)


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without one."""
    with _nvml() as there:
        return _text(pynvml.nvmlSystemGetDriverVersion()) if there else None


def topology() -> str:
    """How the GPUs are wired: links per GPU where there is NVLink, else the worst path between two of them."""
    with _nvml() as there:
        if not there:
            return "unknown"
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        links = {_nvlinks(handle) for handle in handles}
        if min(links) > 0:
            return f"NVLink, {'/'.join(map(str, sorted(links)))} links a GPU"
        paths = [
            _optional(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
            for number, one in enumerate(handles)
            for other in handles[number + 1 :]
        ]
        known = [path for path in paths if path is not None]
        return f"PCIe only, worst path {_PATHS.get(max(known), 'unknown')}" if known else "PCIe, paths unknown"


def _nvlinks(handle: Any) -> int:
    states = [_optional(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return sum(state == pynvml.NVML_FEATURE_ENABLED for state in states)


@contextmanager
def _nvml() -> Iterator[bool]:
    """NVML for the block; False when this machine has no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _read(gpu_id: str) -> Gpu:
    by_number = gpu_id.isdigit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu_id)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(gpu_id)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    power_mw = _optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    rates = _optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    processes = _optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return Gpu(
        id=gpu_id,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        used_gib=memory.used / _GIB,
        total_gib=memory.total / _GIB,
        utilisation_percent=None if rates is None else float(rates.gpu),
        power_w=None if power_mw is None else power_mw / 1000,
        pids=tuple(int(process.pid) for process in processes),
    )


def _optional(question: Any, *words: Any) -> Any:
    """An answer that some GPUs (MIG slices, virtual ones) do not give."""
    try:
        return question(*words)
    except pynvml.NVMLError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _faked(path: Path, ids: Sequence[str] | None) -> tuple[Gpu, ...]:
    told = json.loads(path.read_text())
    wanted = ids if ids is not None else list(told)
    return tuple(Gpu(gpu_id, "fake", told[gpu_id]["used_gib"], told[gpu_id]["total_gib"]) for gpu_id in wanted)
