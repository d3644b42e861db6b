"""Which configuration to try next. The only room that knows Optuna; driver only.

    searcher = Searcher(space, experiment, study=name, storage=root / "study.db", records=study.records())
    while (proposal := searcher.ask()) is not None:            # number, params, role, repeat_of
        ...                                                    # run it
        searcher.tell(record)                                  # the record that went into trials.jsonl
    searcher.ended                                             # why there is nothing more: budget, or exhausted
    searcher.close()

What comes next is a function of the records alone (the sampler's seed derives from the study's seed and the number of
trials so far), so a study that was interrupted goes on exactly as it would have without. ``study.db`` holds finished
trials only: nothing is ever left running in it, and it is rebuilt whenever it disagrees with the records.

It knows neither servers nor files of the study nor MLflow.
"""

from runner.search.schedule import Proposal
from runner.search.searcher import Searcher

__all__ = ["Proposal", "Searcher"]
