"""Two scorings of the same rollouts side by side: verdicts, groups, advantages, rewards."""

import json
from pathlib import Path

import polars as pl
import pytest
from command import dapo
from conftest import CPU, fresh, groups, rows, save

from pipeline import artifacts, compare
from stages import filter, tables
from stages.errors import InputError

Row = dict[str, object]


def scores(*given: Row) -> pl.LazyFrame:
    return rows("scores", *given).lazy()


def scored(**rewards: list[float | None]) -> pl.LazyFrame:
    """What the filter sees of groups whose responses have these rewards."""
    keys = [
        {"response_id": f"{group}{i}", "group_id": group, "reward": reward}
        for group, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    schema = {"response_id": pl.String, "group_id": pl.String, "reward": pl.Float32}
    return pl.LazyFrame(keys, schema=schema)


def candidates(parent: Path, **accs: list[float | None]) -> pl.LazyFrame:
    rollouts, judged = groups(**accs)
    at = save(fresh(parent), "rollouts", rollouts), save(fresh(parent), "scores", judged)
    return filter.responses_of([at[0]], [at[1]], None, None)


def saved(parent: Path, rollouts: pl.DataFrame, a: pl.DataFrame, b: pl.DataFrame) -> list[Path]:
    """The directories of rollouts and of two scorings."""
    frames = {"rollouts": rollouts, "a": a, "b": b}
    return [
        save(parent / name, "rollouts" if name == "rollouts" else "scores", frame)
        for name, frame in frames.items()
    ]


# --- verdicts ------------------------------------------------------------------------------------


def test_pairs_of_verdicts_are_counted_by_id_not_by_position() -> None:
    verdicts = {"r0": ("right", "wrong"), "r1": ("wrong", "wrong"), "r2": ("right", "wrong")}
    a = scores(*({"response_id": r, "verdict": v} for r, (v, _) in verdicts.items()))
    b = scores(*({"response_id": r, "verdict": v} for r, (_, v) in verdicts.items()))
    flips = compare.verdict_flips(a, b.reverse())
    assert flips.select("verdict_a", "verdict_b", "responses").rows() == [
        ("right", "wrong", 2),
        ("wrong", "wrong", 1),
    ]


def test_an_acc_that_changes_under_the_same_verdict_is_counted() -> None:
    a = scores(*({"response_id": r, "acc": acc} for r, acc in (("r0", 1), ("r1", 1), ("r2", None))))
    b = scores(*({"response_id": r, "acc": acc} for r, acc in (("r0", 1), ("r1", 0.5), ("r2", 0))))
    (pair,) = compare.verdict_flips(a, b).to_dicts()
    assert (pair["responses"], pair["other_acc"]) == (3, 2)


def test_examples_are_a_few_of_each_pair_with_the_end_of_the_text() -> None:
    ids = [f"r{i}" for i in range(9)]
    a = scores(*({"response_id": r, "extracted": "6"} for r in ids))
    lost = {"acc": 0.0, "verdict": "truncated", "extracted": None}
    other = {"acc": 0.0, "verdict": "wrong", "extracted": "7"}
    b = scores(*({"response_id": r, **(other if r == "r7" else lost)} for r in ids if r != "r8"))
    b = pl.concat([b, scores({"response_id": "r8", "extracted": "six"})])
    texts = ({"response_id": r, "text": f"{r} " + "x" * 99 + f" {r}"} for r in ids)
    few = compare.examples(a, b, rollouts=rows("rollouts", *texts).lazy())
    assert few["response_id"].to_list() == ["r0", "r1", "r2", "r7"]  # r8: another text, equal acc
    last = few.row(3, named=True)
    assert (last["extracted_a"], last["extracted_b"]) == ("6", "7")
    assert last["text_end"].endswith("x r7") and not last["text_end"].startswith("r7")


# --- groups --------------------------------------------------------------------------------------


def test_a_group_that_flips_is_listed_with_both_reasons(tmp_path: Path) -> None:
    a = candidates(tmp_path, p=[0, 0], q=[1, 0], r=[1, 0], s=[0, 0], t=[1, None])
    b = candidates(tmp_path, p=[0, 0.5], q=[1, 1], r=[0, 1], s=[1, 1], t=[1, 0])
    flips = compare.group_flips(compare.decisions(a, b, config=filter.Config()))
    whole = ("group_id", "decision_a", "reason_a", "acc_a", "decision_b", "reason_b", "acc_b")
    assert flips.select(whole).rows() == [
        ("p", "dropped", "all_wrong", 0, "kept", None, 0.25),
        ("q", "kept", None, 0.5, "dropped", "all_right", 1),
        ("t", "dropped", "too_small", 1, "kept", None, 0.5),
    ]


def test_a_group_that_goes_for_want_of_room_says_so(tmp_path: Path) -> None:
    a, b = candidates(tmp_path, p=[0, 0], q=[1, 0]), candidates(tmp_path, p=[0, 1], q=[1, 0])
    config = filter.Config(batch_groups=1, max_age=0)
    _, q = compare.group_flips(compare.decisions(a, b, config=config)).to_dicts()
    assert (q["decision_a"], q["decision_b"], q["reason_b"]) == ("kept", "dropped", "surplus")
    roomy = compare.decisions(a, b, config=filter.Config(batch_groups=2))
    assert compare.group_flips(roomy)["group_id"].to_list() == ["p"]


# --- advantages ----------------------------------------------------------------------------------


def signs(a: pl.LazyFrame, b: pl.LazyFrame, *kept: str) -> dict[tuple[int, int], tuple[int, float]]:
    table = pl.DataFrame({"group_id": kept}, schema={"group_id": pl.String})
    flips = compare.sign_flips(a, b, kept=table, scale="std")
    return {(x, y): (count, share) for x, y, count, share in flips.iter_rows()}


def test_signs_are_counted_in_kept_groups_only() -> None:
    a = scored(p=[1, -1, -1, -1], q=[1, -1], r=[1, -1])
    b = scored(p=[-1, 1, -1, -1], q=[1, -1], r=[-1, 1])
    assert signs(a, b.reverse(), "p", "q") == {
        (-1, -1): (3, 0.5),
        (-1, 1): (1, pytest.approx(1 / 6)),
        (1, -1): (1, pytest.approx(1 / 6)),
        (1, 1): (1, pytest.approx(1 / 6)),
    }
    assert signs(a, b) == {}


def test_what_float32_leaves_of_a_zero_has_no_sign() -> None:
    a, b = scored(p=[-1.1, -0.6, -0.1, None]), scored(p=[-1, 0, 1, None])
    assert set(signs(a, b, "p")) == {(-1, -1), (0, 0), (1, 1)}


# --- rewards by length ---------------------------------------------------------------------------


def by_length(lengths: list[int], a: list[float | None], b: list[float | None]) -> pl.DataFrame:
    ids = [{"response_id": f"r{i}"} for i in range(len(lengths))]
    frames = [
        scores(*({**key, "reward": x} for key, x in zip(ids, rewards, strict=True)))
        for rewards in (a, b)
    ]
    rollouts = rows(
        "rollouts", *({**key, "length": n} for key, n in zip(ids, lengths, strict=True))
    ).lazy()
    return compare.reward_by_length(*frames, rollouts=rollouts.reverse())


def test_the_buckets_hold_about_equally_many_responses() -> None:
    rewards = [float(i) for i in range(10)]
    buckets = by_length(list(range(1, 11)), rewards, [2 * x for x in rewards])
    assert buckets["responses"].to_list() == [2] * 5
    assert buckets.select("shortest", "longest").rows() == [(n, n + 1) for n in (1, 3, 5, 7, 9)]
    assert (
        buckets["reward_a"].to_list()
        == buckets["difference"].to_list()
        == [0.5, 2.5, 4.5, 6.5, 8.5]
    )


def test_equal_lengths_share_a_bucket_however_many_they_are() -> None:
    buckets = by_length([24] * 7 + [3, 5, 24], [0.0] * 10, [1.0] * 10)
    assert buckets.select("shortest", "longest", "responses").rows() == [(3, 5, 2), (24, 24, 8)]


def test_a_response_that_one_scoring_could_not_score_is_in_no_mean() -> None:
    (bucket,) = by_length([4, 4, 4], [1, None, -1], [0.5, 9, float("nan")]).to_dicts()
    assert (bucket["responses"], bucket["scored"]) == (3, 1)
    assert (bucket["reward_a"], bucket["reward_b"], bucket["difference"]) == (1, 0.5, -0.5)


# --- what belongs together -----------------------------------------------------------------------


def test_tables_of_anybody_are_compared_over_given_rollouts(tmp_path: Path) -> None:
    rollouts, a = groups(p=[0, 0], q=[1, 0])
    _, b = groups(p=[0, 1], q=[0, 1])
    *_, of_b = places = saved(tmp_path, rollouts, a, b[::-1])
    sampled, of_a = places[:2]
    made = compare.compare(of_a / "scores", of_b, rollouts=[sampled])
    assert (made.settings, made.filter_from) == (None, "defaults")
    assert made.group_flips["group_id"].to_list() == ["p"]
    assert made.flipped == {"responses": 2, "share": 1.0}  # of q, which is kept both times


@pytest.mark.parametrize("lost_from", ["a", "b", "rollouts"])
def test_a_response_that_is_not_everywhere_is_named_with_its_file(
    tmp_path: Path, lost_from: str
) -> None:
    rollouts, judged = groups(p=[0, 1], q=[1, 0])
    frames = {"rollouts": rollouts, "a": judged, "b": judged}
    frames[lost_from] = frames[lost_from][:-1]
    sampled, a, b = saved(tmp_path, *frames.values())
    blamed = b if lost_from == "b" else a
    with pytest.raises(InputError, match=f"^{blamed}: 1 responses of the .* first 'qn1'"):
        compare.compare(a, b, rollouts=[sampled])


def test_a_table_without_a_record_needs_rollouts(tmp_path: Path) -> None:
    rollouts, judged = groups(p=[0, 1])
    _, a, b = saved(tmp_path, rollouts, judged, judged)
    with pytest.raises(InputError, match=r"/a: no record .* give --rollouts"):
        compare.compare(a, b)
    with pytest.raises(InputError, match="nowhere does not exist"):
        compare.compare(a, tmp_path / "nowhere")


def test_another_stages_setting_is_refused(tmp_path: Path) -> None:
    rollouts, judged = groups(p=[0, 1])
    sampled, a, b = saved(tmp_path, rollouts, judged, judged)
    for override in ("score.wrong=0", "filter=off"):
        with pytest.raises(InputError, match=f"{override} is no setting of the filter"):
            compare.compare(a, b, rollouts=[sampled], overrides=[override])
    with pytest.raises(InputError, match=r"did you mean 'filter.batch_groups'"):
        compare.compare(a, b, rollouts=[sampled], overrides=["filter.batchgroups=1"])


# --- a real run ----------------------------------------------------------------------------------


def round_of(data: Path, step: int = 1) -> Path:
    return data / "runs" / "small" / f"step_{step:04d}" / "round_0"


def test_scores_of_other_rollouts_are_refused_though_the_ids_be_equal(
    data: Path, tmp_path: Path
) -> None:
    a = artifacts.load(round_of(data) / "score")
    with pytest.raises(InputError, match="made from other rollouts"):
        compare.compare(a.path, round_of(data, 2) / "score")
    with pytest.raises(InputError, match="was made by rollout, not by score"):
        compare.compare(a.path, round_of(data) / "rollout")
    rollout = artifacts.load(round_of(data) / "rollout")
    with artifacts.draft(rollout.path) as building:
        for table in ("rollouts", "skipped"):
            frame = tables.read(rollout.path, table)
            tables.write(building, table, frame.with_columns(pl.col("^text$") + "!"))
        artifacts.publish(
            building,
            rollout.path,
            recipe=rollout.recipe,
            metrics={},
            started=0,
            replace_existing=True,
        )
    with pytest.raises(InputError, match=r"/rollout is not what .*/score was made from"):
        compare.compare(a.path, a.path)
    assert compare.compare(a.path, a.path, rollouts=[rollout.path]).settings == ""


def test_a_rerun_is_compared_with_the_original_in_one_command(data: Path) -> None:
    rerun = ("rerun", "--run", "small", "--step", "1", "--stage", "score")
    made = dapo(*rerun, "score.overlong_factor=4", "score.wrong=0", data=data)
    assert made.returncode == 0, made.stderr
    a, b = round_of(data) / "score", round_of(data) / "score.variant-1"
    before = sorted(data.rglob("*"))
    shown = dapo("compare", a, b, data=data)
    assert shown.returncode == 0, shown.stderr
    assert "config.overlong_factor: 1.0 → 4.0; config.wrong: -1.0 → 0.0" in shown.stdout
    assert "of these rollouts alone, none carried" in shown.stdout
    asked = dapo("compare", a, b, "--json", "filter.dynamic_sampling=true", data=data)
    found = json.loads(asked.stdout)
    assert found["filter_from"] == str(data / "runs" / "small" / "config.yaml")
    # those of the run, one of them overridden
    assert (found["filter"]["batch_groups"], found["filter"]["dynamic_sampling"]) == (4, True)
    assert found["rollouts"] == [str(round_of(data) / "rollout")]
    assert sum(row["responses"] for row in found["verdict_flips"]) == 24
    assert found["examples"] == found["group_flips"] == []  # acc is what it was
    rewards = found["reward_by_length"]
    means = [tables.read(path, "scores")["reward"].cast(pl.Float64).mean() for path in (a, b)]
    for mean, column in zip(means, ("reward_a", "reward_b"), strict=True):
        of_all = sum(row[column] * row["scored"] for row in rewards) / 24
        assert of_all == pytest.approx(mean)
    assert sorted(data.rglob("*")) == before


def test_it_says_what_the_filter_would_have_done(data: Path, tmp_path: Path) -> None:
    """The reference: the stage itself, run on both scorings."""
    rollouts = round_of(data) / "rollout"
    real = tables.read(round_of(data) / "score", "scores").sort("response_id")
    a, b = (
        save(
            fresh(tmp_path, "scores"),
            "scores",
            real.with_columns(acc=pl.Series(acc, dtype=pl.Float32)).with_columns(reward="acc"),
        )
        for acc in ([0] * 8 + [1, 0, 0, 0] * 4, [1, 0, 0] * 8)
    )
    batches = []
    for judged in (a, b):
        out = fresh(tmp_path)
        config = filter.Config(batch_groups=3)
        filter.run(rollouts=[rollouts], scores=[judged], out=out, config=config, machine=CPU)
        batches.append((tables.read(out, "groups"), tables.read(out, "batch")))
    (groups_a, batch_a), (groups_b, batch_b) = batches
    overrides = ["filter.batch_groups=3", "filter.dynamic_sampling=true"]
    made = compare.compare(a, b, rollouts=[rollouts], overrides=overrides)
    decided = dict(groups_a.select("group_id", "decision").iter_rows())
    expected = {
        group: (decided[group], decision)
        for group, decision in groups_b.select("group_id", "decision").iter_rows()
        if decided[group] != decision
    }
    flips = made.group_flips.select("group_id", "decision_a", "decision_b")
    assert expected == {group: (x, y) for group, x, y in flips.iter_rows()} != {}
    both = batch_a.join(batch_b, on="response_id", suffix="_b")
    assert made.sign_flips["responses"].sum() == len(both)
    opposite = both.filter(pl.col("advantage") * pl.col("advantage_b") < 0)
    assert made.flipped["responses"] == len(opposite) > 0


def test_the_command_explains_itself_and_its_errors(data: Path) -> None:
    assert "Example: dapo compare" in dapo("compare", "--help").stdout
    refused = dapo("compare", round_of(data) / "score", round_of(data) / "score" / "scores")
    assert refused.returncode == 2 and "give --rollouts" in refused.stderr
    assert "Traceback" not in refused.stderr and refused.stdout == ""
