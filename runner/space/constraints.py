"""Constraints between knobs: expressions over resolved values, evaluated by a safe expression library.

Names are knobs (a knob with one target: the value that holds after defaults; a bundle: its label), flags with
underscores (``max_num_seqs``), environment variables, ``gpus`` and the model's facts (``heads``, ``layers``).
A constraint that asks for a value nobody knows holds: it cannot be shown to be broken.
"""

import ast
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

from runner.errors import UsageError
from runner.space.document import Document, Where

_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "len": len, "int": int}

_ALLOWED = (
    *(
        ast.BoolOp,
        ast.BinOp,
        ast.UnaryOp,
        ast.Compare,
        ast.IfExp,
        ast.Call,
        ast.Name,
        ast.Constant,
        ast.List,
        ast.Tuple,
    ),
    *(ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)
"""Arithmetic, comparison, logic and calls of the functions above; no attributes, indices or comprehensions."""


class Unknown(Exception):
    """A name has no value here: nobody knows."""


@dataclass(frozen=True)
class Constraint:
    """A parsed expression and the place where it is written."""

    text: str
    tree: ast.expr
    document: Document = field(repr=False, compare=False)
    where: Where = field(repr=False, compare=False)

    def broken(self, value_of: Callable[[str], Any]) -> str | None:
        """Why the expression is not true, with the values of its names; None when it is, or when a value is unknown.

        Args:
            value_of: Name -> value; raises ``Unknown`` for one without.
        """
        try:
            values = self.check(value_of)
        except UsageError as error:
            return error.problem
        if values is None:
            return None
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        return f"breaks `{self.text}` ({shown})" if shown else f"breaks `{self.text}`"

    def check(self, value_of: Callable[[str], Any]) -> dict[str, Any] | None:
        """The values with which the expression is not true; None when it is, or when a value is unknown.

        Raises:
            UsageError: It cannot be evaluated (types that do not go together, division by zero).
        """
        seen: dict[str, Any] = {}

        def look_up(node: ast.Name) -> Any:  # whatever a setting may be
            seen[node.id] = value_of(node.id)
            return seen[node.id]

        evaluator = EvalWithCompoundTypes(functions=_FUNCTIONS, names=look_up)
        try:
            return None if evaluator.eval(self.text, previously_parsed=self.tree) else seen
        except Unknown:
            return None
        except (InvalidExpression, TypeError, ValueError, ArithmeticError) as error:
            raise self.document.error(self.where, f"cannot evaluate `{self.text}`: {error}") from None


def parse_constraint(text: str, known: Set[str], document: Document, where: Where) -> Constraint:
    """The constraint that ``text`` writes at ``where``; ``known`` are the names it may use.

    Raises:
        UsageError: Not one expression, more than arithmetic and logic, or an unknown name.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise document.error(where, f"`{text}` is not an expression: {error}") from None
    foreign = [node for node in ast.walk(tree) if not isinstance(node, _ALLOWED)]
    if foreign:
        shown = ast.unparse(foreign[0])
        raise document.error(where, f"`{shown}` is not allowed here", "arithmetic, comparisons, and, or, not, in")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _FUNCTIONS and node.id not in known and id(node) not in called:
            raise document.error(where, f"`{node.id}` is a function, not a value", f"call it: `{node.id}(a, b)`")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(_FUNCTIONS)
    unknown = sorted(names - known)
    if unknown:
        raise document.error(where, f"`{unknown[0]}` is not known here", f"names: {', '.join(sorted(known))}")
    return Constraint(text, tree, document, where)
