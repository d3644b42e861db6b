"""The first proposals: one knob at a time away from the best configuration so far."""

from pathlib import Path

from runner.schema.base import Scalar
from runner.search.first_steps import first_steps
from runner.space import Space
from tests.spaces import space_of

TEXT = """
knobs:
  path:
    choices:
      default: {}
      own: {flags: {disable-custom-all-reduce: true}}
  protocol: {env: NCCL_PROTO, choices: [LL, Simple], when: {path: own}}
  seqs: {flag: max-num-seqs, int: {low: 16, high: 256, log: true}}
  speculation:
    choices:
      none: {}
      ngram: {json: {speculative-config: {method: ngram}}}
  draft_tokens:
    json: speculative-config.num_speculative_tokens
    int: {low: 1, high: 7}
    required: true
    when: {speculation: ngram}
"""


def steps(space: Space, best: dict[str, Scalar] | None = None) -> list[dict[str, Scalar]]:
    """All of them, from the baseline or from another best configuration."""
    return list(first_steps(space, best or {}, set()))


def test_each_step_sets_one_knob_and_what_it_needs(tmp_path: Path) -> None:
    """A conditional knob brings its parent along, a parent brings what it requires; ranges begin in their middle."""
    found = steps(space_of(tmp_path, TEXT))
    assert found[:5] == [
        {"path": "own"},
        {"path": "own", "protocol": "LL"},
        {"seqs": 64},
        {"speculation": "ngram", "draft_tokens": 4},
        {"speculation": "ngram", "draft_tokens": 4},
    ]


def test_every_first_value_comes_before_any_second_one(tmp_path: Path) -> None:
    """Knobs take turns, so that a short study has seen each of them."""
    found = steps(space_of(tmp_path, TEXT))
    firsts, rest = found[:5], found[5:]
    assert {"path": "own", "protocol": "Simple"} in rest
    assert {"path": "own", "protocol": "Simple"} not in firsts
    assert {"seqs": 16} in rest
    assert {"seqs": 256} in rest


def test_every_step_is_a_point_of_the_space(tmp_path: Path) -> None:
    """All of them resolve."""
    space = space_of(tmp_path, TEXT)
    assert all(space.resolve(params) for params in steps(space))


def test_what_helped_is_kept_on_the_way(tmp_path: Path) -> None:
    """Steps start from the best so far; a changed parent takes the knobs along that depend on it."""
    found = steps(
        space_of(tmp_path, TEXT), {"path": "own", "protocol": "LL", "speculation": "ngram", "draft_tokens": 7}
    )
    assert {"path": "own", "protocol": "Simple", "speculation": "ngram", "draft_tokens": 7} in found
    assert {"path": "own", "protocol": "LL", "seqs": 64, "speculation": "ngram", "draft_tokens": 7} in found
    assert all(params["speculation"] == "ngram" for params in found)


def test_a_value_that_was_tried_is_not_a_step_again(tmp_path: Path) -> None:
    """Each value is met once, alone or in company."""
    space = space_of(tmp_path, TEXT)
    left = list(first_steps(space, {}, {("protocol", "LL"), ("seqs", 64), ("path", "own")}))
    assert left[0] == {"speculation": "ngram", "draft_tokens": 4}
    assert all(params.get("protocol") != "LL" and params.get("seqs") != 64 for params in left)
