"""The task's problems: right, repeatable, and split so that nobody trains on what is held out."""

import json
import random
from itertools import islice

import pytest

from stages import arithmetic, tables
from stages.errors import InputError


def expressions(count: int = 300, *, split: arithmetic.Split = "train") -> list[str]:
    return list(islice(arithmetic.stream(7, split), count))


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
        operands = arithmetic.expression(level, rng).replace("-", "+").split("+")
        assert len(operands) == level
        assert all(1 <= int(o) <= arithmetic.LARGEST_OPERAND for o in operands)


def test_an_expression_is_held_out_by_its_own_hash_whatever_the_seed() -> None:
    train, heldout = (
        {e for seed in range(3) for e in islice(arithmetic.stream(seed, split), 500)}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert all(arithmetic.split_of(e) == "heldout" for e in heldout)


def test_the_split_of_an_expression_never_moves() -> None:
    # frozen: a change here would let a later version train on what an earlier one held out
    assert [arithmetic.split_of(e) for e in ("4-2+2", "4+1+4+3-4", "1+5-1")] == [
        "heldout",
        "heldout",
        "train",
    ]


def test_about_a_tenth_is_held_out() -> None:
    rng = random.Random(0)
    drawn = {arithmetic.expression(6, rng) for _ in range(3000)}
    share = sum(arithmetic.split_of(e) == "heldout" for e in drawn) / len(drawn)
    assert 0.08 < share < 0.12


def test_prompts_are_repeatable_and_differ_by_seed() -> None:
    first = arithmetic.prompts(50, 3, "train")
    assert first.equals(arithmetic.prompts(50, 3, "train"))
    assert not first.equals(arithmetic.prompts(50, 4, "train"))


def test_prompts_are_distinct_and_carry_their_answer_and_level() -> None:
    frame = arithmetic.prompts(400, 0, "heldout", levels=(4, 6))
    assert frame.schema == tables.polars_schema("prompts")
    assert frame["prompt_id"].n_unique() == frame["prompt"].n_unique() == 400
    assert frame["prompt_id"][12] == "arith-heldout-00012"
    for row in frame.iter_rows(named=True):
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert eval(message["content"]) == int(row["answer"])
        assert json.loads(row["meta"])["level"] in (4, 6)
        assert row["task"] == "arithmetic"


def test_asking_for_more_prompts_than_exist_says_how_many_there_are() -> None:
    with pytest.raises(InputError, match=r"found only \d+ of 5000 distinct heldout"):
        arithmetic.prompts(5000, 0, "heldout", levels=(2,))


def test_no_prompts_are_an_empty_table() -> None:
    assert arithmetic.prompts(0, 0, "train").is_empty()
