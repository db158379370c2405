"""Dynamic sampling on raw accuracy: every group is kept, dropped or carried, by name."""

import json
import math
import random
import statistics
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import polars as pl
import pytest
from conftest import CPU, VECTORS, fresh, groups, save
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from pydantic import ValidationError

from stages import filter as stage
from stages import tables
from stages.errors import InputError
from stages.filter import Config

Round = tuple[pl.DataFrame, pl.DataFrame]
MIXED, RIGHT, WRONG = (1, 0), (1, 1), (0, 0)


class Outcome:
    """What a run wrote and returned."""

    def __init__(self, out: Path, metrics: dict[str, float]) -> None:
        self.out, self.metrics = out, metrics
        self.groups, self.batch, self.carried = (
            tables.read(out, table) for table in ("groups", "batch", "carried")
        )

    def decisions(self) -> dict[str, tuple[str, str | None]]:
        columns = self.groups.select("group_id", "decision", "reason")
        return {group: (decision, reason) for group, decision, reason in columns.iter_rows()}

    def of(self, decision: str) -> set[str]:
        return set(self.groups.filter(decision=decision)["group_id"])

    def digests(self) -> dict[str, str]:
        """Equal where every byte of the tables is."""
        return {
            table: sha256((self.out / table / "part-00000.parquet").read_bytes()).hexdigest()
            for table in ("groups", "batch", "carried")
        }


def run(
    parent: Path,
    *rounds: Round,
    carried: Path | None = None,
    shards: int = 1,
    **config: object,
) -> Outcome:
    out = fresh(parent)
    metrics = stage.run(
        rollouts=[save(fresh(parent), "rollouts", one, shards=shards) for one, _ in rounds],
        scores=[save_scores(fresh(parent), one, shards=shards) for _, one in rounds],
        carried=carried,
        out=out,
        config=Config(**config),
        machine=CPU,
    )
    return Outcome(out, metrics)


def save_scores(path: Path, scores: pl.DataFrame, *, shards: int = 1) -> Path:
    """`save` with the columns of the reward parts."""
    parts = [name for name in scores.columns if name.startswith("part_")]
    for shard in range(shards):
        tables.write(path, "scores", scores[shard::shards], shard=shard, more=parts)
    return path


def with_chrf(one: Round, parts: Sequence[float | None]) -> Round:
    """The same responses, with a reward part of that name."""
    rollouts, scores = one
    return rollouts, scores.with_columns(part_chrf=pl.Series(parts, dtype=pl.Float32))


def shaped(one: Round, penalties: Sequence[float]) -> Round:
    """The same accuracies, with the rewards of responses of unequal lengths."""
    rollouts, scores = one
    penalty = pl.Series(penalties, dtype=pl.Float32)
    return rollouts, scores.with_columns(penalty=penalty, reward=pl.col("acc") + penalty)


def case_lines(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (VECTORS / name).read_text().splitlines()]


# --- which groups teach something ---------------------------------------------------------------


def test_only_groups_of_right_and_wrong_are_kept(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(a=RIGHT, b=WRONG, c=MIXED))
    assert outcome.decisions() == {
        "a": ("dropped", "all_right"),
        "b": ("dropped", "all_wrong"),
        "c": ("kept", None),
    }
    assert outcome.batch["group_id"].to_list() == ["c", "c"]


def test_unequal_lengths_do_not_save_a_group_that_is_all_wrong_or_all_right(
    tmp_path: Path,
) -> None:
    penalties = [0, -0.5, -1, 0, -0.25, -0.125]
    outcome = run(tmp_path, shaped(groups(a=WRONG, b=RIGHT, c=MIXED), penalties))
    assert outcome.of("kept") == {"c"}
    a = outcome.groups.filter(group_id="a").row(0, named=True)
    assert a["reward_std"] > 0  # the shaped reward did differ


def test_grouping_goes_by_id_not_by_position(tmp_path: Path) -> None:
    lines = case_lines("interleaved_groups.jsonl")
    by_group: dict[str, list[float]] = {}
    for line in lines:
        by_group.setdefault(line["group_id"], []).append(line["acc"])
    rollouts, scores = groups(**by_group)
    order = [f"{line['group_id']}n{i // 2 % 2}" for i, line in enumerate(lines)]
    interleaved = pl.DataFrame({"response_id": order})
    rollouts = interleaved.join(rollouts, on="response_id", maintain_order="left")
    outcome = run(tmp_path, (rollouts, scores))
    assert outcome.of("kept") == {"P3", "P4"}
    assert outcome.of("dropped") == {"P1", "P2"}


def test_prompts_of_equal_text_stay_groups_of_their_own(tmp_path: Path) -> None:
    first, second, *_ = case_lines("prompts_dup.jsonl")
    assert first["prompt"] == second["prompt"]
    accs = {first["prompt_id"]: [1] * 4, second["prompt_id"]: [0] * 4}
    outcome = run(tmp_path, groups(**accs))
    assert outcome.decisions() == {"q1": ("dropped", "all_right"), "q2": ("dropped", "all_wrong")}


@pytest.mark.parametrize("case", case_lines("zero_variance.jsonl"), ids=lambda case: case["group"])
def test_equal_values_are_dropped_and_different_ones_kept_however_close(
    case: dict[str, list[float]], tmp_path: Path
) -> None:
    outcome = run(tmp_path, groups(g=case["metric"]))
    assert outcome.of("kept") == ({"g"} if case["keep"] else set())
    assert all(abs(advantage) < 3 for advantage in outcome.batch["advantage"])
    if "advantage" in case:  # float32 keeps 1.00001 - 1 to within 1 %
        assert outcome.batch["advantage"].to_list() == pytest.approx(case["advantage"], abs=1e-2)


def test_groups_of_one_are_too_small_and_lost_samples_are_counted(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(one=[1], two=[1, 0], three=[0, 1, 0], four=[1, 0, 0, 1]))
    assert outcome.decisions()["one"] == ("dropped", "too_small")
    assert outcome.of("kept") == {"two", "three", "four"}
    assert outcome.batch["advantage"].is_finite().all()
    assert outcome.metrics["reason/too_small"] == 1
    assert outcome.metrics["incomplete"] == 3


def test_unscored_responses_leave_the_baseline_and_have_no_advantage(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(g=[1, 0, None, None]))
    half = math.sqrt(0.5)
    assert outcome.batch["advantage"].to_list() == pytest.approx([half, -half, 0, 0], abs=1e-5)
    assert outcome.groups.select("n", "n_scored", "acc_mean").row(0) == (4, 2, 0.5)


def test_a_group_with_fewer_than_two_scored_responses_is_dropped(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(a=[None, None], b=[1, None], c=[0, None]))
    assert outcome.decisions() == {
        "a": ("dropped", "unscored"),
        "b": ("dropped", "too_small"),
        "c": ("dropped", "too_small"),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["acc", "reward"])
def test_a_score_that_is_no_number_counts_as_unscored(
    column: str, value: float, tmp_path: Path
) -> None:
    rollouts, scores = groups(a=[1, 1], b=[1, 0, 1])
    broken = pl.col("response_id").is_in(["an1", "bn2"])
    scores = scores.with_columns(pl.when(broken).then(value).otherwise(column).alias(column))
    outcome = run(tmp_path, (rollouts, scores))
    assert outcome.decisions() == {"a": ("dropped", "too_small"), "b": ("kept", None)}
    assert outcome.batch["acc"].to_list() == [1, 0, None]
    assert outcome.batch["reward"].to_list() == [1, 0, None]
    assert outcome.batch["advantage"].is_finite().all()


def test_without_dynamic_sampling_every_group_with_a_baseline_is_kept(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, groups(a=RIGHT, b=WRONG, c=MIXED, d=[1], e=[None] * 2), dynamic_sampling=False
    )
    assert outcome.of("kept") == {"a", "b", "c"}
    even = outcome.batch.filter(pl.col("group_id") != "c")["advantage"]
    assert even.to_list() == [0, 0, 0, 0]


@pytest.mark.parametrize("n", [2, 15, 16, 17, 64, 512])
def test_the_numbers_of_a_group_are_right_whatever_its_size(n: int, tmp_path: Path) -> None:
    accs = [float(i % 2) for i in range(n)]
    penalties = [-0.001 * (i % 7) for i in range(n)]
    one = run(tmp_path, shaped(groups(g=accs), penalties)).groups.row(0, named=True)
    rewards = [acc + penalty for acc, penalty in zip(accs, penalties, strict=True)]
    assert one["acc_mean"] == pytest.approx(statistics.fmean(accs))
    assert one["reward_mean"] == pytest.approx(statistics.fmean(rewards), abs=1e-7)
    assert one["reward_std"] == pytest.approx(statistics.stdev(rewards), abs=1e-7)


def test_advantages_are_centred_and_scaled_within_the_group(tmp_path: Path) -> None:
    one = shaped(groups(a=MIXED, b=[0, 0, 1]), [0, 0, -0.5, 0, 0])
    batch = run(tmp_path, one).batch
    assert batch["advantage"].to_list() == pytest.approx(
        # rewards 1, 0; then -0.5, 0, 1 with mean 1/6 and variance 7/12
        [0.7071, -0.7071, -0.8729, -0.2182, 1.0911],
        abs=1e-4,
    )
    centred = run(tmp_path, one, scale="none").batch["advantage"].to_list()
    assert centred == pytest.approx([0.5, -0.5, -2 / 3, -1 / 6, 5 / 6])


# --- decided on a reward part, or with a tolerance ----------------------------------------------


def test_a_reward_part_decides_in_the_place_of_acc(tmp_path: Path) -> None:
    one = with_chrf(groups(a=RIGHT, b=RIGHT, c=MIXED), [0.25, 0.5, 0.25, 0.75, 0.5, 0.5])
    outcome = run(tmp_path, one, metric="chrf", tolerance=0.25)
    assert outcome.decisions() == {
        "a": ("dropped", "all_equal"),  # exactly the tolerance
        "b": ("kept", None),
        "c": ("dropped", "all_equal"),
    }
    seen = outcome.groups.select("metric_min", "metric_max").rows()
    assert seen == [(0.25, 0.5), (0.25, 0.75), (0.5, 0.5)]


def test_a_part_that_is_all_zero_or_one_is_equal_not_wrong_or_right(tmp_path: Path) -> None:
    one = with_chrf(groups(a=MIXED, b=MIXED), [0, 0, 1, 1])
    outcome = run(tmp_path, one, metric="chrf", keep_all_right=1, keep_all_wrong=1)
    assert outcome.metrics["reason/all_equal"] == 2
    assert outcome.of("dropped") == {"a", "b"}


def test_acc_decides_unless_a_part_is_asked_for(tmp_path: Path) -> None:
    one = with_chrf(groups(a=RIGHT, b=MIXED), [0.25, 0.75, 0.5, 0.5])
    outcome = run(tmp_path, one)
    assert outcome.decisions() == {"a": ("dropped", "all_right"), "b": ("kept", None)}
    assert outcome.groups.select("metric_min", "metric_max").rows() == [(1, 1), (0, 1)]


def test_scores_without_the_part_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"part-00000\.parquet .*'part_chrf' .* is missing"):
        run(tmp_path, groups(a=MIXED), metric="chrf")


@pytest.mark.parametrize("value", [math.nan, None])
def test_a_part_that_is_no_number_counts_as_unscored(value: float | None, tmp_path: Path) -> None:
    accs = groups(a=MIXED, b=MIXED, c=[1, 0, 1])
    one = with_chrf(accs, [value, value, value, 0.5, 0.25, value, 0.75])
    outcome = run(tmp_path, one, metric="chrf")
    assert outcome.decisions() == {
        "a": ("dropped", "unscored"),
        "b": ("dropped", "too_small"),
        "c": ("kept", None),
    }
    assert outcome.batch["acc"].to_list() == [1, None, 1]
    assert outcome.groups["n_scored"].to_list() == [0, 1, 2]
    # what has no baseline says nothing of the others
    assert outcome.batch["advantage"].to_list() == [0, 0, 0]


@pytest.mark.parametrize("metric", ["reward", "penalty"])
def test_what_holds_the_overlong_penalty_may_not_decide(metric: str) -> None:
    with pytest.raises(ValidationError, match=f"{metric} holds the overlong penalty"):
        Config(metric=metric)


def test_graded_accuracies_within_the_tolerance_are_equal(tmp_path: Path) -> None:
    one = groups(near=[0.9, 1.0], far=[0.5, 1.0], right=RIGHT, wrong=WRONG)
    outcome = run(tmp_path, one, tolerance=0.2)
    assert outcome.decisions() == {
        "near": ("dropped", "all_equal"),
        "far": ("kept", None),
        "right": ("dropped", "all_right"),
        "wrong": ("dropped", "all_wrong"),
    }
    assert run(tmp_path, one).of("kept") == {"near", "far"}


def test_what_differs_by_exactly_the_tolerance_is_dropped(tmp_path: Path) -> None:
    one = groups(at=[0.5, 0.75], beyond=[0.5, 0.75 + 2**-20])
    outcome = run(tmp_path, one, tolerance=0.25)
    assert outcome.decisions() == {"at": ("dropped", "all_equal"), "beyond": ("kept", None)}


# --- a share that is kept although it teaches nothing -------------------------------------------


@pytest.mark.parametrize(("share", "every"), [(0, None), (0.25, 4), (0.5, 2), (1, 1)])
@pytest.mark.parametrize(("kind", "names"), [("all_right", "acdf"), ("all_wrong", "eghi")])
def test_every_kth_group_of_a_kind_is_kept_all_the_same(
    kind: str, names: str, share: float, every: int | None, tmp_path: Path
) -> None:
    accs = {name: RIGHT if name in "acdf" else WRONG for name in "abcdefghi"} | {"b": MIXED}
    one, config = groups(**accs), {f"keep_{kind}": share}
    outcome = run(tmp_path, one, **config)
    share_of_kind = set(names[every - 1 :: every]) if every else set()
    assert outcome.of("kept") == share_of_kind | {"b"}
    lost = {name for name, why in outcome.decisions().items() if why == ("dropped", kind)}
    assert lost == set(names) - share_of_kind
    even = outcome.batch.filter(pl.col("group_id") != "b")["advantage"]
    assert even.to_list() == [0] * 2 * len(share_of_kind)
    assert run(tmp_path, shuffled(one, seed=3), **config).digests() == outcome.digests()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.7, 0.95])
def test_a_share_that_no_float_holds_exactly_is_kept_to_within_one_group(
    share: float, tmp_path: Path
) -> None:
    accs = {f"g{i:03d}": RIGHT for i in range(300)}
    outcome = run(tmp_path, groups(**accs), keep_all_right=share, batch_groups=300)
    assert outcome.metrics["kept"] == pytest.approx(300 * share, abs=1)


# --- the batch, the surplus, and those that waited ----------------------------------------------


def test_the_surplus_is_carried_and_goes_first_next_time(tmp_path: Path) -> None:
    first = run(tmp_path, groups(s1g0=MIXED, s1g1=MIXED, s1g2=MIXED), batch_groups=2)
    assert first.of("kept") == {"s1g0", "s1g1"}
    assert first.decisions()["s1g2"] == ("carried", "surplus")
    assert first.carried["age"].to_list() == [0, 0]

    second = run(tmp_path, groups(s0g0=MIXED, s0g1=MIXED), carried=first.out, batch_groups=2)
    # what waited says nothing of how many of the sampled are informative
    assert (second.metrics["groups"], second.metrics["sampled"]) == (3, 2)
    assert second.of("kept") == {"s1g2", "s0g0"}
    ages = dict(second.batch.select("group_id", "age").iter_rows())
    assert ages == {"s1g2": 1, "s0g0": 0}
    assert second.of("carried") == {"s0g1"}


def test_a_carried_group_trains_once(tmp_path: Path) -> None:
    steps: list[Outcome] = []
    for step in range(4):
        names = {f"s{step}g{i}": MIXED for i in range(2 if step == 0 else 1)}
        before = steps[-1].out if steps else None
        steps.append(run(tmp_path, groups(**names), carried=before, batch_groups=1))
    trained = [group for step in steps for group in step.batch["group_id"].unique()]
    assert trained == ["s0g0", "s0g1", "s1g0", "s2g0"]


def test_a_group_that_waited_too_long_is_dropped_by_name(tmp_path: Path) -> None:
    first = run(tmp_path, groups(a=MIXED, b=MIXED), batch_groups=1, max_age=1)
    second = run(tmp_path, groups(), carried=first.out, batch_groups=1, max_age=0)
    assert second.decisions() == {"b": ("dropped", "stale")}
    assert second.batch.is_empty()


def test_surplus_that_would_be_too_old_when_its_turn_comes_is_dropped_at_once(
    tmp_path: Path,
) -> None:
    names = {f"s1g{i}": MIXED for i in range(5)}
    first = run(tmp_path, groups(**names), batch_groups=1, max_age=2)
    assert first.of("kept") == {"s1g0"}
    assert first.of("carried") == {"s1g1", "s1g2"}
    assert first.decisions()["s1g3"] == ("dropped", "surplus")

    second = run(tmp_path, groups(s2g0=MIXED), carried=first.out, batch_groups=1, max_age=2)
    assert second.of("kept") == {"s1g1"}
    assert second.of("carried") == {"s1g2", "s2g0"}
    third = run(tmp_path, groups(), carried=second.out, batch_groups=1, max_age=2)
    assert third.of("kept") == {"s1g2"}
    assert third.of("carried") == {"s2g0"}


def test_older_groups_go_before_younger_ones(tmp_path: Path) -> None:
    first = run(tmp_path, groups(x=MIXED, y=MIXED, z=MIXED), batch_groups=1, max_age=5)
    second = run(tmp_path, groups(a=MIXED), carried=first.out, batch_groups=1, max_age=5)
    third = run(tmp_path, groups(), carried=second.out, batch_groups=1, max_age=5)
    assert [outcome.of("kept") for outcome in (first, second, third)] == [{"x"}, {"y"}, {"z"}]
    assert third.groups.select("group_id", "age").rows() == [("z", 2), ("a", 1)]


def test_with_no_age_allowed_the_surplus_is_dropped_by_name(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(a=MIXED, b=MIXED), batch_groups=1, max_age=0)
    assert outcome.decisions()["b"] == ("dropped", "surplus")
    assert outcome.carried.is_empty()


def test_a_carried_group_keeps_the_policy_that_sampled_it(tmp_path: Path) -> None:
    first = run(tmp_path, groups(a=MIXED, b=MIXED), batch_groups=1)
    rollouts, scores = groups(c=MIXED)
    new = (rollouts.with_columns(policy=pl.lit("new")), scores)
    second = run(tmp_path, new, carried=first.out)
    assert dict(second.batch.select("group_id", "policy").iter_rows()) == {"b": "base", "c": "new"}


def test_what_was_carried_is_not_judged_again(tmp_path: Path) -> None:
    accs = groups(a=MIXED, b=WRONG, c=MIXED)
    first = run(tmp_path, accs, batch_groups=1, max_age=2, keep_all_wrong=1)
    assert first.of("carried") == {"b", "c"}
    one = with_chrf(groups(d=MIXED), [0.5, 0.5])  # the carried rows have no such column
    second = run(tmp_path, one, carried=first.out, metric="chrf", tolerance=1)
    assert second.decisions() == {
        "b": ("kept", None),
        "c": ("kept", None),
        "d": ("dropped", "all_equal"),
    }


def test_a_group_may_not_be_both_fresh_and_carried(tmp_path: Path) -> None:
    first = run(tmp_path, groups(a=MIXED, b=MIXED), batch_groups=1)
    with pytest.raises(InputError, match="'bn0'"):
        run(tmp_path, groups(b=MIXED), carried=first.out)


def test_the_metrics_account_for_every_group(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, groups(a=RIGHT, b=MIXED), groups(c=WRONG, d=MIXED, e=MIXED), batch_groups=2
    )
    assert outcome.metrics == {
        "groups": 5,
        "kept": 2,
        "dropped": 2,
        "carried": 1,
        "carried_in": 0,
        "short": 0,
        "sampled": 5,
        "sampled_informative": 3,
        "incomplete": 0,
        "reason/all_right": 1,
        "reason/all_wrong": 1,
        "reason/surplus": 1,
        "batch_rows": 4,
        "carried_rows": 2,
    }


def test_a_short_batch_says_how_many_groups_it_lacks(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(a=RIGHT, b=MIXED), batch_groups=4)
    assert outcome.metrics["short"] == 3


def test_a_batch_that_is_not_full_is_carried_whole_if_asked(tmp_path: Path) -> None:
    one = groups(a=RIGHT, b=MIXED, c=[1, 0, None])
    outcome = run(tmp_path, one, batch_groups=4, on_short="carry")
    assert outcome.decisions() == {
        "a": ("dropped", "all_right"),
        "b": ("carried", "short"),
        "c": ("carried", "short"),
    }
    assert outcome.batch.is_empty()
    assert outcome.carried["response_id"].to_list() == ["bn0", "bn1", "cn0", "cn1", "cn2"]
    metrics = outcome.metrics
    assert (metrics["kept"], metrics["carried"], metrics["short"]) == (0, 2, 2)
    assert metrics["reason/short"] == metrics["sampled_informative"] == 2


def test_a_full_batch_is_kept_whatever_is_asked_of_a_short_one(tmp_path: Path) -> None:
    one = groups(a=MIXED, b=RIGHT, c=MIXED, d=MIXED)
    carry, keep = (run(tmp_path, one, batch_groups=2, on_short=do) for do in ("carry", "keep"))
    assert carry.of("kept") == {"a", "c"}
    assert carry.decisions()["d"] == ("carried", "surplus")
    assert carry.digests() == keep.digests()
    assert run(tmp_path, one, batch_groups=3, on_short="carry").of("kept") == {"a", "c", "d"}


def test_only_steps_that_trained_make_a_waiting_group_older(tmp_path: Path) -> None:
    config = {"batch_groups": 4, "max_age": 1, "on_short": "carry"}
    step = run(tmp_path, groups(a=MIXED), **config)
    for name in ("b", "c"):  # short again
        step = run(tmp_path, groups(**{name: MIXED}), carried=step.out, **config)
    assert step.batch.is_empty()
    assert step.groups.select("group_id", "age").rows() == [("a", 0), ("b", 0), ("c", 0)]

    trained = run(tmp_path, groups(d=MIXED, e=MIXED), carried=step.out, **config)
    assert trained.of("kept") == {"a", "b", "c", "d"}
    assert trained.batch["age"].to_list() == [0] * 8
    after = run(tmp_path, groups(f=MIXED), carried=trained.out, **config)
    assert after.groups.select("group_id", "age").rows() == [("e", 1), ("f", 0)]


def test_a_short_batch_carries_even_a_group_that_may_grow_no_older(tmp_path: Path) -> None:
    config = {"batch_groups": 3, "on_short": "carry"}
    trained = run(tmp_path, groups(a=MIXED, b=MIXED), batch_groups=1, max_age=1)
    short = run(tmp_path, groups(c=MIXED), carried=trained.out, max_age=1, **config)
    assert short.decisions() == {"b": ("carried", "short"), "c": ("carried", "short")}
    full = run(tmp_path, groups(d=MIXED), carried=short.out, max_age=1, **config)
    assert full.of("kept") == {"b", "c", "d"}
    assert full.groups["age"].to_list() == [1, 0, 0]

    strict = run(tmp_path, groups(c=MIXED), carried=trained.out, max_age=0, **config)
    assert strict.decisions() == {"b": ("dropped", "stale"), "c": ("carried", "short")}


def test_what_came_in_is_counted_apart_from_what_was_sampled(tmp_path: Path) -> None:
    first = run(tmp_path, groups(a=MIXED, b=MIXED, c=MIXED), batch_groups=1, max_age=2)
    assert first.metrics["carried_in"] == 0
    accs = groups(d=RIGHT, e=MIXED, f=[0, 1, 1])
    metrics = run(tmp_path, accs, carried=first.out, batch_groups=3).metrics
    assert (metrics["groups"], metrics["carried_in"], metrics["sampled"]) == (5, 2, 3)
    assert (metrics["kept"], metrics["dropped"], metrics["carried"]) == (3, 1, 1)
    assert (metrics["batch_rows"], metrics["carried_rows"]) == (6, 3)


def test_accounts_that_do_not_close_are_a_crash(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(a=RIGHT, b=MIXED, c=MIXED), batch_groups=1)
    frame, found = outcome.groups, outcome.metrics
    stage._check_accounts(frame, found, candidates=6)
    with pytest.raises(RuntimeError, match=r"accounts .* responses of all groups: 6 of 7"):
        stage._check_accounts(frame, found, candidates=7)
    for name in ("batch_rows", "carried_rows", "groups"):
        with pytest.raises(RuntimeError, match="accounts"):
            stage._check_accounts(frame, found | {name: 9}, candidates=6)


def test_an_empty_batch_keeps_its_schema(tmp_path: Path) -> None:
    outcome = run(tmp_path, groups(a=RIGHT))
    assert outcome.batch.is_empty()
    assert outcome.batch.schema == tables.polars_schema("batch")
    assert outcome.carried.schema == tables.polars_schema("carried")


# --- order and conservation ---------------------------------------------------------------------

group_values = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=5)
any_groups = st.lists(group_values, min_size=1, max_size=10).map(
    lambda many: {f"g{i}": values for i, values in enumerate(many)}
)


def with_uneven_rewards(one: Round) -> Round:
    """Rewards whose sums depend on the order of adding in the last bit."""
    return shaped(one, [-0.1 * (i % 7) for i in range(len(one[0]))])


def shuffled(one: Round, seed: int) -> Round:
    rollouts, scores = one
    return (
        rollouts.sample(fraction=1, shuffle=True, seed=seed),
        scores.sample(fraction=1, shuffle=True, seed=seed + 1),
    )


def a_step(parent: Path) -> tuple[Path, list[Round]]:
    """Where some groups wait, and two rounds of 120 more; all as the stages write them, by id."""
    draw = random.Random(9)
    kinds = ([0, 1, None], [0, 1], [1], [0, None])

    def some(prefix: str, count: int) -> Round:
        values = (draw.choices(draw.choice(kinds), k=8) for _ in range(count))
        accs = {f"{prefix}g{i:03d}": group for i, group in enumerate(values)}
        return with_uneven_rewards(groups(**accs))

    before = run(parent, some("s1", 30), batch_groups=7)
    return before.out, [some("s2r0", 60), some("s2r1", 60)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_order_of_rows_and_shards_changes_nothing(seed: int, tmp_path: Path) -> None:
    before, rounds = a_step(tmp_path)
    plain = run(tmp_path, *rounds, carried=before, batch_groups=40)
    assert plain.metrics["carried_in"] > 0
    assert plain.metrics["carried"] > 0
    waiting = tables.read(before, "carried").sample(fraction=1, shuffle=True, seed=seed)
    other = run(
        tmp_path,
        *(shuffled(one, seed) for one in rounds[::-1]),
        carried=save(fresh(tmp_path), "carried", waiting),
        shards=seed + 2,
        batch_groups=40,
    )
    assert other.digests() == plain.digests()
    assert other.metrics == plain.metrics


def test_rows_in_order_need_no_join_and_end_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Mock(wraps=stage.responses_of)
    monkeypatch.setattr(stage, "responses_of", joined)
    before, rounds = a_step(tmp_path)
    quick = run(tmp_path, *rounds, carried=before, batch_groups=40)
    assert joined.call_count == 0
    assert quick.metrics["carried_in"] > 0
    astray = [(rollouts, shuffled((rollouts, scores), 5)[1]) for rollouts, scores in rounds]
    safe = run(tmp_path, *astray, carried=before, batch_groups=40)
    assert joined.call_count == 1
    assert safe.digests() == quick.digests()
    assert safe.metrics == quick.metrics


def test_a_score_is_its_response_s_whatever_stands_beside_it(tmp_path: Path) -> None:
    rollouts, scores = groups(a=RIGHT, b=MIXED)
    scores = scores.with_columns(reward=pl.Series([1, 0.5, 0.75, 0], dtype=pl.Float32))
    straight = run(tmp_path, (rollouts, scores))
    astray = run(tmp_path, (rollouts, scores[[0, 2, 1, 3]]))  # an1 and bn0 are both right
    assert astray.batch["reward"].to_list() == [0.75, 0]
    assert astray.digests() == straight.digests()


@pytest.mark.parametrize("seed", [None, 4])
def test_a_batch_in_many_pieces_is_the_same_batch(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accs = {f"g{i}": ([0, 1, 1, None, 1], RIGHT, [0, 0, 1])[i % 3] for i in range(10)}
    one = with_uneven_rewards(groups(**accs))
    one = one if seed is None else shuffled(one, seed)
    whole = run(tmp_path, one, batch_groups=4)
    monkeypatch.setattr(stage, "PIECE", 3)
    pieces = run(tmp_path, one, batch_groups=4)
    assert_frame_equal(pieces.batch, whole.batch)
    assert len(pieces.batch) > 3
    assert pieces.digests() == whole.digests()


@settings(max_examples=15)
@given(accs=any_groups, batch_groups=st.integers(1, 6), cut=st.integers(0, 10))
def test_every_group_is_accounted_for_and_the_batch_holds_the_kept_ones_whole(
    accs: dict[str, list[float | None]], batch_groups: int, cut: int
) -> None:
    names = list(accs)
    rounds = [groups(**{name: accs[name] for name in part}) for part in (names[:cut], names[cut:])]
    with TemporaryDirectory() as parent:
        outcome = run(Path(parent), *rounds, batch_groups=batch_groups)
        turned = run(Path(parent), *rounds[::-1], batch_groups=batch_groups)
    assert_frame_equal(outcome.groups, turned.groups)
    assert_frame_equal(outcome.batch, turned.batch)
    kept, dropped, carried = (outcome.of(name) for name in ("kept", "dropped", "carried"))
    assert len(kept) + len(dropped) + len(carried) == len(accs)
    assert kept | dropped | carried == set(accs)
    assert len(kept) <= batch_groups
    assert len(outcome.batch) == sum(len(accs[name]) for name in kept)
    assert len(outcome.carried) == sum(len(accs[name]) for name in carried)
    assert outcome.groups["reason"].is_null().to_list() == [
        decision == "kept" for decision in outcome.groups["decision"]
    ]
    assert outcome.batch["advantage"].is_finite().all()
    for name in kept:
        assert {0, 1} <= set(accs[name])


# --- rows that do not fit together --------------------------------------------------------------


def test_a_missing_score_is_named(tmp_path: Path) -> None:
    rollouts, scores = groups(a=MIXED)
    with pytest.raises(InputError, match=r"1 responses of the rollouts .* 'an1'"):
        run(tmp_path, (rollouts, scores[:1]))


def test_a_score_without_its_response_is_named(tmp_path: Path) -> None:
    rollouts, scores = groups(a=MIXED)
    with pytest.raises(InputError, match=r"1 responses of the scores .* 'an0'"):
        run(tmp_path, (rollouts[1:], scores))


def test_as_many_scores_of_other_responses_are_refused(tmp_path: Path) -> None:
    (rollouts, _), (_, scores) = groups(a=MIXED), groups(b=MIXED)
    with pytest.raises(InputError, match=r"2 responses of the rollouts .* 'an0'"):
        run(tmp_path, (rollouts, scores))


def test_a_response_that_occurs_twice_is_named(tmp_path: Path) -> None:
    one = groups(a=MIXED)
    with pytest.raises(InputError, match=r"'an.' occurs more than once in the rollouts"):
        run(tmp_path, one, one)
    rollouts, scores = one
    with pytest.raises(InputError, match="'an1' occurs more than once in the scores"):
        run(tmp_path, (rollouts, pl.concat([scores, scores[1:]])))


@pytest.mark.parametrize("config", [{"batch_groups": 0}, {"max_age": -1}, {"scale": "mad"}])
def test_impossible_settings_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(config))):
        Config(**config)
