"""The measures of an evaluation, held against brute force, sacrebleu, and values of scipy's."""

import json
import subprocess
import sys
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from stages import bootstrap, measures
from stages.measures import Measure
from stages.verify import Tasks

RIGHT, WRONG, NONE = ("right", 1.0), ("wrong", 0.0), ("no_answer", 0.0)


def asked(*golds: str, task: str = "exact", levels: tuple[str | None, ...] = ()) -> pl.DataFrame:
    """Prompts p0, p1, … with these golds."""
    rows = {"prompt_id": [f"p{i}" for i in range(len(golds))], "answer": golds}
    return pl.DataFrame(rows).with_columns(
        task=pl.lit(task),
        difficulty=pl.Series(levels or [None] * len(golds), dtype=pl.String),
    )


def samples(*answers: list[tuple[str | None, tuple[str, float | None]]]) -> pl.DataFrame:
    """What each prompt's responses answer, and how that was judged."""
    rows = [
        {"prompt_id": f"p{i}", "sample": j, "length": 10 * (j + 1), "finish_reason": "stop"}
        | {"extracted": text, "verdict": verdict, "acc": acc}
        for i, of_prompt in enumerate(answers)
        for j, (text, (verdict, acc)) in enumerate(of_prompt)
    ]
    return pl.DataFrame(rows, schema_overrides={"acc": pl.Float32, "sample": pl.Int32})


def measured(
    answers: pl.DataFrame, prompts: pl.DataFrame, *, n: int = 4, ks: tuple[int, ...] = ()
) -> dict[str, Measure]:
    found = measures.measured(answers, prompts, n=n, ks=ks, tasks=Tasks())
    return {measure.name: measure for measure in found}


def figure(measure: Measure) -> float:
    return float(measure.figure(measure.parts[measure.counted].sum(axis=0)))


# --- pass@k --------------------------------------------------------------------------------------


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_response(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([i < c for i in range(n)], k))
    [found] = measures.pass_at_k(np.array([n]), np.array([c]), k)
    assert found == pytest.approx(np.mean([any(subset) for subset in subsets]), abs=1e-12)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_is_its_closed_form_where_factorials_overflow(
    n: int, data: st.DataObject
) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    [found] = measures.pass_at_k(np.array([n]), np.array([c]), k)
    closed = (comb(n, k) - comb(n - c, k)) / comb(n, k)  # of whole numbers
    assert found == pytest.approx(closed, rel=1e-9, abs=1e-12)


def test_a_prompt_with_fewer_scored_responses_than_k_counts_in_no_pass_at_k() -> None:
    unscorable = ("why", ("unscorable", None))
    answers = samples([("1", RIGHT), unscorable], [("1", RIGHT), ("2", WRONG)])
    found = measured(answers, asked("1", "1"), n=2, ks=(1, 2))
    assert found["pass@2"].counted.tolist() == [False, True]
    assert (figure(found["pass@1"]), figure(found["pass@2"])) == (0.75, 1.0)


# --- maj@k ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "k", "acc"),
    [
        ([("2", WRONG), ("1", RIGHT), ("1", RIGHT)], 3, 1),
        ([("2", WRONG), ("1", RIGHT), ("1", RIGHT)], 1, 0),  # of the first k
        ([("2", WRONG), ("1", RIGHT)], 2, 0),  # a tie: what was given first
        ([("1", RIGHT), ("2", WRONG), ("2", WRONG), ("1", RIGHT)], 4, 1),
        ([(None, NONE), (None, NONE), ("1", RIGHT)], 3, 1),  # no answer is no vote
        ([(None, NONE), (None, NONE)], 2, 0),
    ],
)
def test_the_most_frequent_answer_of_the_first_k_decides(
    answers: list[tuple[str | None, tuple[str, float | None]]], k: int, acc: float
) -> None:
    found = measured(samples(answers), asked("1"), n=len(answers), ks=(k,))
    assert figure(found[f"maj@{k}"]) == acc


def test_texts_have_no_majority() -> None:
    found = measured(samples([("a", RIGHT)]), asked("a", task="format"), n=1, ks=(1,))
    assert not found["maj@1"].counted.any()


# --- translation ---------------------------------------------------------------------------------

REFERENCES = ["the cat sat on the mat .", "it is raining hard today", "good morning to all of you"]
RESPONSES = ["the cat sat on a mat .", "it rains hard today", "good morning to you all", "hello"]


def translated(texts: list[list[str | None]], references: list[str]) -> dict[str, Measure]:
    answers = [[(text, ("partial", 0.5) if text else NONE) for text in each] for each in texts]
    prompts = asked(*references, task="translation")
    return measured(samples(*answers), prompts, n=len(texts[0]))


def test_bleu_and_chrf_are_those_of_sacrebleus_command(tmp_path: Path) -> None:
    texts = [[RESPONSES[i], RESPONSES[i + 1]] for i in range(3)]
    found = translated(texts, REFERENCES)
    (tmp_path / "hyp").write_text("\n".join(text for each in texts for text in each))
    (tmp_path / "ref").write_text("\n".join(r for r in REFERENCES for _ in range(2)))
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-m", "bleu", "chrf"]
    done = subprocess.run(
        [*command, "--force", "-w", "6"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    of_command = json.loads(done.stdout)
    assert [each["name"] for each in of_command] == ["BLEU", "chrF2"]
    for name, theirs in zip(("bleu", "chrf"), of_command, strict=True):
        assert figure(found[name]) == pytest.approx(theirs["score"], abs=1e-5)
        assert found[name].signature == theirs["signature"]


@given(st.lists(st.text("ab c.", max_size=12), min_size=1, max_size=4))
def test_bleu_and_chrf_are_sacrebleus_of_any_texts(texts: list[str]) -> None:
    references = ["a b c a b c .", '["ab ab", "c c c c c"]', "a", "cab cab cab cab"][: len(texts)]
    found = translated([[text] for text in texts], references)
    lists = [json.loads(r) if r.startswith("[") else [r] for r in references]
    streams = [[r[i] if i < len(r) else None for r in lists] for i in range(2 if texts[1:] else 1)]
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        theirs = metric.corpus_score(texts, streams).score  # type: ignore[arg-type]
        assert figure(found[name]) == pytest.approx(theirs, abs=1e-9)


def test_a_response_without_a_translation_is_an_empty_text() -> None:
    found = translated([[RESPONSES[0]], [None]], REFERENCES[:2])
    theirs = sacrebleu.BLEU().corpus_score([RESPONSES[0], ""], [REFERENCES[:2]])
    assert figure(found["bleu"]) == pytest.approx(theirs.score)


# --- classification ------------------------------------------------------------------------------


def test_macro_f1_is_that_of_sklearn_over_the_golds_labels() -> None:
    gold = ["a", "a", "a", "b", "b", "c", "c", "c"]
    found = ["a", "b", None, "b", "c", "c", "zzz", "A"]  # None and zzz are no label
    answers = [
        [(f, RIGHT if f == g else WRONG if f else NONE)] for f, g in zip(found, gold, strict=True)
    ]
    of_task = measured(samples(*answers), asked(*gold, task="classification"), n=1)
    # f1_score(gold, found, labels=["a", "b", "c"], average="macro") of scikit-learn 1.9.1;
    # by hand: 2·1/(2+3), 2·1/(2+2), 2·1/(2+3)
    assert figure(of_task["macro_f1"]) == pytest.approx(0.43333333333333335)
    assert figure(of_task["accuracy"]) == 3 / 8


# --- lengths -------------------------------------------------------------------------------------


def test_the_length_of_those_that_ended_leaves_out_what_was_cut() -> None:
    cut = pl.when(pl.col("sample") == 2).then(pl.lit("length")).otherwise("finish_reason")
    answers = samples([("1", RIGHT)] * 3).with_columns(finish_reason=cut)
    found = measured(answers, asked("1"), n=3)
    assert figure(found["length"]) == 20 and figure(found["length_stopped"]) == 15
    assert figure(found["truncated"]) == pytest.approx(1 / 3)


# --- intervals -----------------------------------------------------------------------------------

VALUES = np.array([i * 37 % 101 / 101 for i in range(40)])
DRAWS = 40_000


def test_intervals_are_those_of_scipy() -> None:
    # scipy.stats.bootstrap 1.17.1, method="percentile", 100,000 resamples
    means = bootstrap.resampled(VALUES[:, None], resamples=DRAWS, seed=0)[:, 0] / 40
    assert bootstrap.interval(means, level=0.9) == pytest.approx((0.41757, 0.56881), abs=2e-3)
    sums = np.stack([VALUES, 1 + np.arange(40) % 3], axis=1)
    ratios = measures.ratio(bootstrap.resampled(sums, resamples=DRAWS, seed=0))
    assert bootstrap.interval(ratios, level=0.95) == pytest.approx((0.20173, 0.30442), abs=2e-3)


def test_resamples_draw_whole_prompts_with_replacement() -> None:
    sums = bootstrap.resampled(np.array([[1.0, 10.0], [0.0, 5.0]]), resamples=20_000, seed=3)
    pairs, counts = np.unique(sums, axis=0, return_counts=True)
    assert pairs.tolist() == [[0, 10], [1, 15], [2, 20]]
    assert counts / 20_000 == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


def test_resamples_depend_on_the_seed_alone() -> None:
    one, again, other = (
        bootstrap.resampled(VALUES[:, None], resamples=5, seed=seed) for seed in (1, 1, 2)
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_more_samples_of_the_same_prompts_are_no_more_evidence() -> None:
    def interval(times: int) -> tuple[object, object]:
        answers = samples(*([("1", RIGHT if i % 2 else WRONG)] * times for i in range(10)))
        rows = rows_of(answers, asked(*["1"] * 10), n=times)
        return rows[0]["low"], rows[0]["high"]

    assert interval(1) == interval(8)


def test_equal_policies_differ_by_chance_and_unequal_ones_do_not() -> None:
    assert bootstrap.p_value(np.zeros(99), 0.0) == 1
    differences = bootstrap.resampled(VALUES[:, None] + 0.5, resamples=999, seed=0)[:, 0] / 40
    assert bootstrap.p_value(differences, differences.mean()) == 1 / 1000


# --- results -------------------------------------------------------------------------------------


def rows_of(answers: pl.DataFrame, prompts: pl.DataFrame, *, n: int) -> list[dict[str, object]]:
    found = measures.measured(answers, prompts, n=n, ks=(), tasks=Tasks())
    return list(measures.results(found, prompts, resamples=100, level=0.95, seed=0))


def test_there_is_a_row_for_all_for_each_task_and_for_each_difficulty() -> None:
    prompts = asked("1", "1", "1", levels=("3", "4", None)).with_columns(
        task=pl.Series(["exact", "math", "math"])
    )
    rows = rows_of(samples([("1", RIGHT)], [("1", RIGHT)], [("2", WRONG)]), prompts, n=1)
    avg = {(r["task"], r["difficulty"]): r["value"] for r in rows if r["metric"] == "avg@1"}
    assert avg == {
        (None, None): pytest.approx(2 / 3),
        ("exact", None): 1,
        ("math", None): 0.5,
        (None, "3"): 1,
        (None, "4"): 1,
        ("exact", "3"): 1,
        ("math", "4"): 1,
    }
    [one] = [r for r in rows if r["metric"] == "avg@1" and r["task"] == "exact"][:1]
    assert (one["low"], one["n_prompts"], one["n_samples"]) == (None, 1, 1)


def test_a_measure_of_one_task_is_of_its_prompts_alone() -> None:
    prompts = asked("a b c d", "1").with_columns(task=pl.Series(["translation", "exact"]))
    rows = rows_of(samples([("a b c d", RIGHT)], [("2", WRONG)]), prompts, n=1)
    [bleu] = [r for r in rows if r["metric"] == "bleu" and r["task"] is None]
    assert (bleu["value"], bleu["n_prompts"]) == (pytest.approx(100), 1)


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        *((None, None), ("{}", None), ('{"level": 3}', "3"), ('{"level": "hard"}', "hard")),
        *(("no json", None), ("[1]", None), ('{"level": null}', None)),
    ],
)
def test_the_difficulty_is_what_meta_says(meta: str | None, said: str | None) -> None:
    prompts = pl.DataFrame({"meta": [meta]}, schema={"meta": pl.String})
    assert measures.difficulties(prompts, "level").to_list() == [said]
