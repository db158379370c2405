"""Checkers of texts: what is right, what is wrong, and what nobody can say."""

import functools
import gc
import json
import math
import re
import string
import time
from collections import Counter
from typing import Any

import pytest
import sacrebleu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.checkers import Verdict, texts
from stages.checkers.texts import F1, Choice, Classification, Exact, Format, Translation

few = settings(max_examples=60)
SENTIMENT = Classification(
    labels=("positive", "negative"), aliases={"positive": ("pos", "+"), "negative": ("neg",)}
)
TASKS = [Exact(), F1(), Choice(), SENTIMENT, Translation(metric="mean")]


def said(task: Any, answer: str, gold: str) -> Verdict:
    return task.check(f"Let me think.\nAnswer: {answer}", gold)


# exact


def test_exact_compares_letter_by_letter() -> None:
    assert said(Exact(), "Paris ", " Paris") == (1.0, "right", "Paris")
    assert said(Exact(), "paris", "Paris") == (0.0, "wrong", "paris")
    assert said(Exact(), "34.0", "34")[:2] == (0.0, "wrong")


@pytest.mark.parametrize("gold", ["U.S.", "*args", "__init__", "$x$", "`ls -l`", "**Rome**", "3.0"])
def test_exact_takes_a_gold_for_right_however_an_answer_is_unwrapped(gold: str) -> None:
    assert said(Exact(), gold, gold).acc == 1
    assert Exact().check(f"\\boxed{{{gold}}}", gold).acc == 1


# F1


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("the Eiffel Tower!", "Eiffel tower", 1),
        ("in Paris, France", "Paris", 1 / 2),  # 1 word in common of 3 and 1
        ("London", "Paris", 0),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("北京市", "北京", 4 / 5),
        ("北京。", "北京", 1),
        ("東京タワー", "東京", 4 / 7),
        ("1999年", "1999 年", 1),
        ("１９９９", "1999", 1),
        ("$5 + ~3", "5 3", 1),
        ("서울 특별시", "서울", 2 / 3),
        ("the", "Eiffel tower", 0),
        ("", "Paris", 0),
    ],
)
def test_f1_counts_the_words_in_common(answer: str, gold: str, f1: float) -> None:
    assert said(F1(), answer, gold).acc == pytest.approx(f1)


def test_f1_is_right_partial_or_wrong() -> None:
    assert said(F1(), "the tower", "tower") == (1.0, "right", "the tower")
    assert said(F1(), "tall tower", "tower")[1] == "partial"
    assert said(F1(), "hill", "tower")[1] == "wrong"


def test_a_threshold_makes_f1_right_or_wrong() -> None:
    assert said(F1(threshold=0.8), "北京市", "北京")[:2] == (1.0, "right")
    assert said(F1(threshold=0.81), "北京市", "北京")[:2] == (0.0, "wrong")


def test_the_best_of_several_golds_counts() -> None:
    gold = json.dumps(["New York City", "NYC", "the"])
    assert said(F1(), "NYC", gold).acc == 1
    assert said(F1(), "York", gold).acc == pytest.approx(1 / 2)
    assert said(F1(), "[sic] erat", "[sic] erat").acc == 1  # no JSON, hence one text


def squad_f1(answer: str, gold: str) -> float:
    """The official script of SQuAD 1.1: normalize_answer and f1_score."""

    def words(text: str) -> list[str]:
        text = "".join(char for char in text.lower() if char not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    ours, theirs = words(answer), words(gold)
    same = sum((Counter(ours) & Counter(theirs)).values())
    if same == 0:
        return 0
    precision, recall = same / len(ours), same / len(theirs)
    return (2 * precision * recall) / (precision + recall)


ENGLISH = st.text("aAtThHeEn. '-,5 ", max_size=30) | st.text(string.printable, max_size=30)


@few
@given(ENGLISH, ENGLISH)
@example("a tower, the tower", "An U.S.-tower")
def test_f1_of_english_is_squads(answer: str, gold: str) -> None:
    assert texts.f1(answer, gold) == pytest.approx(squad_f1(answer, gold))


@few
@given(st.text(max_size=20), st.text(max_size=20))
def test_f1_is_symmetric_and_a_share(one: str, other: str) -> None:
    assert texts.f1(one, other) == texts.f1(other, one)
    assert 0 <= texts.f1(one, other) <= 1
    assert texts.f1(one, one) == bool(texts.tokens(one))


# multiple choice


ONE = ["B", "b", "(B)", "[B]", "B.", "(b).", "B)", "B) Paris", "B. Paris", "B: Paris", "B - Paris"]
ONE += [
    "b) Paris",
    "**B**",
    "**B** ",
    "**(B)** Paris",
    "**B.** Paris",
    "`B`",
    '"B"',
    "$B$",
    r"\text{B}",
]
ONE += [
    r"\textbf{(B)}\ 12",
    r"(\text{B})",
    r"\boxed{B}",
    "Ｂ",
    "（Ｂ）",
    "B、巴黎",
    "B.巴黎",
    "B。",
]
ONE += [
    "B) P(A) > P(C)",
    "B. John F. Kennedy",
    "B) f(a)",
    "B. Paris or Rome",
    "B) 5",
    "B. B",
    "B. AC",
    "B. x",
]


@pytest.mark.parametrize("answer", ONE)
def test_one_letter_in_any_dress_is_a_choice(answer: str) -> None:
    assert said(Choice(), answer, "B")[:2] == (1.0, "right")
    assert said(Choice(), answer, "A")[:2] == (0.0, "wrong")


NOT_ONE = [
    "A or B",
    "A, B",
    "B, A",
    "A/B",
    "AB",
    "BA",
    "B and C",
    "(A) (B)",
    "(B) or (A)",
    "B) or A)",
]
NOT_ONE += [
    "B. A",
    "B、A",
    "B. or A.",
    "b) or a)",
    "(b) (a)",
    "B 或 A",
    "B. 或 A",
    "B) Paris, A) Rome",
    "BB",
]
NOT_ONE += [
    "The answer is B",
    "Option B",
    "not B",
    "B or not",
    "B. A and C",
    "Be",
    "B2",
    "2",
    "",
    "Б",
    "B.A.C.",
]


@pytest.mark.parametrize("answer", NOT_ONE)
def test_more_or_less_than_one_letter_is_wrong(answer: str) -> None:
    assert said(Choice(), answer, "B")[:2] == (0.0, "wrong")


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B.", "B) Paris", "Ｂ", r"\text{B}"])
def test_a_gold_letter_may_be_dressed_too(gold: str) -> None:
    assert said(Choice(), "B", gold).acc == 1


@pytest.mark.parametrize("gold", ["AC", "A,C", "a, c", "A C", "C, A", "(A)(C)", "A and C", "A、C"])
def test_several_gold_letters_have_to_be_listed_all_and_alone(gold: str) -> None:
    for answer in ("AC", "CA", "A, C", "C and A", "(A), (C)", "**A**, **C**", "A、C", "A & C"):
        assert said(Choice(), answer, gold).acc == 1, answer
    for answer in ("A", "C", "ABC", "A, B, C", "A or C", "A) Paris, C) Rome", "", "neither"):
        assert said(Choice(), answer, gold).acc == 0, answer


@pytest.mark.parametrize("gold", ["", "7", "Paris", "CAB", "A or B", "the first", "ABE"])
def test_a_gold_that_names_no_option_is_unscorable(gold: str) -> None:
    verdict = said(Choice(choices=4), "A", gold)
    assert verdict[:2] == (None, "unscorable")
    assert repr(gold) in str(verdict.extracted) and "A to D" in str(verdict.extracted)


def test_letters_beyond_the_choices_are_no_options() -> None:
    assert said(Choice(choices=4), "E", "D").acc == 0
    assert said(Choice(choices=4), "D. I", "D").acc == 1  # I is the option's text
    assert said(Choice(), "D. I", "D").acc == 0
    assert Choice(choices=4).gold_problem("E") and not Choice(choices=5).gold_problem("E")


# classification


POSITIVE = [
    "positive",
    "Positive.",
    "**POSITIVE**",
    '"positive."',
    "“Positive”。",
    "pos",
    "+",
    "Ｐｏｓ",
]
POSITIVE += [r"\text{positive}", "  positive  ", "_pos_", "'Pos'."]


@pytest.mark.parametrize("answer", POSITIVE)
def test_a_label_or_its_alias_is_right(answer: str) -> None:
    for gold in ("positive", "Pos"):
        assert said(SENTIMENT, answer, gold)[:2] == (1.0, "right")
    assert said(SENTIMENT, answer, "negative")[:2] == (0.0, "wrong")


@pytest.mark.parametrize("answer", ["neutral", "positive or negative", "not positive", "", "posit"])
def test_anything_else_is_no_label_and_wrong(answer: str) -> None:
    assert said(SENTIMENT, answer, "positive")[:2] == (0.0, "wrong")


def test_case_differs_only_where_it_is_asked() -> None:
    assert said(Classification(), "us", "US").acc == 1
    assert said(Classification(case=True), "us", "US").acc == 0
    assert said(Classification(labels=("us", "US"), case=True), "US", "US").acc == 1


def test_without_known_labels_any_gold_is_one() -> None:
    assert said(Classification(), "Science  fiction.", "science fiction").acc == 1
    assert Classification().gold_problem("anything") is None


@pytest.mark.parametrize("gold", ["neutral", "", "**", "''"])
def test_a_gold_outside_the_labels_is_unscorable(gold: str) -> None:
    assert said(SENTIMENT, "positive", gold)[:2] == (None, "unscorable")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aliases": {"yes": ["y", "ok"], "no": ["n", "OK."]}}, "'OK.' is a spelling of 'yes'"),
        ({"labels": ["yes", "no"], "aliases": {"yes": ["No"]}}, "'No' is a spelling of 'no'"),
        ({"labels": ["yes", "Yes"]}, "'Yes' is a spelling of 'yes' and of 'Yes'"),
        ({"labels": ["yes"], "aliases": {"no": ["n"]}}, "'no', which is not one of labels"),
        ({"labels": ["yes", "**"]}, "nothing that could be compared"),
        ({"lables": ["yes"]}, "lables"),
    ],
)
def test_labels_that_cannot_be_told_apart_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(why)):
        Classification(**options)


# translation

HYPOTHESIS = "The cat sits on a mat, I think."
CACHE = type(functools.lru_cache(len))
REFERENCES = ["The cat sat on the mat.", "A cat is sitting on the mat, I think!"]


def test_bleu_and_chrf_of_short_texts_are_what_one_computes_by_hand() -> None:
    # all n-grams are right, and 3 words of 4 are there: the brevity penalty alone
    bleu = Translation(metric="bleu").check("the cat sat", "the cat sat down").acc
    assert bleu == pytest.approx(math.exp(1 - 4 / 3))
    # 1 letter of 2 and no pair of letters are right: precision and recall are 1/4 on average
    assert Translation(metric="chrf").check("ab", "ac").acc == pytest.approx(1 / 4)
    both = Translation(metric="mean")
    assert both.check("ab", "ac").acc == pytest.approx(1 / 8)  # no word is right: BLEU is 0


@pytest.mark.parametrize("tokenize", ["13a", "zh", "char", "intl", "none"])
@pytest.mark.parametrize("references", [REFERENCES[:1], REFERENCES])
def test_a_translation_has_the_score_that_sacrebleu_gives(
    tokenize: Any, references: list[str]
) -> None:
    gold = json.dumps(references)
    bleu = sacrebleu.BLEU(tokenize=tokenize, smooth_method="exp", effective_order=True)
    of_bleu = bleu.sentence_score(HYPOTHESIS, references).score / 100
    of_chrf = sacrebleu.CHRF().sentence_score(HYPOTHESIS, references).score / 100
    expected = {"bleu": of_bleu, "chrf": of_chrf, "mean": (of_bleu + of_chrf) / 2}
    for metric, value in expected.items():
        task = Translation.model_validate({"metric": metric, "tokenize": tokenize})
        assert task.check(HYPOTHESIS, gold) == (value, "partial", HYPOTHESIS)
        assert 0 < value < 1


def test_an_empty_reference_is_none() -> None:
    task = Translation(metric="bleu")  # whose brevity penalty goes by the closest length
    assert task.check("a b", '["", "a b c d"]') == task.check("a b", "a b c d")


@few
@given(st.text(max_size=30), st.sampled_from(["bleu", "chrf", "mean"]))
@example("The cat sat on the mat.", "bleu")
@example("猫坐在垫子上。", "mean")
def test_the_reference_itself_is_right(reference: str, metric: str) -> None:
    task = Translation.model_validate({"metric": metric, "label": "<translation>"})
    gold = json.dumps([reference])
    if task.gold_problem(gold) is None:
        assert task.check(f"<translation>{reference}", gold)[:2] == (1.0, "right")


@few
@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_any_translation_has_a_score_from_0_to_1(text: str, gold: str) -> None:
    acc = Translation(metric="mean").check(text, gold).acc
    assert acc is None or 0 <= acc <= 1


@pytest.mark.parametrize(
    "text",
    [
        "Le chat.",
        "Hm.\nTranslation: Le chat.",
        "Translation: The cat. No:\nTranslation:\nLe chat.\n",
        "**Translation:** Le chat.",
        "**Translation: Le chat.**",
    ],
)
def test_what_follows_the_last_label_is_the_translation(text: str) -> None:
    assert Translation().check(text, "Le chat.") == (1.0, "right", "Le chat.")


def test_another_label_may_be_asked() -> None:
    assert Translation(label="译文：").check("想一想。译文：你好", "你好").acc == 1
    assert Translation(label="译文：").check("Translation: 你好", "你好").acc != 1


@pytest.mark.parametrize("tokenize", ["13a", "zh", "char", "intl", "none"])
def test_sacrebleu_keeps_no_text(tokenize: Any) -> None:
    caches = [
        each
        for each in gc.get_objects()
        if isinstance(each, CACHE)
        and re.match(r"Tokenizer\w+\.__call__", getattr(each, "__qualname__", ""))
    ]
    for cache in caches:
        cache.cache_clear()
    assert Translation(metric="bleu", tokenize=tokenize).check("a cat", "a cat").acc == 1
    assert caches and not any(cache.cache_info().currsize for cache in caches)


def test_a_threshold_makes_a_translation_right_or_wrong() -> None:
    assert Translation(threshold=0.25).check("ab", "ac")[:2] == (1.0, "right")
    assert Translation(threshold=0.26).check("ab", "ac")[:2] == (0.0, "wrong")


@pytest.mark.parametrize("text", ["", " \n", "Le chat.\nTranslation:", "**Translation:**"])
def test_no_text_is_no_translation(text: str) -> None:
    assert Translation().check(text, "Le chat.") == (0.0, "no_answer", None)


# form

THOUGHT = "<think>\n2+2=4\n</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "amiss"),
    [
        (THOUGHT, None),
        (f"Well. {THOUGHT} Done.", None),
        ("<think></think><answer></answer>", None),
        ("<answer>4</answer>", "tags: 0 × <think>"),
        ("<think>x<answer>4</answer>", "tags: 0 × </think>"),
        (THOUGHT + "</answer>", "tags: 2 × </answer>"),
        ("<answer>4</answer><think>x</think>", "tags: not in the order"),
        ("<think><answer>4</answer></think>", "tags: not in the order"),
        ("</think>x<think><answer>4</answer>", "tags: not in the order"),
        ("", "tags: 0 × <think>"),
    ],
)
def test_each_tag_opens_and_closes_once_one_after_the_other(text: str, amiss: str | None) -> None:
    verdict = Format(tags=("think", "answer")).check(text, "")
    assert verdict[:2] == ((0.0, "wrong") if amiss else (1.0, "right"))
    assert (verdict.extracted or "").startswith(amiss or "")
    assert (verdict.extracted is None) == (amiss is None)


@pytest.mark.parametrize(
    ("text", "acc"), [("", 0), ("a", 0), ("ab", 1), ("abcd", 1), ("abcde", 0), ("你好", 1)]
)
def test_length_is_counted_in_characters(text: str, acc: float) -> None:
    assert Format(min_chars=2, max_chars=4).check(text, "").acc == acc


def test_a_pattern_matches_from_end_to_end() -> None:
    task = Format(pattern=r"(?s)<a>.*</a>\s*")
    assert task.check("<a>\n1</a>\n", "").acc == 1
    assert task.check("so <a>1</a>", "") == (0.0, "wrong", "pattern: no match")


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("latin", "Où est l'été? 34 + x"),
        ("latin", "Ｆｕｌｌ ｗｉｄｔｈ"),
        ("cyrillic", "Ответ: 34"),
        ("greek", "Η απάντηση"),
        ("arabic", "الجواب"),
        ("hebrew", "תשובה"),
        ("thai", "คำตอบ"),
        ("hangul", "정답은 34"),
        ("han", "人々々"),
        ("japanese", "答えはカタカナです"),
        ("cjk", "答えは 정답"),
        ("latin", "34"),
    ],
)
def test_letters_of_the_language_are_in_order(language: Any, text: str) -> None:
    assert Format(language=language).check(text, "").acc == 1
    if text != "34":
        other = Format(language="cyrillic" if language != "cyrillic" else "latin")
        assert other.check(text, "").acc == 0


def test_nine_letters_of_ten_are_enough() -> None:
    assert Format(language="han").check("一二三四五六七八九x", "").acc == 1
    verdict = Format(language="han").check("一二三四五六七八xy", "")
    assert verdict == (0.0, "wrong", "language: 80% of the letters are han")
    assert Format(language="han").check("答えはカタカナです", "").acc == 0


def test_all_that_is_asked_has_to_hold_and_the_first_lack_is_named() -> None:
    task = Format(pattern="<t>.*</t>", tags=("t",), min_chars=9, language="latin")
    assert task.check("<t>hello</t>", "gold does not matter") == (1.0, "right", None)
    assert task.check("<t>", "").extracted == "min_chars: 3 of 9"
    assert task.check("<t>hello there", "").extracted == "tags: 0 × </t>"
    assert task.check("x <t>hello</t>", "").extracted == "pattern: no match"
    assert task.gold_problem("") is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "asks nothing"),
        ({"pattern": "(a"}, "no regular expression"),
        ({"tags": ["a", "a"]}, "tags has one twice"),
        ({"min_chars": 5, "max_chars": 4}, "max_chars 4 is less than min_chars 5"),
        ({"language": "klingon"}, "latin"),
        ({"tag": ["a"]}, "tag"),
    ],
)
def test_a_form_that_cannot_be_checked_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(why)):
        Format(**options)


# all of them


@pytest.mark.parametrize("task", TASKS[:-1], ids=lambda task: type(task).__name__)
def test_no_final_answer_is_no_answer(task: Any) -> None:
    gold = {"Choice": "B", "Classification": "pos"}.get(type(task).__name__, "x")
    assert task.check("I am not sure.", gold) == (0.0, "no_answer", None)


def test_the_last_answer_counts() -> None:
    assert Choice().check("Answer: A\nNo, wait.\nAnswer: B", "B") == (1.0, "right", "B")
    assert Choice().check("Answer: A\nNo, wait.\nAnswer: B", "A").acc == 0


UNUSABLE = [
    (Exact(), " "),
    (F1(), ""),
    (F1(), "The !"),
    (F1(), "[1, 2]"),
    (F1(), "[]"),
    (F1(), '["a"]'),
]
UNUSABLE += [(Translation(), " "), (Translation(), '[""]'), (Translation(), '["x", 1]')]


@pytest.mark.parametrize(("task", "gold"), UNUSABLE)
def test_a_gold_that_nothing_matches_is_unscorable_before_any_answer(task: Any, gold: str) -> None:
    problem = task.gold_problem(gold)
    assert problem
    for text in ("Answer: x", "no answer"):
        assert task.check(text, gold) == (None, "unscorable", problem)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@few
@given(text=st.text(max_size=40), gold=st.text(max_size=20), label=st.booleans())
def test_no_text_and_no_gold_raise(task: Any, text: str, gold: str, label: bool) -> None:
    acc, verdict, _ = task.check("Answer: " * label + text, gold)
    assert verdict in {"right", "wrong", "partial", "no_answer", "unscorable"}
    assert (acc is None) == (verdict == "unscorable") == (task.gold_problem(gold) is not None)


UNITS = ["a", "A", " ", "{", "}", "(", "*", "_", "`", "$", "\\", '"', "<", "[", "中", "\u0301"]
UNITS += ["A, ", "a b ", "\\text{", "\u0301\u0323", "Answer: ", "**A** ", "\n"]
LONG = {unit: (unit * 100_000)[:100_000] for unit in UNITS}
LONG["boxes"] = "\\boxed{" * 20_000
LONG["braces"] = "\\boxed" + "{" * 20_000 + "}" * 20_000
FORM = Format(tags=("think", "answer"), language="cyrillic")


@pytest.mark.parametrize("task", [*TASKS[:-1], FORM], ids=lambda task: type(task).__name__)
def test_no_response_is_long_enough_to_hang_a_checker(task: Any) -> None:
    for unit, text in LONG.items():
        started = time.process_time()
        assert task.check(f"Answer: {text}", "B" if isinstance(task, Choice) else "pos").acc != 1
        assert time.process_time() - started < 1, unit


@pytest.mark.parametrize("unit", ["a", "中", ".1", "{", "\u0301\u0323"])
def test_no_translation_is_long_enough_to_hang_a_checker(unit: str) -> None:
    started = time.process_time()
    assert TASKS[-1].check(unit * 50_000, "The cat sat.").acc != 1
    assert time.process_time() - started < 3


def test_a_gold_of_brackets_is_one_text() -> None:
    assert F1().gold_problem("[" * 100_000) is not None  # there is no word in it
    assert said(F1(), "x", "[" * 100_000 + " x").acc == 1
