"""Index arithmetic of a host program: loop variables, rank and ranks under + - * // %."""

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from aorta.errors import AortaError


class HostProgramError(AortaError):
    """Raised for a host program that cannot be read, built, rewritten, simulated or run, with the reason."""


MAX_NODES = 200
"""Most nodes of an index's syntax tree: larger ones are mistakes, and reading them is recursive."""

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Expr:
    """Index that depends on variables, in canonical spelling. As in Python, % is never negative."""

    text: str

    def __str__(self) -> str:
        return self.text


Index = int | Expr


def index(text: str | int) -> Index:
    """Index of a text, in canonical spelling; a constant becomes an int.

    Raises HostProgramError for anything but integers, names and + - * // %.
    """
    if isinstance(text, int):
        return text
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise HostProgramError(f"{text!r} is not an index expression") from None
    return index_of(tree)


def index_of(tree: ast.expr) -> Index:
    """Index of a syntax tree, as index() makes it of a text."""
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise HostProgramError("an index expression is too long")
    _check(tree)
    if not any(isinstance(node, ast.Name) for node in ast.walk(tree)):
        return _value(tree, {})
    return Expr(ast.unparse(tree))


def evaluate(value: Index, variables: Mapping[str, int]) -> int:
    """Value of an index for these variables.

    Raises HostProgramError for a variable that is not among them and for a modulus of 0.
    """
    return value if isinstance(value, int) else _value(_tree(value.text), variables)


@cache
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _check(tree: ast.expr) -> None:
    match tree:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            _check(left)
            _check(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand)
        case ast.Name():
            pass
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            pass
        case _:
            raise HostProgramError(
                f"{ast.unparse(tree)!r} is not an index: integers, variables and + - * // % are"
            )


def _value(tree: ast.expr, variables: Mapping[str, int]) -> int:
    match tree:
        case ast.BinOp(left=left, op=op, right=right):
            try:
                return int(OPERATORS[type(op)](_value(left, variables), _value(right, variables)))
            except ZeroDivisionError:
                raise HostProgramError(f"{ast.unparse(tree)!r} divides by zero") from None
        case ast.UnaryOp(operand=operand):
            return -_value(operand, variables)
        case ast.Name(id=name):
            if name not in variables:
                names = ", ".join(sorted(variables)) or "none"
                raise HostProgramError(f"unknown variable {name!r} in an index (known: {names})")
            return variables[name]
        case ast.Constant(value=int(value)):
            return value
    raise AssertionError(ast.dump(tree))
