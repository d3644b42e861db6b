"""The search on the simulated box, without HTTP: what it chooses at C=1 hangs on the price it may pay at C=256."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.schema.base import Scalar
from runner.schema.experiment import Experiment
from runner.search import Searcher
from runner.simulator.describe import load_model, load_node
from runner.simulator.expected import Load, expected
from runner.space import Space, load_experiment, load_space
from tests.studies import record_of

PROTOCOLS = """
knobs:
  allreduce:
    choices:
      nccl: {flags: {disable-custom-all-reduce: true}}
  protocol: {env: NCCL_PROTO, choices: [LL, LL128, Simple], when: {allreduce: nccl}}
"""


def study(folder: Path, max_loss_percent: float) -> tuple[Experiment, Space]:
    """The shipped experiment with a guard-rail of one's own, over the protocols."""
    shipped = load_experiment("simulated-8xpcie.yaml")
    rails = [{"concurrency": 256, "max_loss_percent": max_loss_percent}]
    given = Experiment.model_validate(shipped.model_dump(by_alias=True) | {"guard_rails": rails})
    path = folder / "protocols.yaml"
    path.write_text(PROTOCOLS, encoding="utf-8")
    return given, load_space(path, given)


def chosen(folder: Path, max_loss_percent: float) -> tuple[Mapping[str, Scalar], dict[int, float]]:
    """Parameters of the fastest configuration at C=1 that keeps the guard-rail, and its change against the baseline."""
    given, space = study(folder, max_loss_percent)
    node, model = load_node(given.engine.node or ""), load_model(given.model)
    load = Load(input_tokens=40, output_tokens=40, window_s=60)
    searcher = Searcher(space, given, study="protocols", storage=None)
    found: list[tuple[Mapping[str, Scalar], dict[int, float]]] = []
    while (proposal := searcher.ask()) is not None:
        config = space.resolve(proposal.params)
        tok_s = {level: expected(config, node, model, level, load).output_tok_s for level in given.ladder}
        searcher.tell(record_of(proposal, tok_s))
        found.append((proposal.params, tok_s))
    baseline = found[0][1]
    kept = [one for one in found if one[1][256] >= baseline[256] * (1 - max_loss_percent / 100)]
    params, tok_s = max(kept, key=lambda one: one[1][1])
    return params, {level: 100 * (tok_s[level] / baseline[level] - 1) for level in given.ladder}


def test_ll_wins_and_its_price_is_told(tmp_path: Path) -> None:
    """With 10 % to lose at C=256 it is LL: a third faster at C=1, some 6 % slower at C=256."""
    params, change = chosen(tmp_path, 10)
    assert params["protocol"] == "LL"
    assert 25 < change[1] < 45
    assert -8 < change[256] < -4


@pytest.mark.parametrize("max_loss_percent", [3, 1])
def test_a_narrow_guard_rail_forbids_ll(tmp_path: Path, max_loss_percent: float) -> None:
    """With 3 % to lose it is not LL."""
    params, change = chosen(tmp_path, max_loss_percent)
    assert params.get("protocol") != "LL"
    assert change[256] >= -max_loss_percent
