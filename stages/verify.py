"""Judge an answer: pure functions (text, gold) -> verdict, one per task."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import polars as pl

from stages import tables
from stages.errors import InputError


class Verdict(NamedTuple):
    """`acc` is 1 (right), 0 (wrong) or None (nobody can say); `extracted` is what was judged."""

    acc: float | None
    verdict: str
    extracted: str | None


# bounded, so that no model can make the checker compute 10 ** 999999999
NUMBER = re.compile(r"[-+]?[0-9]{1,64}(\.[0-9]{1,64}|/0{0,63}[1-9][0-9]{0,63})?")
ANSWER_LINE = re.compile(r"^Answer:(.*)$", re.MULTILINE)


def arithmetic(text: str, gold: str) -> Verdict:
    """The last `Answer: N` line, compared as an exact rational number.

    A gold that is not a number makes the response unscorable, never right and never wrong.
    """
    if (expected := _number(gold)) is None:
        return Verdict(None, "unscorable", f"the gold answer {gold!r} is not a number")
    return _judge(text, right=lambda answer: _number(answer) == expected)


def exact(text: str, gold: str) -> Verdict:
    """The last `Answer: …` line, compared as text."""
    return _judge(text, right=lambda answer: answer == gold.strip())


TASKS: dict[str, Callable[[str, str], Verdict]] = {"arithmetic": arithmetic, "exact": exact}


def judge(task: str, text: str, gold: str, *, truncated: bool) -> Verdict:
    """The verdict of `task`'s checker; a truncated response has no final answer and is wrong.

    A number in the middle of an unfinished derivation is not an answer, so no fallback rewards it.
    """
    check = TASKS.get(task)
    if check is None:
        raise InputError(f"task '{task}' has no checker; known tasks: {', '.join(sorted(TASKS))}")
    return Verdict(0.0, "truncated", None) if truncated else check(text, gold)


def judge_all(rollouts: pl.LazyFrame, prompts: pl.LazyFrame) -> pl.DataFrame:
    """One row per response: response_id, length, acc, verdict, extracted.

    Responses find their gold answer by prompt_id; one whose prompt is unknown is an `InputError`.
    """
    asked = prompts.select("prompt_id", "task", "answer")
    answered = tables.collect(
        rollouts.select("response_id", "prompt_id", "length", "finish_reason", "text").join(
            asked, on="prompt_id", how="left", maintain_order="left"
        ),
        "rollouts or prompts",
    )
    if lost := answered.filter(pl.col("answer").is_null())["prompt_id"].to_list():
        raise InputError(f"prompt_id '{lost[0]}' of the rollouts is not in the prompts table")
    verdicts = pl.DataFrame(
        [
            judge(task, text, gold, truncated=finish_reason == "length")
            for task, text, gold, finish_reason in answered.select(
                "task", "text", "answer", "finish_reason"
            ).iter_rows()
        ],
        schema={"acc": pl.Float32, "verdict": pl.String, "extracted": pl.String},
        orient="row",
    )
    return pl.concat([answered.select("response_id", "length"), verdicts], how="horizontal")


def _judge(text: str, *, right: Callable[[str], bool]) -> Verdict:
    answers = [answer.strip() for answer in ANSWER_LINE.findall(text)]
    if not answers:
        return Verdict(0.0, "no_answer", None)
    is_right = right(answers[-1])
    return Verdict(float(is_right), "right" if is_right else "wrong", answers[-1])


def _number(text: str) -> Fraction | None:
    return Fraction(text.strip()) if NUMBER.fullmatch(text.strip()) else None
