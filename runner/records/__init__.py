"""A study as files under ``results/``: the record of truth, from which every other store can be rebuilt.

    root = results_root(None)                                  # $TOK100_RESULTS, else ./results
    with open_study(root / name, description) as study:        # locked; refuses an edited experiment or space
        for running in study.half_run():                       # a driver was killed in the middle of these
            study.close_half_run(running, ended_at)            # -> a record: failed, cancelled
        study.begin(running)                                   # before a server starts
        record = study.finish(record, files)                   # files beside and renamed, then one line, fsynced
        study.records()
    fork_study(root / old, root / new, description)            # a new study with the finished trials, if comparable
    read_study(folder)                                         # for readers: no lock, nothing written
    make_once(database, make)                                  # for the stores that are rebuilt from the records
    latest_study(root)                                         # last written here; results/recorded never counts

It knows no server, no search and no tracking.
"""

from runner.records.files import make_once
from runner.records.locate import latest_study, results_root, studies
from runner.records.study import StudyFiles, fork_study, open_study, read_study

__all__ = [
    "StudyFiles",
    "fork_study",
    "latest_study",
    "make_once",
    "open_study",
    "read_study",
    "results_root",
    "studies",
]
