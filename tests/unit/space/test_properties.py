"""Fingerprints, proposals and encodings, for whatever the search may propose."""

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import Infeasible
from runner.schema.base import Scalar
from runner.schema.launch import LaunchConfig
from runner.space.command import argv
from runner.space.equivalence import equivalent_key
from runner.space.space import Space
from tests.unit.space.test_shipped import SPACES, shipped

SCALARS = st.one_of(
    st.booleans(), st.integers(-5, 2000), st.floats(0.001, 1, allow_nan=False), st.text("abcXYZ0-,;:^", max_size=8)
)
NAMES = st.sampled_from(["max-num-seqs", "dtype", "enforce-eager", "block-size", "optimization-level"])
JSON_VALUES = st.recursive(
    SCALARS, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=6
)
CONFIGS = st.builds(
    lambda flags, structured, env, gpus: LaunchConfig.model_validate(
        {"model": "m", "flags": flags, "json": structured, "env": env, "gpus": gpus}
    ),
    st.dictionaries(NAMES, SCALARS, max_size=4),
    st.dictionaries(
        st.sampled_from(["compilation-config", "speculative-config"]),
        st.dictionaries(st.sampled_from("abc"), JSON_VALUES, min_size=1, max_size=3),
        max_size=2,
    ),
    st.dictionaries(st.sampled_from(["NCCL_PROTO", "A", "B"]), st.text("abLL128^;", max_size=6), max_size=3),
    st.integers(0, 8),
)


def reordered(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, reordered(below, chance)) for key, below in value.items()]
        chance.shuffle(items)
        return dict(items)
    return value


def typed(value: Any) -> str:
    """A text that tells values apart as JSON does: ``True`` is not 1, and 1 is not 1.0."""
    return json.dumps(value, sort_keys=True)


@given(CONFIGS, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_change_a_fingerprint(config: LaunchConfig, chance: random.Random) -> None:
    """Nor the words, nor the key of equivalence."""
    same = LaunchConfig.model_validate(reordered(config.model_dump(by_alias=True), chance))
    assert same.fingerprint == config.fingerprint
    assert equivalent_key(same) == equivalent_key(config)
    words = [argv(c, model="M", host="H", port=1, served_name="n") for c in (config, same)]
    assert words[0] == words[1]


@given(CONFIGS, CONFIGS)
def test_different_configurations_have_different_fingerprints(one: LaunchConfig, other: LaunchConfig) -> None:
    """And equal ones equal fingerprints, by value and type."""
    same = typed(one.model_dump(by_alias=True)) == typed(other.model_dump(by_alias=True))
    assert (one.fingerprint == other.fingerprint) == same


@given(CONFIGS, st.sampled_from(["max-num-seqs", "dtype"]), SCALARS)
def test_any_single_change_changes_the_fingerprint(config: LaunchConfig, name: str, value: Scalar) -> None:
    """One flag more, or another value of it."""
    changed = config.model_copy(update={"flags": {**config.flags, name: value}})
    if typed(changed.flags) != typed(config.flags):
        assert changed.fingerprint != config.fingerprint


@given(CONFIGS)
def test_a_configuration_survives_its_own_json(config: LaunchConfig) -> None:
    """So that a record or a profile loads back to the same fingerprint."""
    assert LaunchConfig.model_validate_json(config.canonical_json()).fingerprint == config.fingerprint


space_of_name = cache(shipped)


def drawn(space: Space, chance: random.Random) -> dict[str, Scalar]:
    """A proposal as a random sampler makes it: knob by knob, in order, only what is active."""
    params: dict[str, Scalar] = {}
    for knob in space.knobs:
        if not space.is_active(knob, params) or (not knob.required and chance.random() < 0.4):
            continue
        if knob.range is None:
            params[knob.name] = chance.choice(knob.labels)
        else:
            params[knob.name] = chance.randint(int(knob.range.low), int(knob.range.high))
    return params


@settings(deadline=None)
@given(st.sampled_from(SPACES), st.integers(0, 2**32))
def test_any_proposal_encodes_and_is_valid_unless_kept_to_fail(name: str, seed: int) -> None:
    """The same proposal always gives the same configuration, and only marked values make it impossible."""
    space = space_of_name(name)
    params = drawn(space, random.Random(seed))
    try:
        config = space.resolve(params)
    except Infeasible:
        kept = {(knob.name, label) for knob in space.knobs for label in knob.keep_failing}
        assert kept & set(params.items())
        return
    assert space.resolve(dict(reversed(params.items()))).fingerprint == config.fingerprint
    words = argv(config, model="M", host="H", port=1, served_name="n")
    assert all(isinstance(word, str) for word in words)
    for position, word in enumerate(words):
        if word in ("--compilation-config", "--speculative-config"):
            assert (
                json.dumps(json.loads(words[position + 1]), sort_keys=True, separators=(",", ":"))
                == words[position + 1]
            )
    assert not any("." in word for word in words if word.startswith("--")), "no dotted keys"


@pytest.mark.parametrize("name", [name for name in SPACES if name not in ("full", "cpu", "nccl")])
def test_what_is_counted_is_what_can_be_proposed(name: str) -> None:
    """The count is that of distinct configurations among all combinations, and no combination is listed twice."""
    space = space_of_name(name)
    combinations = list(space.combinations())
    assert combinations[0] == {}
    assert len(combinations) == space.size()
    assert len({typed(params) for params in combinations}) == len(combinations)
    keys = {space.key(config) for config, reasons in map(space.judged, combinations) if config and not reasons}
    assert space.count() == len(keys)


def test_a_large_space_is_sized_without_trying_each() -> None:
    """Conditions are respected; the count is not given."""
    full = space_of_name("full")
    assert full.count() is None
    size = full.size()
    assert size is not None
    assert size > 10**9
