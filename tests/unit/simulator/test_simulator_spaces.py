"""Every command line that the shipped search spaces make is one the simulated server takes."""

import json
from pathlib import Path

import pytest

from runner.simulator.arguments import parse
from runner.simulator.describe import load_model

GOLDEN = Path(__file__).parents[2] / "golden" / "space"


def command_lines(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("[")]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: str(path.stem))
def test_flags_of_the_shipped_spaces(path: Path) -> None:
    """The recorded words of each edge of each space are understood, flag by flag."""
    recorded = command_lines(path)
    assert recorded
    for words in recorded:
        assert parse(["model", *words]).model_tag == "model"


def test_the_shipped_model_folder() -> None:
    """A folder with a config.json is a model, by relative path from anywhere."""
    model = load_model("experiments/models/qwen3-8b-shape")
    assert (model.layers, model.hidden, model.kv_heads) == (36, 4096, 8)
    assert model.max_model_len > 0
