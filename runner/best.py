"""``python -m runner.best``: a study's best configurations, and the winner as a profile that can be served.

Reads the records only: no Ray, Optuna, MLflow, vLLM or torch, so it works on a laptop on files copied from elsewhere.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from runner.errors import StoreError, UsageError
from runner.records import latest_study, read_study, results_root, studies
from runner.records.files import write_beside
from runner.schema.profile import Chosen, Profile, ProfileLevel
from runner.schema.study import StudyDescription
from runner.schema.trial import TrialRecord
from runner.space.document import read_model
from runner.verdict import Finding, Level, Rows, Standing, Summary, Winner, best_at, describe, drawn, rows, summarise

WIDTH = 160
"""Columns of the table when nobody's terminal says how many there are."""

EXIT_USAGE = 2
EXIT_NOTHING = 1
"""Nothing was measured, so there is no best."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that starts like a number: PyYAML writes by YAML 1.1, which takes ``0E0`` for text; 1.2 does not."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if data[:1] in _NUMERIC else None)

    def ignore_aliases(self, data: object) -> bool:
        return True


_NUMERIC = frozenset("+-.0123456789")
_Dumper.add_representer(str, _Dumper.represent_str)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exports when asked. Returns the exit code."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        return _run(options, console)
    except (UsageError, StoreError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return EXIT_USAGE


def export(summary: Summary, winner: Winner, description: StudyDescription, records: Sequence[TrialRecord]) -> Profile:
    """The winner as a profile."""
    candidate = winner.standing.candidate
    first = next(record for record in records if record.number == candidate.numbers[0])
    goal = summary.experiment.goal
    return Profile(
        engine="simulated" if candidate.simulated else "vllm",
        note=_note(winner.standing, summary),
        fingerprint=candidate.fingerprint,
        config=candidate.config,
        goal_concurrency=goal.concurrency,
        goal_output_tok_s=goal.output_tok_s,
        levels=tuple(_profile_level(level, summary) for level in winner.standing.levels),
        synthetic_acceptance=candidate.synthetic_acceptance,
        chosen=Chosen(
            study=description.study,
            trial=candidate.numbers[0],
            rule=f"C={winner.concurrency}: {winner.rule}",
            trials=summary.trials,
            starts=len(candidate.numbers),
            runner_up=None if winner.runner_up is None else winner.runner_up.candidate.numbers[0],
            margin_percent=_rounded(winner.margin_percent),
        ),
        provenance=first.provenance,
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Writes ``path``; ``engine`` stands first.

    Raises:
        StoreError: It cannot be written.
    """
    content = profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    write_beside(path, text.encode())


def read_profile(path: Path) -> Profile:
    """Reads an exported profile.

    Raises:
        UsageError: It is missing or malformed, or its configuration is not the one that was measured.
    """
    return read_model(path, Profile)


def _run(options: argparse.Namespace, console: Console) -> int:
    folder = _study_folder(options.study, results_root(options.results))
    description, records = read_study(folder)
    summary = summarise(records, description.experiment)
    if not summary.standings and not summary.synthetic:
        print(f"{folder}: nothing was measured ({_counts(summary)}); there is no best configuration")
        return EXIT_NOTHING
    _print_table(rows(summary, top=options.top), description, folder, console)
    _print_levels(summary, console)
    if options.export is None:
        return 0
    winner = _chosen(summary, options)
    write_profile(export(summary, winner, description, records), options.export)
    print(f"wrote {options.export}: trial {winner.standing.candidate.numbers[0]}, {winner.rule}")
    return 0


def _study_folder(given: str | None, root: Path) -> Path:
    if given is None:
        latest = latest_study(root)
        if latest is None:
            raise UsageError(
                "no study was run here yet", remedy="Run `make sweep SPACE=cpu.yaml`, or name one: --study.", path=root
            )
        return latest
    places = [root / given, Path(given)]
    for folder in places:
        if (folder / "study.yaml").is_file():
            return folder
    known = ", ".join(folder.name for folder in studies(root)) or "none"
    beside = ", ".join(sorted(str(one.parent) for one in Path(given).parent.glob("*/study.yaml")))
    raise UsageError(
        f"there is no study {given!r}",
        remedy=f"Studies under {root}: {known}.{f' Beside it: {beside}.' if beside else ''}",
    )


def _chosen(summary: Summary, options: argparse.Namespace) -> Winner:
    """The winner to export. Synthetic acceptance only when asked for, or when nothing else was measured."""
    synthetic = options.synthetic or not summary.standings
    goal = summary.experiment.goal.concurrency
    concurrency = options.concurrency or goal
    if concurrency not in summary.experiment.ladder:
        ladder = ", ".join(str(c) for c in summary.experiment.ladder)
        raise UsageError(f"C={concurrency} was not measured", remedy=f"This study's ladder is {ladder}.")
    if concurrency == goal:
        winner = summary.synthetic_winner if synthetic else summary.winner
    else:
        winner = best_at(summary, concurrency, synthetic=synthetic)
    if winner is None:
        raise UsageError(f"nothing was measured at C={concurrency} within the guard-rails", remedy="See the table.")
    return winner


def _print_table(table: Rows, description: StudyDescription, folder: Path, console: Console) -> None:
    simulated = description.experiment.engine.kind == "simulated"
    title = f"{'simulated ' if simulated else ''}{description.study} ({folder})"
    console.print(drawn(table, title))
    for note in table.notes:
        print(note)


def _print_levels(summary: Summary, console: Console) -> None:
    """Who wins at each concurrency: it is seldom the same configuration."""
    for concurrency in summary.experiment.ladder:
        for synthetic in (False, True):
            winner = best_at(summary, concurrency, synthetic=synthetic)
            if winner is not None:
                console.print(_winner_line(winner, synthetic), markup=False, highlight=False, soft_wrap=True)


def _winner_line(winner: Winner, synthetic: bool) -> str:
    candidate = winner.standing.candidate
    figure = candidate.mean(winner.concurrency)
    name = "baseline" if candidate.is_baseline else describe(candidate.params)
    kind = "synthetic acceptance" if synthetic else "simulated" if candidate.simulated else ""
    label = f"best at C={winner.concurrency}" + (f" ({kind})" if kind else "")
    facts = [winner.rule, *_missed(winner.standing)]
    if winner.concurrency in candidate.front_end_bound:
        facts.append("limited by the server's API process")
    return f"{label}: {name}, {figure:.1f} tok/s, trial {candidate.numbers[0]} ({'; '.join(facts)})"


def _missed(standing: Standing) -> list[str]:
    """The guard-rails that a configuration misses."""
    return [f"misses the guard-rail at C={c} by {x:.1f} %" for c, x in standing.excess_percent.items() if x > 0]


def _profile_level(level: Level, summary: Summary) -> ProfileLevel:
    verdict = level.verdict
    if verdict is not None:
        said = f"{verdict.finding} ({verdict.rule})"
    else:
        said = summary.no_baseline or ("this is the baseline" if level.output_tok_s is not None else "not measured")
    return ProfileLevel(
        concurrency=level.concurrency,
        output_tok_s=_rounded(level.output_tok_s),
        baseline_output_tok_s=_rounded(level.baseline_tok_s),
        change_percent=None if verdict is None else _rounded(verdict.change_percent),
        verdict=said,
        limited_by="api_server" if level.front_end_bound else None,
    )


def _note(standing: Standing, summary: Summary) -> str | None:
    candidate = standing.candidate
    notes = [
        "simulated: no real engine made these numbers" if candidate.simulated else "",
        "synthetic acceptance: drafts were accepted at a set rate, not by the text; real text gives other figures"
        if candidate.synthetic_acceptance is not None
        else "",
        *(
            f"loses {-level.verdict.change_percent:.1f} % against the baseline at C={level.concurrency}"
            for level in standing.levels
            if level.verdict is not None and level.verdict.change_percent is not None
            if level.verdict.finding is Finding.WORSE
        ),
        *_missed(standing),
        f"{summary.no_baseline}: no gain is claimed" if summary.no_baseline else "",
    ]
    return "; ".join(note for note in notes if note) or None


def _counts(summary: Summary) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in summary.outcomes.items()) or "no trials"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runner.best", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--study", help="name under the results folder, or a path; the one last written here if left out"
    )
    parser.add_argument("--top", type=_positive, default=10, help="rows of the table (default 10)")
    parser.add_argument("--export", type=Path, metavar="PROFILE", help="write the winner to this YAML file")
    parser.add_argument(
        "--concurrency", type=_positive, help="export the winner at this concurrency, not at the goal's"
    )
    parser.add_argument("--synthetic", action="store_true", help="export the winner among synthetic-acceptance trials")
    parser.add_argument("--results", type=Path, help="results folder (default: $TOK100_RESULTS, else ./results)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
