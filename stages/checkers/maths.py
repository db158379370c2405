r"""Mathematical answers: numbers exactly and at once, what is left by math-verify and sympy.

Math-Verify (https://github.com/huggingface/Math-Verify) parses LaTeX and compares expressions,
sets, intervals, matrices, equations, quantities with units. What it calls equal is looked at once
more: it compares numerically, so that 1/2004! and 1/2006! are equal to it, and 34, 34 is 34.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from stages.checkers import Checker, Verdict, unscorable
from stages.checkers.answers import balanced, bare, final_answer, plain
from stages.checkers.intervals import same_value

# bounded, so that no model can make the checker compute 10 ** 999999999
DIGITS = r"[0-9]{1,64}"
NUMBER = re.compile(rf"[-+]?({DIGITS}(\.{DIGITS}|/0{{0,63}}[1-9][0-9]{{0,63}})?|\.{DIGITS})")
FRACTION = re.compile(rf"([-+]?)\\[dt]?frac\{{({DIGITS})\}}\{{({DIGITS})\}}")
THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:(,[0-9]{3}){1,21}|( [0-9]{3}){1,21})(\.[0-9]{1,64})?")
SPACES = re.compile(r"\\[ ,;:!]|~")
CIRCLE = re.compile(r"\s*(\^\s*\{?\s*\\circ\s*\}?|°|\\degree)$")
ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")  # math-verify drops what is not in braces
NO_MATTER = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|\\(?:left|right)(?![a-zA-Z])")  # 3 4 is not 34
LONGEST = 2000  # characters of an answer that are read at all
DIGITS_COMPARED, TOLERANCE = 30, "1e-12"  # relative, of numbers that are no decimals
DECIMAL_TOLERANCE = "1e-6"

# it warns at each start that its own timeouts are off: the workers have one
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_LINE = re.compile(r"^Answer:(.*)$", re.MULTILINE)


class Arithmetic(Checker):
    """The last `Answer: N` line, to the letter, compared as an exact rational number.

    A gold that is not a number makes the response unscorable, never right and never wrong.
    """

    def check(self, text: str, gold: str) -> Verdict:
        if problem := self.gold_problem(gold):
            return unscorable(problem)
        answers = ANSWER_LINE.findall(text)
        if not answers:
            return Verdict(0.0, "no_answer", None)
        answer = answers[-1].strip()
        return _judged(number(answer) == number(gold.strip()), answer)

    def gold_problem(self, gold: str) -> str | None:
        """Why no answer could ever be right."""
        return None if number(gold.strip()) is not None else f"the gold {gold!r} is not a number"


class Math(Checker):
    """The final answer as a mathematical object; a hedge or a list of candidates is wrong."""

    def quick(self, text: str, gold: str) -> Verdict | str:
        """The verdict where numbers or texts decide it; else a short text that has the same."""
        answer = final_answer(text)
        if answer is None:
            return Verdict(0.0, "no_answer", None)
        answer = " ".join(answer[:LONGEST].split())
        if not gold.strip():
            return unscorable("the gold answer is empty")
        mine, theirs = tidy(answer), tidy(bare(gold))
        if _spelling(mine) == _spelling(theirs):
            return Verdict(1.0, "right", answer)
        right = _same_number(mine, theirs)
        if right is None:
            right = same_value(mine, theirs)
        return f"Answer: {answer}" if right is None else _judged(right, answer)

    def check(self, text: str, gold: str) -> Verdict:
        """The verdict, whatever it takes. Not in a thread that must answer soon."""
        found = self.quick(text, gold)
        if isinstance(found, Verdict):
            return found
        expected = _parsed_gold(gold) if balanced(gold) else []
        if not expected:
            return unscorable(f"the gold answer {gold!r} cannot be read")
        answer = final_answer(text) or ""
        return _judged(_equal(expected, parsed(answer)), answer)

    def is_number(self, answer: str) -> bool:
        """Whether it is one that needs no sympy."""
        text = tidy(bare(answer))
        return bool(_same_number(text, text))

    def gold_problem(self, gold: str) -> str | None:
        """Why no answer could ever be right."""
        if not gold.strip():
            return "is empty"
        if self.is_number(gold):
            return None
        if not balanced(gold):
            return f"a brace of {gold!r} is not closed"
        expected = parsed(gold)
        return None if _equal(expected, expected) else f"math-verify cannot read {gold!r}"


def tidy(answer: str) -> str:
    """Without full-width forms, LaTeX spaces, thousands commas and a degree sign at the end."""
    answer = SPACES.sub(" ", plain(answer).replace("{,}", ","))
    answer = CIRCLE.sub("", answer).strip()
    if THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "").replace(" ", "")
    return answer


def _spelling(formula: str) -> str:
    """What LaTeX sets the same has the same spelling."""
    return NO_MATTER.sub("", formula).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def number(text: str) -> Fraction | None:
    r"""A decimal, 3/4 or \frac{3}{4} as an exact rational number; None for anything else."""
    if found := FRACTION.fullmatch(text):
        sign, top, bottom = found.groups()
        text = f"{sign}{top}/{bottom}"
    return Fraction(text) if NUMBER.fullmatch(text) else None


def _same_number(answer: str, gold: str) -> bool | None:
    """Whether they are the same number; None if one is no number. 50 % is 50, and it is 1/2."""
    percent = [text.endswith("%") for text in (answer, gold)]
    ours, theirs = (number(text.removesuffix("%").rstrip("\\ ")) for text in (answer, gold))
    if ours is None or theirs is None:
        return None
    if percent == [True, False]:
        return theirs in (ours, ours / 100)
    if percent == [False, True]:
        return ours in (theirs, theirs / 100)
    return ours == theirs


def parsed(answer: str) -> list[Any]:
    """What math-verify reads, as sympy objects and the text; empty if it reads nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = ROOT.sub(r"\\sqrt{\1}", tidy(bare(answer)))
    if not text:
        return []
    # as one formula, whole: outside of dollars an equation would collapse to its last number
    found: list[Any] = parse(
        f"${text}$",
        extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found


@lru_cache(maxsize=1024)  # a prompt's responses share it
def _parsed_gold(gold: str) -> list[Any]:
    return parsed(gold)


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether math-verify calls them equal, in this order, and no closer look says otherwise."""
    import sympy
    from math_verify import verify

    if not gold or not answer or not verify(gold, answer, timeout_seconds=None):
        return False
    listed = isinstance(answer[0], sympy.FiniteSet) and not isinstance(gold[0], sympy.Set)
    return not listed and _same_size(gold[0], answer[0])


def _same_size(gold: Any, answer: Any) -> bool:
    """Whether two numbers are equal relative to their size; true of what is no number."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return True
    if gold.free_symbols or answer.free_symbols:
        return True
    decimals = gold.has(sympy.Float) or answer.has(sympy.Float)
    tolerance = sympy.Float(DECIMAL_TOLERANCE if decimals else TOLERANCE)
    gap = abs(sympy.N(gold - answer, DIGITS_COMPARED))
    return bool(gap <= tolerance * abs(sympy.N(gold, DIGITS_COMPARED)))


def _judged(right: bool, answer: str) -> Verdict:
    return Verdict(float(right), "right" if right else "wrong", answer)
