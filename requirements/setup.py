"""Builds the environment an experiment needs, when it is missing or its lock changed, and prints its Python.

Standard library only: this runs before anything is installed. Uses uv when it is there and pip otherwise. The lock
follows the experiment's engine: ``cpu.lock`` in ``.venv`` (real vLLM on the CPU, every test, the simulated engine),
``gpu.lock`` in ``.venv-gpu``. Progress goes to standard error; the last line on standard output is the interpreter.

    python3 requirements/setup.py [--space X] [--experiment Y] [--engine cpu|gpu]
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"cpu": ROOT / ".venv", "gpu": ROOT / ".venv-gpu"}


def say(text: str) -> None:
    """One line of progress."""
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def gpus_visible() -> bool:
    """Whether an NVIDIA driver shows at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def engine_of(space: str, experiment: str) -> str:
    """Which lock a sweep needs: by the experiment's own words, else by the space and the machine.

    The experiment file is only searched for two words here (nothing can parse YAML yet); it is checked for real
    when the sweep loads it.
    """
    if experiment:
        path = next((p for p in (Path(experiment), ROOT / "experiments" / experiment) if p.is_file()), None)
        path = path or ROOT / "experiments" / f"{experiment}.yaml"
        text = path.read_text(encoding="utf-8") if path.is_file() else "device: cpu"
        on_cpu = re.search(r"\bkind:\s*simulated\b|\bdevice:\s*cpu\b", text)
        return "cpu" if on_cpu else "gpu"
    return "cpu" if Path(space).stem == "cpu" or not gpus_visible() else "gpu"


def run(command: list[str]) -> bool:
    """Runs an installer; its own messages go to standard error."""
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0


def installed_links(pip: list[str]) -> list[str]:
    """Wheel folders that pip's own configuration names, for uv, which does not read it."""
    shown = subprocess.run([*pip, "config", "get", "global.find-links"], capture_output=True, text=True, check=False)
    env = subprocess.run([*pip, "config", "get", ":env:.find-links"], capture_output=True, text=True, check=False)
    links = dict.fromkeys((shown.stdout + " " + env.stdout).split())
    return [word for link in links for word in ("--find-links", link)]


def compile_all(python: str) -> None:
    """Bytecode of everything that was installed, on every core; pip would do it on one.

    Files that do not compile (templates, code for other versions) are left as they are, as pip leaves them.
    """
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    command = [python, "-m", "compileall", "-qq", "-j", "0", packages]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def install(folder: Path, lock: Path) -> bool:
    """Fills ``folder`` from ``lock``; no dependency is resolved, the lock is the whole set.

    The CPU build of torch is not on the package index: where the installer's own configuration does not find it, uv
    does.
    """
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip"]
    project = ["--no-build-isolation", "-e", str(ROOT)]
    uv = shutil.which("uv")
    if uv is None and run([*pip, "install", "-qq", "--no-deps", "--no-compile", "-r", str(lock)]):
        compile_all(python)
        return run([*pip, "install", "-qq", "--no-deps", *project])
    if uv is None:
        say("pip could not install the lock; trying uv, which knows where CPU builds of torch are kept")
        if not run([*pip, "install", "-qq", "uv"]):
            return False
        uv = str(folder / "bin" / "uv")
    base = [uv, "pip", "install", "--python", python, "--no-deps"]
    lines = [*base, "--compile-bytecode", "-r", str(lock)]
    found = run([*lines, *installed_links(pip)]) or (lock.stem == "cpu" and run([*lines, "--torch-backend", "cpu"]))
    return found and run([*base, *project])


def ensure(engine: str) -> Path:
    """The interpreter of the engine's environment, built if need be."""
    folder, lock = FOLDERS[engine], ROOT / "requirements" / f"{engine}.lock"
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    digest = hashlib.sha256(lock.read_bytes() + sys.version.encode())
    if python.exists() and stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return python
    began = time.monotonic()
    packages = sum("==" in line for line in lock.read_text().splitlines())
    with_tool = "uv" if shutil.which("uv") else "pip"
    say(
        f"installing {packages} packages of requirements/{lock.name} into {folder.name} with {with_tool}; "
        f"{'1 to 3 minutes' if engine == 'cpu' else 'several minutes, about 10 GB'}"
    )
    venv.create(folder, with_pip=True, clear=True)
    if not install(folder, lock):
        say(f"could not install requirements/{lock.name}; the installer's own message stands above")
        raise SystemExit(2)
    stamp.write_text(digest.hexdigest())
    say(f"{folder.name} is ready ({time.monotonic() - began:.0f} s)")
    return python


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--space", default="")
    parser.add_argument("--experiment", default="")
    parser.add_argument("--engine", choices=sorted(FOLDERS))
    options = parser.parse_args()
    if sys.version_info < (3, 11):
        say(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; name one with PYTHON3=python3.11")
        raise SystemExit(2)
    engine = options.engine or engine_of(options.space, options.experiment)
    if engine == "gpu" and not gpus_visible():
        say("this needs a GPU and none is visible, so nothing was installed; SPACE=cpu.yaml runs on the CPU, and other")
        say("spaces on a simulated node when EXPERIMENT is left out")
        raise SystemExit(2)
    print(ensure(engine))


if __name__ == "__main__":
    main()
