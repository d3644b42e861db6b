"""The installed vLLM's own parser takes every word that the shipped search spaces lead to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import Infeasible, UsageError
from runner.space.checks import check_knobs
from runner.space.command import argv
from runner.space.installed import installed_flags
from runner.space.surroundings import Machine
from tests.spaces import experiment_of, space_of
from tests.unit.space.test_shipped import SPACES, edges, shipped

LAUNCHER = Path(__file__).parents[2] / "runner" / "serving" / "launcher.py"

pytestmark = pytest.mark.real

_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
for words in json.load(sys.stdin):
    try:
        validate_parsed_serve_args(parser.parse_args(words[1:]))
    except SystemExit:
        print("refused:", json.dumps(words))
print("parsed")
"""


def test_every_edge_of_every_space_parses() -> None:
    """Flags exist, values have the right type, and no structured flag holds a field that vLLM does not know."""
    lines = []
    for name in SPACES:
        space = shipped(name)
        for point in edges(space):
            try:
                config = space.resolve(point)
            except Infeasible:
                continue  # never launched, so never parsed
            lines.append(argv(config, model="some/model", host="127.0.0.1", port=8000, served_name="n"))
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["parsed"], done.stderr[-2000:]
    assert "refused" not in done.stdout, done.stdout + done.stderr[-2000:]
    assert len(lines) > 100


def test_the_installed_vllm_tells_its_flags(tmp_path: Path) -> None:
    """Its own help names every flag of every space; one that it does not name is refused with the nearest."""
    flags = installed_flags([sys.executable, str(LAUNCHER)], "any", tmp_path)
    assert {"max-num-seqs", "no-enable-prefix-caching", "compilation-config"} <= flags
    machine = Machine(known_flags=flags)
    for name in SPACES:
        check_knobs(shipped(name).knobs, experiment_of(), machine)
    with pytest.raises(UsageError, match="has no flag --max-num-sequences") as caught:
        space_of(tmp_path, "knobs: {a: {flag: max-num-sequences, choices: [8]}}\n", machine=machine)
    assert "did you mean `max-num-seqs`" in caught.value.remedy
