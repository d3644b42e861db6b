"""A driver that runs a trial behind Ray and is then left alone: ``python -m tests.fakes.driver FOLDER FAULT``.

Prints the trial's marker, then each phase as the node tells it and the kind of failure, if there is one. A server that
comes up is loaded for as long as it lives. The line ``actor`` on standard input makes it end the actor by Ray's own
call and print ``done``.
"""

import contextlib
import sys
import threading
import time
from pathlib import Path

from runner.cluster.cluster import Cluster, NodeHandle
from runner.errors import TrialFailure
from tests.fakes.trials import PATIENT, SHORT, order

FOR_EVER = SHORT.model_copy(update={"warmup_min_s": 3600.0, "warmup_max_s": 3600.0})


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    trial = order(folder, fault, deadlines=PATIENT, protocol=FOR_EVER)
    print(trial.marker, flush=True)
    with Cluster(None, gpus=0, check_cancelled=lambda: None) as cluster:
        handle = cluster.node(0)
        threading.Thread(target=tell_phases, args=(handle,), daemon=True).start()
        threading.Thread(target=obey, args=(handle,), daemon=True).start()
        try:
            handle.start(trial)
            handle.measure(1)
        except TrialFailure as failure:
            with contextlib.suppress(TrialFailure):
                handle.stop()
            print(failure.kind, flush=True)
        time.sleep(3600)


def tell_phases(handle: NodeHandle) -> None:
    with contextlib.suppress(TrialFailure):
        while True:
            print(handle.phase().name, flush=True)
            time.sleep(0.1)


def obey(handle: NodeHandle) -> None:
    for line in sys.stdin:
        if line.strip() == "actor":
            handle.kill()
            print("done", flush=True)


if __name__ == "__main__":
    main()
