"""JSON Schemas of the YAML files, for editors: ``python -m runner.space.json_schema --write`` or ``--check``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from runner.schema.experiment import Experiment
from runner.schema.space import SpaceFile

SCHEMAS: dict[Path, type[BaseModel]] = {
    Path("experiments/schema/experiment.schema.json"): Experiment,
    Path("search_spaces/schema/search_space.schema.json"): SpaceFile,
}
"""Where each schema stands, relative to the project's folder, and the model it is made from."""


def schema_text(model: type[BaseModel]) -> str:
    """The schema as the file holds it."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= model.model_json_schema(by_alias=True)
    # The file's stem stands in for a name that is not given.
    schema["required"] = [key for key in schema.get("required", []) if key != "name"]
    if not schema["required"]:
        del schema["required"]
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def stale(folder: Path) -> list[Path]:
    """Schemas below ``folder`` that are missing or differ from the models."""
    return [
        path
        for path, model in SCHEMAS.items()
        if not (folder / path).is_file() or (folder / path).read_text(encoding="utf-8") != schema_text(model)
    ]


def write(folder: Path) -> None:
    """Writes every schema below ``folder``."""
    for path, model in SCHEMAS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(schema_text(model), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; with ``--check`` 1 when a schema is stale."""
    parser = argparse.ArgumentParser(description="JSON Schemas of experiments and search spaces, made from the models.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write them")
    what.add_argument("--check", action="store_true", help="say which are stale, and fail if one is")
    asked = parser.parse_args(arguments)
    folder = Path()
    if asked.write:
        write(folder)
        return 0
    old = stale(folder)
    for path in old:
        sys.stderr.write(f"{path} is stale: run `make schema`\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
