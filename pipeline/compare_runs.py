"""Hold two runs side by side: settings, the first artifact that differs, curves, prompts."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import artifacts, mirror, paired
from pipeline.artifacts import TIMINGS, Artifact
from pipeline.config import parse
from pipeline.loop import CONFIG
from pipeline.paired import EvaluationComparison, NotComparable
from pipeline.read import Place, Run, asked, files_of
from stages import tables
from stages.errors import InputError

CURVES = ("acc", "reward", "length", "held_out", "entropy", "kept", "sampled_tokens", "seconds")
# tables whose rows one column does not name
KEYS = {
    "evaluations": ["set", "prompt_id"],
    "results": ["set", "task", "difficulty", "metric"],
    "tokens": ["response_id", "optimizer_step"],
    "unusable": ["file", "row"],
}
PROMPTS = 10


@dataclass(frozen=True)
class Divergence:
    """The first artifact, in a run's order, whose content differs; and the first value in it."""

    place: str
    recipe: str  # what differs in its settings and inputs; empty: nothing does
    table: str | None  # None: only in files that are no tables, such as weights
    files: list[str]
    rows: int = 0  # that differ, or that one of the two has not
    key: dict[str, Any] | None = None
    column: str | None = None  # None: one of the two has no such row
    position: int | None = None  # in a list of tokens
    a: Any = None
    b: Any = None


@dataclass(frozen=True)
class RunComparison:
    """Two runs, a and b."""

    settings: str
    in_common: int  # places that both have
    equal: int  # of these, with equal digests
    only: dict[str, list[str]]  # places that one of them has
    divergence: Divergence | None
    curves: pl.DataFrame
    prompts: pl.DataFrame
    evaluations: EvaluationComparison | None  # the last of each; None: one has none

    def document(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            **vars(self),
            "divergence": self.divergence and vars(self.divergence),
            "curves": self.curves.to_dicts(),
            "prompts": self.prompts.to_dicts(),
            "evaluations": self.evaluations and self.evaluations.document(),
        }


def compare(a: Path, b: Path, *, prompts: int = PROMPTS) -> RunComparison:
    """Compare the runs in two directories.

    Args:
        prompts: how many prompts to name, those whose pass rate changed most.
    """
    runs = [Run(path) for path in (a, b)]
    settings = [_settings(run.directory / CONFIG) for run in runs]
    made_a, made_b = (dict(run.found) for run in runs)
    common = sorted(made_a.keys() & made_b.keys(), key=lambda place: place.order)
    differing = [place for place in common if made_a[place].digest != made_b[place].digest]
    first = differing[0] if differing else None
    for run, made in zip(runs, (made_a, made_b), strict=True):
        if first:
            mirror.bring(run.directory, [made[first].path], mirror.tables)
    return RunComparison(
        settings=artifacts.differences(*settings),
        in_common=len(common),
        equal=len(common) - len(differing),
        only={"a": _only(runs[0], runs[1]), "b": _only(runs[1], runs[0])},
        divergence=first and divergence(first, made_a[first], made_b[first]),
        curves=curves(*runs),
        prompts=pass_rates(*runs).head(prompts),
        evaluations=last_evaluations(*runs),
    )


def _settings(saved: Path) -> dict[str, Any]:
    try:
        return parse(saved.read_text()).stage_settings()
    except InputError as error:
        raise InputError(f"{saved}: {error}") from error


def divergence(place: Place, a: Artifact, b: Artifact) -> Divergence:
    """Where two artifacts of one place differ first: table, row, column, position in a list."""
    files_a, files_b = a.record["files"], b.record["files"]
    files = [
        name
        for name in sorted(files_a | files_b)
        if not name.startswith(TIMINGS)
        and files_a.get(name, {}).get("sha256") != files_b.get(name, {}).get("sha256")
    ]
    head: dict[str, Any] = {
        "place": str(place),
        "recipe": artifacts.differences(a.recipe.flat(), b.recipe.flat()),
        "files": files,
    }
    changed = dict.fromkeys(name.partition("/")[0] for name in files)
    for table in tables.SCHEMAS:
        if table in changed and (found := _first_row(table, a, b)):
            return Divergence(**head, table=table, **found)
    return Divergence(**head, table=None)


def _first_row(table: str, a: Artifact, b: Artifact) -> dict[str, Any] | None:
    """The first row of a table that differs, by its key; None where only the bytes do."""
    frames = [_table(table, each) for each in (a, b)]
    keys = KEYS.get(table, tables.SCHEMAS[table].names[:1])
    others = [name for name in tables.SCHEMAS[table].names if name not in keys]
    sides = [
        frame.with_columns(pl.lit(True).alias("there")).rename(
            {name: f"{name}_{x}" for name in (*others, "there")}
        )
        for frame, x in zip(frames, "ab", strict=True)
    ]
    alone = pl.col("there_a").is_null() | pl.col("there_b").is_null()
    differs = {n: pl.col(f"{n}_a").ne_missing(pl.col(f"{n}_b")) for n in others}
    both = sides[0].join(sides[1], on=keys, how="full", coalesce=True, nulls_equal=True)
    found = both.filter(pl.any_horizontal(alone, *differs.values())).sort(keys)
    rows = tables.collect(found.select(pl.len()), table).item()
    if not rows:
        return None
    row = tables.collect(
        found.head(1).with_columns(d.alias(f"differs_{n}") for n, d in differs.items()), table
    ).row(0, named=True)
    where = {"rows": rows, "key": {key: row[key] for key in keys}}
    if not (row["there_a"] and row["there_b"]):
        return where | {"a": bool(row["there_a"]), "b": bool(row["there_b"])}
    column = next(name for name in others if row[f"differs_{name}"])
    return where | {"column": column} | _value(row[f"{column}_a"], row[f"{column}_b"])


def _value(a: Any, b: Any) -> dict[str, Any]:
    """The two values; of lists the first position that differs, and what stands there."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return {"a": a, "b": b}
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return {
        "position": at,
        "a": a[at] if at < len(a) else None,
        "b": b[at] if at < len(b) else None,
    }


def _table(table: str, artifact: Artifact) -> pl.LazyFrame:
    """A table of an artifact; one that it has not has no rows."""
    files = files_of(artifact, table)
    empty = pl.LazyFrame(schema=tables.polars_schema(table))
    return tables.scan(files, table) if files else empty


def curves(a: Run, b: Run) -> pl.DataFrame:
    """A row per step: the figures of a beside those of b, null where one has no such step."""
    chosen = ["step", *CURVES]
    found = [run.curves.collect() for run in (a, b)]
    sides = [
        frame.select(pl.col(name) for name in chosen if name in frame.columns) for frame in found
    ]
    of_a, of_b = (
        side.rename({n: f"{n}_{x}" for n in side.columns if n != "step"})
        for side, x in zip(sides, "ab", strict=True)
    )
    both = of_a.join(of_b, on="step", how="full", coalesce=True).sort("step")
    names = [f"{n}_{x}" for n in CURVES for x in "ab"]
    return both.select("step", *(name for name in names if name in both.columns))


def pass_rates(a: Run, b: Run) -> pl.DataFrame:
    """Mean acc of each prompt that both runs asked, and how it changed; the largest change first.

    A prompt is the same if its id, messages and answer are. Over all steps: runs that ask it at
    different times compare different policies.
    """

    def rates(run: Run, x: str) -> pl.LazyFrame:
        acc = pl.col("acc").cast(pl.Float64)
        rates = run.responses.group_by("prompt_id").agg(
            acc.count().cast(pl.Int64).alias(f"n_{x}"), acc.mean().alias(f"pass_{x}")
        )
        prompts = run.prompts.select("prompt_id", "answer", prompt=asked())
        return rates.join(prompts, on="prompt_id")

    change = pl.col("pass_b") - pl.col("pass_a")
    return (
        rates(a, "a")
        .join(rates(b, "b"), on=["prompt_id", "prompt", "answer"])
        .select("prompt_id", "n_a", "pass_a", "n_b", "pass_b")
        .drop_nulls()
        .with_columns(change=change)
        .sort(pl.col("change").abs(), pl.col("prompt_id"), descending=[True, False])
        .collect()
    )


def last_evaluations(a: Run, b: Run) -> EvaluationComparison | None:
    """The last evaluations of both runs by prompts in common, if there are any."""
    last = [_last_evaluation(run) for run in (a, b)]
    if last[0] is None or last[1] is None:
        return None
    for run, artifact in zip((a, b), last, strict=True):
        mirror.bring(run.directory, [artifact.path] if artifact else [], mirror.tables)
    with suppress(NotComparable):  # runs may well have been held against different prompts
        return paired.compare(last[0], last[1])
    return None


def _last_evaluation(run: Run) -> Artifact | None:
    """That of the highest step, variants left aside."""
    found = [
        (place.step or 0, artifact)
        for place, artifact in run.found
        if (place.stage, place.variant) == ("evaluate", None)
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


def _only(run: Run, other: Run) -> list[str]:
    theirs = {place for place, _ in other.found}
    return [str(place) for place, _ in run.found if place not in theirs]
