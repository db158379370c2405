"""Generated reviews that are good, bad or neither, by rules of negation, degree and contrast.

A review such as `the food was not bad but the room was very small` has one to three clauses (its
difficulty level). Each is worth something:

- an adjective 2, a strong one 3, with the sign of its kind, and `okay` nothing;
- `very` makes it 3, `slightly` makes it 1;
- `not` turns the sign and leaves 1 of any degree: `not bad` is +1, `not very good` is -1;
- what stands after `but` counts twice: that is what the writer wants to be remembered.

The label is the sign of the sum.
"""

import random
from typing import NamedTuple

from stages.errors import InputError

PREFIX, CHECKER = "sent", "classification"
LEVELS: tuple[int, ...] = (1, 2, 3)  # clauses
LABELS = ("negative", "neutral", "positive")
QUESTION = "Positive, negative or neutral?"

ASPECTS = ("food", "service", "room", "film", "story", "music", "place", "show")
ADJECTIVES = {
    **dict.fromkeys(("good", "nice", "clean", "fresh"), 2),
    **dict.fromkeys(("great", "lovely"), 3),
    **dict.fromkeys(("bad", "slow", "dull", "dirty"), -2),
    **dict.fromkeys(("awful", "terrible"), -3),
    **dict.fromkeys(("okay", "average"), 0),
}
DEGREES = {"very": 3, "slightly": 1}  # what an adjective of 2 is worth then
NEGATED = 1  # what is left of an adjective that is turned round
STRESS = 2  # the weight of what follows `but`
JOINTS = ("and", "but")
WORDS = (
    *(QUESTION, "the", *ASPECTS, "was", "not", *DEGREES, *ADJECTIVES, *JOINTS),
    *(f"{value:+d}" for value in range(-3 * STRESS, 3 * STRESS + 1)),
    *("Answer:", *LABELS),
)
PROMPT_TOKENS = 1 + 7 * max(LEVELS)  # `and the room was not very clean`


class Clause(NamedTuple):
    """One opinion; without an aspect, it is of the same as the clause before."""

    joint: str | None  # to the clause before
    aspect: str | None
    negated: bool
    degree: str | None
    adjective: str

    @property
    def opinion(self) -> str:
        """`not very good`"""
        words = ("not" if self.negated else None, self.degree, self.adjective)
        return " ".join(filter(None, words))

    @property
    def text(self) -> str:
        """`but the food was not very good`"""
        subject = f"the {self.aspect} was" if self.aspect else None
        return " ".join(filter(None, (self.joint, subject, self.opinion)))

    @property
    def value(self) -> int:
        """What it is worth in the review."""
        worth = ADJECTIVES[self.adjective]
        sign, strength = (worth > 0) - (worth < 0), abs(worth)
        if self.degree:
            strength = DEGREES[self.degree]
        if self.negated:
            sign, strength = -sign, NEGATED
        return sign * strength * (STRESS if self.joint == "but" else 1)


def draw(level: int, rng: random.Random) -> str:
    """The question with a review of `level` clauses, every label as often as the others.

    Raises `InputError` for a level that there is not.
    """
    if level not in LEVELS:
        raise InputError(f"levels: a review has {LEVELS[0]} to {LEVELS[-1]} clauses, not {level}")
    wanted = rng.choice(LABELS)
    while True:
        question = f"{QUESTION} {_review(level, rng)}"
        if answer(question) == wanted:
            return question


def _review(level: int, rng: random.Random) -> str:
    """`level` clauses, of which no two share an adjective or an aspect."""
    adjectives = rng.sample(list(ADJECTIVES), level)
    aspects = rng.sample(ASPECTS, level)
    pairs = enumerate(zip(adjectives, aspects, strict=True))
    return " ".join(
        _clause(rng, adjective, aspect, first=i == 0).text for i, (adjective, aspect) in pairs
    )


def _clause(rng: random.Random, adjective: str, aspect: str, *, first: bool) -> Clause:
    worth = ADJECTIVES[adjective]
    negated = worth != 0 and rng.random() < 0.5  # nobody is not okay
    gradable = abs(worth) == 2  # nothing is slightly awful
    degree = rng.choice(list(DEGREES)) if gradable and rng.random() < 0.4 else None
    return Clause(
        joint=None if first else rng.choice(JOINTS),
        aspect=aspect if rng.random() < 0.6 else None,
        negated=negated,
        degree="very" if negated and degree else degree,  # nothing is not slightly bad
        adjective=adjective,
    )


def parse(question: str) -> list[Clause]:
    """The clauses of a review, with or without the question before it.

    Raises `ValueError` for a text of another form.
    """
    words = question.removeprefix(QUESTION).split()
    clauses: list[Clause] = []
    while words:
        joint = words.pop(0) if clauses and words[0] in JOINTS else None
        aspect = None
        if len(words) > 3 and (words[0], words[2]) == ("the", "was"):
            _, aspect, _ = words[:3]
            words = words[3:]
        negated = words[:1] == ["not"]
        words = words[negated:]
        degree = words.pop(0) if words and words[0] in DEGREES else None
        if not words or words[0] not in ADJECTIVES or bool(clauses) != bool(joint):
            raise ValueError(f"no review of this grammar: {question!r}, at {' '.join(words)!r}")
        clauses.append(Clause(joint, aspect, negated, degree, words.pop(0)))
    return clauses


def level_of(question: str) -> int:
    """How many clauses it has."""
    return len(parse(question))


def answer(question: str) -> str:
    """The label: the sign of the sum of what the clauses are worth."""
    return label(sum(clause.value for clause in parse(question)))


def label(value: int) -> str:
    """`positive` above 0, `negative` below, `neutral` at 0."""
    return LABELS[(value > 0) - (value < 0) + 1]


def worked_example(question: str) -> str:
    """A line per clause with what it is worth, and the answer line."""
    return rambling_example(question, repeats=0)


def guess(question: str) -> str:
    """An answer by the good and the bad words alone, blind to `not`, `but` and degrees."""
    worths = [ADJECTIVES[clause.adjective] for clause in parse(question)]
    return f"Answer: {label(sum((worth > 0) - (worth < 0) for worth in worths))}"


def rambling_example(question: str, repeats: int) -> str:
    """A worked example that says its last line `repeats` times more before it answers."""
    lines = [_line(clause) for clause in parse(question)]
    return "\n".join([*lines, *lines[-1:] * repeats, f"Answer: {answer(question)}"])


def _line(clause: Clause) -> str:
    said = " ".join(filter(None, (clause.joint, clause.opinion)))
    return f"{said} {clause.value:+d}"
