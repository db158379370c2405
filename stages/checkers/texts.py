"""Checkers of texts: exact, F1, multiple choice, labels, translation and form."""

import json
import re
import string
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from stages.checkers import Checker, Verdict, graded, unscorable
from stages.checkers.answers import bare, final_answer, nfkc

if TYPE_CHECKING:
    from sacrebleu import BLEU

# Chinese and Japanese put no spaces between words, so each character counts as one
CJK = r"\u3005-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
TOKEN = re.compile(rf"[{CJK}]|[^\s{CJK}]+")
ARTICLES = {"a", "an", "the"}

MARKUP = string.whitespace + "*_`~\"'“”‘’«»「」『』"
LATEX = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\{([^{}]*)\}")
# a letter, and what ends it: nothing, a bracket, a full stop, or a dash before the option's text
OPTION = re.compile(
    r"[(\[]?([A-Za-z])(?:$|[)\]][.:、。]?|[.:、。](?=\s|[^\x00-\x7f]|$)|\s+[-–—](?=\s))"
)
BRACKETED = re.compile(r"(?<![\w(\[])[(\[]?([A-Z])[)\]]")  # not the (A) of P(A)
LISTED = re.compile(r"[A-Z\s,;、/&+()\[\].]+")
Script = Literal[
    "latin", "cyrillic", "greek", "arabic", "hebrew", "thai", "hangul", "han", "japanese", "cjk"
]
SCRIPTS = {  # which words the Unicode name of a letter has; elsewhere the script's own name
    "han": "CJK|IDEOGRAPHIC",
    "japanese": "CJK|IDEOGRAPHIC|HIRAGANA|KATAKANA",
    "cjk": "CJK|IDEOGRAPHIC|HIRAGANA|KATAKANA|HANGUL",
}
LETTERS_IN_SCRIPT = 0.9  # the rest may be names and formulas


class Compared(Checker):
    """An answer that is compared with a gold; an unusable gold makes the response unscorable."""

    def check(self, text: str, gold: str) -> Verdict:
        if problem := self.gold_problem(gold):
            return unscorable(problem)
        if (answer := self._answer(text)) is None:
            return Verdict(0.0, "no_answer", None)
        return graded(self._acc(answer, gold), answer)

    @abstractmethod
    def gold_problem(self, gold: str) -> str | None:
        """Why no response can ever be right by this gold; None if one can."""

    @abstractmethod
    def _acc(self, answer: str, gold: str) -> float:
        """From 0, wrong, to 1, right."""

    def _answer(self, text: str) -> str | None:
        return final_answer(text)


class Exact(Compared):
    """The final answer is the gold, letter by letter, whatever either is wrapped in."""

    def gold_problem(self, gold: str) -> str | None:
        return None if bare(gold) else "the gold is empty"

    def _acc(self, answer: str, gold: str) -> float:
        # an answer line loses the stars and underscores in front, a box does not: of *args, args
        return float(answer in (bare(gold), final_answer(f"Answer: {' '.join(gold.split())}")))


class F1(Compared):
    """SQuAD's F1 of the final answer's words; the best over golds, if they are a JSON list."""

    threshold: float | None = Field(None, gt=0, le=1)  # acc is then 1 from this F1 on, else 0

    def gold_problem(self, gold: str) -> str | None:
        if any(map(tokens, golds(gold))):
            return None
        return f"the gold {gold!r} has no word, articles apart, or is a list not of strings"

    def _acc(self, answer: str, gold: str) -> float:
        return _passed(max(f1(answer, one) for one in golds(gold)), self.threshold)


class Choice(Compared):
    """The final answer's one letter: `B`, `(B)`, `B.` or `B) its text`, in either case.

    More than one candidate, as in `A or B`, is wrong. By a gold of several letters (`AC`, `A, C`)
    the answer has to list just these, in any order.
    """

    choices: int = Field(26, ge=2, le=26)  # the letters from A on that stand for an option

    def gold_problem(self, gold: str) -> str | None:
        if self._expected(gold):
            return None
        return f"the gold {gold!r} names no option from A to {max(self._options)}"

    def _acc(self, answer: str, gold: str) -> float:
        expected = self._expected(gold)
        if len(expected) == 1:
            return float(self._one(answer) == expected)
        return float(set("".join(_listed(unmarked(answer).upper()))) == expected)

    @property
    def _options(self) -> set[str]:
        return set(string.ascii_uppercase[: self.choices])

    def _expected(self, gold: str) -> set[str]:
        """The letters of a gold. `AC` is two, but `CAB` is a word: of another task, very likely."""
        if one := self._one(gold):
            return one
        runs = _listed(unmarked(gold).upper())
        letters = set("".join(runs))
        in_order = len(runs) != 1 or runs[0] == "".join(sorted(letters))
        return letters if in_order and letters <= self._options else set()

    def _one(self, answer: str) -> set[str]:
        """The only option that is named, or nothing."""
        answer = unmarked(answer)
        if (match := OPTION.match(answer)) is None:
            return set()
        rest = answer[match.end() :]
        if match[1].islower():  # so are the other candidates
            rest = rest.upper()
        named = self._options.intersection(BRACKETED.findall(rest))
        # where other letters are all that follows, they are candidates, not the option's text
        named |= self._options.intersection(_listed(re.sub(r"(?i)\bor\b|或", ",", rest)))
        letter = {match[1].upper()}
        return letter if letter <= self._options and named <= letter else set()


class Classification(Compared):
    """The final answer is the gold label or an alias of it, whatever quotes are around it."""

    labels: tuple[str, ...] | None = None  # all that a gold may be; none: anything
    aliases: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # a label's other spellings
    case: bool = False  # whether upper and lower case differ

    @model_validator(mode="after")
    def _one_label_per_spelling(self) -> "Classification":
        if unknown := [label for label in self.aliases if label not in (self.labels or [label])]:
            raise ValueError(f"aliases of {unknown[0]!r}, which is not one of labels")
        seen: dict[str, str] = {}
        for spelling, label in self._spellings():
            key = self._key(spelling)
            if not key:
                raise ValueError(f"{spelling!r} has nothing that could be compared")
            if seen.setdefault(key, label) != label:
                raise ValueError(f"{spelling!r} is a spelling of {seen[key]!r} and of {label!r}")
        return self

    def gold_problem(self, gold: str) -> str | None:
        label = self.label(gold)
        if not label:
            return "the gold is empty"
        if self.labels is not None and label not in self._keys.values():
            return f"the gold {gold!r} is not one of labels"
        return None

    def _acc(self, answer: str, gold: str) -> float:
        return float(self.label(answer) == self.label(gold))

    def label(self, text: str) -> str:
        """The label that an answer stands for, or the answer itself, in a form to compare."""
        key = self._key(text)
        return self._keys.get(key, key)

    @cached_property
    def _keys(self) -> dict[str, str]:
        return {self._key(spelling): self._key(label) for spelling, label in self._spellings()}

    def _spellings(self) -> list[tuple[str, str]]:
        own = [(label, label) for label in dict.fromkeys([*(self.labels or ()), *self.aliases])]
        return own + [(other, label) for label, others in self.aliases.items() for other in others]

    def _key(self, text: str) -> str:
        key = " ".join(unmarked(text).rstrip(MARKUP + ".。").split())
        return key if self.case else key.casefold()


class Translation(Compared):
    """sacrebleu's sentence score of what follows the last `label`, or of the whole response.

    Against several references, if the gold is a JSON list.
    """

    metric: Literal["bleu", "chrf", "mean"] = "chrf"
    tokenize: Literal["13a", "zh", "char", "intl", "none"] = "13a"  # of BLEU; chrF has no words
    label: str = Field("Translation:", min_length=1)
    threshold: float | None = Field(None, gt=0, le=1)  # acc is then 1 from this score on, else 0

    def gold_problem(self, gold: str) -> str | None:
        if any(reference.strip() for reference in golds(gold)):
            return None
        return "the gold has no reference: it is empty, or a list not of strings"

    def _answer(self, text: str) -> str | None:
        before, _, after = text.rpartition(self.label)
        after = after.strip()
        if before.endswith("**"):  # a bold label, or all of the line is bold
            after = after[2:] if after.startswith("**") else after.removesuffix("**")
        return after.strip() or None

    def _acc(self, answer: str, gold: str) -> float:
        references = [reference for reference in golds(gold) if reference.strip()]
        names = ("bleu", "chrf") if self.metric == "mean" else (self.metric,)
        scores = [self._score(name, answer, references) for name in names]
        return _passed(sum(scores) / len(scores), self.threshold)

    def _score(self, name: str, answer: str, references: list[str]) -> float:
        import sacrebleu  # half a second, for this task alone

        if name == "chrf":
            return sacrebleu.sentence_chrf(answer, references).score / 100
        bleu = sacrebleu.BLEU(tokenize=self.tokenize, effective_order=True)
        score = bleu.sentence_score(answer, references).score
        forget_texts(bleu)
        # its exp(log …) gives 100.00000000000004 for the reference itself
        return 1.0 if abs(score - 100) < 1e-9 else score / 100


def forget_texts(bleu: "BLEU") -> None:
    """Empty its tokenizer's cache: the last 65,536 texts, of any length, fit no worker's memory."""
    for tokenizer in (bleu.tokenizer, getattr(bleu.tokenizer, "_post_tokenizer", None)):
        if hasattr(call := type(tokenizer).__call__, "cache_clear"):
            call.cache_clear()


class Format(Checker):
    """Whether the whole response has the form that is asked; `extracted` is the first thing amiss.

    `re` knows no time limit, and a pattern such as (a+)+b may take for ever: whoever checks with a
    pattern does so in a worker that can be killed.
    """

    pattern: str | None = Field(None, min_length=1)  # matches the response from end to end
    tags: tuple[str, ...] = ()  # each opened and closed once, one after the other
    min_chars: int = Field(0, ge=0)
    max_chars: int | None = Field(None, ge=1)
    language: Script | None = None  # of 9 in 10 letters; where there is none, nothing is amiss

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _asks_for_something(self) -> "Format":
        if not any(self.model_dump().values()):
            raise ValueError("asks nothing: set pattern, tags, min_chars, max_chars or language")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars {self.max_chars} is less than min_chars {self.min_chars}")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags has one twice: {', '.join(self.tags)}")
        return self

    def check(self, text: str, gold: str) -> Verdict:
        amiss = next(self._amiss(text), None)
        return graded(float(amiss is None), amiss)

    def gold_problem(self, gold: str) -> str | None:
        """None: a form has no gold."""
        return None

    def _amiss(self, text: str) -> Iterator[str]:
        if len(text) < self.min_chars:
            yield f"min_chars: {len(text)} of {self.min_chars}"
        if self.max_chars is not None and len(text) > self.max_chars:
            yield f"max_chars: {len(text)} of {self.max_chars}"
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        yield from (f"tags: {text.count(mark)} × {mark}" for mark in marks if text.count(mark) != 1)
        if marks != sorted(marks, key=text.find):
            yield f"tags: not in the order {' '.join(marks)}"
        if self.language and (share := _share(text, self.language)) < LETTERS_IN_SCRIPT:
            yield f"language: {share:.0%} of the letters are {self.language}"
        if self.pattern is not None and not re.fullmatch(self.pattern, text):
            yield "pattern: no match"


def golds(gold: str) -> list[str]:
    """The strings of a JSON list, or else the one text; nothing, if the list is of other things."""
    if not gold.lstrip().startswith("["):
        return [gold]
    try:
        several = json.loads(gold)
    except (ValueError, RecursionError):  # a text that only begins like a list
        return [gold]
    return several if all(isinstance(one, str) for one in several) else []


def tokens(text: str) -> list[str]:
    """SQuAD's words: lower case, without punctuation and English articles."""
    kept = (
        char
        for char in nfkc(text).lower()
        if char not in string.punctuation and unicodedata.category(char)[0] != "P"
    )
    return [token for token in TOKEN.findall("".join(kept)) if token not in ARTICLES]


def f1(answer: str, gold: str) -> float:
    """2 · |common words| / (|words of the answer| + |words of the gold|)"""
    ours, theirs = Counter(tokens(answer)), Counter(tokens(gold))
    return 2 * (ours & theirs).total() / max(ours.total() + theirs.total(), 1)


def unmarked(answer: str) -> str:
    """The answer without quotes, Markdown and the LaTeX of text."""
    return LATEX.sub(r"\1", nfkc(bare(answer))).replace("**", "").strip(MARKUP)


def _listed(text: str) -> list[str]:
    """The letters of `AC` as one run, or those of `A, C` and `(A) and (C)` one by one."""
    listed = re.sub(r"(?i)\band\b|和", ",", text)
    runs = re.findall(r"[A-Z]+", listed) if LISTED.fullmatch(listed) else []
    return runs if len(runs) == 1 or all(len(run) == 1 for run in runs) else []


def _passed(value: float, threshold: float | None) -> float:
    return value if threshold is None else float(value >= threshold)


def _share(text: str, script: Script) -> float:
    """The share of the letters that are of `script`; 1 where there is none."""
    names = re.compile(SCRIPTS.get(script, script.upper()))
    ours = [bool(names.search(unicodedata.name(char, ""))) for char in text if char.isalpha()]
    return sum(ours) / len(ours) if ours else 1.0
