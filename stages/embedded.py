"""The tasks that the project makes itself: endless questions by seed, split by their own hashes.

Nothing here decides what a sampled response is worth: that is scoring.
"""

import json
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal, Protocol

import polars as pl

from stages import arithmetic, sentiment, tables, translation
from stages.errors import InputError

Name = Literal["arithmetic", "translation", "sentiment"]
Split = Literal["train", "heldout"]

HELDOUT_SHARE = 10  # one question in ten is held out
PATIENCE = 10_000  # draws in a row without a new question before a split counts as used up


class Task(Protocol):
    """What a task's module has: questions of several levels, their answers, and ways to respond."""

    PREFIX: str  # of the ids of its prompts
    CHECKER: str  # the task, as scoring knows it, that judges its responses
    LEVELS: tuple[int, ...]  # of difficulty, the easiest first
    WORDS: tuple[str, ...]  # one token each in the vocabulary of the policy made from scratch
    PROMPT_TOKENS: int  # of the longest question in that vocabulary

    def draw(self, level: int, rng: random.Random, /) -> str:
        """A question. Raises `InputError` if there are none of this level."""

    def level_of(self, question: str, /) -> int:
        """Its level."""

    def answer(self, question: str, /) -> str:
        """The gold, as the checker takes it."""

    def worked_example(self, question: str, /) -> str:
        """A good response."""

    def guess(self, question: str, /) -> str:
        """A response without the work."""

    def rambling_example(self, question: str, repeats: int, /) -> str:
        """A good response that says something `repeats` times more."""


TASKS: dict[Name, Task] = {
    "arithmetic": arithmetic,
    "translation": translation,
    "sentiment": sentiment,
}


def split_of(question: str) -> Split:
    """The split a question belongs to, by its own hash: whoever draws it, whenever, agrees."""
    digest = blake2b(question.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_SHARE == 0 else "train"


def stream(task: Task, seed: int, split: Split, levels: Sequence[int] = ()) -> Iterator[str]:
    """Endless questions of one split, levels drawn evenly; the short ones soon come again.

    Args:
        levels: which; none: all of the task's.
    """
    rng = random.Random(f"{split}-{seed}")
    while True:
        question = task.draw(rng.choice(levels or task.LEVELS), rng)
        if split_of(question) == split:
            yield question


def prompts(
    task: Task, count: int, seed: int, split: Split, levels: Sequence[int] = ()
) -> pl.DataFrame:
    """`count` distinct questions of one split as a 'prompts' table.

    Raises `InputError` when the split holds fewer questions of these levels than asked for.
    """
    drawn: dict[str, None] = {}
    fruitless = 0  # draws in a row that gave nothing new
    for question in stream(task, seed, split, levels):
        if len(drawn) == count:
            break
        fruitless = fruitless + 1 if question in drawn else 0
        if fruitless == PATIENCE:
            raise InputError(
                f"found only {len(drawn)} of {count} distinct {split} questions of levels "
                f"{list(levels or task.LEVELS)}; ask for fewer prompts or add levels"
            )
        drawn[question] = None
    rows = [_row(task, f"{task.PREFIX}-{split}-{i:05d}", each) for i, each in enumerate(drawn)]
    return pl.DataFrame(rows, schema=tables.polars_schema("prompts"))


def _row(task: Task, prompt_id: str, question: str) -> dict[str, object]:
    return {
        "prompt_id": prompt_id,
        "prompt": [{"role": "user", "content": question}],
        "answer": task.answer(question),
        "task": task.CHECKER,
        "meta": json.dumps({"level": task.level_of(question)}),
    }
