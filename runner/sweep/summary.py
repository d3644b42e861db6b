"""The end of a sweep on the terminal: the best configurations beside the baseline and the goal."""

from rich.console import Console

from runner.records import StudyFiles
from runner.sweep.plan import Plan
from runner.verdict import Summary, drawn, rows, summarise

TOP = 5
"""Configurations in the table; `python -m runner.best --top N` shows more."""


def print_summary(plan: Plan, study: StudyFiles, console: Console) -> Summary:
    """Prints the study's table and where to look next. Returns what it shows."""
    summary = summarise(study.records(), plan.experiment)
    shown = rows(summary, top=TOP)
    unit = "SIMULATED " if summary.simulated else ""
    goal = plan.experiment.goal
    title = f"{unit}{plan.study}: goal {goal.output_tok_s:g} tok/s at C={goal.concurrency}"
    console.print()
    if shown.rows:
        console.print(drawn(shown, title))
    for note in shown.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"records: {study.folder}   next: make ui, or python -m runner.best --export profile.yaml", soft_wrap=True
    )
    return summary
