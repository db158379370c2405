"""What a run believes of its prompts: integrals, pools whose answer is plain, and old evidence."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from conftest import rows, save
from hypothesis import given
from hypothesis import strategies as st

from stages import beliefs, tables
from stages.errors import InputError

SHAPES, RESPONSES = st.floats(0.1, 20), st.integers(2, 16)
SOURCE = Path("prompts.parquet")
RIGHT_OR_WRONG = (16, 0, 0), (0, 16, 0)  # prompts of pool 0, as `posterior` takes them
UNSEEN = (0, 0, 0)


def expected_informative(a: float, b: float, n: int) -> float:
    return float(beliefs.expected_informative(np.array([float(a)]), np.array([float(b)]), n)[0])


def integral(a: float, b: float, n: int) -> float:
    """∫ informative(p, n) Beta(p; a, b) dp, by the trapezoid rule over log(p / (1 - p))."""
    x, width = np.linspace(-40, 40, 4001, retstep=True)
    p, q = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(x))
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    density = np.exp(a * np.log(p) + b * np.log(q) - log_beta)  # with dp = p (1 - p) dx
    return float((beliefs.informative(p, n) * density).sum() * width)


def posterior(*prompts: tuple[float, float, int]) -> beliefs.Posterior:
    """Of prompts with so many right, so many wrong, and the number of their pool."""
    right, wrong, pools = np.array(prompts, np.float64).T
    return beliefs.posterior(right, wrong, pools.astype(np.int64))


def known(**prompts: tuple[float, float, int, int]) -> pl.DataFrame:
    """`beliefs`: right, wrong, step and asked of each prompt."""
    given_rows = [(prompt_id, *values) for prompt_id, values in prompts.items()]
    return pl.DataFrame(given_rows, schema=tables.polars_schema("beliefs"), orient="row")


def selected(*prompt_ids: str, step: int = 1) -> pl.DataFrame:
    chosen = [
        {"group_id": f"s{step}g{i}", "prompt_id": prompt_id, "step": step}
        for i, prompt_id in enumerate(prompt_ids)
    ]
    return rows("selection", *chosen)


def judged(selection: pl.DataFrame, *accs: float | None, n: int = 4) -> pl.DataFrame:
    """`groups` of the first prompts of `selection`, with these accuracies; null was not scored."""
    found = [
        {"group_id": group_id, "prompt_id": prompt_id, "n": n, "acc_mean": acc}
        | {"n_scored": 0 if acc is None else n, "decision": "kept", "policy": "base"}
        | {"age": 0, "sampled": True}
        for (group_id, prompt_id), acc in zip(
            selection.select("group_id", "prompt_id").iter_rows(), accs, strict=False
        )
    ]
    return pl.DataFrame(found, schema=tables.polars_schema("groups"))


def update(
    before: pl.DataFrame, selection: pl.DataFrame, groups: pl.DataFrame, half_life: float = 1.0
) -> dict[str, tuple[float, float, int, int]]:
    after = beliefs.updated(before, selection, groups, half_life=half_life)
    return {prompt_id: tuple(values) for prompt_id, *values in after.iter_rows()}


def prompts(*metas: str | None) -> pl.DataFrame:
    given_rows = ({"prompt_id": f"p{i}", "meta": meta} for i, meta in enumerate(metas))
    return rows("prompts", *given_rows)


@given(a=SHAPES, b=SHAPES, n=RESPONSES)
def test_the_expectation_is_the_integral_over_the_beta_distribution(
    a: float, b: float, n: int
) -> None:
    assert expected_informative(a, b, n) == pytest.approx(integral(a, b, n), abs=1e-9)


@given(a=SHAPES, b=SHAPES, n=RESPONSES)
def test_the_expectation_is_a_probability_that_does_not_care_which_side_is_right(
    a: float, b: float, n: int
) -> None:
    assert 0 <= expected_informative(a, b, n) <= 1
    assert expected_informative(a, b, n) == pytest.approx(expected_informative(b, a, n))


@given(a=SHAPES, b=SHAPES, n=st.integers(2, 15))
def test_one_more_response_makes_a_mixed_group_likelier(a: float, b: float, n: int) -> None:
    assert expected_informative(a, b, n) < expected_informative(a, b, n + 1)


@given(n=RESPONSES)
def test_where_every_pass_rate_is_alike_likely_two_of_the_counts_are_uninformative(n: int) -> None:
    assert expected_informative(1, 1, n) == pytest.approx(1 - 2 / (n + 1))


@given(p=st.floats(0, 1), n=RESPONSES)
def test_much_evidence_makes_the_expectation_that_of_one_pass_rate(p: float, n: int) -> None:
    found = expected_informative(1e7 * p, 1e7 * (1 - p), n)
    assert found == pytest.approx(1 - p**n - (1 - p) ** n, abs=1e-4)


def test_a_prompt_that_was_never_asked_is_taken_for_one_of_its_pool_where_all_are_alike() -> None:
    found = posterior(*[(4.8, 11.2, 0)] * 100, UNSEEN)
    assert found.mean[-1] == pytest.approx(0.3, abs=0.02)
    assert found.a[-1] + found.b[-1] > 20
    assert found.evidence[-1] == 0


def test_an_unseen_prompt_of_a_pool_of_always_and_never_is_one_or_the_other() -> None:
    found = posterior(*RIGHT_OR_WRONG * 50, UNSEEN)
    assert found.mean[-1] == pytest.approx(0.5)
    assert found.a[-1] + found.b[-1] < 0.2


def test_pools_of_which_much_is_known_keep_to_themselves() -> None:
    found = posterior(*[(14, 2, 0)] * 50, *[(2, 14, 1)] * 50, UNSEEN, (0, 0, 1))
    assert found.mean[-2:] == pytest.approx([14 / 16, 2 / 16], abs=0.06)


def test_a_pool_that_was_never_asked_is_taken_for_all_the_others() -> None:
    seen = [(8, 8, 0)] * 50 + [(4, 12, 1)] * 50
    others = posterior(*((right, wrong, 0) for right, wrong, _ in seen), UNSEEN)
    assert posterior(*seen, (0, 0, 2)).mean[-1] == pytest.approx(others.mean[-1], abs=0.01)


def test_a_pool_of_one_prompt_does_not_believe_it_alone() -> None:
    found = posterior(*[(4, 12, 0)] * 50, (16, 0, 1), (0, 0, 1))
    assert 0.3 < found.mean[-1] < 0.6


def test_without_any_evidence_a_pass_rate_is_beta_of_two_halves() -> None:
    found = posterior(UNSEEN, (0, 0, 1))
    assert found.a.tolist() == found.b.tolist() == pytest.approx([0.5, 0.5])
    assert found.mean.tolist() == pytest.approx([0.5, 0.5])


def test_much_evidence_of_its_own_outweighs_the_pool() -> None:
    found = posterior(*[(4.8, 11.2, 0)] * 100, (360, 40, 0), (0.9, 0.1, 0))
    assert found.mean[-2] == pytest.approx(0.9, abs=0.03)
    assert found.mean[-1] < 0.6  # as right, of a single response
    assert found.evidence[-2:].tolist() == [400, 1]


@given(st.lists(st.tuples(st.floats(0, 64), st.floats(0, 64), st.integers(0, 2)), min_size=1))
def test_a_posterior_is_a_distribution_whatever_was_seen(
    seen: list[tuple[float, float, int]],
) -> None:
    seen = [(round(right, 3), round(wrong, 3), pool) for right, wrong, pool in seen]
    found = posterior(*seen)
    assert np.isfinite(found.a).all() and np.isfinite(found.b).all()
    assert (found.a > 0).all() and (found.b > 0).all()
    assert found.evidence.tolist() == [right + wrong for right, wrong, _ in seen]


def test_evidence_counts_half_after_a_half_life() -> None:
    found = beliefs.faded(known(p=(8.0, 4.0, 3, 2)), 13, half_life=10)
    assert found.row(0) == ("p", 4.0, 2.0, 13, 2)


def test_right_and_wrong_responses_of_a_selection_are_counted() -> None:
    selection = selected("p", "q")
    found = update(known(), selection, judged(selection, 0.75, 0.0))
    assert found == {"p": (3.0, 1.0, 1, 1), "q": (0.0, 4.0, 1, 1)}


def test_two_groups_of_one_prompt_add_up() -> None:
    selection = selected("p", "p")
    assert update(known(), selection, judged(selection, 0.75, 0.5)) == {"p": (5.0, 3.0, 1, 1)}


def test_groups_of_other_selections_are_left_alone() -> None:
    selection, other = selected("p", step=2), selected("p", "q", step=1)
    groups = pl.concat([judged(selection, 0.25), judged(other, 1.0, 1.0)])
    assert update(known(), selection, groups) == {"p": (1.0, 3.0, 2, 2)}


def test_a_group_that_nobody_could_score_adds_nothing() -> None:
    selection = selected("p")
    assert update(known(), selection, judged(selection, None)) == {"p": (0.0, 0.0, 1, 1)}


def test_a_prompt_whose_group_was_skipped_was_asked_all_the_same() -> None:
    selection = selected("p", "q", step=5)
    before = known(q=(4.0, 0.0, 4, 3))
    found = update(before, selection, judged(selection, 1.0))
    assert found == {"p": (4.0, 0.0, 5, 5), "q": (2.0, 0.0, 5, 5)}


def test_evidence_adds_up_over_rounds_and_fades_over_steps() -> None:
    now = known()
    for step in (1, 1, 2):
        selection = selected("p", step=step)
        groups = judged(selection, 0.75)
        now = beliefs.updated(now, selection, groups, half_life=1)
    assert now.rows() == [("p", (3 + 3) / 2 + 3, (1 + 1) / 2 + 1, 2, 2)]


def test_a_prompt_that_was_not_asked_again_fades_and_keeps_the_step_that_it_was_asked_in() -> None:
    found = update(known(p=(4.0, 8.0, 1, 1)), selected("q", step=3), judged(selected()))
    assert found == {"p": (1.0, 2.0, 3, 1), "q": (0.0, 0.0, 3, 3)}


def test_beliefs_are_sorted_and_have_the_schema_of_their_table() -> None:
    selection = selected("c", "a")
    groups = judged(selection, 0.5, 0.5)
    found = beliefs.updated(known(b=(1.0, 1.0, 0, 0)), selection, groups, half_life=1)
    assert found["prompt_id"].to_list() == ["a", "b", "c"]
    assert found.schema == tables.polars_schema("beliefs")


def test_before_the_first_selection_and_after_a_shuffle_nothing_is_known(tmp_path: Path) -> None:
    shuffle = save(tmp_path / "select", "selection", selected("p"))
    for source in (None, shuffle):
        assert beliefs.read(source).is_empty()
        assert beliefs.read(source).schema == tables.polars_schema("beliefs")


def test_prompts_of_one_value_are_one_pool_and_without_a_key_all_are() -> None:
    given_prompts = prompts('{"level": 2}', '{"level": "2"}', '{"level": null}', '{"level": 2}')
    first, second, third, fourth = beliefs.pools(given_prompts, "level", SOURCE)
    assert first == fourth
    assert len({first, second, third}) == 3
    assert len(set(beliefs.pools(given_prompts, None, SOURCE))) == 1


def test_numbers_of_the_meta_come_in_the_order_of_the_prompts() -> None:
    found = beliefs.numbers(prompts('{"level": 2}', '{"level": 0.5}'), "level", SOURCE)
    assert found.tolist() == [2.0, 0.5]


@pytest.mark.parametrize("meta", [None, "", "{}", '{"Level": 1}', "[1]"])
def test_a_meta_without_the_key_is_refused_by_file_prompt_and_key(meta: str | None) -> None:
    for ask in (beliefs.numbers, beliefs.pools):
        with pytest.raises(InputError, match=r"prompts\.parquet: .*'p1' has no 'level'"):
            ask(prompts('{"level": 1}', meta), "level", SOURCE)


@pytest.mark.parametrize("value", ['"3"', "true", "null", "[3]"])
def test_what_is_no_number_is_refused_by_file_prompt_and_key(value: str) -> None:
    given_prompts = prompts('{"level": 1}', f'{{"level": {value}}}')
    with pytest.raises(InputError, match=r"prompts\.parquet: meta\.level of prompt 'p1' is"):
        beliefs.numbers(given_prompts, "level", SOURCE)


def test_evidence_that_has_faded_away_says_nothing_of_a_pool() -> None:
    half = np.array([1.0, 0.0] * 20)  # always right and never right
    pool = np.zeros(41, np.int64)
    certain = []
    for count in (16.0, 1.01, 0.99, 0.1, 1e-200):
        right, wrong = np.append(half * count, 0), np.append((1 - half) * count, 0)
        a, b, _ = beliefs.posterior(right, wrong, pool)
        certain.append(a[-1] + b[-1])
    assert np.isfinite(certain).all()
    assert max(certain) <= 1.01  # of an unseen prompt: never more than when nothing is known
