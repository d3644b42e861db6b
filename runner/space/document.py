"""YAML files read strictly, with the place of every value kept. Knows nothing of knobs or experiments' meaning.

Strict means: YAML 1.2's core types only (``on``, ``off``, ``1:30`` and dates stay text), each key once, text keys,
no aliases, no tags, one document, finite numbers. What is wrong is told as file, line, column, value and remedy.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from runner.errors import UsageError

Where = tuple[str | int, ...]
"""A place in a document: keys and list positions from the top."""

ModelT = TypeVar("ModelT", bound=BaseModel)

_CORE_TYPES = [
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$")),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")),
    (
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"),
    ),
]

_SCALARS: dict[str, Callable[[str], bool | int | float | str | None]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text == "true",
    "tag:yaml.org,2002:int": int,
    "tag:yaml.org,2002:float": float,
    "tag:yaml.org,2002:str": str,
}


class _Loader(yaml.SafeLoader):
    """Composes nodes only; nothing is constructed by PyYAML."""

    yaml_implicit_resolvers = {None: _CORE_TYPES}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases (`*name`) are not supported; write the value out or use `include`",
                problem_mark=mark,
            )
        return super().compose_node(parent, index)


@dataclass(frozen=True)
class Document:
    """A parsed file and where everything stands in it.

    Attributes:
        path: The file, as it is named in messages.
        data: Plain dicts, lists and scalars.
        values: Place -> (line, column) of the value, 1-based.
        keys: Place -> (line, column) of the key, 1-based.
    """

    path: Path
    data: dict[str, Any]
    values: dict[Where, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Where, tuple[int, int]] = field(default_factory=dict)

    def error(self, where: Sequence[str | int], problem: str, remedy: str = "", *, at_key: bool = False) -> UsageError:
        """A ``UsageError`` at ``where``, or at the nearest place above it that the file really has."""
        place = tuple(where)
        marks = self.keys if at_key and place in self.keys else self.values
        while place not in marks and place:
            place = place[:-1]
        line, column = marks.get(place, (1, 1))
        return UsageError(problem, remedy=remedy, path=self.path, line=line, column=column)

    def parse(self, model: type[ModelT]) -> ModelT:
        """The data as ``model``, no type coerced.

        Raises:
            UsageError: With the place, the value and what would be right.
        """
        try:
            return model.model_validate_json(json.dumps(self.data), strict=True)
        except ValidationError as error:
            raise self._explained(model, error) from None

    def _explained(self, model: type[BaseModel], error: ValidationError) -> UsageError:
        problems = error.errors(include_url=False)
        problem = max(problems, key=self._weight)
        where = self._place(problem)
        name = ".".join(str(part) for part in where)
        if problem["type"] == "extra_forbidden":
            return self.error(where, f"unknown key `{where[-1]}`", _known_keys(model, where), at_key=True)
        if problem["type"] == "missing":
            return self.error(where[:-1], f"`{name}` is missing", f"add `{where[-1]}: ...`")
        remedy = ""
        if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
            remedy = f'text is wanted here: write "{json.dumps(problem["input"])}" in quotes'
        return self.error(where, f"{f'`{name}`' if name else 'the file'}: {_told(problem)}", remedy)

    def _weight(self, problem: ErrorDetails) -> tuple[int, bool]:
        """The deepest problem tells most: of a union it belongs to the branch that was meant."""
        return len(self._place(problem)), problem["type"] == "extra_forbidden"

    def _place(self, problem: ErrorDetails) -> Where:
        """Pydantic's location without the union branches it names; a missing or unknown key stays last."""
        location = problem["loc"]
        names_a_key = problem["type"] in ("missing", "extra_forbidden")
        place: list[str | int] = []
        for position, part in enumerate(location):
            if (*place, part) in self.values or (names_a_key and position == len(location) - 1):
                place.append(part)
        return tuple(place)


def _told(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    if problem["type"] == "value_error" or isinstance(value, dict | list):
        return message
    return f"{message[:1].lower()}{message[1:]}, found {json.dumps(value)}"


def _known_keys(model: type[BaseModel], where: Where) -> str:
    """What may stand where the unknown key stands, by the model's JSON schema."""
    schema = model.model_json_schema(by_alias=True)
    known = sorted(_keys_at(schema, schema, where[:-1]))
    close = difflib.get_close_matches(str(where[-1]), known, n=1)
    meant = f"did you mean `{close[0]}`? " if close else ""
    return f"{meant}known here: {', '.join(known)}" if known else ""


def _keys_at(root: dict[str, Any], schema: dict[str, Any], where: Where) -> set[str]:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    found = {key for branch in branches for key in _keys_at(root, branch, where)}
    if not where:
        return found | set(schema.get("properties", {}))
    below = schema.get("properties", {}).get(where[0], schema.get("additionalProperties"))
    if isinstance(where[0], int):
        below = schema.get("items")
    if isinstance(below, dict):
        found |= _keys_at(root, below, where[1:])
    return found


def read_document(path: Path) -> Document:
    """Reads one YAML file whose top is a mapping.

    Raises:
        UsageError: It cannot be read, is not YAML, or breaks one of the rules of the module's docstring.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the file: {error.strerror}", path=path) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text (byte {error.start})", path=path) from None
    return parse_document(text, path)


def parse_document(text: str, path: Path) -> Document:
    """As ``read_document``, from text that is at hand; ``path`` is only what messages name."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        problem = error.problem or error.context or "malformed"
        raise UsageError(f"not valid YAML: {problem}", path=path, line=line, column=column) from None
    except yaml.reader.ReaderError as error:
        raise UsageError(f"not valid YAML: {error.reason} at character {error.position}", path=path) from None
    except RecursionError:
        raise UsageError("nested too deeply", path=path) from None
    if not isinstance(node, yaml.MappingNode):
        raise UsageError("the file must hold `key: value` lines", path=path, line=1, column=1)
    document = Document(path, {})
    document.data.update(_built(document, node, ()))
    return document


def _built(document: Document, node: yaml.Node, where: Where) -> Any:  # the YAML value: any JSON type
    document.values[where] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _built_mapping(document, node, where)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_built(document, child, (*where, position)) for position, child in enumerate(node.value)]
    construct = _SCALARS.get(node.tag)
    if construct is None or not isinstance(node, yaml.ScalarNode):
        raise document.error(where, f"the tag `{node.tag}` is not supported", "write a plain value")
    try:
        value = construct(node.value)
    except ValueError:
        raise document.error(where, f"`{node.value}` is not a {node.tag.rsplit(':', 1)[-1]}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise document.error(where, f"`{node.value}` is not a finite number")
    return value


def _built_mapping(document: Document, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = (*where, str(key_node.value)) if isinstance(key_node, yaml.ScalarNode) else where
        document.keys.setdefault(place, (key_node.start_mark.line + 1, key_node.start_mark.column + 1))
        mark = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        if key_node.tag != "tag:yaml.org,2002:str":
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "this key"
            raise UsageError(
                f"the key `{shown}` is not text",
                remedy=f'write it in quotes: "{shown}"',
                path=document.path,
                line=mark[0],
                column=mark[1],
            )
        key = str(key_node.value)
        if key in built:
            first_line, _ = document.keys[place]
            raise UsageError(
                f"`{key}` stands twice, first in line {first_line}",
                remedy="keep one of the two",
                path=document.path,
                line=mark[0],
                column=mark[1],
            )
        built[key] = _built(document, value_node, place)
    return built


def read_model(path: Path, model: type[ModelT]) -> ModelT:
    """Loads a YAML file as ``model``, strictly.

    Raises:
        UsageError: With file, line, column, value and what would be right.
    """
    return read_document(path).parse(model)


def find_file(name_or_path: str | Path, folder: str, what: str) -> Path:
    """The file meant: a path that exists (its .yaml may be left out), else one of that name in ``folder``.

    ``folder`` is looked up in the current directory, then beside the package.

    Raises:
        UsageError: No such file; those that exist are listed.
    """
    asked = Path(name_or_path)
    roots = [Path(folder), Path(__file__).resolve().parents[2] / folder]
    candidates = [asked, asked.with_name(f"{asked.name}.yaml")] if asked.name else []
    if len(asked.parts) == 1:
        candidates += [root / name for root in roots for name in (asked.name, f"{asked.name}.yaml")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = sorted({path.name for root in roots if root.is_dir() for path in root.glob("*.yaml")})
    close = difflib.get_close_matches(asked.name, [*names, *(name.removesuffix(".yaml") for name in names)], n=1)
    meant = f"did you mean `{close[0]}`? " if close else ""
    there = ", ".join(names) if names else "none"
    raise UsageError(f"no {what} `{name_or_path}`", remedy=f"{meant}{folder}/ has: {there}; a path works too")
