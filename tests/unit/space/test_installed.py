"""The installed vLLM is asked for its flags once, and a stale JSON Schema is found."""

import sys
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.space import json_schema
from runner.space.installed import flags_of_help, installed_flags

HELP = """usage: vllm serve [model_tag] [options]

options:
  --headless            Run in headless mode. See --not-an-option for more.
                        --neither-is-this
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many (default: None)
  --enable-log-requests, --no-enable-log-requests
  -tp TENSOR_PARALLEL_SIZE, --tensor-parallel-size TENSOR_PARALLEL_SIZE
  --max_num_seqs N
"""

FAKE = """
import sys
from pathlib import Path
Path(sys.argv[1]).open("a").write("asked\\n")
assert sys.argv[2:] == ["serve", "--help=all"], sys.argv
print("options:\\n  --max-num-seqs N")
"""


def test_flags_are_read_from_the_help() -> None:
    """Long options where options stand, no-forms included; what the prose mentions is none."""
    assert flags_of_help(HELP) == {
        "headless",
        "api-server-count",
        "enable-log-requests",
        "no-enable-log-requests",
        "tensor-parallel-size",
        "max-num-seqs",
    }


def test_each_version_is_asked_once(tmp_path: Path) -> None:
    """A second question is answered from the cache; another version is asked anew."""
    fake, asked = tmp_path / "fake.py", tmp_path / "asked"
    fake.write_text(FAKE)
    command = [sys.executable, str(fake), str(asked)]
    for version in ("0.32.0+cpu", "0.32.0+cpu", "0.33.0"):
        assert installed_flags(command, version, tmp_path / "cache") == {"max-num-seqs"}
    assert asked.read_text() == "asked\n" * 2


def test_a_missing_or_broken_vllm_is_told(tmp_path: Path) -> None:
    """With the last line it said, and what to do."""
    with pytest.raises(UsageError, match="cannot run") as caught:
        installed_flags([str(tmp_path / "none")], "0", tmp_path)
    assert "make sweep" in caught.value.remedy
    with pytest.raises(UsageError, match="no vllm here"):
        installed_flags([sys.executable, "-c", "raise SystemExit('no vllm here')"], "0", tmp_path)
    with pytest.raises(UsageError, match="names no flag"):
        installed_flags([sys.executable, "-c", "print('hello')"], "0", tmp_path)


def test_the_schemas_in_the_project_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make schema` was run after the last change of a model."""
    monkeypatch.chdir(Path(__file__).parents[3])
    assert json_schema.main(["--check"]) == 0


def test_a_stale_schema_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing or edited: the check names it and fails; writing mends it."""
    monkeypatch.chdir(tmp_path)
    assert json_schema.main(["--check"]) == 1
    assert "run `make schema`" in capsys.readouterr().err
    assert json_schema.main(["--write"]) == 0
    assert json_schema.main(["--check"]) == 0
    path = next(iter(json_schema.SCHEMAS))
    path.write_text("{}")
    assert json_schema.main(["--check"]) == 1
