"""YAML is read strictly and every refusal names file, line, column, value and remedy."""

from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.schema.experiment import Experiment
from runner.schema.space import SpaceFile
from runner.space.document import find_file, parse_document, read_document, read_model
from runner.space.load import load_experiment

FILE = Path("x.yaml")


def refused(text: str, model: type[SpaceFile] | type[Experiment] = SpaceFile) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_document(text, FILE).parse(model)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("knobs: {}\nknobs: {}\n", 2, 1, "stands twice, first in line 1"),
        ("a: &x 1\nb: *x\n", 2, 4, "aliases"),
        ("knobs: [1\n", 2, 1, "not valid YAML"),
        ("\tknobs: {}\n", 1, 1, "not valid YAML"),
        ("", 1, 1, "key: value"),
        ("- 1\n", 1, 1, "key: value"),
        ("a: !!python/object:os.system x\n", 1, 4, "tag"),
        ("a: 1\n---\nb: 2\n", 2, 1, "another document"),
        ("a: 1e999\n", 1, 4, "finite"),
        ("16: a\n", 1, 1, "is not text"),
        ("? [a]\n: b\n", 1, 3, "is not text"),
        ("knobs:\n  a: {flag: x, chices: [1]}\n", 2, 16, "unknown key `chices`"),
        ("knobs:\n  a: {flag: x, int: {low: 1}}\n", 2, 21, "`knobs.a.int.high` is missing"),
        ("knobs:\n  a: {flag: x, int: {low: 1, high: '2'}}\n", 2, 36, 'found "2"'),
        ("knobs:\n  a: {flag: x, int: {low: 5, high: 2}}\n", 2, 21, "low 5 must be below high 2"),
        ("knobs:\n  a: {flag: x, choices: []}\n", 2, 25, "at least 1 item"),
        ("knobs:\n  a: {flag: x}\n", 2, 6, "exactly one of `choices`, `int` and `float`"),
        ("knobs:\n  a: {choices: [1]}\n", 2, 6, "exactly one of `flag`, `env` and `json`"),
        ("knobs:\n  a: {flag: x, choices: {b: {}}}\n", 2, 6, "leave out"),
        ("knobs:\n  a: {flag: x, choices: [1], required: true}\n", 2, 6, "`required` needs `when`"),
        ("knobs:\n  a: {json: compilation-config, choices: [1]}\n", 2, 6, "field inside a structured flag"),
        ("knobs:\n  a: {flag: x, int: {low: 0, high: 2, log: true}}\n", 2, 21, "starts above 0"),
        ("knobs:\n  a: {flag: x, choices: [1], when: {b: []}}\n", 2, 40, "at least 1 item"),
        ("knobs:\n  a: {flag: x, choices: [[1, 2]]}\n", 2, 26, "a choice is a plain value, or `{value: ...}`"),
        ("knobs:\n  a: {flag: x, choices: [null]}\n", 2, 26, "a choice is a plain value"),
    ],
)
def test_a_malformed_space_is_refused_at_its_place(text: str, line: int, column: int, words: str) -> None:
    """The first wrong thing is named with its line and column, 1-based."""
    error = refused(text)
    assert (error.line, error.column) == (line, column)
    assert words in str(error)
    assert str(error).startswith(f"x.yaml:{line}:{column}: ")


@pytest.mark.parametrize(
    ("text", "words", "remedy"),
    [
        ("model: 1\n", "`model`", 'write "1" in quotes'),
        ("laddr: [1]\n", "unknown key `laddr`", "did you mean `ladder`"),
        ("ladder: [2, 1]\n", "must rise", ""),
        ("workload: {input_tokens: {low: 1, hig: 2}}\n", "unknown key `hig`", "did you mean `high`"),
        ("defaults: {env: {NCCL_NTHREADS: 64}}\n", "defaults.env.NCCL_NTHREADS", 'write "64" in quotes'),
        ("budget: {trials: 0}\n", "greater than 0, found 0", ""),
        ("goal: {concurrency: 3}\n", "concurrency 3 of the goal", ""),
    ],
)
def test_a_malformed_experiment_is_refused_with_a_remedy(text: str, words: str, remedy: str) -> None:
    """Unknown keys, wrong types and values out of range say what would be right."""
    whole = "name: x\nengine: {}\n" + ("" if text.startswith("model") else "model: m\n") + text
    error = refused(whole, Experiment)
    assert words in error.problem
    assert remedy in error.remedy


def test_yaml_one_point_one_traps_stay_text() -> None:
    """`on`, `off`, `1:30`, dates and numbers with a leading zero are text, not what YAML 1.1 made of them."""
    data = parse_document("a: [on, off, yes, 1:30, 2026-01-01, 007, 0x10, 1_000]\n", FILE).data
    assert data == {"a": ["on", "off", "yes", "1:30", "2026-01-01", "007", "0x10", "1_000"]}


def test_core_types_are_read() -> None:
    """Null, truth values, whole numbers and decimals are what they look like."""
    data = parse_document("a: [null, ~, true, false, 12, -3, 0.5, 1e3, .5, x]\n", FILE).data
    assert data == {"a": [None, None, True, False, 12, -3, 0.5, 1000.0, 0.5, "x"]}


def test_deep_nesting_is_refused_instead_of_ending_the_process() -> None:
    """Ten thousand open brackets are a usage error."""
    assert "nested too deeply" in str(refused("[" * 10_000))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing files, folders and binary content are told apart."""
    with pytest.raises(UsageError, match="No such file"):
        read_document(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="directory"):
        read_document(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_document(binary)


def test_an_unknown_name_lists_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name gets a suggestion and the list."""
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "mine.yaml").write_text("knobs: {}\n")
    monkeypatch.chdir(tmp_path)
    assert find_file("mine", "search_spaces", "search space") == Path("search_spaces/mine.yaml")
    assert find_file("search_spaces/mine", "search_spaces", "search space") == Path("search_spaces/mine.yaml")
    assert find_file("search_spaces/mine.yaml", "search_spaces", "search space") == Path("search_spaces/mine.yaml")
    with pytest.raises(UsageError, match="no search space"):
        find_file("", "search_spaces", "search space")
    with pytest.raises(UsageError) as caught:
        find_file("mone", "search_spaces", "search space")
    assert "did you mean `mine`" in caught.value.remedy
    assert "mine.yaml" in caught.value.remedy


def test_an_experiment_takes_its_files_stem_as_name(tmp_path: Path) -> None:
    """`name` may be left out, and may be given."""
    path = tmp_path / "my-box.yaml"
    path.write_text("engine: {}\nmodel: m\n")
    assert load_experiment(path).name == "my-box"
    path.write_text("name: other\nengine: {}\nmodel: m\n")
    assert load_experiment(path).name == "other"


def test_read_model_gives_the_model(tmp_path: Path) -> None:
    """Any schema can be read from a file."""
    path = tmp_path / "space.yaml"
    path.write_text("knobs: {a: {flag: x, choices: [1, {value: 2, keep_failing: why}]}}\n")
    assert read_model(path, SpaceFile).knobs["a"].choices is not None


def test_an_experiments_wrong_setting_is_refused_at_its_line(tmp_path: Path) -> None:
    """A value, a name and a form, each where it stands in the experiment's own file."""
    path = tmp_path / "mine.yaml"
    for part, setting, column, words in (
        ("defaults", "env: {NCCL_NTHREADS: '100'}", 24, "`100` is no value of NCCL_NTHREADS"),
        ("pinned", "json: {compilation-config: {cudagraph_mod: FULL}}", 46, "has no `cudagraph_mod`"),
        ("defaults", "flags: {tp: 2}", 3, "write `tensor-parallel-size` in full"),
    ):
        path.write_text(f"engine: {{}}\nmodel: m\n{part}:\n  {setting}\n")
        with pytest.raises(UsageError) as caught:
            load_experiment(path)
        assert words in caught.value.problem
        assert (caught.value.path, caught.value.line, caught.value.column) == (path, 4, column)
