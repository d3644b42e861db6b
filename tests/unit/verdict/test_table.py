"""The table's cells; simulated and synthetic numbers say so in them."""

import io

from rich.console import Console

from runner.schema.experiment import GuardRail
from runner.schema.trial import Role
from runner.verdict import Rows, describe, drawn, rows, summarise
from tests.studies import experiment, record


def text(table: Rows) -> str:
    return "\n".join(" | ".join(row) for row in (table.header, *table.rows)) + "\n" + "\n".join(table.notes)


def test_each_level_stands_beside_its_change_and_finding() -> None:
    """The whole table of a small study."""
    records = [
        record(0, {1: 50.0, 8: 400.0}, role=Role.BASELINE),
        record(1, {1: 80.0, 8: 410.0}, params={"dtype": "bfloat16", "seqs": 16}),
        record(2, {1: 50.2, 8: 401.0}, role=Role.BASELINE),
        record(3, {1: 80.1, 8: 409.0}, params={"dtype": "bfloat16", "seqs": 16}, role=Role.FINALIST, repeat_of=1),
        record(4, {1: 30.0}, params={"seqs": 2}),
    ]
    table = rows(summarise(records, experiment()))
    assert table.header == ("#", "trial", "configuration", "C=1 tok/s", "C=8 tok/s", "% of 100\nat C=1")
    assert table.rows == (
        ("1 winner", "1, 3", "dtype=bfloat16 seqs=16", "80.0 +59.8 %\nbetter", "409.5 +2.2 %\nbetter", "80 %"),
        ("2", "0, 2", "baseline", "50.1", "400.5", "50 %"),
        ("3", "4", "seqs=2", "30.0 -40.1 %\nworse", "–", "30 %"),
    )


def test_no_word_of_a_configuration_is_cut() -> None:
    """The figures give way: an unreadable name names nothing."""
    params = {"omp_threads": "all_cpus", "speculation": "ngram_synthetic"}
    records = [record(0, {1: 50.0, 8: 400.0}, role=Role.BASELINE), record(1, {1: 80.0, 8: 410.0}, params=params)]
    out = io.StringIO()
    Console(file=out, width=80).print(drawn(rows(summarise(records, experiment())), "a title"))
    assert "omp_threads=all_cpus" in out.getvalue()
    assert "speculation=ngram_synthetic" in out.getvalue()


def test_top_keeps_the_baseline() -> None:
    """A table of the best is worth nothing without what they are better than."""
    records = [record(0, 10.0, role=Role.BASELINE), *(record(i, 10.0 + i, params={"a": i}) for i in range(1, 6))]
    table = rows(summarise(records, experiment(ladder=(1,))), top=2)
    assert [row[2] for row in table.rows] == ["a=5", "a=4", "baseline"]


def test_a_simulated_number_is_never_shown_without_the_word() -> None:
    """In each row, and under the table."""
    table = rows(summarise([record(0, 10.0, role=Role.BASELINE, simulated=True)], experiment(ladder=(1,))))
    assert "(simulated)" in table.rows[0][2]
    assert any(note.startswith("simulated:") for note in table.notes)


def test_synthetic_acceptance_is_always_named() -> None:
    """With its length, in the row and under the table."""
    records = [record(0, 10.0, role=Role.BASELINE), record(1, 20.0, params={"d": 3}, synthetic_acceptance=2.5)]
    table = rows(summarise(records, experiment(ladder=(1,))))
    assert "(synthetic acceptance 2.5)" in table.rows[1][2]
    assert any(note.startswith("synthetic acceptance:") for note in table.notes)


def test_a_missed_guard_rail_is_told_in_its_row() -> None:
    """By how much, and where."""
    given = experiment(guard_rails=(GuardRail(concurrency=8, max_loss_percent=10),))
    records = [record(0, {1: 10.0, 8: 80.0}, role=Role.BASELINE), record(1, {1: 12.0, 8: 60.0}, params={"a": "x"})]
    assert "(misses the guard-rail at C=8 by 15.0 %)" in text(rows(summarise(records, given)))


def test_a_configuration_is_described_by_its_knobs() -> None:
    """Unset ones are not written; none at all is said."""
    assert describe({"a": "x", "n": 4}) == "a=x n=4"
    assert describe({}) == "every knob unset"
