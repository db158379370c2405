"""Generated sentences in plain English, and their translations into a small invented language.

A sentence such as `the small dogs do not see a lamp` has 3 to 10 words (its difficulty level). The
other language differs from English in ways that a word-by-word gloss gets wrong:

- the adverb stands first and the verb last: `bai lo taro lirai vide`, the dog sees lamps often;
- adjectives stand after their noun, the nearest first;
- a noun has a gender, -o or -a, and a plural, -i; its article and adjectives end as it does;
- the verb ends in -e, in the plural of its subject in -en; in the future in -ur, -uren;
- `ne` before the verb negates it, and `su` after it makes a question;
- some words have two meanings, and what stands beside them decides: see `SENSES`, `PAIRS`.
"""

import random
from typing import Literal, NamedTuple

from stages.errors import InputError

PREFIX, CHECKER = "trans", "translation"
LEVELS = tuple(range(3, 11))  # words, the question mark apart
PROMPT_TOKENS = max(LEVELS) + 1

Kind = Literal["living", "thing"]


class Noun(NamedTuple):
    """A meaning of an English noun."""

    stem: str
    gender: Literal["o", "a"]
    kind: Kind


# an ambiguous noun is a thing where a thing is bought, broken or carried, else a living being
SENSES: dict[str, tuple[Noun, ...]] = {
    "dog": (Noun("tar", "o", "living"),),
    "cat": (Noun("mel", "a", "living"),),
    "horse": (Noun("gov", "o", "living"),),
    "man": (Noun("dor", "o", "living"),),
    "woman": (Noun("sen", "a", "living"),),
    "child": (Noun("bim", "a", "living"),),
    "bat": (Noun("murk", "a", "living"), Noun("bast", "o", "thing")),
    "mouse": (Noun("sof", "o", "living"), Noun("klik", "a", "thing")),
    "crane": (Noun("gru", "a", "living"), Noun("hak", "o", "thing")),
    "house": (Noun("lom", "a", "thing"),),
    "lamp": (Noun("lir", "a", "thing"),),
    "book": (Noun("ket", "o", "thing"),),
    "boat": (Noun("nav", "o", "thing"),),
}
IRREGULAR = {"man": "men", "woman": "women", "child": "children", "mouse": "mice"}
PLURALS = {noun: IRREGULAR.get(noun, f"{noun}s") for noun in SENSES}
SINGULARS = {plural: noun for noun, plural in PLURALS.items()}

ADJECTIVES = {"small": "pik", "big": "gran", "red": "rus", "white": "bel"}
# of a living being, of a thing
PAIRS: dict[str, dict[Kind, str]] = {
    "old": {"living": "vet", "thing": "ant"},
    "light": {"living": "fin", "thing": "klar"},
}
ARTICLES = {"the": "l", "a": "un", "this": "k"}  # no `a` in the plural
ARTICLE_FORMS = {article: article for article in ARTICLES} | {"an": "a", "these": "this"}
VERBS: dict[str, tuple[str, Kind | None]] = {  # with the kind of object, if only one will do
    "see": ("vid", None),
    "find": ("trov", None),
    "feed": ("nut", "living"),
    "hear": ("ud", "living"),
    "buy": ("emp", "thing"),
    "break": ("romp", "thing"),
    "carry": ("port", "thing"),
}
INTRANSITIVE = {"sleep": "dorm", "sing": "kant", "wait": "esp"}
ADVERBS = {"today": "hui", "here": "tis", "often": "bai"}
STEMS = {verb: stem for verb, (stem, _) in VERBS.items()} | INTRANSITIVE
THIRD = {verb: "carries" if verb == "carry" else f"{verb}s" for verb in STEMS}
BASES = {third: verb for verb, third in THIRD.items()}
NOT, ASKS = "ne", "su"
ENDINGS = ("o", "a", "oi", "ai")
WORDS = (
    *(*SENSES, *SINGULARS, *ADJECTIVES, *PAIRS, *ARTICLE_FORMS, *STEMS, *BASES, *ADVERBS),
    *("do", "does", "will", "not", "?"),
    *(
        sense.stem + sense.gender + number
        for senses in SENSES.values()
        for sense in senses
        for number in ("", "i")
    ),
    *(
        stem + ending
        for stems in (ADJECTIVES.values(), *(pair.values() for pair in PAIRS.values()), "lk")
        for stem in stems
        for ending in ENDINGS
    ),
    *("uno", "una"),
    *(stem + ending for stem in STEMS.values() for ending in ("e", "en", "ur", "uren")),
    *(*ADVERBS.values(), NOT, ASKS),
)


class Phrase(NamedTuple):
    """A noun with what belongs to it."""

    article: str | None  # the, a or this
    adjectives: tuple[str, ...]
    noun: str
    plural: bool


class Sentence(NamedTuple):
    """What is said, in neither language's order."""

    subject: Phrase
    verb: str
    object: Phrase | None
    adverb: str | None
    negated: bool
    future: bool
    question: bool


def draw(level: int, rng: random.Random) -> str:
    """An English sentence of `level` words. Raises `InputError` for a level that there is not."""
    if level not in LEVELS:
        raise InputError(f"levels: a sentence has {LEVELS[0]} to {LEVELS[-1]} words, not {level}")
    while True:
        text = english(_sentence(rng))
        if level_of(text) == level:
            return text


def _sentence(rng: random.Random) -> Sentence:
    living = [noun for noun, senses in SENSES.items() if senses[0].kind == "living"]
    verb = rng.choice([*VERBS, *INTRANSITIVE])
    wanted = VERBS[verb][1] if verb in VERBS else None
    objects = [
        noun
        for noun, senses in SENSES.items()
        if wanted is None or any(sense.kind == wanted for sense in senses)
    ]
    return Sentence(
        subject=_phrase(rng, living),
        verb=verb,
        object=_phrase(rng, objects) if verb in VERBS else None,
        adverb=rng.choice(list(ADVERBS)) if rng.random() < 0.3 else None,
        negated=rng.random() < 0.25,
        future=rng.random() < 0.25,
        question=rng.random() < 0.25,
    )


def _phrase(rng: random.Random, nouns: list[str]) -> Phrase:
    plural = rng.random() < 0.5
    articles = ["the", "this", None if plural else "a"]
    count = rng.choice((0, 0, 1, 1, 2))
    return Phrase(
        article=rng.choice(articles),
        adjectives=tuple(rng.sample([*ADJECTIVES, *PAIRS], count)),
        noun=rng.choice(nouns),
        plural=plural,
    )


def english(sentence: Sentence) -> str:
    """`does the dog not see a cat today ?`"""
    subject, verb = sentence.subject, sentence.verb
    helper = "will" if sentence.future else "do" if subject.plural else "does"
    helped = sentence.future or sentence.negated or sentence.question
    if not helped and not subject.plural:
        verb = THIRD[verb]
    words = [
        helper if sentence.question else None,
        *_english(subject),
        helper if helped and not sentence.question else None,
        "not" if sentence.negated else None,
        verb,
        *(_english(sentence.object) if sentence.object else ()),
        sentence.adverb,
        "?" if sentence.question else None,
    ]
    return " ".join(filter(None, words))


def _english(phrase: Phrase) -> list[str]:
    rest = [*phrase.adjectives, PLURALS[phrase.noun] if phrase.plural else phrase.noun]
    if phrase.article is None:
        return rest
    before_vowel = phrase.article == "a" and rest[0][0] in "aeiou"
    these = phrase.article == "this" and phrase.plural
    return ["an" if before_vowel else "these" if these else phrase.article, *rest]


def parse(text: str) -> Sentence:
    """What an English sentence says. Raises `ValueError` for one of another grammar."""
    words = text.split()
    try:
        sentence = _parsed(words)
    except (IndexError, KeyError):
        raise ValueError(f"no sentence of this grammar: {text!r}") from None
    phrases = [phrase for phrase in (sentence.subject, sentence.object) if phrase]
    possible = (sentence.verb in VERBS) == (sentence.object is not None) and not any(
        phrase.plural and phrase.article == "a" for phrase in phrases
    )
    if not possible or english(sentence) != text:  # a form that does not agree
        raise ValueError(f"no sentence of this grammar: {text!r}")
    return sentence


def _parsed(words: list[str]) -> Sentence:
    """The sentence that these words would make, if its grammar is right; takes them away."""
    question = words[-1] == "?"
    words = words[:-1] if question else words
    helper = words.pop(0) if question else None
    subject = _parsed_phrase(words)
    if words[0] in ("do", "does", "will"):
        helper = words.pop(0)
    negated = words[0] == "not"
    words = words[negated:]
    verb = BASES.get(words[0], words[0])
    STEMS[verb]  # a KeyError, if it is none
    words = words[1:]
    adverb = words.pop() if words and words[-1] in ADVERBS else None
    found = _parsed_phrase(words) if words else None
    return Sentence(subject, verb, found, adverb, negated, helper == "will", question)


def _parsed_phrase(words: list[str]) -> Phrase:
    article = ARTICLE_FORMS[words.pop(0)] if words[0] in ARTICLE_FORMS else None
    adjectives = []
    while words[0] in ADJECTIVES or words[0] in PAIRS:
        adjectives.append(words.pop(0))
    noun = words.pop(0)
    plural = noun in SINGULARS
    singular = SINGULARS[noun] if plural else noun
    SENSES[singular]  # a KeyError, if it is none
    return Phrase(article, tuple(adjectives), singular, plural)


def answer(text: str) -> str:
    """The translation of an English sentence."""
    sentence = parse(text)
    wanted = VERBS[sentence.verb][1] if sentence.object else None
    ending = ("ur" if sentence.future else "e") + _plural_of_verb(sentence)
    words = [
        ADVERBS[sentence.adverb] if sentence.adverb else None,
        *_translated(sentence.subject, kind="living"),
        *(_translated(sentence.object, kind=wanted) if sentence.object else ()),
        NOT if sentence.negated else None,
        STEMS[sentence.verb] + ending,
        ASKS if sentence.question else None,
    ]
    return " ".join(filter(None, words))


def _plural_of_verb(sentence: Sentence) -> str:
    if not sentence.subject.plural:
        return ""
    return "en" if sentence.future else "n"


def _translated(phrase: Phrase, *, kind: Kind | None) -> list[str]:
    """The article, the noun in the meaning of that kind, and the adjectives, all with one ending.

    Args:
        kind: None: the noun's first meaning.
    """
    senses = SENSES[phrase.noun]
    sense = next((each for each in senses if each.kind == kind), senses[0])
    ending = sense.gender + ("i" if phrase.plural else "")
    article = [ARTICLES[phrase.article]] if phrase.article else []
    adjectives = [
        PAIRS[each][sense.kind] if each in PAIRS else ADJECTIVES[each]
        for each in reversed(phrase.adjectives)
    ]
    return [stem + ending for stem in (*article, sense.stem, *adjectives)]


def level_of(text: str) -> int:
    """How many words it has, the question mark apart."""
    return len(text.removesuffix("?").split())


def worked_example(text: str) -> str:
    """The translation."""
    return answer(text)


def guess(text: str) -> str:
    """A gloss: word by word in English order, each in its first meaning, nothing agreeing."""
    glosses = {
        **{word: f"{stem}o" for word, stem in ADJECTIVES.items()},
        **{word: f"{ARTICLES[article]}o" for word, article in ARTICLE_FORMS.items()},
        **{word: pair["living"] + "o" for word, pair in PAIRS.items()},
        **{
            word: senses[0].stem + senses[0].gender
            for noun, senses in SENSES.items()
            for word in (noun, PLURALS[noun])
        },
        **{word: STEMS[verb] + "e" for word, verb in BASES.items()},
        **{verb: stem + "e" for verb, stem in STEMS.items()},
        **ADVERBS,
        **{"not": NOT, "?": ASKS},
    }
    return " ".join(glosses[word] for word in text.split() if word in glosses)


def rambling_example(text: str, repeats: int) -> str:
    """A translation that says its last word `repeats` times more."""
    words = answer(text).split()
    return " ".join([*words, *words[-1:] * repeats])
