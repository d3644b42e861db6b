"""Knobs as Optuna's parameters, and back."""

from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from runner.schema.base import Scalar
from runner.search.encoding import encode, suggest
from runner.space import Space
from tests.studies import experiment, space


@pytest.fixture
def given(tmp_path: Path) -> Space:
    return space(tmp_path, experiment())


def test_unset_is_a_value_of_its_own(given: Space) -> None:
    """None for choices; for a range a parameter that says whether it is set."""
    encoded = encode({}, given)
    assert encoded is not None
    assert encoded[0] == {"seqs is set": False, "block": None, "dtype": None, "speculation": None}
    assert "seqs" not in encoded[1]


def test_a_range_is_a_number_of_its_own_kind(given: Space) -> None:
    """On its scale, beside its switch; the required knob under its condition has no switch."""
    encoded = encode({"seqs": 128, "speculation": "ngram", "drafts": 3}, given)
    assert encoded is not None
    values, distributions = encoded
    assert (values["seqs is set"], values["seqs"], values["drafts"]) == (True, 128, 3)
    assert distributions["seqs"] == IntDistribution(16, 1024, log=True)
    assert distributions["drafts"] == IntDistribution(1, 5)
    assert distributions["speculation"] == CategoricalDistribution([None, "ngram"])
    assert "drafts is set" not in values


@pytest.mark.parametrize(
    "params",
    [
        {"block": "48"},
        {"seqs": 8},
        {"seqs": True},
        {"drafts": 2},
        {"speculation": "ngram"},
        {"no_such_knob": "x"},
    ],
)
def test_what_is_no_point_of_the_space_has_no_encoding(given: Space, params: dict[str, Scalar]) -> None:
    """A label or a number that is gone, a knob that is inactive, one that is required and missing."""
    assert encode(params, given) is None


def test_what_optuna_suggests_encodes_to_what_optuna_stored(given: Space) -> None:
    """For many random points: the same values under the same distributions, so the store can be rebuilt exactly."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(200):
        trial = study.ask()
        params = suggest(trial, given)
        encoded = encode(params, given)
        assert encoded is not None
        assert encoded[0] == trial.params
        assert encoded[1] == trial.distributions
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
