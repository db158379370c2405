"""The rules of both languages hold in every sentence."""

import re
from itertools import islice

import pytest

from stages import embedded, translation

NOUNS = {sense.stem: sense for senses in translation.SENSES.values() for sense in senses}
PLURAL_VERB, SINGULAR_VERB = r"(?:en|uren)", r"(?:e|ur)"
STEMS = "|".join(translation.STEMS.values())


def sentences(count: int = 600) -> list[str]:
    return list(islice(embedded.stream(translation, 7, "train"), count))


def stem_and_ending(word: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.+?)([oa]i?)", word)
    assert match is not None, word
    return match[1], match[2]


def phrases(target: str) -> list[list[str]]:
    """The words of a translation by the noun that they belong to."""
    words = [word for word in target.split() if word not in translation.ADVERBS.values()]
    found: list[list[str]] = []
    for word in words:
        if re.fullmatch(f"(?:{STEMS})(?:{PLURAL_VERB}|{SINGULAR_VERB})", word) or word == "ne":
            break
        stem, _ = stem_and_ending(word)
        opens = stem in translation.ARTICLES.values()
        has_noun = any(stem_and_ending(each)[0] in NOUNS for each in found[-1]) if found else True
        if opens or (stem in NOUNS and has_noun):
            found.append([])
        found[-1].append(word)
    return found


@pytest.mark.parametrize(
    ("english", "target"),
    [
        ("the dog sleeps", "lo taro dorme"),
        ("dogs see cats", "taroi melai viden"),
        ("the small red dog sees an old cat", "lo taro ruso piko una mela veta vide"),
        ("does the woman not sing ?", "la sena ne kante su"),
        ("these men will wait today", "hui koi doroi espuren"),
        ("will a child carry the lamps ?", "una bima lai lirai portur su"),
        ("the cat hears the mouse", "la mela lo sofo ude"),
        ("the cat breaks the mouse", "la mela la klika rompe"),
        ("the man buys an old bat", "lo doro uno basto anto empe"),
        ("an old bat waits", "una murka veta espe"),
        ("the bat sees the bat", "la murka la murka vide"),
        ("light dogs see a light house", "taroi finoi una loma klara viden"),
    ],
)
def test_a_sentence_has_its_translation(english: str, target: str) -> None:
    assert translation.answer(english) == target


def test_article_noun_and_adjectives_agree_in_every_sentence() -> None:
    for english in sentences():
        for phrase in phrases(translation.answer(english)):
            endings = {stem_and_ending(word)[1] for word in phrase}
            assert len(endings) == 1, (english, phrase)
            (noun,) = [NOUNS[s] for s in (stem_and_ending(w)[0] for w in phrase) if s in NOUNS]
            assert endings <= {noun.gender, noun.gender + "i"}


def test_the_verb_agrees_with_its_subject_and_stands_behind_all_nouns() -> None:
    for english in sentences():
        target = translation.answer(english)
        plural = phrases(target)[0][0].endswith("i")
        ending = PLURAL_VERB if plural else SINGULAR_VERB
        assert re.search(f" (?:ne )?(?:{STEMS}){ending}(?: su)?$", target), (english, target)


def test_the_english_verb_agrees_too() -> None:
    for english in sentences():
        said = translation.parse(english)
        words = set(english.split())
        if words & {"do", "does"}:
            assert ("do" in words) == said.subject.plural
        elif "will" not in words:
            assert (said.verb in words) == said.subject.plural
        assert ("su" in translation.answer(english).split()) == english.endswith("?")
        assert ("ne" in translation.answer(english).split()) == ("not" in words)


def test_one_sentence_has_one_translation_and_says_the_same_again() -> None:
    for english in sentences():
        assert translation.english(translation.parse(english)) == english
        assert translation.answer(english) == translation.answer(english)


def test_sentences_have_the_words_of_their_level() -> None:
    levels = {len(english.replace("?", "").split()) for english in sentences()}
    assert levels == set(range(3, 11))


def test_no_word_of_the_other_language_means_two_things_but_by_design() -> None:
    assert len(translation.WORDS) == len(set(translation.WORDS))


def test_a_gloss_is_right_only_where_there_is_nothing_to_know() -> None:
    assert translation.guess("the dog sleeps") == translation.answer("the dog sleeps")
    english = "does the woman not see the red lamps ?"
    assert translation.guess(english) == "lo sena ne vide lo ruso lira su"
    wrong = [text for text in sentences() if translation.guess(text) != translation.answer(text)]
    assert len(wrong) > 0.9 * 600


@pytest.mark.parametrize(
    "text",
    [
        *("the dog", "the dog see", "a dogs sleep", "a old dog sleeps", "the dog flies", "", "?"),
        *("the dog sleeps ?", "does the dog sleeps ?", "the dog sleeps the cat", "this dogs sleep"),
    ],
)
def test_a_text_of_another_grammar_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no sentence of this grammar"):
        translation.answer(text)
