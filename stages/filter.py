"""Dynamic sampling: keep the groups that are neither all right nor all wrong."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import Field, field_validator

from stages import dapo, tables
from stages import policy as policies
from stages.errors import InputError
from stages.settings import Machine, Settings

ACC, PART = "acc", "part_"
GROUP = ["group_id", "prompt_id", "policy", "age", "sampled"]  # the same in all its rows
CANDIDATE = [name for name in tables.SCHEMAS["batch"].names if name != "advantage"]
COLUMNS = [*CANDIDATE, "metric", "sampled"]
PIECE = 2 * tables.ROWS_PER_GROUP  # rows with their tokens that are in memory at a time
WHAT = "rollouts, scores or carried rows"


class Config(Settings):
    batch_groups: int = Field(16, ge=1)  # groups that one training step needs
    dynamic_sampling: bool = True  # off: every group with two scored responses is kept (GRPO)
    metric: str = ACC  # or a reward part, as score.parts names it
    tolerance: float = Field(0, ge=0)  # dropped if the metric's max - min (float32) is at most this
    # the share of such groups that is kept all the same
    keep_all_right: float = Field(0, ge=0, le=1)
    keep_all_wrong: float = Field(0, ge=0, le=1)
    max_age: int = Field(1, ge=0)  # steps that a surplus group may wait; 0 drops it at once
    on_short: Literal["keep", "carry"] = "keep"  # carry: a batch that is not full waits, whole
    scale: Literal["std", "none"] = "std"  # of the advantage; none = Dr.GRPO

    @field_validator("metric")
    @classmethod
    def _is_not_shaped(cls, metric: str) -> str:
        if metric in ("reward", "penalty"):
            raise ValueError(
                f"{metric} holds the overlong penalty: all-wrong groups of unequal lengths would "
                "pass; give acc or the name of a reward part"
            )
        return metric


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
    inputs = (rollouts, scores, carried, policy)
    responses = _beside(*inputs, metric=config.metric)
    groups, piece = decide(responses, config), PIECE
    if not groups["in_order"].all():
        responses = responses_of(*inputs, metric=config.metric)
        groups = decide(responses, config)
        piece = max(1, int(groups["n"].sum()))  # all at once, for each piece would sort them again
    tables.write(out, "groups", groups)
    rows = {
        table: tables.write_all(out, table, _rows_of(groups, decision, responses, config, piece))
        for table, decision in (("batch", "kept"), ("carried", "carried"))
    }
    found = counts(groups, config) | {f"{table}_rows": count for table, count in rows.items()}
    candidates = tables.count(rollouts, "rollouts")
    candidates += tables.count(carried, "carried") if carried else 0
    _check_accounts(groups, found, candidates=candidates)
    return found


def decide(responses: pl.LazyFrame, config: Config) -> pl.DataFrame:
    """One row per group: its numbers, `decision` (kept, dropped, carried) and the `reason`.

    The decision is on raw `acc` or a reward part, never on the shaped reward: an all-wrong group
    of unequal lengths has nothing to teach (Eq. 11: 0 < |right| < n).
    """
    metric = pl.col("metric")  # as acc and reward, null where nobody could score
    rank = pl.col("rank")
    late = (rank - 1) // config.batch_groups  # steps until it is its turn
    short = pl.lit(config.on_short == "carry") & (rank.max() < config.batch_groups)
    waits = pl.when(short).then(1).otherwise(late)
    return tables.collect(
        responses.select(*GROUP, "acc", "reward", "metric", "in_order")
        .with_row_index("row")
        .group_by("group_id")
        .agg(
            pl.col(GROUP[1:]).first(),
            n=pl.len(),
            n_scored=pl.col("acc").count(),
            acc_mean=_mean(pl.col("acc")),
            metric_min=metric.min(),
            metric_max=metric.max(),
            reward_mean=_mean(pl.col("reward")),
            reward_std=_std(pl.col("reward")),
            first_row=pl.col("row").min(),
            last_row=pl.col("row").max(),
            in_order=pl.col("in_order").all(),
        )
        # those that waited go first, then in the order of the ids
        .sort("age", "first_row", descending=[True, False])
        .with_columns(reason=_uninformative(config))
        .with_columns(reason=pl.when(~_kept_all_the_same(config)).then("reason"))
        .with_columns(rank=pl.col("reason").is_null().cum_sum())
        .with_columns(waits=pl.when(pl.col("reason").is_null()).then(waits))
        .with_columns(
            decision=pl.when(pl.col("waits") == 0)
            .then(pl.lit("kept"))
            # a step that trains nothing makes no group older; else, one that would be too old when
            # its turn comes is not worth its place
            .when((pl.col("waits") > 0) & (short | (pl.col("age") + late <= config.max_age)))
            .then(pl.lit("carried"))
            .otherwise(pl.lit("dropped")),
            reason=pl.when(pl.col("waits") > 0)
            .then(pl.when(short).then(pl.lit("short")).otherwise(pl.lit("surplus")))
            .otherwise("reason"),
        ),
        WHAT,
    )


# sums of whole numbers of 2⁻²⁸: the last bit of a sum of floats would depend on the order of the
# rows and on the threads that add them up; exact as long as n · |value| is less than 10¹⁰
ONE = 2**28


def _whole(value: pl.Expr) -> pl.Expr:
    return (value.cast(pl.Float64) * ONE).round().cast(pl.Int64).cast(pl.Int128)


def _mean(value: pl.Expr) -> pl.Expr:
    n = value.count().cast(pl.Int64)  # a product of the count's own 32 bits would overflow
    return _whole(value).sum() / (pl.when(n > 0).then(n) * ONE)


def _std(value: pl.Expr) -> pl.Expr:
    """With n - 1, from exact sums: nothing cancels."""
    n, whole = value.count().cast(pl.Int128), _whole(value)
    squares = n * (whole * whole).sum() - whole.sum() * whole.sum()
    return (squares / pl.when(n > 1).then(n * (n - 1))).sqrt() / ONE


def _uninformative(config: Config) -> pl.Expr:
    """Why a group can teach nothing, or null."""
    # max - min, not std: the float std of equal values need not be 0
    spread = pl.col("metric_max") - pl.col("metric_min")
    alike = pl.lit(config.dynamic_sampling) & (spread <= config.tolerance)
    return (
        pl.when(pl.col("age") > config.max_age)
        .then(pl.lit("stale"))
        .when(~pl.col("sampled"))  # decided in its own step
        .then(None)
        .when(pl.col("n_scored") == 0)
        .then(pl.lit("unscored"))
        .when(pl.col("n_scored") < 2)  # no baseline
        .then(pl.lit("too_small"))
        .when(alike & (pl.lit(config.metric != ACC)))
        .then(pl.lit("all_equal"))
        .when(alike & (pl.col("metric_min") >= 1))
        .then(pl.lit("all_right"))
        .when(alike & (pl.col("metric_max") <= 0))
        .then(pl.lit("all_wrong"))
        .when(alike)
        .then(pl.lit("all_equal"))
    )


def _kept_all_the_same(config: Config) -> pl.Expr:
    """Whether a group is of the share of its kind that is kept: every k-th, in their order."""
    found = pl.lit(False)
    for kind, share in (("all_right", config.keep_all_right), ("all_wrong", config.keep_all_wrong)):
        of_kind = (pl.col("reason") == kind).fill_null(False)
        place = of_kind.cum_sum().cast(pl.Int64)
        found |= of_kind & ((place * share).floor() > ((place - 1) * share).floor())
    return found


def counts(groups: pl.DataFrame, config: Config) -> dict[str, float]:
    """The accounting of a step: in = kept + dropped + carried, and why each went."""
    decisions = dict(groups["decision"].value_counts().iter_rows())
    reasons = dict(groups.drop_nulls("reason")["reason"].value_counts().sort("reason").iter_rows())
    usable = groups["reason"].is_null() | groups["reason"].is_in(["surplus", "short"])
    return {
        "groups": len(groups),
        "kept": decisions.get("kept", 0),
        "dropped": decisions.get("dropped", 0),
        "carried": decisions.get("carried", 0),
        "carried_in": int((~groups["sampled"]).sum()),
        "short": max(0, config.batch_groups - int(usable.sum())),
        "sampled": int(groups["sampled"].sum()),
        "sampled_informative": int((usable & groups["sampled"]).sum()),
        "incomplete": float((groups["n"] < groups["n"].max()).sum()),  # lost samples
        **{f"reason/{reason}": count for reason, count in reasons.items()},
    }


def _check_accounts(groups: pl.DataFrame, found: dict[str, float], *, candidates: int) -> None:
    """Every response came in a group, and every group is kept, dropped or carried."""
    kept, carried = (groups.filter(decision=name)["n"].sum() for name in ("kept", "carried"))
    for ours, theirs, name in (
        (groups["n"].sum(), candidates, "responses of all groups"),
        (found["batch_rows"], kept, "rows of the batch"),
        (found["carried_rows"], carried, "rows that are carried"),
        (found["kept"] + found["dropped"] + found["carried"], found["groups"], "groups decided"),
    ):
        if ours != theirs:
            raise RuntimeError(f"the accounts of filter do not close: {name}: {ours} of {theirs}")


def responses_of(
    rollouts: Sequence[Path],
    scores: Sequence[Path],
    carried: Path | None,
    policy: Path | None,
    *,
    metric: str = ACC,
) -> pl.LazyFrame:
    """The candidates by response_id, lazily; a query reads what it names.

    The columns of `batch` but for the advantage, and the `metric`, and whether they were `sampled`
    in this step. Raises `InputError` unless every response is there once and has one score.
    """
    check_ids(rollouts, scores, carried)
    sampled, scored = _sampled(rollouts, policy), _scored(scores, metric)
    joined = sampled.join(scored, left_on="response_id", right_on="scored_id", how="inner")
    waiting = [_waiting(carried, metric)] if carried else []
    found = pl.concat([*waiting, joined.select(COLUMNS)])
    return found.sort("response_id").with_columns(in_order=pl.lit(True))


def _beside(
    rollouts: Sequence[Path],
    scores: Sequence[Path],
    carried: Path | None,
    policy: Path | None,
    *,
    metric: str,
) -> pl.LazyFrame:
    """The same without a join and a sort of millions of ids, if they are as the stages write them.

    That is so where all are `in_order`: the ids grow from row to row, so that none is there twice,
    and each score stands beside its own response. Where they are not, it tells nothing.
    """
    if tables.count(rollouts, "rollouts") != tables.count(scores, "scores"):
        return responses_of(rollouts, scores, carried, policy, metric=metric)
    pair = [_sampled(rollouts, policy), _scored(scores, metric)]
    both = pl.concat(pair, how="horizontal").select(*COLUMNS, "scored_id")
    ids = pl.col("response_id")
    waiting = [_waiting(carried, metric).with_columns(scored_id=ids)] if carried else []
    grows = (ids > ids.shift(1)).fill_null(True)  # the first one
    beside = (ids == pl.col("scored_id")).fill_null(False)
    return pl.concat([*waiting, both]).with_columns(in_order=grows & beside)


def _sampled(rollouts: Sequence[Path], policy: Path | None) -> pl.LazyFrame:
    age = pl.lit(0) if policy is None else pl.col("policy") != policies.digest(policy)
    return tables.scan(rollouts, "rollouts").with_columns(
        age=age.cast(pl.Int32), sampled=pl.lit(True)
    )


def _scored(scores: Sequence[Path], metric: str) -> pl.LazyFrame:
    """The values that count; all null where one is no number."""
    column = metric if metric == ACC else f"{PART}{metric}"
    scored = tables.scan(scores, "scores", more=[] if metric == ACC else [column])
    values = {"acc": "acc", "reward": "reward", "metric": column}
    finite = pl.all_horizontal(pl.col(name).is_finite() for name in set(values.values()))
    return scored.select(
        pl.col("response_id").alias("scored_id"),
        *(pl.when(finite).then(column).alias(name) for name, column in values.items()),
    )


def _waiting(carried: Path, metric: str) -> pl.LazyFrame:
    """What waits since the step before: a step older, if that step trained a policy at all."""
    batch = carried / "batch"
    trained = not batch.is_dir() or tables.count(batch, "batch") > 0
    known = pl.col("acc") if metric == ACC else pl.lit(None, pl.Float32)  # was decided then
    return (
        tables.scan(carried, "carried")
        .with_columns(pl.col("age") + int(trained), metric=known, sampled=pl.lit(False))
        .select(COLUMNS)
    )


def _rows_of(
    groups: pl.DataFrame, decision: str, responses: pl.LazyFrame, config: Config, size: int
) -> Iterator[pl.DataFrame]:
    """The responses of the groups so decided, with advantages, by response_id, in pieces.

    Args:
        size: rows of the candidates that a piece is looked for in.
    """
    wanted = groups.filter(decision=decision)
    first, last = wanted.select(
        pl.col("first_row").min().fill_null(0), pl.col("last_row").max().fill_null(-1)
    ).row(0)
    whole = responses.select(CANDIDATE)
    is_wanted = pl.col("group_id").is_in(wanted["group_id"].implode())

    def rows(start: int, stop: int) -> pl.LazyFrame:  # of the files, only this part is read
        return whole.slice(start, stop - start).filter(is_wanted)

    # the sums over a group need the rewards of all of it, and nothing else of a row
    advantage = dapo.group_advantages(pl.col("reward"), "group_id", scale=config.scale)
    scalars = tables.collect(
        rows(first, last + 1).select("response_id", "group_id", "reward"), WHAT
    )
    # in one piece, for a sum over several depends on where they end
    advantages = scalars.rechunk().select("response_id", advantage=advantage)
    for start in range(first, last + 1, size):
        piece = tables.collect(rows(start, min(start + size, last + 1)), WHAT)
        yield piece.join(advantages, on="response_id", how="left", maintain_order="left")


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
