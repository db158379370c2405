"""Prompts by what they ask: repeats, contradictions, and the split into train and held-out."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from stages.verify import Judges

Messages = list[dict[str, str]]


class Unusable(ValueError):
    """Why no prompt can be made of a row; without a column, of the row as a whole."""

    def __init__(self, reason: str, column: str | None = None) -> None:
        super().__init__(reason)
        self.column = column


class Place(NamedTuple):
    """Where a row stands, and the id that it gives itself."""

    file: str
    row: int
    prompt_id: str | None


class Prompt(NamedTuple):
    """A row of the `prompts` table."""

    prompt_id: str
    prompt: Messages
    answer: str
    task: str
    meta: str | None


class Found(NamedTuple):
    """A prompt, where it stands, and the hash of what it asks."""

    content: bytes
    place: Place
    prompt: Prompt


Refused = tuple[Place, Unusable]


def content(messages: Messages) -> bytes:
    """A hash of what is asked, the same for any white space."""
    said = [[message["role"], " ".join(message["content"].split())] for message in messages]
    return blake2b(json.dumps(said).encode(), digest_size=16).digest()


def name(content: bytes, copy: int = 0) -> str:
    """An id for a prompt that has none of its own; `copy` counts from 0 those of equal content."""
    return content[:8].hex() + (f"-{copy + 1}" if copy else "")


def held_out(content: bytes, *, fraction: float, seed: int) -> bool:
    """Whether it is held out: decided by itself alone, whatever else its file holds."""
    drawn = blake2b(f"{seed}/".encode() + content, digest_size=8).digest()
    return int.from_bytes(drawn) < fraction * 2**64


@dataclass
class Question:
    """Every row that asks one thing: `kept` has the first of them, or all."""

    content: bytes
    kept: list[Prompt]
    places: list[Place]
    contradiction: str | None = None  # an answer that is not the first one's

    def found(self) -> Iterator[Found]:
        """The kept prompts, each with its place."""
        pairs = zip(self.places, self.kept, strict=False)
        return (Found(self.content, place, prompt) for place, prompt in pairs)


class Questions:
    """The rows of a source, those that ask the same thing together.

    Args:
        dedup: keep the first row of each only.
    """

    def __init__(self, judges: Judges, *, dedup: bool) -> None:
        self.judges, self.dedup = judges, dedup
        self._by_content: dict[bytes, Question] = {}

    def add(self, content: bytes, prompt: Prompt, place: Place) -> None:
        """One more row."""
        question = self._by_content.get(content)
        if question is None:
            self._by_content[content] = Question(content, [prompt], [place])
            return
        question.places.append(place)
        first = question.kept[0]
        if not self.judges.same_answer(first.task, prompt.answer, first.answer):
            question.contradiction = prompt.answer
        if not self.dedup:
            copy = len(question.kept)
            mine = prompt.prompt_id if place.prompt_id else name(content, copy)
            question.kept.append(prompt._replace(prompt_id=mine))

    @property
    def rows(self) -> int:
        """How many there are."""
        return sum(len(question.places) for question in self._by_content.values())

    def __iter__(self) -> Iterator[Question]:
        """Those without a contradiction, in the order of their first rows."""
        return (q for q in self._by_content.values() if q.contradiction is None)

    def contradictions(self, column: str) -> Iterator[Refused]:
        """The rows whose prompt has another answer elsewhere: nobody can say which is right."""
        for question in self._by_content.values():
            if question.contradiction is not None:
                one, other = question.kept[0].answer, question.contradiction
                why = Unusable(f"the same prompt has the answers {one!r} and {other!r}", column)
                yield from ((place, why) for place in question.places)


def unique(found: Iterable[Found], column: str | None) -> tuple[list[Prompt], list[Refused]]:
    """The prompts whose id no earlier one has, and the others, refused."""
    first: dict[str, Place] = {}
    prompts: list[Prompt] = []
    refused: list[Refused] = []
    for _, place, prompt in found:
        known = first.setdefault(prompt.prompt_id, place)
        if known is place:
            prompts.append(prompt)
        else:
            where = f"first in {known.file}, row {known.row}"
            why = Unusable(f"'{prompt.prompt_id}' occurs more than once, {where}", column)
            refused.append((place, why))
    return prompts, refused
