"""Ask and tell, in memory: what is proposed, what is refused, what Optuna learns."""

import random
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from runner.errors import FailureKind, UsageError
from runner.schema.base import Scalar
from runner.schema.experiment import Experiment, GuardRail, Search
from runner.schema.trial import Outcome, Role, TrialRecord
from runner.search import Proposal, Searcher
from runner.space import Space
from tests.studies import SPACE, experiment, record_of, space

SMALL = """
knobs:
  block: {flag: block-size, choices: [32, 64]}
  dtype: {flag: dtype, choices: [bfloat16, float16]}
"""

Answer = Callable[[Proposal], TrialRecord]


def figure(proposal: Proposal) -> TrialRecord:
    """A speed that depends on the configuration alone; the block that dies, dies."""
    if proposal.params.get("block") == "16":
        return record_of(proposal, failure=FailureKind.SERVER_EXITED)
    speed = 50.0 + len(str(proposal.params)) + float(proposal.params.get("drafts", 0))
    return record_of(proposal, {1: speed, 8: 8 * speed})


def run(searcher: Searcher, answer: Answer = figure, *, stop_after: int = 10**6) -> list[TrialRecord]:
    """Asks and tells to the end."""
    records: list[TrialRecord] = []
    while len(records) < stop_after and (proposal := searcher.ask()) is not None:
        records.append(answer(proposal))
        searcher.tell(records[-1])
    return records


def searcher_of(given: Space, an: Experiment, records: tuple[TrialRecord, ...] = ()) -> Searcher:
    return Searcher(given, an, study="s", storage=None, records=records)


def test_the_baseline_is_trial_zero(tmp_path: Path) -> None:
    """Every knob unset, before anything is learnt."""
    given = experiment()
    first = searcher_of(space(tmp_path, given), given).ask()
    assert first == Proposal(0, {}, Role.BASELINE, None)


def test_numbers_follow_each_other_and_no_configuration_is_searched_twice(tmp_path: Path) -> None:
    """Over a study of forty trials; repeats are deliberate and say of what."""
    given = experiment(trials=40)
    found = space(tmp_path, given)
    records = run(searcher_of(found, given))
    assert [r.number for r in records] == list(range(40))
    searched = [found.key(found.resolve(r.params)) for r in records if r.role is Role.SEARCH]
    assert len(set(searched)) == len(searched) == 37
    assert all(r.repeat_of is not None for r in records[1:] if r.role is not Role.SEARCH)


def test_the_same_seed_proposes_the_same_and_another_does_not(tmp_path: Path) -> None:
    """A study can be repeated."""
    given, other = experiment(trials=20), experiment(trials=20, search=Search(seed=1))
    found = space(tmp_path, given)
    one, two, three = (run(searcher_of(found, e)) for e in (given, given, other))
    assert [r.params for r in one] == [r.params for r in two]
    assert [r.params for r in one] != [r.params for r in three]


@pytest.mark.parametrize("killed_after", [1, 5, 11, 14, 24])
def test_a_resumed_study_goes_on_as_an_uninterrupted_one_would(tmp_path: Path, killed_after: int) -> None:
    """Random proposals, learnt ones, repeats and finalists: what comes next depends on the records alone."""
    given = experiment(trials=25)
    found = space(tmp_path, given)
    whole = run(searcher_of(found, given))
    begun = run(searcher_of(found, given), stop_after=killed_after)
    resumed = run(searcher_of(found, given, tuple(begun)))
    assert [(r.number, r.params, r.role, r.repeat_of) for r in [*begun, *resumed]] == [
        (r.number, r.params, r.role, r.repeat_of) for r in whole
    ]


def test_a_trial_cut_short_is_proposed_once_more_with_the_same_params(tmp_path: Path) -> None:
    """Its record says cancelled; the next trial is the same again; after that the search goes on."""
    given = experiment(trials=12)
    found = space(tmp_path, given)
    begun = run(searcher_of(found, given), stop_after=4)
    asked = searcher_of(found, given, tuple(begun)).ask()
    assert asked is not None
    cut = record_of(asked, failure=FailureKind.CANCELLED)
    resumed = searcher_of(found, given, (*begun, cut))
    again = resumed.ask()
    assert again == Proposal(5, cut.params, Role.SEARCH, 4)
    resumed.tell(record_of(again, failure=FailureKind.CANCELLED))
    third = resumed.ask()
    assert third is not None
    assert third.params != cut.params


def test_a_small_space_is_gone_through_point_by_point(tmp_path: Path) -> None:
    """All eight points beside the baseline, each once, then the owed repeats, then the end."""
    given = experiment(trials=30)
    searcher = searcher_of(space(tmp_path, given, SMALL), given)
    records = run(searcher)
    searched = [tuple(sorted(r.params.items())) for r in records if r.role is Role.SEARCH]
    assert len(searched) == len(set(searched)) == 8
    assert [r.role for r in records[9:]] == [Role.BASELINE, Role.FINALIST]
    assert searcher.ended == "every configuration was tried"


def test_a_sampler_that_has_seen_everything_ends_the_study(tmp_path: Path) -> None:
    """TPE on the small space: the same points, and no endless asking."""
    given = experiment(trials=30, search=Search(sampler="tpe"))
    searcher = searcher_of(space(tmp_path, given, SMALL), given)
    records = run(searcher)
    assert len({tuple(sorted(r.params.items())) for r in records if r.role is Role.SEARCH}) == 8
    assert searcher.ended == "every configuration was tried"
    assert searcher.refused["tried already"] > 0


def test_a_grid_needs_a_space_that_can_be_counted(tmp_path: Path) -> None:
    """Said before anything starts."""
    given = experiment(search=Search(sampler="grid"))
    text = "knobs:\n  memory: {flag: gpu-memory-utilization, float: {low: 0.5, high: 0.9}}\n"
    with pytest.raises(UsageError, match="sampler: grid"):
        searcher_of(space(tmp_path, given, text), given)
    with pytest.raises(UsageError, match="sampler: grid"):
        searcher_of(space(tmp_path, given, SPACE), given)


def test_the_budget_ends_the_study(tmp_path: Path) -> None:
    """And asking again gives nothing again."""
    given = experiment(trials=3)
    searcher = searcher_of(space(tmp_path, given), given)
    run(searcher)
    assert (searcher.ask(), searcher.ended) == (None, "the budget of trials is used up")


def test_what_cannot_run_is_never_proposed(tmp_path: Path) -> None:
    """The space's own rules decide, without a launch and without using up a trial."""
    text = SPACE.replace("max_num_seqs != 100", "max_num_seqs > 900")
    given = experiment(trials=30)
    found = space(tmp_path, given, text)
    searcher = searcher_of(found, given)
    for record in run(searcher):
        if record.role is Role.SEARCH:
            assert float(record.params.get("seqs", 1024)) > 900
    assert any("max_num_seqs > 900" in reason for reason in searcher.refused)


def test_a_value_that_is_kept_to_fail_is_tried_until_it_failed_once(tmp_path: Path) -> None:
    """A deliberate failure is part of the study; a second one would teach nobody anything."""
    given = experiment(trials=40)
    records = run(searcher_of(space(tmp_path, given), given))
    assert sum(r.params.get("block") == "16" for r in records) == 1


def test_optuna_is_told_what_its_samplers_use(tmp_path: Path) -> None:
    """Failed: PRUNED, no value, not feasible. Guard-rail missed: COMPLETE with the excess. Cancelled: FAIL."""
    rails = (GuardRail(concurrency=8, max_loss_percent=10),)
    given = experiment(guard_rails=rails)
    searcher = Searcher(space(tmp_path, given), given, study="s", storage=tmp_path / "study.db")
    answers: list[Answer] = [
        lambda p: record_of(p, {1: 50.0, 8: 400.0}),
        lambda p: record_of(p, failure=FailureKind.OUT_OF_MEMORY),
        lambda p: record_of(p, {1: 60.0, 8: 300.0}),
        lambda p: record_of(p, failure=FailureKind.ENVIRONMENT),
        lambda p: record_of(p, failure=FailureKind.CLIENT_BOUND),
    ]
    for answer in answers:
        proposal = searcher.ask()
        assert proposal is not None
        searcher.tell(answer(proposal))
    searcher.close()
    trials = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert [(t.state.name, t.values, t.constraints) for t in trials] == [
        ("COMPLETE", [50.0], {"failed": 0.0, "C=8": -10.0}),
        ("PRUNED", None, {"failed": 1.0}),
        ("COMPLETE", [60.0], {"failed": 0.0, "C=8": 15.0}),
        ("FAIL", None, {}),
        ("FAIL", None, {}),
    ]


def test_pareto_has_two_directions_and_takes_failures(tmp_path: Path) -> None:
    """The whole study runs, with values for both ends of the ladder."""
    given = experiment(trials=20, search=Search(objective="pareto"))
    records = run(searcher_of(space(tmp_path, given), given))
    assert len(records) == 20
    assert any(r.outcome is not Outcome.COMPLETE for r in records)


def test_a_record_of_another_space_is_kept_but_not_learnt_from(tmp_path: Path) -> None:
    """A fork of an edited space: a label that is gone, a knob that is gone; the study still goes on."""
    given = experiment(trials=12)
    old = space(tmp_path, given)
    records = run(searcher_of(old, given), stop_after=8)
    narrow = space(tmp_path, given, SMALL)
    searcher = Searcher(narrow, given, study="s", storage=tmp_path / "study.db", records=records)
    proposal = searcher.ask()
    searcher.close()
    assert proposal is not None
    assert proposal.number == 8
    states = [t.state.name for t in optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db").trials]
    assert len(states) == 8
    assert "FAIL" in states


def test_trials_under_way_are_not_proposed_again(tmp_path: Path) -> None:
    """Asking several times before telling, as with several sets of GPUs."""
    given = experiment(trials=12)
    searcher = searcher_of(space(tmp_path, given), given)
    asked = [searcher.ask() for _ in range(6)]
    found = [proposal for proposal in asked if proposal is not None]
    assert [proposal.number for proposal in found] == list(range(6))
    searched = [str(sorted(proposal.params.items())) for proposal in found if proposal.role is Role.SEARCH]
    assert len(set(searched)) == len(searched)
    for proposal in random.Random(0).sample(found, len(found)):
        searcher.tell(figure(proposal))
    assert len(run(searcher)) == 6


def test_closing_proposes_only_what_is_owed(tmp_path: Path) -> None:
    """When the time is up: the baseline's last start and the finalist."""
    given = experiment(trials=50)
    searcher = searcher_of(space(tmp_path, given), given)
    run(searcher, stop_after=6)
    roles = []
    while (proposal := searcher.ask(closing=True)) is not None:
        roles.append(proposal.role)
        searcher.tell(figure(proposal))
    assert roles == [Role.BASELINE, Role.FINALIST]
    assert searcher.ended == "the time is used up (the same command goes on)"


@pytest.mark.parametrize("kind", [FailureKind.ENVIRONMENT, FailureKind.CLIENT_BOUND])
def test_a_broken_environment_stops_the_sweep_and_not_the_study(kind: FailureKind, tmp_path: Path) -> None:
    """Two configurations, each tried twice, and it is the machine: stop, and go on when asked again."""
    given = experiment(trials=20)
    found = space(tmp_path, given)
    begun = run(searcher_of(found, given), stop_after=3)
    searcher = searcher_of(found, given, tuple(begun))
    failed = run(searcher, lambda proposal: record_of(proposal, failure=kind))
    assert [r.params for r in failed] == [failed[0].params] * 2 + [failed[2].params] * 2
    assert searcher.ended is None
    assert searcher.stopped is not None
    assert "4 trials in a row" in searcher.stopped
    resumed = searcher_of(found, given, (*begun, *failed))
    later = run(resumed)
    assert all(r.params not in (failed[0].params, failed[2].params) for r in later)
    assert len(begun) + 2 + len(later) == 20
    assert (resumed.ended, resumed.stopped) == ("the budget of trials is used up", None)


def test_what_was_found_by_hand_is_tried_first(tmp_path: Path) -> None:
    """Right after the baseline, in order, once, also after a resume; numbers may stand for labels."""
    wishes = ({"block": 64, "seqs": 128}, {"dtype": "float16"}, {"block": 64, "seqs": 128})
    given = experiment(trials=12, search=Search(try_first=wishes))
    found = space(tmp_path, given)
    begun = run(searcher_of(found, given), stop_after=2)
    records = [*begun, *run(searcher_of(found, given, tuple(begun)))]
    assert [r.params for r in records[:3]] == [{}, {"block": "64", "seqs": 128}, {"dtype": "float16"}]
    assert sum(r.params == {"dtype": "float16"} and r.role is Role.SEARCH for r in records) == 1


@pytest.mark.parametrize("wish", [{"block": 48}, {"seqs": 2}, {"nonsense": 1}, {"drafts": 3}])
def test_a_wish_that_is_no_point_of_the_space_is_refused(tmp_path: Path, wish: dict[str, Scalar]) -> None:
    """Before anything starts, with the knobs there are."""
    given = experiment(search=Search(try_first=(wish,)))
    with pytest.raises(UsageError, match="try_first") as refused:
        searcher_of(space(tmp_path, given), given)
    assert "block: 32|64|16" in str(refused.value)
