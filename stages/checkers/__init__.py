"""Checkers: (response text, gold answer) → verdict, one class of settings per task."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """`acc` is 1 (right), 0 (wrong), between (partly right) or None: nobody can say.

    `verdict` is right, partial, wrong, no_answer, truncated, timeout, memory, error or unscorable;
    `extracted` is what was judged, or why it could not be.
    """

    acc: float | None
    verdict: str
    extracted: str | None


def graded(acc: float, extracted: str | None) -> Verdict:
    """The verdict of a checker that gives credit in [0, 1]."""
    word = "right" if acc >= 1 else "partial" if acc > 0 else "wrong"
    return Verdict(acc, word, extracted)


def unscorable(why: str) -> Verdict:
    """Nobody can say: the reward is null, and the row counts in no baseline."""
    return Verdict(None, "unscorable", why)
