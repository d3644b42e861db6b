"""A process that owns a server and is killed with it: ``python -m tests.fakes.owner FOLDER FAULT``.

Prints each phase on a line of its own, ``ready`` when the server is, and then waits to be killed.
"""

import sys
import time
from pathlib import Path

from runner.serving.server import Server
from tests.fakes.trials import PATIENT, order


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    trial = order(folder, fault, deadlines=PATIENT)
    print(trial.marker, flush=True)
    Server(trial, folder / "trial", (), lambda name, detail: print(name, flush=True)).start()
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
