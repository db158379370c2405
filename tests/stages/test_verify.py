"""Right, wrong, no answer, or nobody can say: whatever text a model may write."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from conftest import rows

from stages import verify
from stages.checkers import Verdict
from stages.checkers.maths import Arithmetic
from stages.errors import InputError
from stages.verify import Answered, Judges, Tasks


def arithmetic(text: str, gold: str) -> Verdict:
    return Arithmetic().check(text, gold)


def judged(task: str, text: str, gold: str = "34", *, truncated: bool = False) -> Verdict:
    with Judges() as judges:
        return judges.judge([Answered(task, text, gold, truncated)])[0]


def acc(text: str, gold: str = "34", task: str = "arithmetic") -> float | None:
    return judged(task, text, gold).acc


def judge_all(rollouts: pl.DataFrame, prompts: pl.DataFrame, **how: Any) -> pl.DataFrame:
    with Judges() as judges:
        return verify.judge_all(rollouts.lazy(), prompts.lazy(), judges, **how)


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 34",
        "Answer:34",
        "3+31=34\nAnswer:  34 \t",
        "Answer: 34\r\n",
        "Answer: +34.0",
        "Answer: 034",
        "Answer: 68/2",
    ],
)
def test_an_equal_number_is_right(text: str) -> None:
    assert arithmetic(text, "34")[:2] == (1.0, "right")


@pytest.mark.parametrize(
    "answer",
    ["35", "-34", "34 or 35", "12, 34", "34.000001", "", "x", "34/0", "3 4", "0x22", "³⁴"],
)
def test_anything_else_on_the_answer_line_is_wrong(answer: str) -> None:
    assert arithmetic(f"Answer: {answer}", "34")[:2] == (0.0, "wrong")


@pytest.mark.parametrize(
    "text", ["", "34", "so x = 34", "The Answer: 34", "answer: 34", " Answer: 34"]
)
def test_a_number_without_an_answer_line_is_no_answer(text: str) -> None:
    assert arithmetic(text, "34") == (0.0, "no_answer", None)


def test_the_last_answer_line_counts() -> None:
    assert acc("Answer: 12\nWait, that is wrong.\nAnswer: 34") == 1
    assert acc("Answer: 34\nWait, that is wrong.\nAnswer: 12") == 0
    assert arithmetic("Answer: 1\nAnswer: 2", "2").extracted == "2"


def test_any_amount_of_text_after_the_answer_does_not_hide_it() -> None:
    assert acc("Answer: 34\n" + "and so it is consistent. " * 4000) == 1


def test_large_numbers_are_compared_exactly() -> None:
    assert acc("Answer: 100000001", gold="100000000") == 0
    assert acc("Answer: 0.1", gold="1/10") == 1


@pytest.mark.parametrize(
    "answer",
    [
        "1e999999999",
        "9" * 100_000,
        "1/" + "0" * 100_000 + "1",
        "0." + "1" * 100_000,
        "-" * 100_000,
        "a" + " " * 100_000 + "b",
        "Answer: " * 10_000,
    ],
    ids=["power", "digits", "denominator", "decimals", "signs", "spaces", "labels"],
)
def test_no_answer_is_long_enough_to_hang_or_crash_the_checker(answer: str) -> None:
    started = time.perf_counter()
    assert acc(f"Answer: {answer}") == 0
    assert time.perf_counter() - started < 1


def test_a_truncated_response_earns_nothing_even_with_the_right_number() -> None:
    text = "Answer: 34"
    for task in verify.BY_ANSWER:
        assert judged(task, text, truncated=True) == (0.0, "truncated", None)
    assert judged("arithmetic", text).acc == 1


@pytest.mark.parametrize("gold", ["", "many", "1e999999999", "1/0"])
def test_a_gold_answer_that_is_no_number_is_unscorable(gold: str) -> None:
    verdict = arithmetic("Answer: 34", gold)
    assert verdict[:2] == (None, "unscorable")
    assert repr(gold) in str(verdict.extracted)


def test_the_exact_task_compares_text() -> None:
    assert acc("Answer: Paris ", gold=" Paris", task="exact") == 1
    assert acc("Answer: paris", gold="Paris", task="exact") == 0
    assert acc("Answer: 34.0", gold="34", task="exact") == 0


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'chess' has no checker.*arithmetic, math"):
        judged("chess", "Answer: 34")


@pytest.mark.parametrize("task", ["format", "custom"])
def test_a_task_that_has_to_be_described_says_so(task: str) -> None:
    with pytest.raises(InputError, match=f"'{task}' needs settings.*tasks.{task}"):
        judged(task, "Answer: 34")


def test_only_the_response_is_scored() -> None:
    prompts = rows("prompts", {"prompt_id": "p", "prompt": "Answer: 34", "answer": "34"})
    rollouts = rows("rollouts", {"response_id": "r", "text": "I am not sure."})
    verdicts = judge_all(rollouts, prompts)
    assert verdicts["verdict"].to_list() == ["no_answer"]


def test_verdicts_keep_the_order_of_the_responses_and_find_gold_by_id() -> None:
    prompts = rows("prompts", {"prompt_id": "a", "answer": "1"}, {"prompt_id": "b", "answer": "2"})
    rollouts = rows(
        "rollouts",
        *(
            {"response_id": f"r{i}", "prompt_id": prompt_id, "text": f"Answer: {i}"}
            for i, prompt_id in enumerate("bab")
        ),
    )
    verdicts = judge_all(rollouts, prompts)
    assert verdicts["response_id"].to_list() == ["r0", "r1", "r2"]
    assert verdicts["acc"].to_list() == [0, 1, 1]


def test_no_responses_give_no_verdicts() -> None:
    assert judge_all(rows("rollouts"), rows("prompts")).shape == (0, 5)


def test_the_checker_works_outside_the_main_thread() -> None:
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(acc("Answer: 34")))
    thread.start()
    thread.join()
    assert found == [1]


# --- worker processes --------------------------------------------------------------------------

POISON = [
    "Answer: 9^{9^{9^9}}",
    "Answer: (1+x)^{10000000}",
    "Answer: " + r"\frac{1}{" * 300 + "1" + "}" * 300,
    "Answer: " + "(" * 1000 + ")" * 1000,
]
SOON = Tasks(timeout_s=2.0, memory_mib=256)


def hang(text: str, gold: str) -> float:
    while True:
        pass


def eat(text: str, gold: str) -> float:
    return float(len(bytearray(2**33)))


def die(text: str, gold: str) -> float:
    os._exit(3)


def fail(text: str, gold: str) -> float:
    raise KeyError("what")


def share(text: str, gold: str) -> tuple[float, str]:
    return text.count(gold) / len(text), "counted"


def refuse(text: str, gold: str) -> float:
    raise InputError("no such machine")


def cannot_say(text: str, gold: str) -> None:
    return None


def custom(function: str) -> Tasks:
    return Tasks.model_validate(
        {"custom": {"function": f"{__name__}:{function}"}} | SOON.model_dump(include={"timeout_s"})
    )


def test_a_poisonous_response_costs_its_own_row_only() -> None:
    good = [Answered("math", rf"Answer: \sqrt{{{i * i}}}", f"{i}", False) for i in range(1, 7)]
    bad = [Answered("math", text, "5", False) for text in POISON]
    mixed = [each for pair in zip(good, [*bad, *bad[:2]], strict=True) for each in pair]
    before = set(psutil.Process().children(recursive=True))
    with Judges(SOON, workers=2) as judges:
        verdicts = judges.judge(mixed)
    assert [verdict.acc for verdict in verdicts[::2]] == [1.0] * 6
    assert {verdict[:2] for verdict in verdicts[1::2]} <= {
        *((0.0, word) for word in ("timeout", "memory", "crash", "wrong")),
        (None, "unscorable"),
    }
    assert (0.0, "timeout") in {verdict[:2] for verdict in verdicts[1::2]}
    left = [p for p in set(psutil.Process().children(recursive=True)) - before if works(p)]
    assert not left


def works(process: psutil.Process) -> bool:
    """Whether it is a worker, and not the idle process that workers are forked from."""
    try:
        return bool(process.parent() and process.parent().pid != os.getpid())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("function", "verdict", "said"),
    [
        ("hang", (0.0, "timeout"), "longer than 2 s"),
        ("eat", (0.0, "memory"), "more memory"),
        ("die", (0.0, "crash"), "ended its process"),
        ("fail", (None, "unscorable"), "KeyError: 'what'"),
        ("cannot_say", (None, "unscorable"), "cannot say"),
        ("share", (0.5, "partial"), "counted"),
    ],
)
def test_a_checker_of_ones_own_is_called_in_a_worker(
    function: str, verdict: tuple[float | None, str], said: str
) -> None:
    started = time.monotonic()
    with Judges(custom(function)) as judges:
        [found] = judges.judge([Answered("custom", "abab", "a", False)])
    assert time.monotonic() - started < 30  # the limit is 2 s; then there is the workers' start
    assert found[:2] == verdict
    assert said in str(found.extracted)


def test_what_is_no_responses_fault_stops_the_stage() -> None:
    with Judges(custom("refuse")) as judges, pytest.raises(InputError, match="no such machine"):
        judges.judge([Answered("custom", "abab", "a", False)])


def test_a_program_that_starts_itself_again_in_each_worker_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from stages.verify import Answered, Judges\n"
        "with Judges(workers=1) as judges:\n"
        "    judges.judge([Answered('math', 'Answer: x=3', 'x+1=4', False)])\n"
    )
    ended = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert "InputError: the checkers' processes do not start" in ended.stderr


def test_a_checker_that_cannot_be_imported_is_refused_with_the_settings() -> None:
    for name in ("no_such_module:judge", f"{__name__}:nothing", "nonsense", f"{__name__}:SOON"):
        with pytest.raises(ValueError, match=r"cannot import|not callable"):
            Tasks.model_validate({"custom": {"function": name}})


def test_verdicts_are_the_same_whatever_the_number_of_workers_and_the_thread() -> None:
    answers = [rf"Answer: \frac{{{i}}}{{\sqrt{{4}}}}" for i in range(12)]
    responses = [Answered("math", text, "3", False) for text in answers * 2]
    found: list[list[Verdict]] = []

    def judge(workers: int) -> None:
        with Judges(workers=workers) as judges:
            found.append(judges.judge(responses))

    judge(1)
    thread = threading.Thread(target=judge, args=(3,))
    thread.start()
    thread.join()
    assert found[0] == found[1]
    assert sum(verdict.acc or 0 for verdict in found[0]) == 2


def test_answers_that_are_the_same_number_need_no_worker() -> None:
    before = psutil.Process().children(recursive=True)
    with Judges() as judges:
        judges.judge([Answered("math", f"Answer: {i}", "34", False) for i in range(100)])
        assert psutil.Process().children(recursive=True) == before


def test_golds_are_checked_and_compared_by_their_tasks_own_measure(tmp_path: Path) -> None:
    with Judges() as judges:
        assert judges.gold_problem("arithmetic", "34") is None
        assert "not a number" in str(judges.gold_problem("arithmetic", "many"))
        assert judges.gold_problem("math", r"\frac{\sqrt{2}}{2}") is None
        assert judges.gold_problem("math", "\\frac{1}{")
        assert judges.gold_problem("custom", "anything") is None
        assert judges.same_answer("math", r"\frac{\sqrt{4}}{4}", "0.5")
        assert not judges.same_answer("code", "{}", "[]")
