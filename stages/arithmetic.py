"""The demo's task: running sums that a small model can learn to work out line by line.

An expression such as `3+5-2` has 3 to 6 operands (its difficulty level) between 1 and 5, and no
running total below zero. Nothing here decides what a sampled response is worth: that is scoring.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

import polars as pl

from stages import tables
from stages.errors import InputError

Split = Literal["train", "heldout"]

LEVELS = (3, 4, 5, 6)
LARGEST_OPERAND = 5
HELDOUT_SHARE = 10  # one expression in ten is held out
PATIENCE = 10_000  # draws in a row without a new expression before a split counts as used up


def expression(level: int, rng: random.Random) -> str:
    """One running sum of `level` operands, its totals never negative."""
    total = rng.randint(1, LARGEST_OPERAND)
    text = str(total)
    for _ in range(level - 1):
        operand = rng.randint(1, LARGEST_OPERAND)
        sign = rng.choice("+-") if operand <= total else "+"
        total += operand if sign == "+" else -operand
        text += f"{sign}{operand}"
    return text


def split_of(expr: str) -> Split:
    """The split an expression belongs to, by its own hash: whoever draws it, whenever, agrees."""
    digest = blake2b(expr.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_SHARE == 0 else "train"


def stream(seed: int, split: Split, levels: Sequence[int] = LEVELS) -> Iterator[str]:
    """Endless expressions of one split, levels drawn evenly; the short ones soon come again."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        expr = expression(rng.choice(levels), rng)
        if split_of(expr) == split:
            yield expr


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


def answer_line(expr: str) -> str:
    """The line that every response must end with."""
    return f"Answer: {totals(expr)[-1]}"


def worked_example(expr: str) -> str:
    """The working and the answer line: what a good response looks like."""
    return "\n".join([*chain(expr), answer_line(expr)])


def rambling_example(expr: str, repeats: int) -> str:
    """A worked example that says its last line `repeats` times more before it answers."""
    lines = chain(expr)
    return "\n".join([*lines, *lines[-1:] * repeats, answer_line(expr)])


def prompts(count: int, seed: int, split: Split, levels: Sequence[int] = LEVELS) -> pl.DataFrame:
    """`count` distinct expressions of one split as a 'prompts' table.

    Raises `InputError` when the split holds fewer expressions of these levels than asked for.
    """
    drawn: dict[str, None] = {}
    fruitless = 0  # draws in a row that gave nothing new
    for expr in stream(seed, split, levels):
        if len(drawn) == count:
            break
        fruitless = fruitless + 1 if expr in drawn else 0
        if fruitless == PATIENCE:
            raise InputError(
                f"found only {len(drawn)} of {count} distinct {split} expressions of levels "
                f"{list(levels)}; ask for fewer prompts or add levels"
            )
        drawn[expr] = None
    rows = [_row(f"arith-{split}-{i:05d}", expr) for i, expr in enumerate(drawn)]
    return pl.DataFrame(rows, schema=tables.polars_schema("prompts"))


def _row(prompt_id: str, expr: str) -> dict[str, object]:
    running = totals(expr)
    return {
        "prompt_id": prompt_id,
        "prompt": [{"role": "user", "content": expr}],
        "answer": str(running[-1]),
        "task": "arithmetic",
        "meta": json.dumps({"level": len(running)}),
    }
