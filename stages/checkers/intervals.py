r"""Formulas compared by their values, in microseconds.

Both are computed at the same points in interval arithmetic (mpmath). Intervals that do not meet
prove that the formulas differ; narrow ones that meet at every point say that they are equal, to
more digits than math-verify compares. Only what has one reading is read: whole numbers, single
letters, + - * / ^ ( ), \frac, \sqrt, \pi, \cdot, \times, and pairs, intervals, sets and equations
of them. All else is for math-verify.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mpmath.ctx_iv import MPIntervalContext
from mpmath.libmp import ComplexResult

LONGEST = 200  # characters of a formula
POWERS = 64  # the largest exponent
POINTS = (3, 7, 14, -40, -75)  # of the letters, in elevenths: a = 3/11, b = 4/11, …; then others
WIDTH = 1e-50  # of what is equal, relative
NO_VARIABLES = set("dei")  # a differential, Euler's number, the imaginary unit
UNSURE = re.compile(
    r"\d\s+\d|\d\s*\\[dt]?frac"  # 3 4; a mixed number
    r"|/(?!\s*\d+\s*(?:[-+)}\],]|$))"  # 1/2x
    r"|\^\s*(?!\{|\d(?!\d))|\^\s*\d\s*\^"  # x^10, x^-1, x^2^3
    r"|(?<![a-zA-Z\\])[a-zA-Z]\s*[a-zA-Z(\d]"  # cm, f(x), x2
)
BRACED = (
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"√(\1)"),
    (re.compile(r"\^\{([^{}]*)\}"), r"^(\1)"),
)
COMMANDS = ((r"\cdot", "*"), (r"\times", "*"), (r"\pi", "π"))
SIZED = re.compile(r"\\(?:left|right)(?![a-zA-Z])")
BRACKETS = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
LEFT_OUT = re.compile(r"(?<=[0-9a-zA-Zπ)])(?=[a-zA-Zπ√(])")  # the times of 2x
READABLE = re.compile(r"[0-9a-zA-Zπ√+\-*/^()]+")
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
iv: Any = MPIntervalContext()
iv.prec = 200  # bits, of which the last 30 may be lost on the way


def same_value(mine: str, theirs: str) -> bool | None:
    """Whether two LaTeX formulas have the same value; None where that is not easily told."""
    mine, theirs = (SIZED.sub("", formula).strip() for formula in (mine, theirs))
    if "=" in mine and "=" in theirs:
        return _same_equation(mine.split("="), theirs.split("="))
    (ours, kind), (others, other) = _listed(mine), _listed(theirs)
    sets = [each == r"\{\}" for each in (kind, other)]
    if all(sets):
        return _same_set(ours, others)
    if any(sets) or len(ours) != len(others):
        return None
    found = [_same(*pair) for pair in zip(ours, others, strict=True)]
    if False in found:
        return False
    return True if all(found) and kind == other else None


def _listed(formula: str) -> tuple[list[str], str]:
    """What a pair, an interval or a set holds, and its brackets; else the formula and none."""
    found = BRACKETS.fullmatch(formula)
    parts, depth = [""], 0
    for letter in found[2] if found else "":
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:  # the first bracket is closed before the end
            return [formula], ""
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if found is None or (len(parts) == 1 and found[1] != r"\{"):
        return [formula], ""
    return parts, found[1] + found[3]


def _same_set(ours: list[str], others: list[str]) -> bool | None:
    found = [[_same(one, other) for other in others] for one in ours]
    lines = [*found, *zip(*found, strict=True)]  # of each element of both
    if any(all(same is False for same in line) for line in lines):
        return False
    return True if all(True in line for line in lines) else None


def _same_equation(ours: list[str], others: list[str]) -> bool | None:
    """False if the sides' differences are no multiples of each other."""
    if len(ours) != 2 or len(others) != 2:
        return None
    sides = (f"({left.strip()})-({right.strip()})" for left, right in (ours, others))
    ratios = [a / b for a, b in filter(None, _values(*sides))]
    return False if any(map(_apart, ratios, ratios[1:])) else None


def _same(mine: str, theirs: str) -> bool | None:
    values = _values(mine, theirs)
    if any(_apart(*pair) for pair in filter(None, values)):
        return False
    met = [pair and (abs(pair[0] - pair[1]) <= WIDTH * abs(pair[0])) is True for pair in values]
    return True if met and all(met) else None


def _apart(a: Any, b: Any) -> bool:
    return (a < b) is True or (a > b) is True


def _values(mine: str, theirs: str) -> list[tuple[Any, Any] | None]:
    """Both values at each point, None where one has none; empty if one cannot be read."""
    ours, others = _read(mine), _read(theirs)
    if ours is None or others is None or ours[1] != others[1]:
        return []
    found: list[tuple[Any, Any] | None] = []
    for start in POINTS if ours[1] else POINTS[:1]:
        at = {name: iv.mpf(start + i) / 11 for i, name in enumerate(sorted(ours[1]))}
        try:
            found.append((_value(ours[0], at), _value(others[0], at)))
        except (ArithmeticError, ComplexResult, ValueError):
            found.append(None)
    return found


@lru_cache(maxsize=1024)  # a prompt's responses share its gold
def _read(formula: str) -> tuple[ast.expr, frozenset[str]] | None:
    """The formula as Python reads it and its letters; None if it may have another reading."""
    if len(formula) > LONGEST or UNSURE.search(formula):
        return None
    before = None
    while before != formula:  # the innermost braces first
        before = formula
        for pattern, plainly in BRACED:
            formula = pattern.sub(plainly, formula)
    for command, plainly in COMMANDS:
        formula = re.sub(re.escape(command) + r"(?![a-zA-Z])", plainly, formula)
    formula = LEFT_OUT.sub("*", re.sub(r"\s", "", formula))
    letters = frozenset(re.findall("[a-zA-Z]", formula))
    if not READABLE.fullmatch(formula) or letters & NO_VARIABLES:
        return None
    try:
        tree = ast.parse(formula.replace("√", "sqrt").replace("^", "**"), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        return None
    return tree.body, letters


def _value(node: ast.expr, at: Mapping[str, Any]) -> Any:
    """An interval that holds the value at a point; of what is not allowed a `ValueError`."""
    match node:
        case ast.Constant(value=int(value)):
            return iv.mpf(value)
        case ast.Name("π"):
            return iv.pi
        case ast.Name(name) if name in at:
            return at[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, at)
        case ast.Call(_, [inner]):
            return iv.sqrt(_value(inner, at))
        case ast.BinOp(base, ast.Pow(), ast.Constant(value=int(power))) if power <= POWERS:
            return _value(base, at) ** power
        case ast.BinOp(left, sign, right) if operation := BINARY.get(type(sign)):
            return operation(_value(left, at), _value(right, at))
    raise ValueError("not a formula of this kind")
