"""Dynamic sampling: keep the groups that are neither all right nor all wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import Field

from stages import dapo, tables
from stages import policy as policies
from stages.errors import InputError
from stages.settings import Machine, Settings

GROUP = ["group_id", "prompt_id", "policy", "age", "sampled"]  # the same in all its rows
CANDIDATE = [name for name in tables.SCHEMAS["batch"].names if name != "advantage"]


class Config(Settings):
    batch_groups: int = Field(16, ge=1)  # groups that one training step needs
    dynamic_sampling: bool = True  # off: every group with two scored responses is kept (GRPO)
    max_age: int = Field(1, ge=0)  # steps that a surplus group may wait; 0 drops it at once
    scale: Literal["std", "none"] = "std"  # of the advantage; none = Dr.GRPO


def run(
    *,
    rollouts: Sequence[Path],
    scores: Sequence[Path],
    carried: Path | None = None,
    policy: Path | None = None,
    out: Path,
    config: Config,
    machine: Machine,
) -> dict[str, float]:
    """Decide on every group of a step's rounds and of those carried over from the step before.

    Writes `groups` (one row each, with decision and reason), `batch` (the responses of the kept
    groups) and `carried` (those of the surplus). The result depends on the rows, not their order.

    Args:
        policy: the one that the batch is for; responses of another one are from the step before.
            Default: all are fresh.
    """
    check_ids(rollouts, scores, carried)
    responses = responses_of(rollouts, scores, carried, policy)
    groups = decide(responses, config)
    tables.write(out, "groups", groups)
    batch = _rows_of(groups, "kept", responses, config)
    tables.write(out, "batch", batch)
    tables.write(out, "carried", _rows_of(groups, "carried", responses, config))
    return counts(groups, config) | {"batch_rows": len(batch)}


def decide(responses: pl.LazyFrame, config: Config) -> pl.DataFrame:
    """One row per group: its numbers, `decision` (kept, dropped, carried) and the `reason`.

    The decision is on raw `acc`, never on the shaped reward: an all-wrong group of unequal
    lengths has nothing to teach (Eq. 11: 0 < |right| < n).
    """
    acc, reward = pl.col("acc"), pl.col("reward")  # both null where nobody could score
    return tables.collect(
        # sorted, so that the last bit of a mean does not depend on the order of rows or threads
        responses.select("response_id", *GROUP, "acc", "reward")
        .sort("response_id")
        .group_by("group_id")
        .agg(
            pl.col(GROUP[1:]).first(),
            n=pl.len(),
            n_scored=acc.count(),
            acc_mean=acc.mean(),
            acc_min=acc.min(),
            acc_max=acc.max(),
            reward_mean=reward.mean(),
            reward_std=reward.std(),
        )
        # those that waited go first, then in the order of the ids: never in the order of the rows
        .sort("age", "group_id", descending=[True, False])
        .with_columns(reason=_uninformative(config))
        .with_columns(rank=pl.col("reason").is_null().cum_sum())
        .with_columns(surplus=pl.col("reason").is_null() & (pl.col("rank") > config.batch_groups))
        .with_columns(
            decision=pl.when(pl.col("surplus") & (pl.col("age") < config.max_age))
            .then(pl.lit("carried"))
            .when(pl.col("surplus") | pl.col("reason").is_not_null())
            .then(pl.lit("dropped"))
            .otherwise(pl.lit("kept")),
            reason=pl.when("surplus").then(pl.lit("surplus")).otherwise("reason"),
        ),
        "rollouts, scores or carried rows",
    )


def _uninformative(config: Config) -> pl.Expr:
    """Why a group can teach nothing, or null."""
    alike = pl.lit(config.dynamic_sampling) & (pl.col("acc_max") == pl.col("acc_min"))
    return (
        pl.when(pl.col("age") > config.max_age)
        .then(pl.lit("stale"))
        .when(pl.col("n_scored") == 0)
        .then(pl.lit("unscored"))
        .when(pl.col("n_scored") < 2)  # no baseline
        .then(pl.lit("too_small"))
        # max == min, not std == 0: the float std of equal values need not be 0
        .when(alike & (pl.col("acc_max") >= 1))
        .then(pl.lit("all_right"))
        .when(alike & (pl.col("acc_max") <= 0))
        .then(pl.lit("all_wrong"))
        .when(alike)
        .then(pl.lit("all_equal"))
    )


def counts(groups: pl.DataFrame, config: Config) -> dict[str, float]:
    """The accounting of a step: in = kept + dropped + carried, and why each went."""
    decisions = dict(groups["decision"].value_counts().iter_rows())
    reasons = dict(groups.drop_nulls("reason")["reason"].value_counts().sort("reason").iter_rows())
    kept = decisions.get("kept", 0)
    sampled = groups.filter("sampled")
    informative = sampled["reason"].is_null() | (sampled["reason"] == "surplus")
    return {
        "groups": len(groups),
        "kept": kept,
        "dropped": decisions.get("dropped", 0),
        "carried": decisions.get("carried", 0),
        "short": max(0, config.batch_groups - kept),
        "sampled": len(sampled),
        "sampled_informative": int(informative.sum()),
        "incomplete": float((groups["n"] < groups["n"].max()).sum()),  # lost samples
        **{f"reason/{reason}": count for reason, count in reasons.items()},
    }


def responses_of(
    rollouts: Sequence[Path], scores: Sequence[Path], carried: Path | None, policy: Path | None
) -> pl.LazyFrame:
    """The candidates, lazily; a query reads what it names.

    The columns of `batch` but for the advantage, and whether they were `sampled` in this step.
    """
    is_scored = (pl.col("acc").is_finite() & pl.col("reward").is_finite()).fill_null(False)
    age = pl.lit(0) if policy is None else pl.col("policy") != policies.digest(policy)
    judged = tables.scan(scores, "scores").select(
        "response_id", pl.when(is_scored).then(pl.col("acc", "reward"))
    )
    sampled = (
        tables.scan(rollouts, "rollouts")
        .join(judged, on="response_id", how="inner")
        .with_columns(age=age.cast(pl.Int32))
        .select(*CANDIDATE, sampled=True)
    )
    if carried is None:
        return sampled
    waiting = (
        tables.scan(carried, "carried")
        .with_columns(pl.col("age") + 1)
        .select(*CANDIDATE, sampled=False)
    )
    return pl.concat([sampled, waiting])


def _rows_of(
    groups: pl.DataFrame, decision: str, responses: pl.LazyFrame, config: Config
) -> pl.DataFrame:
    """The responses of the groups so decided, with advantages, sorted by response_id."""
    wanted = groups.lazy().filter(decision=decision).select("group_id")
    return tables.collect(
        responses.join(wanted, on="group_id", how="semi")
        .sort("response_id")  # before the sums, whose last bit depends on the order
        .with_columns(
            advantage=dapo.group_advantages(pl.col("reward"), "group_id", scale=config.scale)
        ),
        "rollouts, scores or carried rows",
    )


def check_ids(rollouts: Sequence[Path], scores: Sequence[Path], carried: Path | None) -> None:
    """Every response is there once and has one score: joined by id, position cannot mislead."""
    sampled, scored = _ids(rollouts, "rollouts"), _ids(scores, "scores")
    candidates = pl.concat([sampled, _ids(carried, "carried")]) if carried else sampled
    for ids, where in ((candidates, "rollouts and carried rows"), (scored, "scores")):
        if twice := ids.filter(ids.is_duplicated()).sort().to_list():
            raise InputError(f"response_id '{twice[0]}' occurs more than once in the {where}")
    for ids, others, names in (
        (sampled, scored, ("rollouts", "scores")),
        (scored, sampled, ("scores", "rollouts")),
    ):
        if lost := ids.filter(~ids.is_in(others.implode())).sort().to_list():
            raise InputError(
                f"{len(lost)} responses of the {names[0]} are missing in the {names[1]}, first "
                f"'{lost[0]}': give the {names[1]} of every round"
            )


def _ids(source: Path | Sequence[Path], table: str) -> pl.Series:
    ids = tables.scan(source, table).select("response_id")
    return tables.collect(ids, f"{table} in {source}")["response_id"]
