"""Evidence starts: NCCL's own choices in the records, and no start made twice for the same environment."""

from pathlib import Path

import pytest

from tests.integration.sweep.conftest import Start, records

pytestmark = pytest.mark.timeout(900)
"""A sweep of a few trials takes a minute, and several on a busy machine."""

EAGER = "knobs:\n  eager: {flag: enforce-eager, choices: [true]}\n"


def test_what_nccl_chose_is_asked_once_and_kept_over_sittings(folder: Path, start: Start) -> None:
    """The first sitting asks for the baseline; the second knows it from the records."""
    (folder / "space.yaml").write_text(EAGER)
    first = start("--evidence", "--trials", "1")
    assert first.end() == 0, first.text
    assert "evidence start" in first.text
    second = start("--evidence", "--trials", "2")
    assert second.end() == 0, second.text
    assert "evidence start" not in second.text
    choices = [record["effective"]["nccl_choice"] for record in records(folder)]
    assert len(choices) == 2
    assert choices[0]
    assert choices[1] == choices[0]
