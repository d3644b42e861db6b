"""A response surface to search on: effects that multiply, a trap, failures, start-to-start noise. Invented numbers.

Shaped like launching an engine over PCIe: graphs matter most, a small batch limit helps one stream and breaks the
guard-rail, drafts help until they do not, one value dies at start.
"""

import math
import random
from collections.abc import Mapping
from typing import Literal

from runner.errors import FailureKind
from runner.schema.base import Scalar
from runner.schema.experiment import Experiment, GuardRail, Search
from runner.schema.space import IntRange
from runner.schema.trial import TrialRecord
from runner.search import Proposal, Searcher
from runner.space import Space
from tests.studies import experiment, record_of

SURFACE = """
knobs:
  eager: {flag: enforce-eager, choices: [true, false]}
  seqs: {flag: max-num-seqs, int: {low: 8, high: 1024, log: true}}
  batched: {flag: max-num-batched-tokens, choices: [1024, 2048, 4096, 8192]}
  block: {flag: block-size, choices: [32, 64, 128, {value: 16, keep_failing: the server dies of it}]}
  dtype: {flag: dtype, choices: [bfloat16, float16]}
  interval: {flag: stream-interval, choices: [2, 4, 8]}
  speculation:
    choices:
      none: {}
      ngram: {json: {speculative-config: {method: ngram, prompt_lookup_max: 4}}}
  drafts:
    json: speculative-config.num_speculative_tokens
    int: {low: 1, high: 7}
    required: true
    when: {speculation: ngram}
"""
FACTORS: dict[str, dict[Scalar, float]] = {
    "eager": {"true": 0.45, "false": 1.0},
    "batched": {"1024": 0.96, "2048": 1.0, "4096": 1.01, "8192": 0.98},
    "block": {"32": 1.02, "64": 1.05, "128": 0.97},
    "dtype": {"bfloat16": 1.0, "float16": 1.04},
    "interval": {"2": 1.03, "4": 1.05, "8": 1.06},
}
BASE_TOK_S = 40.0
MANY = 8
"""Streams of the guard-rail's level."""

Sampler = Literal["auto", "random"]


def speed(params: Mapping[str, Scalar]) -> tuple[float, float]:
    """True output tok/s at C=1 and at C=8."""
    one = BASE_TOK_S * math.prod(FACTORS.get(knob, {}).get(value, 1.0) for knob, value in params.items())
    seqs = float(params.get("seqs", 256))
    one *= 1.0 + 0.12 * math.exp(-((math.log2(seqs) - 4.0) ** 2))
    drafts = float(params.get("drafts", 0))
    one *= 1.0 + 0.5 * math.exp(-((drafts - 4.0) ** 2) / 4.0) if drafts else 1.0
    many = MANY * one * (0.75 if drafts > 5 else 0.9 if drafts else 1.0) * min(1.0, seqs / MANY)
    return one, many


def measured(proposal: Proposal, chance: random.Random, noise: float) -> TrialRecord:
    """A start: true speed, times the luck of that start."""
    if proposal.params.get("block") == "16":
        return record_of(proposal, failure=FailureKind.SERVER_EXITED)
    one, many = speed(proposal.params)
    return record_of(proposal, {1: one * chance.lognormvariate(0, noise), MANY: many * chance.lognormvariate(0, noise)})


def flat(proposal: Proposal, chance: random.Random, noise: float) -> TrialRecord:
    """A start where no knob does anything."""
    return record_of(proposal, {1: 50 * chance.lognormvariate(0, noise), MANY: 400 * chance.lognormvariate(0, noise)})


def setting(trials: int, seed: int, sampler: Sampler, *, startup: int | None = None) -> Experiment:
    rails = (GuardRail(concurrency=MANY, max_loss_percent=10),)
    chosen = Search(seed=seed, sampler=sampler, startup_trials=startup)
    return experiment(trials=trials, ladder=(1, MANY), guard_rails=rails, search=chosen)


def study(found: Space, given: Experiment, *, noise: float = 0.02, equal: bool = False) -> list[TrialRecord]:
    """One whole study."""
    searcher = Searcher(found, given, study="s", storage=None)
    chance = random.Random(given.search.seed)
    records = []
    while (proposal := searcher.ask()) is not None:
        records.append((flat if equal else measured)(proposal, chance, noise))
        searcher.tell(records[-1])
    return records


def best_speed(found: Space, points: int = 20_000) -> float:
    """Highest true speed at C=1 within the guard-rail, over many random points."""
    floor = 0.9 * speed({})[1]
    chance = random.Random(0)
    return max(one for one, many in (speed(random_point(found, chance)) for _ in range(points)) if many >= floor)


def random_point(found: Space, chance: random.Random) -> dict[str, Scalar]:
    """Any point that does not die."""
    params: dict[str, Scalar] = {}
    for knob in found.knobs:
        if not found.is_active(knob, params) or (not knob.required and chance.random() < 0.25):
            continue
        if isinstance(knob.range, IntRange):
            low, high = math.log(knob.range.low), math.log(knob.range.high)
            params[knob.name] = round(math.exp(chance.uniform(low, high)))
        else:
            params[knob.name] = chance.choice([label for label in knob.labels if label not in knob.keep_failing])
    return params


def trials_to_reach(records: list[TrialRecord], target: float) -> int | None:
    """Trials until a configuration of at least this true speed, within the guard-rail, was tried; None: never."""
    floor = 0.9 * speed({})[1]
    for count, record in enumerate(records, start=1):
        one, many = speed(record.params)
        if record.failure is None and one >= target and many >= floor:
            return count
    return None
