"""The demo's task: running sums that a small model can learn to work out line by line.

An expression such as `3+5-2` has 3 to 6 operands (its difficulty level) between 1 and 5, and no
running total below zero. Nothing here decides what a sampled response is worth: that is scoring.
"""

import random
import re
from itertools import pairwise

PREFIX, CHECKER = "arith", "arithmetic"
LEVELS: tuple[int, ...] = (3, 4, 5, 6)
LARGEST_OPERAND = 5
WORDS: tuple[str, ...] = ()  # every character is a token of its own
PROMPT_TOKENS = 2 * max(LEVELS) - 1  # operands, and the signs between them


def draw(level: int, rng: random.Random) -> str:
    """One running sum of `level` operands, its totals never negative."""
    total = rng.randint(1, LARGEST_OPERAND)
    text = str(total)
    for _ in range(level - 1):
        operand = rng.randint(1, LARGEST_OPERAND)
        sign = rng.choice("+-") if operand <= total else "+"
        total += operand if sign == "+" else -operand
        text += f"{sign}{operand}"
    return text


def totals(expr: str) -> list[int]:
    """The running totals, first operand first: `3+5-2` gives 3, 8, 6."""
    running = [0]
    for term in re.findall(r"[+-]?\d+", expr):
        running.append(running[-1] + int(term))
    return running[1:]


def chain(expr: str) -> list[str]:
    """The working, one line per operation: `3+5-2` gives `3+5=8`, `8-2=6`."""
    operations = re.findall(r"[+-]\d+", expr)
    return [
        f"{before}{operation}={after}"
        for operation, (before, after) in zip(operations, pairwise(totals(expr)), strict=True)
    ]


def level_of(expr: str) -> int:
    """How many operands it has."""
    return len(totals(expr))


def answer(expr: str) -> str:
    """The last running total."""
    return str(totals(expr)[-1])


def answer_line(expr: str) -> str:
    """The line that every response must end with."""
    return f"Answer: {answer(expr)}"


def worked_example(expr: str) -> str:
    """The working and the answer line: what a good response looks like."""
    return "\n".join([*chain(expr), answer_line(expr)])


def guess(expr: str) -> str:
    """An answer without the working; right, but too hard to say at once."""
    return answer_line(expr)


def rambling_example(expr: str, repeats: int) -> str:
    """A worked example that says its last line `repeats` times more before it answers."""
    lines = chain(expr)
    return "\n".join([*lines, *lines[-1:] * repeats, answer_line(expr)])
