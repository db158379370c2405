"""The label of a review follows the rules: negation, degree, contrast."""

from collections import Counter
from itertools import islice

import pytest

from stages import embedded, sentiment


def reviews(count: int = 600) -> list[str]:
    return list(islice(embedded.stream(sentiment, 7, "train"), count))


@pytest.mark.parametrize(
    ("review", "label"),
    [
        ("good", "positive"),
        ("the food was slow", "negative"),
        ("okay", "neutral"),
        ("not bad", "positive"),
        ("not very bad", "positive"),
        ("not great", "negative"),
        ("not very good", "negative"),
        ("good but slow", "negative"),
        ("slow but good", "positive"),
        ("good and slow", "neutral"),
        ("very good and slow", "positive"),
        ("good and very slow", "negative"),
        ("good but slightly slow", "neutral"),
        ("the food was awful and the service was good", "negative"),
        ("the food was awful but the service was good", "positive"),
        ("the food was awful but the service was not bad", "negative"),
        ("not dirty but the room was average and lovely", "positive"),
        ("good but slow but nice", "positive"),
    ],
)
def test_a_label_follows_the_rules(review: str, label: str) -> None:
    assert sentiment.answer(review) == label
    assert sentiment.answer(f"{sentiment.QUESTION} {review}") == label


def test_a_worked_example_weighs_every_clause_and_then_answers() -> None:
    text = sentiment.worked_example("the food was not bad but the room was very dirty")
    assert text == "not bad +1\nbut very dirty -6\nAnswer: negative"


def test_the_weights_of_a_worked_example_add_up_to_its_label() -> None:
    for review in reviews():
        *lines, answer = sentiment.worked_example(review).split("\n")
        assert len(lines) == sentiment.level_of(review)
        total = sum(int(line.split()[-1]) for line in lines)
        assert answer == f"Answer: {sentiment.label(total)}"


def test_a_guess_is_blind_to_negation_degree_and_contrast() -> None:
    for review in ("not bad", "very good and awful but bad", "good but awful and slow"):
        assert sentiment.guess(review) == "Answer: negative"
    assert sentiment.guess("good but slow") == "Answer: neutral"


def test_turning_every_word_round_turns_the_label_round() -> None:
    opposite = {
        **{"good": "bad", "nice": "slow", "clean": "dirty", "fresh": "dull"},
        **{"great": "awful", "lovely": "terrible"},
    }
    opposite |= {bad: good for good, bad in opposite.items()}
    turned = {"positive": "negative", "negative": "positive", "neutral": "neutral"}
    for review in reviews(200):
        words = [opposite.get(word, word) for word in review.split()]
        assert sentiment.answer(" ".join(words)) == turned[sentiment.answer(review)]


def test_a_parsed_review_says_the_same_again() -> None:
    for review in reviews():
        clauses = sentiment.parse(review)
        assert f"{sentiment.QUESTION} {' '.join(clause.text for clause in clauses)}" == review
        assert len({clause.adjective for clause in clauses}) == len(clauses)
        assert clauses[0].joint is None and all(clause.joint for clause in clauses[1:])


def test_every_label_is_as_frequent_as_the_others() -> None:
    labels = Counter(map(sentiment.answer, reviews(1500)))
    assert set(labels) == set(sentiment.LABELS)
    assert min(labels.values()) > 0.28 * 1500


@pytest.mark.parametrize(
    "text", ["superb", "good bad", "good but", "the food was", "but good", "not not good", "good ,"]
)
def test_a_text_of_another_grammar_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no review of this grammar"):
        sentiment.answer(text)
