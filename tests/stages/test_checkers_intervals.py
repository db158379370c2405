"""Formulas compared by their values: never wrongly, and only what has one reading."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.checkers.intervals import POINTS, same_value
from stages.checkers.maths import Math

X, Y = sympy.Symbol("x"), sympy.Symbol("y")
Formula = tuple[str, sympy.Expr]  # as LaTeX, and what it means


def _joined(parts: tuple[str, Formula, Formula]) -> Formula:
    sign, (a, left), (b, right) = parts
    match sign:
        case "+":
            return f"({a} + {b})", left + right
        case "-":
            return f"({a}-{b})", left - right
        case "cdot":
            return rf"{a} \cdot {b}", left * right
        case "frac":
            return rf"\frac{{{a}}}{{{b}}}", left / (right if right != 0 else sympy.Integer(1))
        case "power":
            return f"({a})^{{3}}", left**3
        case _:
            return rf"\sqrt{{{a}}}", sympy.sqrt(left)


atoms: st.SearchStrategy[Formula] = st.one_of(
    st.integers(1, 20).map(lambda i: (str(i), sympy.Integer(i))),
    st.sampled_from([("x", X), ("y", Y), (r"\pi", sympy.pi), ("2x", 2 * X), ("x^2", X**2)]),
)
formulas = st.recursive(
    atoms,
    lambda inner: st.tuples(
        st.sampled_from(["+", "-", "cdot", "frac", "power", "sqrt"]), inner, inner
    ).map(_joined),
    max_leaves=5,
)


def _at(formula: Formula, start: int) -> complex:
    letters = sorted(letter for letter in "xy" if letter in formula[0])
    point = {letter: sympy.Rational(start + i, 11) for i, letter in enumerate(letters)}
    return complex(formula[1].subs(point).evalf(30))


@given(formulas, formulas)
@settings(max_examples=150)
def test_formulas_are_told_apart_where_their_values_are(a: Formula, b: Formula) -> None:
    try:
        gaps = [abs(_at(a, start) - _at(b, start)) for start in POINTS]
    except (ArithmeticError, TypeError, ValueError):  # a denominator of zero
        return
    found = same_value(a[0], b[0])
    if ("x" in a[0], "y" in a[0]) != ("x" in b[0], "y" in b[0]):
        assert found is None
    elif max(gaps) < 1e-12:
        assert found is not False
    elif max(gaps) > 1e-6:
        assert found is not True
        assert found is False or "sqrt" in a[0] + b[0] or "frac" in a[0] + b[0]


@given(formulas, formulas)
@settings(max_examples=50)
def test_a_formula_is_never_different_from_itself_written_otherwise(a: Formula, b: Formula) -> None:
    one = same_value(rf"({a[0]} + {b[0]}) \cdot 3", rf"3\times ({b[0]}) + 3({a[0]})")
    two = same_value(rf"\frac{{{a[0]}}}{{7}}", rf"\frac{{2}}{{14}}({a[0]})")
    if "sqrt" not in a[0] + b[0] and "frac" not in a[0] + b[0]:
        assert one is not False
        assert two is True or a[1] == 0
    else:
        assert False not in (one, two)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (r"\frac{3}{2\sqrt{3}}", r"\frac{\sqrt{3}}{2}"),
        (r"x^2+2\cdot 3x+3^2", "(x+3)^2"),
        ("(x+1)(x-1)", "x^2-1"),
        (r"\left(\sqrt{4}, 1\right)", "(2,1)"),
        ("[1+1, 100)", "[2,100)"),
        ("1-1+2", "2"),
        (r"\{3, 1+1, 1\}", r"\{1,2,3\}"),
        (r"\{3, 3\}", r"\{3\}"),
    ],
)
def test_what_is_equal_is_right_without_a_worker(mine: str, theirs: str) -> None:
    assert same_value(mine, theirs) is True
    assert Math().quick(f"Answer: ${mine}$", theirs) == (1.0, "right", mine)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (r"\frac{5}{2\sqrt{5}}", r"\frac{\sqrt{3}}{2}"),
        (r"\sqrt{3}/2", r"\frac{\sqrt{5}}{2}"),
        ("(x+1)(x-1)", "x^2-2"),
        (r"\sqrt{x^2}", "x"),  # not below zero
        ("-x^2", "x^2"),
        (r"2\pi r", r"\pi r^2"),
        ("[4, 100)", "[3, 100)"),
        (r"(\frac{1}{2}, 3)", r"\left(\frac{1}{3}, 3\right)"),
        ("(1, 2)", "[1, 3]"),
        ("5", r"\sqrt{2}"),
        ("2^{60}+1", "2^{60}"),
        (r"\{1, 2, 4\}", r"\{1,2,3\}"),
        (r"\{1, 2\}", r"\{1,2,3\}"),
        (r"\{1, 2, 3\}", r"\{1,2\}"),
        ("x=3", "x=4"),
        ("y=2x+3", "y=2x+4"),
        ("3x-y+13=0", "3x-y+12=0"),
    ],
)
def test_what_differs_is_wrong_without_a_worker(mine: str, theirs: str) -> None:
    assert same_value(mine, theirs) is False
    assert Math().quick(f"Answer: ${mine}$", theirs) == (0.0, "wrong", mine)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("100cm", "1m"),  # units, words, functions
        ("1000mm", "1m"),
        ("x", "y"),
        ("f(x)", "f(2)"),
        ("i^2+1", "2i^2+2"),
        ("1/2x", "3x"),  # two readings
        ("1/2(x)", "3x"),
        ("x^10", "x^9"),
        ("2^3^2", "3"),
        ("3 4", "35"),
        (r"1\frac{1}{2}", "2"),
        ("x2", "3x"),
        ("0.33", r"\frac{\sqrt{1}}{3}"),  # decimals, which have a tolerance
        ("(1,2)", "[1,2]"),  # kinds of intervals
        ("(1,2,3)", "(1,3)"),
        ("1,2", "2,1"),
        (r"\sqrt{x}", r"1\cdot\sqrt{x}"),  # no value below zero
        (r"\sqrt{-2}", "3"),  # without a real value
        (r"\frac{1}{x-x}", "x"),
        ("9^{9^{9^{9}}}", "3"),
        ("(" * 90 + "7" + "^{64})" * 20, "3"),
        (r"\frac12", r"\sqrt{3}"),
        ("2y=4x+6", "y=2x+3"),  # equations are equal for math-verify alone
        ("x=y=3", "x=4"),
        (r"\{1, f(x)\}", r"\{1,2\}"),
        (r"\{1, 2\}", "(1,3)"),
        (r"\{1\}", "2"),
        ("", "3"),
        (r"\{\}", r"\{3\}"),
    ],
)
def test_nothing_is_said_of_what_has_another_reading(mine: str, theirs: str) -> None:
    assert same_value(mine, theirs) is None
    assert same_value(theirs, mine) is None
