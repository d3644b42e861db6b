"""The study in MLflow: a view of the records. The only room that knows MLflow; driver only.

    with Tracking(root, description) as tracking:              # calls return at once; one thread of its own works
        tracking.open(study.folder, study.records())           # makes the stores, closes what a killed driver left
                                                               # open, logs what is missing (all, if mlflow.db is gone)
        tracking.log(record)                                   # after each trial
        tracking.close(finished=True)                          # waits; the charts go onto the parent run
    tracking.problems()                                        # what went wrong, in words; the records stay the truth

MLflow's experiment is the experiment, the parent run the study, a child run a trial, a metric's step the concurrency.
It knows neither servers nor the search.
"""

import os

# MLflow asks at its import whether it may report usage to its makers; it may not.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from runner.tracking.tracking import Tracking

__all__ = ["Tracking"]
