"""Orders for trials on the simulated server, with faults of its own."""

import os
from pathlib import Path

from runner.schema.experiment import Deadlines, Engine, Protocol, Workload
from runner.schema.launch import LaunchConfig, TrialOrder
from tests.fakes.trials import PATIENT, SHORT, STALLING


def simulated_order(
    folder: Path, fault: str = "", *, number: int = 0, deadlines: Deadlines = PATIENT, protocol: Protocol | None = None
) -> TrialOrder:
    """A trial on a described node of two GPUs."""
    return TrialOrder(
        study="simulated",
        number=number,
        marker=f"sim-{os.getpid()}-{folder.name}-{number}",
        engine=Engine(kind="simulated", node="2x-h200-nvlink"),
        model="experiments/models/qwen3-8b.yaml",
        config=LaunchConfig(
            model="experiments/models/qwen3-8b.yaml",
            flags={"tensor-parallel-size": 2},
            env={"SIMULATED_FAULT": fault} if fault else {},
            gpus=2,
        ),
        workload=Workload(prompts="random_tokens", vocabulary=1000, input_tokens=16, output_tokens=16),
        protocol=protocol or (STALLING if fault.startswith("engine_stuck") else SHORT),
        deadlines=deadlines,
        ladder=(1, 2),
        seed=1,
    )
