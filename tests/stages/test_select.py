"""A seeded shuffle without replacement, weights, and prompts that teach, whoever resumes them."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from conftest import CPU, fresh, rows, save
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages import beliefs, select, tables
from stages.errors import InputError
from stages.select import Config

ADAPTIVE = {"policy": "adaptive", "explore": 0.0, "rest": 0}
WEIGHTED = {"policy": "weighted", "explore": 0.0, "rest": 0, "weight_by": "weight"}
CURRICULUM = {"by": "level", "start": 2, "end": 18, "steps": 5}


def ids(count: int) -> list[str]:
    return [f"p{i:02d}" for i in range(count)]


def pool(parent: Path, prompt_ids: Iterable[str], **meta: Mapping[str, object]) -> Path:
    """Prompts; `meta`: what they say of each key, by prompt."""
    given_rows = (
        {"prompt_id": prompt_id, "meta": json.dumps({key: meta[key][prompt_id] for key in meta})}
        for prompt_id in prompt_ids
    )
    return save(fresh(parent, "prompts"), "prompts", rows("prompts", *given_rows))


def run(
    prompts: Path, previous: Path | None = None, groups: Path | None = None, **config: object
) -> Path:
    out = fresh(prompts.parent)
    select.run(
        prompts=prompts,
        previous=previous,
        groups=groups,
        out=out,
        config=Config(**config),
        machine=CPU,
    )
    return out


def asked(parent: Path, prompt_ids: Iterable[str], **columns: object) -> Path:
    """The selection of just these prompts in step 1, before which there was none."""
    chosen = (
        {"group_id": f"g{i}", "prompt_id": prompt_id, **columns}
        for i, prompt_id in enumerate(prompt_ids)
    )
    return save(fresh(parent, "asked"), "selection", rows("selection", *chosen))


def judged(selection: Path, accs: Mapping[str, float], *, mixed: bool | None = None) -> Path:
    """What the filter found of a selection whose prompts are right this often, of 8 responses.

    `mixed`: whether the groups are, if it is not to follow from that.
    """
    found = [
        {"group_id": group_id, "prompt_id": prompt_id, "n": 8, "n_scored": 8, "metric_min": 0.0}
        | {"metric_max": float(0 < accs[prompt_id] < 1 if mixed is None else mixed)}
        | {"acc_mean": accs[prompt_id], "decision": "kept", "policy": "base"}
        | {"age": 0, "sampled": True}
        for group_id, prompt_id in tables.read(selection, "selection")
        .select("group_id", "prompt_id")
        .iter_rows()
    ]
    frame = pl.DataFrame(found, schema=tables.polars_schema("groups"))
    return save(fresh(selection.parent, "groups"), "groups", frame)


def chain(
    prompts: Path,
    accs: Mapping[str, float],
    steps: Iterable[int],
    previous: Path | None = None,
    **config: object,
) -> list[Path]:
    """A selection per step, each knowing what the groups of those before it showed."""
    made = []
    for step in steps:
        groups = judged(previous, accs) if previous else None
        previous = run(prompts, previous, groups, step=step, **config)
        made.append(previous)
    return made


def draws(prompts: Path, count: int, **config: object) -> list[pl.DataFrame]:
    """First rounds of so many seeds."""
    frame = tables.read_prompts(prompts)
    nothing = beliefs.read(None)
    return [
        select.choose(frame, nothing, 0, Config(seed=seed, **config), source=prompts)
        for seed in range(count)
    ]


def drawn(selection: Path) -> list[str]:
    return tables.read(selection, "selection")["prompt_id"].to_list()


@settings(max_examples=30)
@given(count=st.integers(1, 9), sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_chained_selections_are_one_stream_of_whole_epochs(count: int, sizes: list[int]) -> None:
    with TemporaryDirectory() as parent:
        prompts = pool(Path(parent), ids(count))
        selection, chained = None, []
        for size in sizes:
            selection = run(prompts, selection, size=size)
            chained += drawn(selection)
        at_once = tables.read(run(prompts, size=sum(sizes)), "selection")
    assert chained == at_once["prompt_id"].to_list()
    for (epoch,), one in at_once.group_by("epoch", maintain_order=True):
        assert one["prompt_id"].is_unique().all()
        if epoch < at_once["epoch"].max():
            assert sorted(one["prompt_id"]) == ids(count)
    assert at_once["position"].to_list() == list(range(sum(sizes)))


def test_the_order_of_the_file_does_not_matter(tmp_path: Path) -> None:
    forwards, backwards = pool(tmp_path, ids(20)), pool(tmp_path, ids(20)[::-1])
    assert drawn(run(forwards, size=30)) == drawn(run(backwards, size=30))


def test_another_seed_is_another_order_and_so_is_another_epoch(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(20))
    first, second = drawn(run(prompts, size=40)), drawn(run(prompts, size=40, seed=1))
    assert first != second
    assert first[:20] != first[20:]
    assert sorted(first[:20]) == sorted(second[:20])


def test_one_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(5))
    files = [run(prompts, size=8, seed=3) / "selection" / "part-00000.parquet" for _ in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_group_ids_are_unique_over_rounds_and_steps(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(3))
    selections = [
        run(prompts, size=4, step=step, round=number) for step in (1, 2, 11) for number in (0, 1)
    ]
    frame = tables.read(selections, "selection")
    assert frame["group_id"].n_unique() == len(frame) == 24
    assert set(frame.select("step", "round").iter_rows()) == {
        (step, number) for step in (1, 2, 11) for number in (0, 1)
    }


def test_a_prompt_drawn_twice_in_one_round_is_two_groups(tmp_path: Path) -> None:
    frame = tables.read(run(pool(tmp_path, ids(1)), size=3), "selection")
    assert frame["group_id"].n_unique() == 3
    assert frame["epoch"].to_list() == [0, 1, 2]


def test_unusable_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'p00' occurs more than once"):
        run(pool(tmp_path, ["p00", "p00"]))
    with pytest.raises(InputError, match="no rows"):
        run(pool(tmp_path, []))


def test_a_previous_selection_without_rows_is_refused(tmp_path: Path) -> None:
    empty = save(tmp_path / "empty", "selection", rows("selection"))
    with pytest.raises(InputError, match="previous selection has no rows"):
        run(pool(tmp_path, ids(3)), empty)


def test_a_round_of_no_prompts_is_refused() -> None:
    with pytest.raises(ValidationError, match="size"):
        Config(size=0)


def test_a_round_that_chooses_passes_on_what_is_known_and_a_shuffle_does_not(
    tmp_path: Path,
) -> None:
    prompts = pool(tmp_path, ids(2), weight={"p00": 1, "p01": 1})
    assert not (run(prompts, size=2) / "beliefs").exists()
    for config in (ADAPTIVE, WEIGHTED):
        assert tables.read(run(prompts, size=2, **config), "beliefs").is_empty()
        second = run(prompts, asked(tmp_path, ["p00"]), size=2, step=2, **config)
        assert tables.read(second, "beliefs")["prompt_id"].to_list() == ["p00"]


def test_prompts_whose_groups_were_mixed_are_asked_before_the_all_right_and_the_all_wrong(
    tmp_path: Path,
) -> None:
    accs = dict.fromkeys(ids(4), 1.0) | dict.fromkeys(ids(12)[4:8], 0.0)
    accs |= dict.fromkeys(ids(12)[8:], 0.5)
    prompts, everyone = pool(tmp_path, accs), asked(tmp_path, accs)
    for seed in range(3):
        found = run(
            prompts, everyone, judged(everyone, accs), size=4, step=2, seed=seed, **ADAPTIVE
        )
        assert sorted(drawn(found)) == ids(12)[8:]


def test_what_was_solved_or_hopeless_many_half_lives_ago_is_asked_again(tmp_path: Path) -> None:
    accs = dict.fromkeys(ids(4), 1.0) | dict.fromkeys(ids(12)[4:8], 0.0)
    accs |= dict.fromkeys(ids(12)[8:], 0.5)
    prompts, everyone = pool(tmp_path, accs), asked(tmp_path, accs)
    groups, again = judged(everyone, accs), set()
    for seed in range(20):
        later = run(
            prompts, everyone, groups, size=4, step=101, half_life=1.0, seed=seed, **ADAPTIVE
        )
        again |= set(drawn(later))
    assert again == set(accs)


@pytest.mark.parametrize("config", [ADAPTIVE, WEIGHTED], ids=["adaptive", "weighted"])
def test_a_prompt_that_was_asked_rests_so_many_steps(
    tmp_path: Path, config: dict[str, object]
) -> None:
    prompts = pool(tmp_path, ids(9), weight=dict.fromkeys(ids(9), 1))
    steps = chain(prompts, dict.fromkeys(ids(9), 0.5), range(1, 7), size=3, **config | {"rest": 2})
    chosen = [set(drawn(selection)) for selection in steps]
    assert set.union(*chosen[:3]) == set(ids(9))
    assert chosen[3:] == chosen[:3]  # each is ready when the others rest


@pytest.mark.parametrize("config", [ADAPTIVE, WEIGHTED], ids=["adaptive", "weighted"])
def test_those_that_rest_fill_the_round_if_there_are_no_others(
    tmp_path: Path, config: dict[str, object]
) -> None:
    prompts = pool(tmp_path, ids(6), weight=dict.fromkeys(ids(6), 1))
    before = asked(tmp_path, ids(4))
    found = drawn(run(prompts, before, size=5, step=2, **config | {"rest": 9}))
    assert set(found[:2]) == {"p04", "p05"}
    assert len(set(found)) == 5


def test_another_round_of_one_step_asks_others_even_where_none_rest(tmp_path: Path) -> None:
    prompts, before = pool(tmp_path, ids(6)), asked(tmp_path, ids(3))
    groups = judged(before, dict.fromkeys(ids(3), 0.5))
    found = run(prompts, before, groups, size=3, step=1, round=1, **ADAPTIVE)
    assert set(drawn(found)) == {"p03", "p04", "p05"}


def test_unseen_prompts_are_judged_by_their_pool(tmp_path: Path) -> None:
    levels = dict.fromkeys(ids(8), 1) | dict.fromkeys(ids(16)[8:], 2)
    prompts = pool(tmp_path, levels, level=levels)
    before = asked(tmp_path, ids(4) + ids(12)[8:])
    groups = judged(
        before, {prompt_id: 1.0 if levels[prompt_id] == 1 else 0.5 for prompt_id in levels}
    )
    config = {**ADAPTIVE, "rest": 9, "size": 4, "step": 2}
    assert sorted(drawn(run(prompts, before, groups, pool_by="level", **config))) == ids(16)[12:]
    without = {
        p for seed in range(5) for p in drawn(run(prompts, before, groups, seed=seed, **config))
    }
    assert {levels[prompt_id] for prompt_id in without} == {1, 2}


def test_a_pool_that_not_every_prompt_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts0: meta of prompt 'p00' has no 'level'"):
        run(pool(tmp_path, ids(2)), pool_by="level", **ADAPTIVE)


@pytest.mark.parametrize("config", [ADAPTIVE, WEIGHTED], ids=["adaptive", "weighted"])
def test_all_exploring_is_the_shuffle(tmp_path: Path, config: dict[str, object]) -> None:
    accs = dict.fromkeys(ids(5), 0.5)
    prompts = pool(tmp_path, accs, weight=dict.fromkeys(accs, 1))
    explored = chain(prompts, accs, range(1, 5), size=3, **config | {"explore": 1.0})
    shuffled = chain(prompts, accs, range(1, 5), size=3)
    same = ["group_id", "step", "round", "position", "epoch", "prompt_id"]
    found, wanted = (tables.read(made, "selection") for made in (explored, shuffled))
    assert found.select(same).equals(wanted.select(same))
    assert set(found["why"]) == {"explore"}


def test_a_share_of_the_rounds_goes_along_the_shuffle_so_that_every_prompt_returns(
    tmp_path: Path,
) -> None:
    accs = dict.fromkeys(ids(3), 0.5) | dict.fromkeys(ids(10)[3:], 0.0)
    prompts = pool(tmp_path, accs)
    made = chain(prompts, accs, range(1, 31), size=3, **ADAPTIVE | {"explore": 0.3})
    explored = tables.read(made, "selection").filter(why="explore")
    count = len(explored)
    assert 15 < count < 40  # of 27 to expect
    assert explored["position"].to_list() == list(range(count))
    assert explored["prompt_id"].to_list() == drawn(run(prompts, size=count))
    assert set(explored["prompt_id"]) == set(accs)


def test_a_prompt_that_was_explored_is_not_chosen_once_more(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(6))
    for seed in range(5):
        found = tables.read(
            run(prompts, size=6, seed=seed, **ADAPTIVE | {"explore": 0.5}), "selection"
        )
        assert sorted(found["prompt_id"]) == ids(6)
        assert found["why"].n_unique() == 2


def test_a_round_that_explores_nothing_stays_where_the_shuffle_was(tmp_path: Path) -> None:
    prompts = pool(tmp_path, ids(4))
    first = run(prompts, size=2, **ADAPTIVE)
    assert tables.read(first, "selection")["position"].to_list() == [-1, -1]
    shuffled = tables.read(run(prompts, first, size=3, step=2), "selection")
    assert shuffled["position"].to_list() == [0, 1, 2]
    third = run(prompts, save(tmp_path / "third", "selection", shuffled), size=2, **ADAPTIVE)
    assert tables.read(third, "selection")["position"].to_list() == [2, 2]


def test_a_selection_says_why_and_what_it_went_by(tmp_path: Path) -> None:
    accs = dict(zip(ids(6), [0.0, 0.25, 0.5, 1.0, 0.5, 0.5], strict=True))
    prompts, before = pool(tmp_path, accs), asked(tmp_path, ids(4))
    config = {**ADAPTIVE, "explore": 0.3, "size": 6, "step": 11, "half_life": 10.0, "n": 4}
    found = tables.read(run(prompts, before, judged(before, accs), **config), "selection")
    right = np.array([0.0, 1.0, 2.0, 4.0, 0.0, 0.0])  # of 8 responses each, a half-life ago
    wrong = np.array([4.0, 3.0, 2.0, 0.0, 0.0, 0.0])
    a, b, evidence = beliefs.posterior(right, wrong, np.zeros(6, np.int64))
    wanted = {
        prompt_id: pytest.approx(values)
        for prompt_id, *values in zip(
            ids(6), beliefs.expected_informative(a, b, 4), a / (a + b), evidence, strict=True
        )
    }
    assert set(found["why"]) == {"explore", "informative", "unseen"}
    for prompt_id, *values, why in found.select(
        "prompt_id", "weight", "pass_rate", "evidence", "why"
    ).iter_rows():
        assert values == wanted[prompt_id]
        assert why in ("explore", "informative" if prompt_id in ids(4) else "unseen")


def test_a_shuffle_expects_nothing(tmp_path: Path) -> None:
    found = tables.read(run(pool(tmp_path, ids(2)), size=2), "selection")
    assert (
        found.select("weight", "pass_rate", "evidence", "why").rows()
        == [(1.0, None, None, "shuffle")] * 2
    )


def test_the_counts_of_a_round_say_why_its_prompts_were_chosen_and_where_the_shuffle_is(
    tmp_path: Path,
) -> None:
    prompts, before = pool(tmp_path, ids(4)), asked(tmp_path, ids(1))
    found = select.run(
        prompts=prompts,
        previous=before,
        groups=judged(before, {"p00": 0.5}),
        out=fresh(tmp_path),
        config=Config(size=4, step=2, **ADAPTIVE),
        machine=CPU,
    )
    wanted = {"selected": 4, "epoch": 0, "position": 1, "why/informative": 1, "why/unseen": 3}
    assert found == wanted


@pytest.mark.parametrize(
    "config",
    [ADAPTIVE, ADAPTIVE | {"draw": "thompson"}, WEIGHTED],
    ids=["greedy", "thompson", "weighted"],
)
def test_a_choice_depends_on_what_it_was_given_and_not_on_the_order_of_the_file(
    tmp_path: Path, config: dict[str, object]
) -> None:
    accs = {prompt_id: i / 11 for i, prompt_id in enumerate(ids(12))}
    before = asked(tmp_path, ids(6))
    groups = judged(before, accs)
    forwards, backwards = (
        pool(tmp_path, order, weight=accs) for order in (ids(12), reversed(ids(12)))
    )
    config = {**config, "explore": 0.3, "size": 5, "step": 2}
    one, same, other = (
        {
            table: (out / table / "part-00000.parquet").read_bytes()
            for table in ("selection", "beliefs")
        }
        for out in (
            run(prompts, before, groups, **config) for prompts in (forwards, forwards, backwards)
        )
    )
    assert one == same == other


@pytest.mark.parametrize(
    "config", [ADAPTIVE | {"draw": "thompson"}, WEIGHTED], ids=["thompson", "weighted"]
)
def test_another_seed_step_or_round_draws_otherwise(
    tmp_path: Path, config: dict[str, object]
) -> None:
    prompts = pool(tmp_path, ids(20), weight=dict.fromkeys(ids(20), 1))
    first, *others = (
        drawn(run(prompts, size=10, **config, **change))
        for change in ({}, {"seed": 1}, {"step": 2}, {"round": 1})
    )
    for other in others:
        assert other != first


def test_thompson_also_asks_what_greedy_would_not(tmp_path: Path) -> None:
    accs = dict.fromkeys(ids(8), 0.5) | dict.fromkeys(ids(16)[8:], 0.25)
    prompts, before = pool(tmp_path, accs), asked(tmp_path, accs)
    groups = judged(before, accs)
    found = {
        draw: Counter(
            accs[prompt_id]
            for seed in range(5)
            for prompt_id in drawn(
                run(prompts, before, groups, size=4, step=2, seed=seed, draw=draw, **ADAPTIVE)
            )
        )
        for draw in ("greedy", "thompson")
    }
    assert found["greedy"] == {0.5: 20}
    assert 0 < found["thompson"][0.25] < found["thompson"][0.5]


def test_prompts_are_drawn_in_proportion_to_their_weights(tmp_path: Path) -> None:
    weights = {"a": 1, "b": 2.5, "c": 6.5}
    prompts = pool(tmp_path, weights, weight=weights)
    rounds = pl.concat(draws(prompts, 1000, size=1, **WEIGHTED))
    counts = Counter(rounds["prompt_id"])
    for prompt_id, weight in weights.items():
        assert counts[prompt_id] / 1000 == pytest.approx(weight / 10, abs=0.05)
    assert dict(rounds.select("prompt_id", "weight").iter_rows()) == weights
    assert set(rounds["why"]) == {"weighted"}


def test_a_prompt_of_weight_zero_is_never_chosen(tmp_path: Path) -> None:
    weights = {"a": 0, "b": 1e-6, "c": 3}
    prompts = pool(tmp_path, weights, weight=weights)
    for found in draws(prompts, 50, size=2, **WEIGHTED):
        assert set(found["prompt_id"]) == {"b", "c"}
    for found in draws(prompts, 10, size=4, **WEIGHTED):
        assert set(found["prompt_id"]) == {"b", "c"}


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1, -1], r"meta\.weight is a weight: expected numbers ≥ 0"),
        ([0, 0], r"meta\.weight is a weight: .* not all 0"),
        ([1, math.inf], r"meta\.weight of prompt 'p01' is inf, expected a number"),
        ([1, math.nan], r"meta\.weight of prompt 'p01' is nan, expected a number"),
        ([1, "2"], r"meta\.weight of prompt 'p01' is '2', expected a number"),
        ([1, True], r"meta\.weight of prompt 'p01' is True, expected a number"),
    ],
)
def test_impossible_weights_are_refused(tmp_path: Path, weights: list[object], match: str) -> None:
    prompts = pool(tmp_path, ids(2), weight=dict(zip(ids(2), weights, strict=True)))
    with pytest.raises(InputError, match=f"prompts0: {match}"):
        run(prompts, **WEIGHTED)


def test_a_prompt_without_a_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts0: meta of prompt 'p00' has no 'weight'"):
        run(pool(tmp_path, ids(2)), **WEIGHTED)


def test_a_curriculum_moves_from_its_start_to_its_end_and_stays_there(tmp_path: Path) -> None:
    levels = {f"p{level:02d}": level for level in range(21)}
    prompts = pool(tmp_path, levels, level=levels)
    config = {"policy": "weighted", "explore": 0.0, "size": 3, "curriculum": CURRICULUM}
    for step, target in ((0, 2), (1, 2), (3, 10), (5, 18), (50, 18)):
        rounds = pl.concat(draws(prompts, 40, step=step, **config))
        far = [abs(levels[prompt_id] - target) for prompt_id in rounds["prompt_id"]]
        assert np.mean([levels[prompt_id] for prompt_id in rounds["prompt_id"]]) == pytest.approx(
            target, abs=0.5
        )
        assert 0 < np.mean(far) < 1.5  # near it, and not the nearest only


def test_a_curriculum_of_one_step_is_at_its_start(tmp_path: Path) -> None:
    levels = {"low": 2, "high": 18}
    prompts = pool(tmp_path, levels, level=levels)
    found = run(
        prompts, size=1, policy="weighted", explore=0.0, curriculum=CURRICULUM | {"steps": 1}
    )
    assert drawn(found) == ["low"]


def test_a_curriculum_weighs_by_a_normal_curve_around_the_target(tmp_path: Path) -> None:
    levels = {"a": 102, "b": 104, "c": 106}  # however far all of them are
    prompts = pool(tmp_path, levels, level=levels)
    curriculum = {**CURRICULUM, "start": 102, "width": 2.0}
    found = run(prompts, size=3, policy="weighted", explore=0.0, curriculum=curriculum)
    weights = dict(tables.read(found, "selection").select("prompt_id", "weight").iter_rows())
    assert weights == pytest.approx({"a": 1, "b": math.exp(-1 / 2), "c": math.exp(-4 / 2)})
    (far,) = draws(prompts, 1, size=1, policy="weighted", explore=0.0, curriculum=CURRICULUM)
    assert far["prompt_id"].to_list() == ["a"]
    assert far["weight"].to_list() == [1.0]


@pytest.mark.parametrize(
    "config",
    [
        {"policy": "weighted"},
        {"policy": "weighted", "weight_by": "weight", "curriculum": CURRICULUM},
        {"policy": "adaptive", "weight_by": "weight"},
        {"policy": "shuffle", "weight_by": "weight"},
        {"policy": "shuffle", "curriculum": CURRICULUM},
    ],
)
def test_weighted_and_only_it_has_weights_or_a_curriculum(config: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="needs weight_by or curriculum, one of them"):
        Config(**config)


@pytest.mark.parametrize("draw", ["greedy", "thompson"])
def test_a_resumed_run_chooses_what_an_undisturbed_one_would_have(
    tmp_path: Path, draw: str
) -> None:
    accs = {prompt_id: i / 9 for i, prompt_id in enumerate(ids(10))}
    prompts = pool(tmp_path / "run", accs)
    config = {"policy": "adaptive", "size": 3, "rest": 1, "explore": 0.2, "draw": draw}
    undisturbed = chain(prompts, accs, range(1, 7), **config)
    kept = shutil.copytree(undisturbed[2], tmp_path / "elsewhere" / "kept")
    resumed = chain(prompts, accs, range(4, 7), previous=kept, **config)
    for table in ("selection", "beliefs"):
        for one, other in zip(undisturbed[3:], resumed, strict=True):
            files = [out / table / "part-00000.parquet" for out in (one, other)]
            assert files[0].read_bytes() == files[1].read_bytes()
    assert tables.read(undisturbed[5], "beliefs")["right"].sum() > 0


def test_a_policy_that_does_not_weigh_takes_no_weights() -> None:
    for policy in ("shuffle", "adaptive"):
        with pytest.raises(ValidationError, match="weight_by or curriculum"):
            Config(
                policy=policy,
                weight_by="level",
                curriculum={"by": "level", "start": 1, "end": 2, "steps": 3},
            )
