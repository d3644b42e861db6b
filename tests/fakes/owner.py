"""A process that owns a server and is killed with it: ``python -m tests.fakes.owner FOLDER FAULT``.

Prints each phase on a line of its own, ``ready`` when the server is, and then waits to be killed.
"""

import sys
import time
from pathlib import Path

from runner.serving.server import Server
from tests.fakes.trials import QUICK, order


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    patient = QUICK.model_copy(update={"silence_s": 60.0, "first_token_s": 60.0})
    trial = order(folder, fault, deadlines=patient)
    print(trial.marker, flush=True)
    Server(trial, folder / "trial", (), lambda name, detail: print(name, flush=True)).start()
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
