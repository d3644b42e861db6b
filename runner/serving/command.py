"""What is executed for a trial: the interpreter, the command line and the whole environment of the server."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import runner
from runner.schema.launch import TrialOrder
from runner.serving.lease import LOOPBACK
from runner.space.command import argv
from runner.space.environment import server_env

PYTHON_VARIABLE = "TOK100_PYTHON"
"""Interpreter that has vLLM, when it is not this one."""

_NCCL_EVIDENCE = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}
"""Makes NCCL log which algorithm and protocol it takes for which size; far too much for a timed run."""

LAUNCHER = Path(__file__).with_name("launcher.py")
_ROOT = Path(runner.__file__).parents[1]


def interpreter(ordered: str | None = None) -> str:
    """The Python that runs the server: the one ordered, else that adopted by ``TOK100_PYTHON``, else this one."""
    found = ordered or os.environ.get(PYTHON_VARIABLE) or sys.executable
    # Servers run in folders of their own. Not resolved: an environment is known by its own link.
    return str(Path(found).expanduser().absolute()) if os.sep in found else found


def served_name(order: TrialOrder) -> str:
    """The name the trial's model goes by; nobody else's server has it."""
    return f"trial-{order.marker}".replace("/", "-")


def command(order: TrialOrder, *, port: int, served_name: str) -> list[str]:
    """The server's whole command line, bound to loopback."""
    words = argv(order.config, model=order.model, host=LOOPBACK, port=port, served_name=served_name)
    if order.engine.kind == "simulated":
        return [sys.executable, "-m", "runner.simulator", *words]
    return [interpreter(order.python), str(LAUNCHER), *words]


def environment(
    order: TrialOrder, base: Mapping[str, str], gpu_ids: Sequence[str], *, sockets: Path, ready_s: float
) -> dict[str, str]:
    """The server's whole environment.

    Args:
        order: The trial.
        base: The environment of this process.
        gpu_ids: GPUs the server may see; none for a server that needs none.
        sockets: A short-named folder for the server's own sockets, fresh for each trial.
        ready_s: Longest start that this runner allows.
    """
    env = server_env(order.config, base, allow=order.allow_env)
    for name in ("OMP_NUM_THREADS", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"):
        # Ray sets the first for itself and vLLM would obey it; the second hides a dead engine.
        if name not in order.config.env:
            env.pop(name, None)
    # Development mode gives /server_info and /reset_prefix_cache; the server listens on loopback only.
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        # This runner's deadlines end a start, not the API server's: that one would leave its engine behind.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(ready_s) + 300),
    }
    if order.evidence:
        env |= _NCCL_EVIDENCE
    if Path(order.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if order.engine.kind == "simulated":
        env["PYTHONPATH"] = str(_ROOT)
        env["SIMULATED_NODE"] = str(_simulated_node(order.engine.node or ""))
    elif gpu_ids:
        # NVML counts GPUs in PCI order; CUDA must mean the same GPU by the same number.
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    return env


def _simulated_node(name: str) -> Path:
    given = Path(name)
    return given.resolve() if given.is_file() else _ROOT / "experiments" / "nodes" / f"{given.stem}.yaml"
