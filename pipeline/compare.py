"""Hold two scorings of the same rollouts side by side: what other reward settings would change."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import artifacts, mirror
from pipeline.artifacts import RECORD, Artifact
from pipeline.config import load, parse
from pipeline.loop import CONFIG
from stages import dapo, filter, tables
from stages.errors import InputError

EXAMPLES, ENDING = 3, 60  # of each pair of verdicts; letters of a text, where its answer stands
BUCKETS = 5
NOISE = 1e-6  # rewards are float32: an advantage nearer to 0 than this has no sign


@dataclass(frozen=True)
class Comparison:
    """Two scorings, a and b, of the same responses; the tables are the functions of their names."""

    settings: str | None  # those that differ; None: unknown, for a table alone has no record
    rollouts: list[str]
    filter: dict[str, Any]
    filter_from: str  # the file of these settings, or `defaults`
    verdict_flips: pl.DataFrame
    examples: pl.DataFrame
    group_flips: pl.DataFrame
    sign_flips: pl.DataFrame
    reward_by_length: pl.DataFrame

    @property
    def flipped(self) -> dict[str, float]:
        """How many responses are pushed the other way, and their share; see `sign_flips`."""
        opposite = self.sign_flips.filter(pl.col("sign_a") * pl.col("sign_b") < 0)
        return opposite.select(pl.col("responses", "share").sum()).row(0, named=True)

    def document(self) -> dict[str, Any]:
        """All of it as plain values; a table is a list of its rows."""
        return {
            name: value.to_dicts() if isinstance(value, pl.DataFrame) else value
            for name, value in {**vars(self), "flipped": self.flipped}.items()
        }


def compare(
    a: Path, b: Path, *, rollouts: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> Comparison:
    """Compare `score` artifacts, or `scores` tables, over the rollouts that they were made from.

    The filter decides with the settings of the run, changed by `overrides`, and on these rollouts
    alone: it sees no other round, and no rows carried from the step before.

    Raises `InputError` if a and b are not scores of the same responses.
    """
    a, b = a.resolve(), b.resolve()
    known = [_scoring(path) for path in (a, b) if (path / RECORD).is_file()]
    scores = [tables.scan(path, "scores") for path in (a, b)]
    sampled = [path.resolve() for path in rollouts] or [_rollouts(known, a, b)]
    config, config_from = _filter_config([*sampled, a, b], overrides)
    for path in (a, b):
        _check_ids(sampled, path)
    responses = [filter.responses_of(sampled, [path], None, None) for path in (a, b)]
    decided = decisions(*responses, config=config)
    kept = decided.filter(decision_a="kept", decision_b="kept")
    return Comparison(
        settings=artifacts.differences(*map(_settings, known)) if len(known) == 2 else None,
        rollouts=[str(path) for path in sampled],
        filter=config.model_dump(mode="json"),
        filter_from=config_from,
        verdict_flips=verdict_flips(*scores),
        examples=examples(*scores, rollouts=tables.scan(sampled, "rollouts")),
        group_flips=group_flips(decided),
        sign_flips=sign_flips(*responses, kept=kept, scale=config.scale),
        reward_by_length=reward_by_length(*scores, rollouts=tables.scan(sampled, "rollouts")),
    )


def verdict_flips(a: pl.LazyFrame, b: pl.LazyFrame) -> pl.DataFrame:
    """How many responses have which pair of verdicts, and how many of them another acc."""
    both = _beside(a, b, "response_id", "verdict", "acc")
    other_acc = pl.col("acc_a").ne_missing(pl.col("acc_b")).sum()
    counts = both.group_by("verdict_a", "verdict_b").agg(responses=pl.len(), other_acc=other_acc)
    return _collect(counts.sort("verdict_a", "verdict_b"))


def examples(a: pl.LazyFrame, b: pl.LazyFrame, *, rollouts: pl.LazyFrame) -> pl.DataFrame:
    """A few responses of each pair of verdicts whose acc changes, with the ends of their texts."""
    few = _collect(
        _beside(a, b, "response_id", "verdict", "extracted", "acc")
        .filter(pl.col("acc_a").ne_missing(pl.col("acc_b")))
        .sort("verdict_a", "verdict_b", "response_id")
        .group_by("verdict_a", "verdict_b", maintain_order=True)
        .head(EXAMPLES)
    )
    ids = few["response_id"].to_list()  # in a query of their own: only their texts are read
    texts = rollouts.filter(pl.col("response_id").is_in(ids)).select(
        "response_id", text_end=pl.col("text").str.tail(ENDING)
    )
    return _collect(few.lazy().join(texts, on="response_id", maintain_order="left"))


def decisions(a: pl.LazyFrame, b: pl.LazyFrame, *, config: filter.Config) -> pl.DataFrame:
    """What the filter decides on each group under a and under b: decision, reason, mean acc."""
    groups_a, groups_b = (
        filter.decide(responses, config).lazy().rename({"acc_mean": "acc"}) for responses in (a, b)
    )
    both = _beside(groups_a, groups_b, "group_id", "decision", "reason", "acc")
    return _collect(both.sort("group_id"))


def group_flips(decided: pl.DataFrame) -> pl.DataFrame:
    """The groups that are kept, dropped or carried under a, and not so under b."""
    return decided.filter(pl.col("decision_a") != pl.col("decision_b"))


def sign_flips(
    a: pl.LazyFrame, b: pl.LazyFrame, *, kept: pl.DataFrame, scale: dapo.Scale
) -> pl.DataFrame:
    """How many responses of the groups `kept` have which pair of advantage signs, and their share.

    -1 and 1: a response that is pushed down under one scoring and up under the other.
    """

    def signs(responses: pl.LazyFrame) -> pl.LazyFrame:
        advantage = dapo.group_advantages(pl.col("reward"), "group_id", scale=scale)
        sign = pl.when(advantage.abs() >= NOISE).then(advantage.sign()).otherwise(0)
        return (
            responses.join(kept.lazy(), on="group_id", how="semi")
            .sort("response_id")
            .select("response_id", sign=sign.cast(pl.Int8))
        )

    both = _beside(signs(a), signs(b), "response_id", "sign")
    counts = both.group_by("sign_a", "sign_b").agg(responses=pl.len())
    share = pl.col("responses") / pl.col("responses").sum()
    return _collect(counts.with_columns(share=share).sort("sign_a", "sign_b"))


def reward_by_length(
    a: pl.LazyFrame, b: pl.LazyFrame, *, rollouts: pl.LazyFrame, buckets: int = BUCKETS
) -> pl.DataFrame:
    """Mean rewards of responses `shortest` to `longest` tokens long, in buckets of about one size.

    Equal lengths share a bucket. The means are over the responses `scored` under both a and b.
    """
    reward_a, reward_b = (pl.col(f"reward_{x}").cast(pl.Float64) for x in "ab")
    scored = (reward_a.is_finite() & reward_b.is_finite()).fill_null(False)
    length = pl.col("length")
    return _collect(
        rollouts.select("response_id", "length")
        .join(_beside(a, b, "response_id", "reward"), on="response_id")
        .sort("response_id")  # before the sums, whose last bit depends on the order
        .with_columns(bucket=(length.rank("max") * buckets - 1) // pl.len())
        .group_by("bucket", maintain_order=True)
        .agg(
            shortest=length.min(),
            longest=length.max(),
            responses=pl.len(),
            scored=scored.sum(),
            reward_a=reward_a.filter(scored).mean(),
            reward_b=reward_b.filter(scored).mean(),
            difference=(reward_b - reward_a).filter(scored).mean(),
        )
        .sort("bucket")
        .drop("bucket")
    )


def _beside(a: pl.LazyFrame, b: pl.LazyFrame, key: str, *columns: str) -> pl.LazyFrame:
    """The columns of a, named `…_a`, beside those of b, named `…_b`, joined by `key`."""
    of_a, of_b = (
        frame.select(key, pl.col(columns).name.suffix(suffix))
        for frame, suffix in ((a, "_a"), (b, "_b"))
    )
    return of_a.join(of_b, on=key)


def _collect(query: pl.LazyFrame) -> pl.DataFrame:
    return tables.collect(query, "rollouts or scores")


def _scoring(path: Path) -> Artifact:
    found = artifacts.load_unchanged(path)
    if found.stage != "score":
        raise InputError(f"{path} was made by {found.stage}, not by score; give two scorings")
    return found


def _settings(scoring: Artifact) -> dict[str, Any]:
    """All that a difference may come from: a checker changes with the code."""
    return scoring.recipe.flat() | {"code": scoring.record["code"]}


def _rollouts(known: Sequence[Artifact], a: Path, b: Path) -> Path:
    """Those that both scorings were made from, if they are still what they were."""
    if len(known) < 2:
        bare = next(path for path in (a, b) if not (path / RECORD).is_file())
        raise InputError(f"{bare}: no record says which rollouts it scores; give --rollouts DIR")
    of_a, of_b = (scoring.recipe.inputs["rollouts"] for scoring in known)
    path: Path = known[0].sources["rollouts"]
    # by content: what was sampled again has the same ids
    if of_a != of_b:
        raise InputError(f"{b} was made from other rollouts than {a}, which is from {path}")
    if artifacts.digest(path) != of_a:
        raise InputError(f"{path} is not what {a} was made from; rerun score, or give --rollouts")
    return mirror.looked_at(path, mirror.tables)


def _filter_config(paths: Sequence[Path], overrides: Sequence[str]) -> tuple[filter.Config, str]:
    """The filter's settings of the run that one of the artifacts lies in, or the defaults."""
    for override in overrides:
        if not override.lstrip("+").startswith("filter."):
            raise InputError(f"{override} is no setting of the filter, the one stage applied here")
    # run/stage, run/step/stage or run/step/round/stage
    above = (p for path in paths if (path / RECORD).is_file() for p in path.parents[:3])
    saved = next((p / CONFIG for p in above if (p / CONFIG).is_file()), None)
    if saved is None:
        return load(overrides).filter, "defaults"
    return parse(saved.read_text(), overrides).filter, str(saved)


def _check_ids(rollouts: Sequence[Path], scores: Path) -> None:
    try:
        filter.check_ids(rollouts, [scores], None)
    except InputError as error:
        raise InputError(f"{scores}: {error}") from error
