"""`math` of stages/verify.py beside plain math-verify: public cases, and answers per second.

    python tests/bench/verify.py

A set is whole numbers, and a share of prompts whose answers are roots, polynomials, intervals,
sets and equations, eight responses to each; the last two need sympy. Ratios are of the same run.
The poisonous set keeps sympy for ever.
"""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from math_verify import parse, verify

from stages.verify import Answered, Judges, Tasks

PAIRS = Path(__file__).parents[1] / "vectors" / "math_pairs.jsonl"
PROMPTS, N = 4000, 8
FORMULAS = [
    (r"\frac{{\sqrt{{{}}}}}{{2}}", r"\frac{{{}}}{{2\sqrt{{{}}}}}"),
    (r"(x+{})^2", r"x^2+2\cdot {}x+{}^2"),
    (r"[{}, 100)", r"[{}, 100)"),
]
FOR_SYMPY = [
    (r"\{{1,{},1003\}}", r"\{{1003,1,{}\}}"),
    ("3x-{}y+13=0", r"6x-2\cdot {}y+26=0"),
]


def answers(algebra: float, prompts: int, forms: Sequence[tuple[str, str]]) -> list[Answered]:
    """Responses that are right half of the time; a share of `algebra` has one of the forms."""
    draw = random.Random(0)
    found = []
    for i in range(prompts):
        form = draw.choice(forms) if draw.random() < algebra else ("{}", "{}")
        gold = form[0].format(i + 2)
        for _ in range(N):
            value = i + 2 if draw.random() < 0.5 else draw.randrange(2, 1000)
            said = form[1].format(*[value] * 3)
            found.append(Answered("math", f"Some working.\nAnswer: ${said}$", gold, False))
    return found


def plain(responses: list[Answered]) -> None:
    """Math-Verify as its page shows it, but for its timeouts, which need the main thread."""
    for response in responses:
        gold = parse(f"${response.gold}$", parsing_timeout=None)
        answer = parse(response.text, parsing_timeout=None)
        verify(gold, answer, timeout_seconds=None)


def pairs() -> None:
    """Which public cases each checker judges as they should be."""
    cases = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    golds = ["" if case["gold"] is None else str(case["gold"]) for case in cases]
    responses = [
        Answered("math", case["response"], gold, False)
        for case, gold in zip(cases, golds, strict=True)
    ]
    with Judges() as judges:
        ours = [verdict.acc for verdict in judges.judge(responses)]
    found = {
        "ours": ours,
        "plain math-verify": [_plain(case["response"], case["gold"]) for case in cases],
        "regular expression": [_regex(case["response"], case["gold"]) for case in cases],
    }
    for name, accs in found.items():
        wrong = [
            case["id"]
            for case, acc in zip(cases, accs, strict=True)
            if acc != (None if case["correct"] is None else float(case["correct"]))
        ]
        print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} cases; not {' '.join(wrong)}")


def _plain(response: str, gold: object) -> float:
    expected, answer = (parse(each, parsing_timeout=None) for each in (gold, response))
    return float(verify(expected, answer, timeout_seconds=None))


def _regex(response: str, gold: object) -> float:
    found = re.findall(r"Answer:\s*(\S+)", response)
    return float(bool(found) and found[-1] == str(gold))


def poisonous() -> None:
    """How long a set takes in which every check runs into its limit."""
    hangs = [Answered("math", f"Answer: {i}^{{9^{{9^9}}}}", r"\pi", False) for i in range(2, 14)]
    limit, workers = 1.0, 2
    with Judges(Tasks(timeout_s=limit), workers=workers) as judges:
        started = time.perf_counter()
        verdicts = judges.judge(hangs)
        took = time.perf_counter() - started
    timeouts = sum(verdict.verdict == "timeout" for verdict in verdicts)
    ideal = len(hangs) * limit / workers
    print(
        f"poisonous: {timeouts} timeouts of {len(hangs)} in {took:.1f} s; "
        f"rows × limit ÷ workers is {ideal:.1f} s"
    )


def rate(work: Callable[[list[Answered]], object], responses: list[Answered]) -> float:
    """Responses per second of wall time."""
    started = time.perf_counter()
    work(responses)
    return len(responses) / (time.perf_counter() - started)


def main() -> None:
    pairs()
    poisonous()
    hard = answers(1.0, PROMPTS // 32, FOR_SYMPY)
    plain(hard[:1])  # imports
    rates = {}
    for workers in (1, 2):
        with Judges(workers=workers) as judges:
            judges.judge(hard[:workers])  # the workers start
            rates[workers] = rate(judges.judge, hard)
    print(f"for sympy alone: 2 workers ÷ 1: {rates[2] / rates[1]:.2f}")
    print(f"for sympy alone: 1 worker ÷ plain: {rates[1] / rate(plain, hard):.2f}")
    with Judges(workers=2) as judges:
        judges.judge(hard)  # what sympy does once
        for share in (0.0, 0.005, 0.02):
            mixed = answers(share, PROMPTS, FORMULAS + FOR_SYMPY)
            ours, theirs = rate(judges.judge, mixed), rate(plain, mixed)
            print(f"{share:.1%} algebra: {ours:.0f} answers/s, {ours / theirs:.1f} × plain")


if __name__ == "__main__":
    main()
