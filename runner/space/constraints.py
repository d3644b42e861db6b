"""Constraints between knobs: expressions over resolved values, evaluated by a safe expression library.

Names are knobs (a knob with one target: the value that holds after defaults; a bundle: its label), flags and fields
with underscores (``max_num_seqs``), environment variables, ``gpus`` and the model's facts (``heads``, ``layers``).
A constraint that asks for a value nobody knows holds: it cannot be shown to be broken.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "len": len, "int": int}


class Unknown(Exception):
    """A name has no value here."""


@dataclass(frozen=True)
class Constraint:
    """A parsed expression and the names it uses."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Whether the expression is true.

        Args:
            value_of: Name -> value; raises ``Unknown`` for one without.

        Raises:
            ValueError: The expression cannot be evaluated (types that do not go together, division by zero).
        """
        evaluator = EvalWithCompoundTypes(functions=_FUNCTIONS, names=lambda node: value_of(node.id))
        try:
            return bool(evaluator.eval(self.text, previously_parsed=self.tree))
        except Unknown:
            return True
        except (InvalidExpression, TypeError, ZeroDivisionError, ArithmeticError) as error:
            raise ValueError(f"cannot evaluate `{self.text}`: {error}") from None


def parse_constraint(text: str, known: Mapping[str, Any]) -> Constraint:
    """The constraint that ``text`` writes; ``known`` are the names it may use.

    Raises:
        ValueError: Not one expression, or an unknown name.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"`{text}` is not an expression: {error}") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(_FUNCTIONS)
    unknown = sorted(names - set(known))
    if unknown:
        raise ValueError(f"`{unknown[0]}` is not known here; names: {', '.join(sorted(known))}")
    return Constraint(text, tree, frozenset(names))
