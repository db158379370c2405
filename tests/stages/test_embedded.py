"""Every embedded task: repeatable, split for good, and with golds that its own checker takes."""

import json
import random
from itertools import islice

import pytest
from pydantic import ValidationError

from stages import arithmetic, embedded, prompts, tables, verify
from stages.embedded import TASKS
from stages.errors import InputError
from stages.verify import Answered

FIRSTS = {
    "arithmetic": "2+5-3+4+1+3",
    "translation": "does the light horse not carry the old house ?",
    "sentiment": "Positive, negative or neutral? dirty but okay",
}
each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
generated = pytest.mark.parametrize("name", ["sentiment", "translation"])


@each_task
def test_a_question_is_held_out_by_its_own_hash_whatever_the_seed(task: embedded.Task) -> None:
    train, heldout = (
        {question for seed in range(2) for question in islice(embedded.stream(task, seed, s), 150)}
        for s in ("train", "heldout")
    )
    assert not train & heldout
    assert all(embedded.split_of(question) == "heldout" for question in heldout)


def test_the_split_of_a_question_never_moves() -> None:
    # frozen: a change here would let a later version train on what an earlier one held out
    assert [embedded.split_of(e) for e in ("4-2+2", "4+1+4+3-4", "1+5-1")] == [
        "heldout",
        "heldout",
        "train",
    ]


def test_the_first_questions_of_a_seed_never_move() -> None:
    firsts = {name: next(embedded.stream(task, 0, "train")) for name, task in TASKS.items()}
    assert firsts == FIRSTS


@each_task
def test_about_a_tenth_is_held_out(task: embedded.Task) -> None:
    rng = random.Random(0)
    drawn = {task.draw(task.LEVELS[-1], rng) for _ in range(2000)}
    share = sum(embedded.split_of(question) == "heldout" for question in drawn) / len(drawn)
    assert 0.08 < share < 0.12


@each_task
def test_prompts_are_repeatable_and_differ_by_seed(task: embedded.Task) -> None:
    first = embedded.prompts(task, 50, 3, "train")
    assert first.equals(embedded.prompts(task, 50, 3, "train"))
    assert not first.equals(embedded.prompts(task, 50, 4, "train"))


@each_task
def test_prompts_are_distinct_and_carry_their_answer_and_level(task: embedded.Task) -> None:
    levels = task.LEVELS[1:3]
    frame = embedded.prompts(task, 100, 0, "heldout", levels)
    assert frame.schema == tables.polars_schema("prompts")
    assert frame["prompt_id"].n_unique() == frame["prompt"].n_unique() == 100
    assert frame["prompt_id"][12] == f"{task.PREFIX}-heldout-00012"
    for row in frame.iter_rows(named=True):
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert row["answer"] == task.answer(message["content"])
        assert json.loads(row["meta"]) == {"level": task.level_of(message["content"])}
        assert task.level_of(message["content"]) in levels
        assert row["task"] == task.CHECKER


def test_asking_for_more_prompts_than_exist_says_how_many_there_are() -> None:
    with pytest.raises(InputError, match=r"found only \d+ of 5000 distinct heldout"):
        embedded.prompts(arithmetic, 5000, 0, "heldout", levels=(2,))


@each_task
def test_no_prompts_are_an_empty_table(task: embedded.Task) -> None:
    assert embedded.prompts(task, 0, 0, "train").is_empty()


@each_task
def test_a_good_response_gets_all_of_the_reward_and_a_guess_less(task: embedded.Task) -> None:
    questions = list(islice(embedded.stream(task, 5, "train"), 120))

    def answered(responses: list[str]) -> list[Answered]:
        return [
            Answered(task.CHECKER, text, task.answer(question), truncated=False)
            for question, text in zip(questions, responses, strict=True)
        ]

    tasks = verify.Tasks(
        translation={"metric": "mean"},
        classification={"labels": ["positive", "negative", "neutral"]},
    )
    with verify.Judges(tasks, workers=1) as judges:
        assert not any(judges.gold_problem(task.CHECKER, task.answer(each)) for each in questions)
        good = judges.judge(answered([task.worked_example(each) for each in questions]))
        guessed = judges.judge(answered([task.guess(each) for each in questions]))
    assert {(verdict.acc, verdict.verdict) for verdict in good} == {(1.0, "right")}
    if task is not arithmetic:  # whose guesses are right, and hard to say at once
        assert 0.2 < sum(verdict.acc or 0 for verdict in guessed) / len(guessed) < 0.75


@each_task
def test_a_ramble_is_a_good_response_and_longer(task: embedded.Task) -> None:
    for question in islice(embedded.stream(task, 6, "train"), 20):
        good = task.worked_example(question)
        assert task.rambling_example(question, 0) == good
        rambling = [len(task.rambling_example(question, repeats)) for repeats in (1, 2, 3)]
        assert len(good) < rambling[0] < rambling[1] < rambling[2]


@generated
def test_a_level_that_there_is_not_is_refused(name: embedded.Name) -> None:
    with pytest.raises(InputError, match=r"levels: .* to .*, not 11"):
        embedded.prompts(TASKS[name], 1, 0, "train", levels=(11,))


def test_a_generator_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValidationError, match="'arithmetic', 'translation' or 'sentiment'"):
        prompts.Config(generator="poetry")
