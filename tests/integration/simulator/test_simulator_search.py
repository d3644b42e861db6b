"""The search on the simulated box, without HTTP: what it chooses at C=1 hangs on the price it may pay at C=256."""

import pytest

from runner.schema.experiment import Experiment
from runner.schema.trial import TrialRecord
from runner.search import Searcher
from runner.simulator.describe import load_model, load_node
from runner.simulator.expected import Load, expected
from runner.space import load_experiment, load_space
from runner.verdict import Standing, summarise
from tests.studies import record_of


def winner(max_loss_percent: float) -> Standing:
    """The winner of `nccl.yaml` under the shipped experiment with a guard-rail of one's own, by the verdict."""
    shipped = load_experiment("simulated-8xpcie.yaml")
    rails = [{"concurrency": 256, "max_loss_percent": max_loss_percent}]
    given = Experiment.model_validate(shipped.model_dump(by_alias=True) | {"guard_rails": rails})
    space = load_space("nccl.yaml", given)
    node, model = load_node(given.engine.node or ""), load_model(given.model)
    load = Load(input_tokens=40, output_tokens=40, window_s=60)
    searcher = Searcher(space, given, study="protocols", storage=None)
    records: list[TrialRecord] = []
    while (proposal := searcher.ask()) is not None:
        config = space.resolve(proposal.params)
        tok_s = {level: expected(config, node, model, level, load).output_tok_s for level in given.ladder}
        records.append(record_of(proposal, tok_s))
        searcher.tell(records[-1])
    assert any(record.params.get("protocol") == "LL" for record in records), "the search tried it"
    found = summarise(records, given).winner
    assert found is not None
    return found.standing


def change(standing: Standing, concurrency: int) -> float:
    """Percent against the baseline."""
    level = standing.level(concurrency)
    assert level is not None
    assert level.verdict is not None
    assert level.verdict.change_percent is not None
    return level.verdict.change_percent


def test_ll_wins_and_its_price_is_told() -> None:
    """With 10 % to lose at C=256 it is LL: a third faster at C=1, some 6 % slower at C=256."""
    found = winner(10)
    assert found.candidate.params["protocol"] == "LL"
    assert 25 < change(found, 1) < 45
    assert -9 < change(found, 256) < -4


@pytest.mark.parametrize("max_loss_percent", [3, 1])
def test_a_narrow_guard_rail_forbids_ll(max_loss_percent: float) -> None:
    """With 3 % to lose it is not LL, although the search tried it and it is the fastest at C=1."""
    found = winner(max_loss_percent)
    assert found.candidate.params.get("protocol") != "LL"
    assert found.within_guard_rails
    assert found.candidate.is_baseline or change(found, 256) >= -max_loss_percent
