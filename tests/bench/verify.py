"""Answers per second: `math` of stages/verify.py beside plain math-verify, on the same answers.

    python tests/bench/verify.py

The mixed set is what a run of competition mathematics looks like: 95 % whole numbers, the rest
fractions, roots and expressions, eight responses to a prompt. Ratios are of the same run.
"""

import random
import time
from collections.abc import Callable

from math_verify import parse, verify

from stages.verify import Answered, Judges

PROMPTS, N = 500, 8
HARD = [
    (r"\frac{{\sqrt{{{}}}}}{{2}}", r"\frac{{{}}}{{2\sqrt{{{}}}}}"),
    (r"(x+{})^2", r"x^2+2\cdot {}x+{}^2"),
    (r"[{}, 100)", r"[{}, 100)"),
]


def answers(hard: float, prompts: int) -> list[Answered]:
    """Responses that are right half of the time; a share of `hard` needs algebra."""
    draw = random.Random(0)
    found = []
    for i in range(prompts):
        form = draw.choice(HARD) if draw.random() < hard else ("{}", "{}")
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


def rate(work: Callable[[list[Answered]], object], responses: list[Answered]) -> float:
    """Responses per second of wall time."""
    started = time.perf_counter()
    work(responses)
    return len(responses) / (time.perf_counter() - started)


def main() -> None:
    mixed, hard = answers(0.05, PROMPTS), answers(1.0, PROMPTS // 4)
    plain(hard[:1])  # imports
    reference = rate(plain, mixed)
    print(f"mixed set, plain math-verify: {reference:.0f} answers/s")
    rates = {}
    for workers in (1, 2):
        with Judges(workers=workers) as judges:
            judges.judge(hard[:workers])  # the workers start
            rates[workers] = rate(judges.judge, hard)
            mine = rate(judges.judge, mixed)
        print(f"{workers} worker(s): mixed {mine:.0f} answers/s, {mine / reference:.1f} × plain")
        print(f"             hard {rates[workers]:.0f} answers/s")
    print(f"hard, 2 workers ÷ 1: {rates[2] / rates[1]:.2f}")
    print(f"hard, 1 worker ÷ plain: {rates[1] / rate(plain, hard):.2f}")


if __name__ == "__main__":
    main()
