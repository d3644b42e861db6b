"""The table of a study, as text cells and as they are drawn. Simulated and synthetic numbers say so here."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from runner.schema.base import Scalar
from runner.verdict.ranking import Level, Standing, Summary

MISSING = "–"
NAME = 2
"""Position of the column that names the configuration."""

FRONT_END = "*"
"""Beside a figure that the server's front end limits."""

LONGEST_WORD = 36
"""Of a configuration, characters, that a narrow terminal still shows uncut."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A header, one row per configuration, and the lines that must stand under it."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def rows(summary: Summary, *, top: int | None = None) -> Rows:
    """The best ``top`` configurations (all when None), the baseline always among them, each level beside its change.

    The fastest figure is not always the winner: it may not be shown to be better than the baseline.
    Columns: rank, trials, configuration, one per concurrency (``56.1 +31.0 %`` and the finding below it), percent of
    the goal.
    """
    goal = summary.experiment.goal
    header = (
        "#",
        "trial",
        "configuration",
        *(f"C={concurrency} tok/s" for concurrency in summary.experiment.ladder),
        f"% of {goal.output_tok_s:g}\nat C={goal.concurrency}",
    )
    shown = [*_top(summary.standings, top), *_top(summary.synthetic, top)]
    winner = None if summary.winner is None else summary.winner.standing
    return Rows(header, tuple(_row(standing, standing is winner) for standing in shown), _notes(summary))


def drawn(shown: Rows, title: str) -> Table:
    """The rows for a terminal: the configuration gets the room that is left, and no word of it is cut."""
    table = Table(title=Text(title), title_justify="left")
    words = (len(word) for row in shown.rows for word in row[NAME].split())
    widest = min(max(words, default=0), LONGEST_WORD)
    for position, heading in enumerate(shown.header):
        if position == NAME:
            table.add_column(heading, ratio=1, min_width=widest, overflow="fold")
        else:
            table.add_column(heading, justify="right", overflow="fold")
    for row in shown.rows:
        table.add_row(*map(Text, row))
    return table


def _top(standings: Sequence[Standing], top: int | None) -> list[Standing]:
    return [s for s in standings if top is None or s.rank <= top or s.candidate.is_baseline]


def _row(standing: Standing, wins: bool) -> tuple[str, ...]:
    candidate = standing.candidate
    goal = MISSING if standing.percent_of_goal is None else f"{standing.percent_of_goal:.0f} %"
    return (
        f"{standing.rank} winner" if wins else str(standing.rank),
        ", ".join(str(number) for number in candidate.numbers),
        _name(standing),
        *(_cell(level) for level in standing.levels),
        goal,
    )


def _name(standing: Standing) -> str:
    candidate = standing.candidate
    marks = [
        "baseline" if candidate.is_baseline else describe(candidate.params),
        "(simulated)" if candidate.simulated else "",
        f"(synthetic acceptance {candidate.synthetic_acceptance:g})" if candidate.synthetic_acceptance else "",
        *(f"(misses the guard-rail at C={c} by {x:.1f} %)" for c, x in standing.excess_percent.items() if x > 0),
    ]
    return " ".join(mark for mark in marks if mark)


def describe(params: dict[str, Scalar]) -> str:
    """A configuration in words: its knobs that are set."""
    return " ".join(f"{knob}={value}" for knob, value in params.items()) or "every knob unset"


def _cell(level: Level) -> str:
    if level.output_tok_s is None:
        return MISSING
    text = f"{level.output_tok_s:.1f}{FRONT_END if level.front_end_bound else ''}"
    if level.verdict is None or level.verdict.change_percent is None:
        return text
    return f"{text} {level.verdict.change_percent:+.1f} %\n{level.verdict.finding}"


def _notes(summary: Summary) -> tuple[str, ...]:
    notes = []
    if summary.simulated:
        notes.append("simulated: no real engine made these numbers")
    if summary.synthetic:
        notes.append("synthetic acceptance: drafts are accepted at a set rate, not by the text; ranked apart")
    if any(level.front_end_bound for s in (*summary.standings, *summary.synthetic) for level in s.levels):
        notes.append(f"{FRONT_END} limited by the server's API process, not by the engine")
    if summary.no_baseline:
        notes.append(f"{summary.no_baseline}; no gain is claimed and guard-rails do not apply")
    if summary.winner is not None:
        candidate = summary.winner.standing.candidate
        name = "baseline" if candidate.is_baseline else describe(candidate.params)
        notes.append(f"winner at C={summary.winner.concurrency}: {name} ({summary.winner.rule})")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in summary.outcomes.items())
    notes.append(f"{summary.trials} trials: {counts or 'none'}")
    return tuple(notes)
