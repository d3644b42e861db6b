"""Search launch configurations and record what each is worth; see ``python -m runner.sweep --help``."""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from runner.cluster import Cluster, refuse_silence
from runner.errors import StoreError, UsageError
from runner.records import StudyFiles, fork_study, open_study, results_root
from runner.schema.study import StudyDescription
from runner.search import Searcher
from runner.serving.checks import Verdict, all_checks
from runner.serving.processes import end_leftovers
from runner.serving.provenance import provenance
from runner.space import explain
from runner.sweep.display import Display
from runner.sweep.dry import print_dry_run
from runner.sweep.interrupt import Interrupt
from runner.sweep.loop import Loop, baseline_order
from runner.sweep.plan import Options, Plan, make_plan
from runner.sweep.summary import print_summary
from runner.tracking import Tracking

PLAIN_WIDTH = 140
"""Columns where no terminal says how many there are."""


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code.

    0: done. 1: nothing could be measured, or the machine put an end to it. 2: bad input. 130: stopped by the user.
    """
    options, arguments = parse(words)
    # Whatever is written from here on, by whichever library or child, is the user's own.
    os.umask(0o077)
    console = new_console()
    try:
        return sweep(options, arguments, console)
    except UsageError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except StoreError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


def new_console() -> Console:
    """The terminal; a file or a pipe gets lines wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def parse(words: Sequence[str] | None) -> tuple[Options, argparse.Namespace]:
    """The command line as values."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.sweep",
        description="Optuna proposes launch configurations, a Ray actor serves and loads each, MLflow records.",
    )
    parser.add_argument("--space", required=True, help="a file of search_spaces/, or a path")
    parser.add_argument(
        "--experiment", help="a file of experiments/, or a path; chosen by space and machine if left out"
    )
    parser.add_argument("--trials", type=int, help="trials of the whole study, the baseline's included")
    parser.add_argument("--study", help="name of the study; <experiment>-<space> if left out")
    parser.add_argument("--model", help="model folder or hub name, in place of the experiment's")
    parser.add_argument("--serve", default="", help="flags of `vllm serve` for every trial, as one string")
    parser.add_argument("--address", help="of a running Ray cluster; RAY_ADDRESS works too")
    parser.add_argument("--results", type=Path, help="where results go; ./results if left out")
    parser.add_argument("--fork", metavar="STUDY", help="start from the finished trials of another study")
    parser.add_argument("--evidence", action="store_true", help="collect NCCL's own choices by extra starts, not timed")
    parser.add_argument("--explain", action="store_true", help="say what the space holds and rules out; start nothing")
    parser.add_argument("--dry-run", action="store_true", help="show the first trial's command line; start nothing")
    found = parser.parse_args(words)
    if found.trials is not None and found.trials < 1:
        parser.error(f"--trials {found.trials}: a study has at least one trial")
    options = Options(
        space=found.space,
        experiment=found.experiment,
        trials=found.trials,
        study=found.study,
        model=found.model,
        serve=found.serve,
        address=found.address or os.environ.get("RAY_ADDRESS"),
        results=found.results,
        fork=found.fork,
        evidence=found.evidence,
    )
    return options, found


def sweep(options: Options, arguments: argparse.Namespace, console: Console) -> int:
    """Runs, explains or shows the study that ``options`` describe."""
    plan = make_plan(options, lambda text: console.print(text, markup=False, highlight=False))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    if arguments.explain:
        console.print(explain(plan.space), markup=False, highlight=False, soft_wrap=True)
        return 0
    if arguments.dry_run:
        print_dry_run(plan, baseline_order(plan), console)
        return 0
    root = results_root(options.results)
    if options.address is not None:
        refuse_silence(options.address)
    look_around(plan, root, console)
    with Interrupt(lambda text: console.print(text, style="bold")) as interrupt:
        with open_or_fork(plan, options, root, console) as study:
            whole = run_study(plan, options, study, console, interrupt)
            summary = print_summary(plan, study, console)
        if interrupt.asked:
            console.print("stopped; the same command goes on where this left off", style="bold")
            return 130
    return 0 if whole and (summary.standings or summary.synthetic) else 1


def look_around(plan: Plan, root: Path, console: Console) -> None:
    """The doctor's checks, and an end to what crashed sweeps left behind.

    Raises:
        UsageError: Something is in the way that the user must mend first.
    """
    for line in end_leftovers():
        console.print(line, markup=False)
    found = all_checks(root, plan.experiment)
    wrong = [check for check in found if check.verdict is Verdict.WRONG]
    for check in found:
        if check.verdict is Verdict.WARNING:
            console.print(f"warning: {check.name}: {check.says}; {check.remedy}", markup=False, highlight=False)
    if wrong:
        raise UsageError(
            "; ".join(f"{check.name}: {check.says}" for check in wrong),
            remedy="; ".join(check.remedy for check in wrong if check.remedy),
        )


def open_or_fork(plan: Plan, options: Options, root: Path, console: Console) -> StudyFiles:
    """The study's files, locked for this process."""
    description = StudyDescription(
        study=plan.study,
        experiment=plan.experiment,
        space=plan.space.name,
        space_content=plan.space.content,
        provenance=provenance(None),
        created_at=datetime.now(UTC),
    )
    if options.fork is None:
        return open_study(root / plan.study, description)
    study, said = fork_study(root / options.fork, root / plan.study, description)
    console.print(said, highlight=False)
    return study


def run_study(plan: Plan, options: Options, study: StudyFiles, console: Console, interrupt: Interrupt) -> bool:
    """Goes on with the study until its end or until somebody asks to stop; whether the machine let it."""
    root = study.folder.parent
    for running in study.half_run():
        record = study.close_half_run(running, datetime.now(UTC))
        console.print(
            f"trial {record.number} was cut short by the end of its driver; it is closed, and tried once more"
        )
    searcher = Searcher(
        plan.space, plan.experiment, study=plan.study, storage=root / "study.db", records=study.records()
    )
    simulated = plan.experiment.engine.kind == "simulated"
    # A local Ray is told of a described node's GPUs, and finds real ones by itself.
    gpus = plan.gpus if simulated else None
    display = Display(console, budget=plan.experiment.budget, simulated=simulated)
    with Tracking(root, study.description) as tracking:
        # Its stores are made while the first server starts.
        tracking.open(study.folder, study.records())
        try:
            with Cluster(options.address, gpus=gpus, check_cancelled=interrupt.check) as cluster, display:
                loop = Loop(
                    plan, study, searcher, cluster, tracking,
                    display=display, interrupt=interrupt, evidence=options.evidence,
                )  # fmt: skip
                loop.run()
        finally:
            searcher.close()
        tracking.close(finished=searcher.ended is not None)
    if searcher.ended is not None:
        console.print(f"the search ended: {searcher.ended}", markup=False)
    if searcher.stopped is not None:
        console.print(f"stopped: {searcher.stopped}", style="yellow", markup=False)
    for problem in tracking.problems():
        console.print(f"MLflow: {problem}; the records are whole, the next sweep of this study logs the rest")
    for gpu in loop.quarantined:
        console.print(f"GPU {gpu} did not give its memory back and was left out from then on", style="yellow")
    return searcher.stopped is None


if __name__ == "__main__":
    sys.exit(main())
