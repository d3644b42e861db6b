"""Values that tests of several rooms build: experiments, records, and a small space."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from runner.errors import FailureKind
from runner.schema.base import FlagValue, Scalar
from runner.schema.experiment import Budget, Engine, Experiment, Goal, GuardRail, Search
from runner.schema.launch import LaunchConfig
from runner.schema.study import StudyDescription
from runner.schema.trial import Failure, Measurement, Outcome, Role, TrialRecord
from runner.search import Proposal
from runner.space import Machine, Space, load_space

BEGAN = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
MODEL = "bundled:tiny"


def experiment(
    *,
    trials: int = 12,
    ladder: tuple[int, ...] = (1, 8),
    guard_rails: tuple[GuardRail, ...] = (),
    search: Search | None = None,
    simulated: bool = False,
    goal_tok_s: float = 100.0,
) -> Experiment:
    """An experiment whose goal is at C=1."""
    engine = Engine(kind="simulated", node="some-node") if simulated else Engine(device="cpu")
    return Experiment(
        name="tiny",
        engine=engine,
        model=MODEL,
        ladder=ladder,
        goal=Goal(concurrency=1, output_tok_s=goal_tok_s),
        guard_rails=guard_rails,
        budget=Budget(trials=trials),
        search=search or Search(),
    )


def description(
    given: Experiment, *, study: str = "tiny-space", values: tuple[int, ...] = (128, 256)
) -> StudyDescription:
    """A study of ``given`` over a space with one knob of ``values``."""
    content = {"knobs": {"max_seqs": {"flag": "max-num-seqs", "choices": list(values)}}}
    return StudyDescription(study=study, experiment=given, space="space", space_content=content, created_at=BEGAN)


def config(params: Mapping[str, Scalar], *, gpus: int = 0) -> LaunchConfig:
    """The configuration that sets one flag per knob."""
    flags: dict[str, FlagValue] = dict(params)
    return LaunchConfig(model=MODEL, flags=flags, gpus=gpus)


def record(
    number: int,
    tok_s: Mapping[int, float] | float | None = None,
    *,
    params: Mapping[str, Scalar] | None = None,
    role: Role = Role.SEARCH,
    failure: FailureKind | None = None,
    outcome: Outcome | None = None,
    duplicate_of: int | None = None,
    repeat_of: int | None = None,
    synthetic_acceptance: float | None = None,
    simulated: bool = False,
) -> TrialRecord:
    """A trial's record. ``tok_s``: concurrency -> output tok/s, or the figure at C=1; None measured nothing."""
    figures = {1: tok_s} if isinstance(tok_s, float | int) else dict(tok_s or {})
    chosen = dict(params or {})
    resolved = config(chosen)
    ended = outcome or (Outcome.COMPLETE if failure is None else Outcome.FAILED)
    return TrialRecord(
        study="tiny-space",
        number=number,
        role=role,
        params=chosen,
        config=resolved,
        fingerprint=resolved.fingerprint,
        outcome=ended,
        failure=None if failure is None else Failure(kind=failure, message=f"{failure} it is"),
        measurements=tuple(Measurement(concurrency=c, valid=True, output_tok_s=x) for c, x in figures.items()),
        duplicate_of=duplicate_of,
        repeat_of=repeat_of,
        synthetic_acceptance=synthetic_acceptance,
        simulated=simulated,
        started_at=BEGAN + timedelta(minutes=number),
        ended_at=BEGAN + timedelta(minutes=number, seconds=50),
    )


def record_of(proposal: Proposal, tok_s: Mapping[int, float] | float | None = None, **more: FailureKind) -> TrialRecord:
    """The record of a proposal that was run."""
    return record(
        proposal.number,
        tok_s,
        params=proposal.params,
        role=proposal.role,
        repeat_of=proposal.repeat_of,
        failure=more.get("failure"),
    )


SPACE = """
knobs:
  seqs: {flag: max-num-seqs, int: {low: 16, high: 1024, log: true}}
  block: {flag: block-size, choices: [32, 64, {value: 16, keep_failing: the server dies of it}]}
  dtype: {flag: dtype, choices: [bfloat16, float16]}
  speculation:
    choices:
      none: {}
      ngram: {json: {speculative-config: {method: ngram, prompt_lookup_max: 4}}}
  drafts:
    json: speculative-config.num_speculative_tokens
    int: {low: 1, high: 5}
    required: true
    when: {speculation: ngram}
constraints:
  - max_num_seqs != 100
"""
"""A range, choices with one that fails on purpose, a bundle, and a required knob under a condition."""


def space(folder: Path, given: Experiment, text: str = SPACE) -> Space:
    """The space written in ``text``."""
    path = folder / "space.yaml"
    path.write_text(text)
    return load_space(path, given, machine=Machine())
