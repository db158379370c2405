"""Right, wrong, no answer, or nobody can say: whatever text a model may write."""

import threading
import time

import pytest
from conftest import rows

from stages import verify
from stages.errors import InputError


def acc(text: str, gold: str = "34", task: str = "arithmetic") -> float | None:
    return verify.judge(task, text, gold, truncated=False).acc


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
    assert verify.arithmetic(text, "34")[:2] == (1.0, "right")


@pytest.mark.parametrize(
    "answer",
    ["35", "-34", "34 or 35", "12, 34", "34.000001", "", "x", "34/0", "3 4", "0x22", "³⁴"],
)
def test_anything_else_on_the_answer_line_is_wrong(answer: str) -> None:
    assert verify.arithmetic(f"Answer: {answer}", "34")[:2] == (0.0, "wrong")


@pytest.mark.parametrize(
    "text", ["", "34", "so x = 34", "The Answer: 34", "answer: 34", " Answer: 34"]
)
def test_a_number_without_an_answer_line_is_no_answer(text: str) -> None:
    assert verify.arithmetic(text, "34") == (0.0, "no_answer", None)


def test_the_last_answer_line_counts() -> None:
    assert acc("Answer: 12\nWait, that is wrong.\nAnswer: 34") == 1
    assert acc("Answer: 34\nWait, that is wrong.\nAnswer: 12") == 0
    assert verify.arithmetic("Answer: 1\nAnswer: 2", "2").extracted == "2"


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
    assert verify.judge("arithmetic", text, "34", truncated=True) == (0.0, "truncated", None)
    assert verify.judge("arithmetic", text, "34", truncated=False).acc == 1


@pytest.mark.parametrize("gold", ["", "many", "1e999999999", "1/0"])
def test_a_gold_answer_that_is_no_number_is_unscorable(gold: str) -> None:
    verdict = verify.arithmetic("Answer: 34", gold)
    assert verdict[:2] == (None, "unscorable")
    assert repr(gold) in str(verdict.extracted)


def test_the_exact_task_compares_text() -> None:
    assert acc("Answer: Paris ", gold=" Paris", task="exact") == 1
    assert acc("Answer: paris", gold="Paris", task="exact") == 0
    assert acc("Answer: 34.0", gold="34", task="exact") == 0


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'chess' has no checker.*arithmetic, exact"):
        verify.judge("chess", "Answer: 34", "34", truncated=False)


def test_only_the_response_is_scored() -> None:
    prompts = rows("prompts", {"prompt_id": "p", "prompt": "Answer: 34", "answer": "34"})
    rollouts = rows("rollouts", {"response_id": "r", "text": "I am not sure."})
    judged = verify.judge_all(rollouts.lazy(), prompts.lazy())
    assert judged["verdict"].to_list() == ["no_answer"]


def test_verdicts_keep_the_order_of_the_responses_and_find_gold_by_id() -> None:
    prompts = rows("prompts", {"prompt_id": "a", "answer": "1"}, {"prompt_id": "b", "answer": "2"})
    rollouts = rows(
        "rollouts",
        *(
            {"response_id": f"r{i}", "prompt_id": prompt_id, "text": f"Answer: {i}"}
            for i, prompt_id in enumerate("bab")
        ),
    )
    judged = verify.judge_all(rollouts.lazy(), prompts.lazy())
    assert judged["response_id"].to_list() == ["r0", "r1", "r2"]
    assert judged["acc"].to_list() == [0, 1, 1]


def test_no_responses_give_no_verdicts() -> None:
    judged = verify.judge_all(rows("rollouts").lazy(), rows("prompts").lazy())
    assert judged.shape == (0, 5)


def test_the_checker_works_outside_the_main_thread() -> None:
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(acc("Answer: 34")))
    thread.start()
    thread.join()
    assert found == [1]
