"""Trials on two GPUs with what ``experiments/2x-h200-p2p-off.yaml`` pins; as a program, an owner of one.

python -m tests.fakes.two_gpus FOLDER
"""

import sys
import time
from pathlib import Path
from typing import Any

from runner.schema.experiment import Experiment
from runner.schema.launch import LaunchConfig, TrialOrder
from runner.serving.server import Server
from runner.space import load_experiment

ROOT = Path(__file__).parents[2]
EXPERIMENT = "2x-h200-p2p-off"
GPUS = ("0", "1")

QUICK: dict[str, Any] = {"enforce-eager": True, "max-model-len": 4096}
"""Comes up in half the time, and takes as much GPU memory as a whole one."""


def experiment() -> Experiment:
    """The experiment's own file."""
    return load_experiment(EXPERIMENT)


def order(folder: Path, number: int = 0, *, layers: int | None = 8, **flags: Any) -> TrialOrder:
    """A trial of a few layers, eager, without a space; ``flags`` in Python's spelling, None takes one away.

    Args:
        folder: Names the trial apart from others.
        number: Of the trial.
        layers: Of the model; None leaves it whole.
        flags: Beyond the experiment's.
    """
    told = experiment()
    settings = {**told.defaults.flags, **told.pinned.flags}
    settings |= {name.replace("_", "-"): value for name, value in flags.items()}
    structured = {**told.defaults.structured, **told.pinned.structured}
    if layers is not None:
        structured["hf-overrides"] = {"num_hidden_layers": layers}
    return TrialOrder(
        study="gpu",
        number=number,
        marker=f"gpu-{folder.name}-{number}",
        engine=told.engine,
        model=str(ROOT / told.model),
        config=LaunchConfig(
            model=told.model,
            flags={name: value for name, value in settings.items() if value is not None},
            structured=structured,
            env={**told.defaults.env, **told.pinned.env},
            gpus=len(GPUS),
        ),
        workload=told.workload,
        protocol=told.protocol,
        deadlines=told.deadlines,
        ladder=(1, 64),
        seed=1,
    )


def main() -> None:
    """Start a server and hold it until killed; prints its marker, then each phase, then ``ready``."""
    folder = Path(sys.argv[1])
    asked = order(folder, **QUICK)
    print(asked.marker, flush=True)
    Server(asked, folder / "trial", GPUS, lambda name, detail: print(name, flush=True)).start()
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
