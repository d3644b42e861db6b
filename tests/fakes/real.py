"""Trials on real vLLM on the CPU; as a program, an owner of one: ``python -m tests.fakes.real FOLDER``."""

import os
import sys
import time
from pathlib import Path

from runner.schema.experiment import Deadlines, Engine, Protocol, Workload
from runner.schema.launch import LaunchConfig, TrialOrder
from runner.serving.bundled import bundled_model_folder
from runner.serving.server import Server

MODEL = "smollm2-135m-instruct"


def real_order(folder: Path, number: int = 0) -> TrialOrder:
    """A small trial on the bundled model, eager, on the CPUs this process may use."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    return TrialOrder(
        study="real",
        number=number,
        marker=f"real-{os.getpid()}-{folder.name}-{number}",
        engine=Engine(device="cpu"),
        model=str(bundled_model_folder(MODEL)),
        config=LaunchConfig(
            model=f"bundled:{MODEL}",
            flags={"enforce-eager": True, "max-model-len": 1024, "dtype": "bfloat16", "max-num-seqs": 16},
            env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))},
        ),
        workload=Workload(),
        protocol=Protocol(),
        deadlines=Deadlines(),
        ladder=(1,),
        seed=1,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    order = real_order(folder)
    print(order.marker, flush=True)
    Server(order, folder / "trial", (), lambda name, detail: print(name, flush=True)).start()
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
