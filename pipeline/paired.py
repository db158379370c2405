"""Hold two evaluations side by side: is one policy better, on the same prompts?

The prompts are resampled in pairs, so that what makes a prompt hard for both policies cancels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from pipeline.artifacts import Artifact
from stages import bootstrap, evaluate, measures, tables
from stages.bootstrap import Floats
from stages.errors import InputError
from stages.measures import Measure

RESULTS = "results"  # an evaluation without this table is of an older kind
SAMPLES = ("prompt_id", "sample", "length", "finish_reason", "acc", "extracted", "verdict")
FIGURES = {
    "set": pl.String,
    "task": pl.String,
    "difficulty": pl.String,
    "metric": pl.String,
    "a": pl.Float64,
    "b": pl.Float64,
    "difference": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "p": pl.Float64,
    "n_prompts": pl.Int64,
}


class NotComparable(InputError):
    """There is nothing of the one that the other could be held against."""


@dataclass(frozen=True)
class EvaluationComparison:
    """Two evaluations, a and b; `figures` and `prompts` are the functions of their names."""

    a: str  # where they lie
    b: str
    level: float  # of the intervals
    resamples: int
    prompts: pl.DataFrame
    figures: pl.DataFrame

    def document(self) -> dict[str, Any]:
        """All of it as plain values; a table is a list of its rows."""
        return {
            name: value.to_dicts() if isinstance(value, pl.DataFrame) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class Side:
    """One evaluation's settings and tables."""

    artifact: Artifact
    config: evaluate.Config
    evaluations: pl.DataFrame

    @classmethod
    def of(cls, artifact: Artifact) -> "Side":
        """Raises `NotComparable` if it is none, or of an older kind."""
        if artifact.stage != "evaluate" or RESULTS not in artifact.record["rows"]:
            raise NotComparable(
                f"{artifact.path} holds no table {RESULTS}: give what evaluate makes now"
            )
        config = evaluate.Config.model_validate(artifact.recipe.config)
        return cls(artifact, config, tables.read(artifact.path, "evaluations"))

    def measured(self, name: str, asked: pl.DataFrame) -> list[Measure]:
        """The measures of a set on the prompts `asked`."""
        samples = tables.scan(self.artifact.path, "samples").filter(set=name).select(SAMPLES)
        return measures.measured(
            samples.join(asked.lazy().select("prompt_id"), on="prompt_id", how="semi").collect(),
            asked,
            n=self.config.sampling(name).n,
            ks=self.config.ks(name),
            tasks=self.config.tasks,
        )


def compare(a: Artifact, b: Artifact) -> EvaluationComparison:
    """Compare two evaluations, with the resamples, level and seed of a.

    Raises `NotComparable` if they have no prompt of any set in common.
    """
    sides = Side.of(a), Side.of(b)
    matched = {name: _matched(name, *sides) for name in sides[0].config.sets}
    found = prompts(*sides, matched)
    if not found["matched"].sum():
        raise NotComparable(
            f"{a.path} and {b.path} have no prompt in common, by set, id, task and answer; their "
            f"sets are {', '.join(sides[0].config.sets)} and {', '.join(sides[1].config.sets)}"
        )
    rows = [
        {"set": name, **row}
        for name, asked in matched.items()
        if len(asked)
        for row in figures(name, *sides, asked)
    ]
    return EvaluationComparison(
        a=str(a.path),
        b=str(b.path),
        level=sides[0].config.level,
        resamples=sides[0].config.resamples,
        prompts=found,
        figures=pl.DataFrame(rows, schema=FIGURES),
    )


def _matched(name: str, a: Side, b: Side) -> pl.DataFrame:
    """The prompts of a set that both asked, with one task and answer: what a says of them."""
    of_a, of_b = (side.evaluations.filter(set=name) for side in (a, b))
    keys = ["prompt_id", "task", "answer"]
    return of_a.join(of_b, on=keys, how="semi", maintain_order="left").select(*keys, "difficulty")


def prompts(a: Side, b: Side, matched: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """How many prompts of each set are in both, and how many in one alone, which count nowhere."""
    names = list(dict.fromkeys([*a.config.sets, *b.config.sets]))
    counts = [dict(side.evaluations["set"].value_counts().iter_rows()) for side in (a, b)]
    return pl.DataFrame(
        [
            {
                "set": name,
                "matched": (both := len(matched.get(name, ()))),
                "only_a": counts[0].get(name, 0) - both,
                "only_b": counts[1].get(name, 0) - both,
            }
            for name in names
        ]
    )


def figures(name: str, a: Side, b: Side, asked: pl.DataFrame) -> Iterator[dict[str, object]]:
    """Each figure of a set that both have, under a and under b, by task and difficulty.

    `difference` is b - a with its percentile interval, p that of `bootstrap.p_value`. avg@n is an
    estimate of one thing whatever n, so that two n may be compared; pass@k needs one k.
    """
    pairs = list(measures.pairs(a.measured(name, asked), b.measured(name, asked)))
    config = a.config
    for group in measures.groups(asked):
        resampled = measures.resampled(
            pairs, group.rows, resamples=config.resamples, seed=config.seed
        )
        chance = {measure.name: found[:, 1] - found[:, 0] for measure, found in resampled}
        for pair in pairs:
            rows = group.rows[pair.counted[group.rows]]
            if not len(rows):
                continue
            of_a, of_b = map(float, pair.figure(pair.parts[rows].sum(axis=0)))
            yield {
                "task": group.task,
                "difficulty": group.difficulty,
                "metric": pair.name,
                "a": of_a,
                "b": of_b,
                "difference": of_b - of_a,
                **_uncertainty(chance.get(pair.name), of_b - of_a, level=config.level),
                "n_prompts": len(rows),
            }


def _uncertainty(
    differences_B: Floats | None, observed: float, *, level: float
) -> dict[str, float | None]:
    """Interval and p-value; null of one prompt, which says nothing of others."""
    if differences_B is None:
        return {"low": None, "high": None, "p": None}
    low, high = bootstrap.interval(differences_B, level=level)
    return {"low": low, "high": high, "p": bootstrap.p_value(differences_B, observed)}
