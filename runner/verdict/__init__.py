"""What the numbers of a study say: objective, guard-rails, intervals, ranking.

Pure: takes records and an experiment, gives values. Shared by the search (what is told to the sampler), by the sweep
(its table) and by ``runner.best``. It knows neither files nor the terminal nor who proposed a configuration.

    objective(record, experiment)              numbers told to the sampler, or None
    excess_percent(record, rail, baseline)     how far a guard-rail is missed; <= 0 holds
    judge(candidate, baseline)                 better / worse / no difference seen / not decided, about server starts
    summarise(records, experiment)             everything a table or an export needs
    rows(summary), drawn(rows, title)          the table, as text cells and for a terminal
"""

from runner.verdict.objective import baseline_tok_s, excess_percent, objective, objective_levels, output_tok_s
from runner.verdict.ranking import Candidate, Level, Standing, Summary, Winner, best_at, best_so_far, summarise
from runner.verdict.starts import Finding, Verdict, judge
from runner.verdict.table import Rows, describe, drawn, rows

__all__ = [
    "Candidate",
    "Finding",
    "Level",
    "Rows",
    "Standing",
    "Summary",
    "Verdict",
    "Winner",
    "baseline_tok_s",
    "best_at",
    "best_so_far",
    "describe",
    "drawn",
    "excess_percent",
    "judge",
    "objective",
    "objective_levels",
    "output_tok_s",
    "rows",
    "summarise",
]
