"""Mathematical answers: what is equal, what only looks so, and what nobody can read."""

import json
import time

import pytest
from conftest import VECTORS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.checkers.answers import final_answer, last_boxed
from stages.checkers.maths import Math, number, tidy

PAIRS = [json.loads(line) for line in (VECTORS / "math_pairs.jsonl").read_text().splitlines()]


def acc(answer: str, gold: str) -> float | None:
    return Math().check(f"Answer: {answer}", gold).acc


@pytest.mark.parametrize("case", PAIRS, ids=[f"{case['id']} {case['why']}" for case in PAIRS])
def test_public_cases_of_right_and_wrong_answers(case: dict[str, object]) -> None:
    gold = "" if case["gold"] is None else str(case["gold"])
    verdict = Math().check(str(case["response"]), gold)
    if case["correct"] is None:
        assert verdict[:2] == (None, "unscorable")
    else:
        assert verdict.acc == case["correct"]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("0.5", r"\frac12"),
        (r"50\%", r"\frac{1}{2}"),
        ("50%", "50"),
        ("0.5", r"50\%"),
        ("{3,2,1}", r"\{1,2,3\}"),
        (r"(-\infty,3)", "x<3"),
        (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        ("12 cm", "12"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("4\\sqrt(2)", r"4\sqrt{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("3x-y+13=0", "3*x-1*y+13=0"),
        ("x=34", "34"),
        ("34", "34^\\circ"),
        ("34°", "34"),
        ("1 000", "1000"),
        ("1\\,000", "1000"),
        ("\\left( \\dfrac{1}{2}, 3 \\right)", r"(\frac{1}{2},3)"),
        ("2^{10}", "1024"),
        (r"\frac{1}{2004!}", r"\frac{1}{2004!}"),
    ],
)
def test_what_is_equal_is_right(answer: str, gold: str) -> None:
    assert acc(answer, gold) == 1


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("(2,1)", "(1,2)"),
        ("[0,1]", "[0,1)"),
        ("3.14159", r"\pi"),
        ("1/3", "0.333333"),
        ("34, 34", "34"),
        ("3 4", "34"),
        ("3\\,4", "34"),
        ("34 or 34", "34"),
        (r"\text{odd}", r"\text{even}"),
        ("x<3", r"(-\infty,3)"),  # math-verify reads an inequality as its set in one order only
    ],
)
def test_what_only_looks_equal_is_wrong(answer: str, gold: str) -> None:
    assert acc(answer, gold) == 0


@pytest.mark.parametrize("gold", ["", "  ", "\\frac{", "$$"])
def test_a_gold_that_cannot_be_read_is_a_problem_and_makes_nothing_right(gold: str) -> None:
    assert Math().gold_problem(gold)
    assert acc("34", gold) is None


@pytest.mark.parametrize("gold", ["34", "1,000", r"\frac{3}{4}", "x^2+1", r"\text{even}", "[0,1)"])
def test_a_gold_that_can_be_read_is_none(gold: str) -> None:
    assert Math().gold_problem(gold) is None


@given(st.fractions(max_denominator=10**6))
def test_numbers_are_read_exactly_in_every_spelling(value: object) -> None:
    from fractions import Fraction

    assert isinstance(value, Fraction)
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    for spelled in (
        f"{value}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"${value}$".replace("-", "−"),
    ):
        assert number(tidy(spelled.strip("$"))) == value
    if bottom == 1:
        assert number(tidy(f"{value.numerator:,}")) == value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("**Answer:** 34", "34"),
        ("**Answer: 34**", "34"),
        ("### Final Answer:\n\n$$34$$", "34"),
        ("The answer is: \\(34\\).", "34"),
        ("最终答案：３４", "３４"),
        ("Answer: it is \\boxed{34}", "34"),
        ("Answer: 12\nno, \\boxed{34}", "34"),
        ("\\boxed{12}\nAnswer: 34", "34"),
        ("Answer: $3$ and $4$", "$3$ and $4$"),
        ("my answer is 34", None),
        ("Answer: 34\nso \\boxed{35", None),
    ],
)
def test_the_last_final_answer_counts_without_its_wrapping(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@given(st.binary(max_size=400))
@example(b"\\boxed{")
@settings(max_examples=500)
def test_no_bytes_upset_the_extractors(noise: bytes) -> None:
    text = noise.decode("utf-8", errors="replace")
    for wrapped in (text, f"Answer: {text}", f"\\boxed{{{text}}}", f"答案：{text}"):
        final_answer(wrapped)
        last_boxed(wrapped)
        assert Math().quick(wrapped, "34")


@pytest.mark.parametrize(
    "piece",
    [
        *("\\boxed{", "{", "}", "*", "Answer: ", "Answer:\n", "$", "$ ", "\\", "answer is"),
        *("\\text{", "> ", "the ", "1,", "-", "9", "\\frac{", "^\\circ", "\u202f"),
    ],
)
def test_extraction_takes_linear_time(piece: str) -> None:
    many = piece * 20_000
    started = time.process_time()
    for text in (many, f"Answer: {many}", f"\\boxed{{{many}}}"):
        Math().quick(text, "34")
    assert time.process_time() - started < 20  # a quadratic scan takes minutes
