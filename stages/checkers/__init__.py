"""Checkers: (response text, gold answer) → verdict, one class of settings per task."""

from abc import abstractmethod
from typing import NamedTuple

from stages.settings import Settings


class Verdict(NamedTuple):
    """`acc` is 1 (right), 0 (wrong), between (partly right) or None: nobody can say.

    `verdict` is right, partial, wrong, no_answer, truncated, timeout, memory, error or unscorable;
    `extracted` is what was judged, or why it could not be.
    """

    acc: float | None
    verdict: str
    extracted: str | None


class Checker(Settings):
    """The settings of a task, and what judges by them."""

    def prepare(self) -> None:
        """What a worker process does once, before its first check."""

    @abstractmethod
    def check(self, text: str, gold: str) -> Verdict:
        """Judge a response by the prompt's answer."""

    @abstractmethod
    def gold_problem(self, gold: str) -> str | None:
        """Why no response could be right by this gold; None if one could."""


def graded(acc: float, extracted: str | None) -> Verdict:
    """The verdict of a checker that gives credit in [0, 1]."""
    word = "right" if acc >= 1 else "partial" if acc > 0 else "wrong"
    return Verdict(acc, word, extracted)


def unscorable(why: str) -> Verdict:
    """Nobody can say: the reward is null, and the row counts in no baseline."""
    return Verdict(None, "unscorable", why)
