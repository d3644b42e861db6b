"""What the search is worth on a surface whose truth is known: how soon it is near the best, how often it is fooled.

python -m pytest -m bench -s tests/bench/search
"""

import statistics
import time
from pathlib import Path

import pytest

from runner.search import Searcher
from runner.verdict import summarise
from tests.bench.search.surface import SURFACE, Sampler, best_speed, setting, speed, study, trials_to_reach
from tests.studies import experiment, space

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

STUDIES = 24
TRIALS = 60
NEAR = 0.95


def test_the_search_is_near_the_best_sooner_than_chance(tmp_path: Path) -> None:
    """Share of studies within 5 % of the best after 60 trials, and how good the winner truly is: better than random."""
    found = space(tmp_path, setting(TRIALS, 0, "auto"), SURFACE)
    best = best_speed(found)
    reached: dict[Sampler, float] = {}
    truth: dict[Sampler, float] = {}
    for sampler in ("auto", "random"):
        counts, winners = [], []
        for seed in range(STUDIES):
            given = setting(TRIALS, seed, sampler)
            records = study(found, given)
            counts.append(trials_to_reach(records, NEAR * best))
            winner = summarise(records, given).winner
            assert winner is not None
            winners.append(speed(winner.standing.candidate.params)[0] / best)
        reached[sampler] = sum(count is not None for count in counts) / STUDIES
        truth[sampler] = statistics.fmean(winners)
        within = sorted(count if count is not None else TRIALS + 1 for count in counts)
        print(
            f"{sampler}: {reached[sampler]:.0%} within 5 % of the best after {TRIALS} trials "
            f"(first quarter of studies after {within[STUDIES // 4]}), "
            f"the winner's true speed is {truth[sampler]:.1%} of the best"
        )
    assert reached["auto"] > reached["random"]
    assert truth["auto"] > truth["random"]


@pytest.mark.parametrize("trials", [12, 24])
def test_equal_configurations_are_seldom_called_better(tmp_path: Path, trials: int) -> None:
    """A/A: all configurations are equal, starts differ by 2 %: an improvement is claimed in about one study of 20."""
    found = space(tmp_path, setting(trials, 0, "random"), SURFACE)
    studies = 400
    fooled = 0
    for seed in range(studies):
        given = setting(trials, seed, "random")
        winner = summarise(study(found, given, equal=True), given).winner
        assert winner is not None
        fooled += not winner.standing.candidate.is_baseline
    print(f"A/A, {trials} trials: an improvement is claimed in {fooled} of {studies} studies")
    assert fooled / studies < 0.1


def test_proposing_and_encoding_is_quick_beside_a_trial(tmp_path: Path) -> None:
    """Milliseconds each, where a trial takes minutes; printed, compared with random proposals only."""
    found = space(tmp_path, experiment(), SURFACE)
    spent_s: dict[Sampler, float] = {}
    for sampler in ("random", "auto"):
        given = setting(200, 0, sampler)
        searcher = Searcher(found, given, study="s", storage=None)
        began = time.perf_counter()
        told = study(found, given)
        spent_s[sampler] = (time.perf_counter() - began) / len(told)
        searcher.close()
        print(f"{sampler}: {1e3 * spent_s[sampler]:.1f} ms a trial to ask, encode and tell")
    assert spent_s["random"] < spent_s["auto"]
