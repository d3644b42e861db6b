"""D-8: a driver is killed in a trial; what the same command, an edited one and a fork then do. Files, search, store."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import optuna
import pytest

from runner.errors import UsageError
from runner.records import StudyFiles, fork_study, open_study
from runner.schema.study import Running, StudyDescription
from runner.schema.trial import Role
from runner.search import Proposal, Searcher
from runner.space import Space
from tests.studies import BEGAN, config, description, experiment, record_of, space

TRIALS = experiment(trials=12)
KNOB = """
knobs:
  max_num_seqs: {flag: max-num-seqs, choices: [%s]}
  dtype: {flag: dtype, choices: [bfloat16, float16]}
"""


def described(found: Space, study: str = "tiny-space") -> StudyDescription:
    return description(TRIALS, study=study).model_copy(update={"space_content": dict(found.content)})


@contextmanager
def driver(study: StudyFiles, found: Space) -> Iterator[Searcher]:
    """What a sweep does when it opens a study."""
    with study:
        for running in study.half_run():
            study.close_half_run(running, datetime.now(UTC))
        root = study.folder.parent
        searcher = Searcher(found, TRIALS, study=study.folder.name, storage=root / "study.db", records=study.records())
        yield searcher
        searcher.close()


def begin(study: StudyFiles, searcher: Searcher) -> Proposal:
    proposal = searcher.ask()
    assert proposal is not None
    study.begin(
        Running(
            number=proposal.number,
            role=proposal.role,
            params=proposal.params,
            config=config(proposal.params),
            marker="m",
            started_at=BEGAN,
        )
    )
    return proposal


@pytest.fixture
def killed(tmp_path: Path) -> Proposal:
    """Four finished trials, and a fifth whose driver was killed: its mark is left, nothing else."""
    found = space(tmp_path, TRIALS, KNOB % "128, 256")
    study = open_study(tmp_path / "tiny-space", described(found))
    with driver(study, found) as searcher:
        for _ in range(4):
            record = record_of(begin(study, searcher), {1: 50.0, 8: 400.0})
            searcher.tell(study.finish(record, {}))
        return begin(study, searcher)


def test_an_unedited_resume_queues_the_cut_trial_once_more(tmp_path: Path, killed: Proposal) -> None:
    """Trial 4 is FAIL in Optuna, cancelled in the records; the next one has its params; nothing is running."""
    found = space(tmp_path, TRIALS, KNOB % "128, 256")
    study = open_study(tmp_path / "tiny-space", described(found))
    with driver(study, found) as searcher:
        assert searcher.ask() == Proposal(5, killed.params, Role.SEARCH, killed.number)
        assert [str(r.outcome) for r in study.records()] == ["complete"] * 4 + ["failed"]
    trials = optuna.load_study(study_name="tiny-space", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert [t.state.name for t in trials] == ["COMPLETE"] * 4 + ["FAIL"]


def test_an_edited_space_is_refused_and_can_be_forked(tmp_path: Path, killed: Proposal) -> None:
    """The difference and the way out; the fork has the four finished trials and searches the new value too."""
    edited = space(tmp_path, TRIALS, KNOB % "128, 256, 512")
    with pytest.raises(UsageError) as refused:
        open_study(tmp_path / "tiny-space", described(edited))
    assert "+      - 512" in str(refused.value)
    assert "--fork" in str(refused.value)
    forked, _ = fork_study(tmp_path / "tiny-space", tmp_path / "forked", described(edited, "forked"))
    with driver(forked, edited) as searcher:
        assert [r.number for r in forked.records()] == [0, 1, 2, 3]
        while (proposal := searcher.ask()) is not None:
            searcher.tell(forked.finish(record_of(proposal, {1: 50.0, 8: 400.0}), {}))
        records = forked.records()
    searched = [str(r.params) for r in records if r.role is Role.SEARCH]
    assert len(searched) == len(set(searched))
    assert any(r.params.get("max_num_seqs") == "512" for r in records)
    trials = optuna.load_study(study_name="forked", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert [t.state.name for t in trials] == ["COMPLETE"] * len(records)
