"""Judge responses: each prompt's task names a checker, (text, gold) → verdict."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import polars as pl
from pydantic import Field

from stages import tables
from stages.checkers import Checker, Verdict
from stages.checkers.code import Code
from stages.checkers.custom import Custom
from stages.checkers.maths import Arithmetic, Math
from stages.checkers.pool import Job, Pool
from stages.checkers.texts import F1, Choice, Classification, Exact, Format, Translation
from stages.errors import InputError
from stages.settings import Settings

# the others read a text once, from left to right: nothing a model writes can keep them
IN_WORKERS = {"math", "translation", "format", "code", "custom"}
BOXING_S = 60.0  # for what goes on around a program
BY_ANSWER = {"arithmetic", "math", "exact", "f1", "multiple_choice", "classification"}


class Tasks(Settings):
    """The checker of every task with its settings, and what one check may take."""

    arithmetic: Arithmetic = Arithmetic()
    math: Math = Math()
    exact: Exact = Exact()
    f1: F1 = F1()
    multiple_choice: Choice = Choice()
    classification: Classification = Classification()
    translation: Translation = Translation()
    code: Code = Code()
    format: Format | None = None  # has to be said
    custom: Custom | None = None
    # of a check in a worker process, which is killed then: the response is wrong
    timeout_s: float = Field(5.0, gt=0)
    memory_mib: int = Field(1024, ge=64)

    def checkers(self) -> dict[str, Checker]:
        """By task, those that can be used."""
        return {task: found for task in TASKS if (found := getattr(self, task)) is not None}


TASKS = [name for name in Tasks.model_fields if name not in ("timeout_s", "memory_mib")]


class Answered(NamedTuple):
    """A response, and how it is to be judged."""

    task: str
    text: str
    gold: str
    truncated: bool


class Judges(AbstractContextManager["Judges"]):
    """Judges responses; the hard ones in worker processes, which `with` ends.

    Args:
        workers: at most so many; None: one per core.
    """

    def __init__(self, tasks: Tasks | None = None, *, workers: int | None = None) -> None:
        self.tasks = tasks or Tasks()
        self._checkers = self.tasks.checkers()
        self._pool = Pool(
            self._checkers,
            workers=workers,
            # a program has limits of its own, and ends within them
            timeout_s={"code": self.tasks.code.timeout_s + BOXING_S},
            default_timeout_s=self.tasks.timeout_s,
            memory_mib=max(self.tasks.memory_mib, self.tasks.code.memory_mib),
        )

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def judge(self, responses: Sequence[Answered]) -> list[Verdict]:
        """The verdicts, in the order of the responses."""
        found = [self._at_once(response) for response in responses]
        hard = [each for each in found if isinstance(each, Job)]
        judged = iter(self._pool.judge(hard) if hard else ())
        return [next(judged) if isinstance(each, Job) else each for each in found]

    def gold_problem(self, task: str, gold: str) -> str | None:
        """Why nobody could give this answer; None if one can."""
        if task in TASKS and task not in self._checkers:
            return None  # its settings will say what a gold is
        if task != "math":
            return self._checker(task).gold_problem(gold)
        if self.tasks.math.is_number(gold):
            return None
        [verdict] = self._pool.judge([Job(task, None, gold)])
        return None if verdict.acc == 1 else verdict.extracted

    def same_answer(self, task: str, answer: str, gold: str) -> bool:
        """Whether both are right by each other, such as 1/2 and 0.5."""
        if answer == gold or task not in BY_ANSWER:
            return answer == gold
        [verdict] = self.judge([Answered(task, f"Answer: {answer}", gold, truncated=False)])
        return verdict.acc == 1

    def _checker(self, task: str) -> Checker:
        if task in self._checkers:
            return self._checkers[task]
        if task in TASKS:
            raise InputError(f"task '{task}' needs settings: say what it asks in tasks.{task}")
        raise InputError(f"task '{task}' has no checker; known tasks: {', '.join(TASKS)}")

    def _at_once(self, response: Answered) -> Verdict | Job:
        """The verdict where it is easily had.

        A truncated response has no final answer and is wrong: a number in the middle of an
        unfinished derivation is none.
        """
        task, text, gold, truncated = response
        checker = self._checker(task)
        if truncated:
            return Verdict(0.0, "truncated", None)
        if task not in IN_WORKERS:
            return checker.check(text, gold)
        if isinstance(checker, Math):
            found = checker.quick(text, gold)
            return found if isinstance(found, Verdict) else Job(task, found, gold)
        return Job(task, text, gold)


def judge_all(
    rollouts: pl.LazyFrame, prompts: pl.LazyFrame, judges: Judges, *, task: str | None = None
) -> pl.DataFrame:
    """One row per response: response_id, length, acc, verdict, extracted.

    Responses find their gold answer by prompt_id; one whose prompt is unknown is an `InputError`.

    Args:
        task: for all of them; None: each prompt's own.
    """
    asked = prompts.select("prompt_id", "answer", pl.col("task") if task is None else task_is(task))
    answered = tables.collect(
        rollouts.select("response_id", "prompt_id", "length", "finish_reason", "text").join(
            asked, on="prompt_id", how="left", maintain_order="left"
        ),
        "rollouts or prompts",
    )
    if lost := answered.filter(pl.col("answer").is_null())["prompt_id"].to_list():
        raise InputError(f"prompt_id '{lost[0]}' of the rollouts is not in the prompts table")
    verdicts = pl.DataFrame(
        judges.judge(list(_answered(answered))),
        schema={"acc": pl.Float32, "verdict": pl.String, "extracted": pl.String},
        orient="row",
    )
    return pl.concat([answered.select("response_id", "length"), verdicts], how="horizontal")


def judged(rollouts: pl.DataFrame, prompts: pl.DataFrame, judges: Judges) -> pl.DataFrame:
    """The rollouts in their order, with acc, verdict and extracted."""
    found = judge_all(rollouts.lazy(), prompts.lazy(), judges).drop("length")
    return rollouts.join(found, on="response_id", maintain_order="left")


def task_is(task: str) -> pl.Expr:
    """A column `task` that says so in every row."""
    return pl.lit(task).alias("task")


def _answered(rows: pl.DataFrame) -> Iterator[Answered]:
    columns = rows.select("task", "text", "answer", pl.col("finish_reason") == "length")
    return (Answered(*row) for row in columns.iter_rows())
