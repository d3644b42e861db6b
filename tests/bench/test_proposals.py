"""How long it takes to load the full space and to propose and encode a thousand configurations. Prints, not gates."""

import random
import time

import pytest

from runner.space.command import argv
from runner.space.environment import server_env
from tests.unit.space.test_properties import drawn
from tests.unit.space.test_shipped import shipped

pytestmark = pytest.mark.bench

PROPOSALS = 1000


def test_a_thousand_proposals_of_the_full_space() -> None:
    """None is invalid; those that equal another are counted, for the search leaves them out."""
    began = time.perf_counter()
    space = shipped("full")
    loaded = time.perf_counter()
    chance = random.Random(1)
    keys: set[str] = set()
    for _ in range(PROPOSALS):
        config = space.resolve(drawn(space, chance))
        argv(config, model="some/model", host="127.0.0.1", port=8000, served_name="n")
        server_env(config, {})
        keys.add(space.key(config))
    ended = time.perf_counter()
    print(
        f"\nload and validate {1000 * (loaded - began):.0f} ms; {PROPOSALS} proposed, resolved, encoded and keyed in "
        f"{ended - loaded:.2f} s; {PROPOSALS - len(keys)} equal to another"
    )
    assert len(keys) > PROPOSALS / 2
