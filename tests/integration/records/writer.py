"""A driver in miniature: writes records of a study until it is told to stop, or killed, or the disk is full.

    python -m tests.integration.records.writer FOLDER FIRST LAST LOG_BYTES

Prints each number after its record is safe, ``full`` when the disk is, and waits for its end at the last one.
"""

import sys
import time
from pathlib import Path

from runner.errors import StoreError
from runner.records import open_study
from runner.schema.study import Running
from tests.studies import BEGAN, config, description, experiment, record


def main(folder: Path, first: int, last: int, log_bytes: int) -> None:
    with open_study(folder, description(experiment())) as study:
        for running in study.half_run():
            study.close_half_run(running, BEGAN)
        for number in range(max(first, len(study.records())), last):
            params = {"a": number}
            study.begin(Running(number=number, params=params, config=config(params), marker="m", started_at=BEGAN))
            try:
                study.finish(record(number, 5.0, params=params), {"server.log": b"x" * log_bytes})
            except StoreError as error:
                print("full", error.problem, flush=True)
                return
            print(number, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5]))
