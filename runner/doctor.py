"""What this machine has, and what is in the way: ``python -m runner.doctor``.

Prints one line per check with its remedy. Exit code 0: nothing is wrong (warnings are fine); 1: something is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runner.errors import UsageError
from runner.serving.checks import Check, Verdict, all_checks
from runner.serving.processes import leftovers, reap_leftovers
from runner.space import load_experiment

_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.WRONG: "red"}


def main(words: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = _parser().parse_args(words)
    console = Console()
    try:
        experiment = load_experiment(options.experiment) if options.experiment else None
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if options.reap:
        for process in leftovers():
            console.print(f"ending pid {process.pid} of {process.marker}: {process.command[:80]}", markup=False)
        reap_leftovers()
    found = all_checks(Path(options.results), experiment)
    console.print(table(found))
    return int(any(check.verdict is Verdict.WRONG for check in found))


def table(checks: Sequence[Check]) -> Table:
    """The checks as a table."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("check", "", "what was found", "remedy"):
        shown.add_column(heading, overflow="fold")
    for check in checks:
        colour = _COLOURS[check.verdict]
        shown.add_row(check.name, f"[{colour}]{check.verdict}[/]", _plain(check.says), _plain(check.remedy))
    return shown


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runner.doctor", description=__doc__)
    parser.add_argument("--experiment", help="check for this one (name or path)")
    parser.add_argument("--results", default="results", help="folder of the studies (default: %(default)s)")
    parser.add_argument("--reap", action="store_true", help="end servers that crashed sweeps left behind")
    return parser


if __name__ == "__main__":
    sys.exit(main())
