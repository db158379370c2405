"""The task's problems and their workings are right."""

import random
from itertools import islice

import pytest

from stages import arithmetic, embedded


def expressions(count: int = 300) -> list[str]:
    return list(islice(embedded.stream(arithmetic, 7, "train"), count))


def test_totals_agree_with_python_and_are_never_negative() -> None:
    for expr in expressions():
        assert arithmetic.totals(expr)[-1] == eval(expr)
        assert min(arithmetic.totals(expr)) >= 0


def test_every_line_of_the_working_is_a_true_equation() -> None:
    for expr in expressions():
        for line in arithmetic.chain(expr):
            left, right = line.split("=")
            assert eval(left) == int(right)


def test_a_worked_example_shows_every_step_and_then_the_answer() -> None:
    assert arithmetic.worked_example("3+5-2") == "3+5=8\n8-2=6\nAnswer: 6"


def test_a_ramble_repeats_its_last_line_before_it_answers() -> None:
    text = arithmetic.rambling_example("3+5-2", repeats=2)
    assert text == "3+5=8\n8-2=6\n8-2=6\n8-2=6\nAnswer: 6"
    assert arithmetic.rambling_example("3+5-2", repeats=0) == arithmetic.worked_example("3+5-2")


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_the_level_is_the_number_of_operands(level: int) -> None:
    rng = random.Random(0)
    for _ in range(50):
        operands = arithmetic.draw(level, rng).replace("-", "+").split("+")
        assert len(operands) == level
        assert all(1 <= int(o) <= arithmetic.LARGEST_OPERAND for o in operands)
