"""What a sweep comes to: its runs' curves, held side by side at equal updates and equal tokens.

Runs that differ by their seed alone are one variant; intervals are Student's t over the seeds, and
say nothing where there is one seed only. Curves are straight between two evaluations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipeline import artifacts, mirror, summary
from pipeline.artifacts import Artifact
from pipeline.read import Run
from pipeline.sweep import Point
from stages.errors import InputError

ACCURACY = "accuracy"  # how avg@k is called here
LEVEL = 0.95  # of all intervals
FIGURES = ("at_step", "at_tokens", "gain_at_step", "gain_at_tokens", "entropy", "length", "cut")
AXES = ("step", "tokens", "seconds")
MEASURED = ("held_out", "held_out_length", "held_out_cut")
CURVE = {
    **{"variant": pl.String, "seed": pl.Int64, "run": pl.String, "step": pl.Int32},
    # since training began: tokens generated to train on; seconds of all stages but evaluations
    **dict.fromkeys(("tokens", "seconds"), pl.Float64),
    # of the held-out samples, where the step was evaluated
    **dict.fromkeys(MEASURED, pl.Float64),
    # of the step's own samples
    **dict.fromkeys(("entropy", "length", "cut"), pl.Float64),
}


@dataclass(frozen=True)
class Comparison:
    """The variants of a sweep side by side; the first is the baseline."""

    metric: str  # of the held-out samples
    step: float  # the last that every run was evaluated after
    tokens: float  # those that every run had generated when it was evaluated last
    goal: float  # the baseline's figure at its end, mean over its seeds
    variants: pl.DataFrame  # a row each
    points: pl.DataFrame  # a row per run
    curves: pl.DataFrame  # a row per run and step


def curve(point: Point, metric: str | None = None) -> pl.DataFrame:
    """A row of `CURVE` per step of a point's run, from step 0; none if it has no record yet.

    Args:
        metric: what `held_out` is, such as bleu; None: avg@k.

    Raises `InputError` if the run was not evaluated by that metric.
    """
    run = Run(mirror.looked_at(point.config.place))
    held_out = {p.step: artifact for p, artifact in run.found if p.stage == "evaluate"}
    evaluated = pl.DataFrame(
        [{"step": step, **_measured(artifact, metric)} for step, artifact in held_out.items()],
        schema={"step": pl.Int32, **dict.fromkeys(MEASURED, pl.Float64)},
    )
    spent = pl.col("seconds") - pl.col("seconds_evaluate")
    return (
        run.curves.drop("held_out")
        .collect()
        .join(evaluated, on="step", how="left", maintain_order="left")
        .with_columns(
            variant=pl.lit(point.variant),
            seed=pl.lit(point.config.seed, pl.Int64),
            run=pl.lit(point.run),
            tokens=pl.col("sampled_tokens").fill_null(0).cum_sum(),
            seconds=spent.fill_null(0).cum_sum(),
            cut="truncated",
            entropy=pl.col("entropy") if "entropy" in run.curves.collect_schema() else None,
        )
        .select(pl.col(name).cast(kind) for name, kind in CURVE.items())
    )


def _measured(evaluation: Artifact, metric: str | None) -> dict[str, float]:
    """Of the first set's samples: the metric, mean tokens, and the share that was cut."""
    metrics = evaluation.metrics
    name = metric or summary.headline(evaluation)
    if name not in metrics:
        raise InputError(
            f"{evaluation.path} has no metric '{name}'; choose among {', '.join(metrics)}"
        )
    return dict(
        zip(MEASURED, (metrics[name], metrics["length"], metrics["truncated"]), strict=True)
    )


def is_finished(point: Point, curve: pl.DataFrame) -> bool:
    """Whether the run has come to its end, and that was evaluated."""
    schedule = point.config.schedule
    if curve.is_empty() or curve["held_out"][-1] is None:
        return False
    return bool(curve["step"][-1] >= schedule.steps or schedule.epochs is not None)


def compare(curves: pl.DataFrame, metric: str | None = None) -> Comparison:
    """Compare finished runs by their curves, rows of `CURVE`; the first row is the baseline's.

    Args:
        metric: what `held_out` is; None: avg@k.

    Raises `InputError` if the baseline has no run among them.
    """
    runs = [run for _, run in curves.group_by("run", maintain_order=True)]
    if not runs:
        raise InputError("no run of the sweep is finished: there is nothing to compare yet")
    ends = [known(run, "held_out") for run in runs]
    step, tokens = (min(float(end[axis][-1]) for end in ends) for axis in ("step", "tokens"))
    baseline = curves["variant"][0]
    goal = float(np.mean([e["held_out"][-1] for e in ends if e["variant"][0] == baseline]))
    points = _gains(pl.DataFrame([_figures(run, step, tokens, goal) for run in runs]), baseline)
    variants = [_pooled(rows) for _, rows in points.group_by("variant", maintain_order=True)]
    name = metric or ACCURACY
    return Comparison(name, step, tokens, goal, pl.DataFrame(variants), points, curves)


def known(run: pl.DataFrame, column: str) -> pl.DataFrame:
    """The rows of a run's curve in which a column has a value."""
    return run.filter(pl.col(column).is_not_null())


def _figures(run: pl.DataFrame, step: float, tokens: float, goal: float) -> dict[str, object]:
    """A run in one row."""
    evaluated = known(run, "held_out")
    last = run.row(-1, named=True)

    def at(axis: str, where: float) -> float:
        return float(np.interp(where, evaluated[axis], evaluated["held_out"]))

    return {
        **{name: last[name] for name in ("variant", "seed", "run")},
        "at_end": evaluated["held_out"][-1],
        "at_step": at("step", step),
        "at_tokens": at("tokens", tokens),
        **{f"{axis}_to_goal": reached(evaluated, axis, goal) for axis in AXES},
        "entropy": last["entropy"],
        "length": evaluated["held_out_length"][-1],
        "cut": evaluated["held_out_cut"][-1],
        **{axis: float(last[axis]) for axis in AXES},
    }


def reached(evaluated: pl.DataFrame, axis: str, goal: float) -> float | None:
    """Where on an axis the held-out figure first is at the goal; None: it never is."""
    x, y = evaluated[axis].to_list(), evaluated["held_out"].to_list()
    first = next((i for i, value in enumerate(y) if value >= goal), None)
    if first is None:
        return None
    if first == 0:
        return float(x[0])
    (x0, x1), (y0, y1) = x[first - 1 : first + 1], y[first - 1 : first + 1]
    return float(x0 + (x1 - x0) * (goal - y0) / (y1 - y0))


def _gains(points: pl.DataFrame, baseline: str) -> pl.DataFrame:
    """What each run is ahead of the baseline's run of the same seed; null where there is none."""
    base = points.filter(variant=baseline).select("seed", "at_step", "at_tokens")
    paired = points.join(base, on="seed", how="left", suffix="_base", maintain_order="left")
    other = pl.col("variant") != baseline
    ahead = {
        f"gain_{at}": pl.when(other).then(pl.col(at) - pl.col(f"{at}_base"))
        for at in ("at_step", "at_tokens")
    }
    return paired.with_columns(**ahead).drop("at_step_base", "at_tokens_base")


def _pooled(rows: pl.DataFrame) -> dict[str, object]:
    """A variant in one row: means over its seeds, and ± half of their intervals."""
    pooled: dict[str, object] = {"variant": rows["variant"][0], "seeds": len(rows)}
    for name in FIGURES:
        values = rows[name].drop_nulls().to_list()
        pooled |= {name: float(np.mean(values)) if values else None, f"{name}_±": half(values)}
    reached = rows.filter(pl.col("step_to_goal").is_not_null())
    means = {f"{axis}_to_goal": reached[f"{axis}_to_goal"].mean() for axis in AXES}
    return {**pooled, "reached_goal": len(reached), **means}


def half(values: Sequence[float]) -> float | None:
    """Half of Student's interval of the mean, t · s / √n with n - 1 in s; None of one value."""
    if len(values) < 2:
        return None
    return student(len(values) - 1) * float(np.std(values, ddof=1)) / len(values) ** 0.5


def student(freedom: int, level: float = LEVEL) -> float:
    """The t beyond which Student's distribution has 1 - level, on both sides together.

    That share is I_x(ν/2, 1/2), the regularised incomplete beta function, at x = ν / (ν + t²).
    """
    import mpmath

    def excess(x: float) -> float:
        return mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True) - (1 - level)

    x = float(mpmath.findroot(excess, (0, 1), solver="bisect", tol=1e-15))
    return float((freedom * (1 - x) / x) ** 0.5)


def cells(found: Comparison) -> list[dict[str, str]]:
    """The comparison as text, a row per variant; each column says what it is of."""
    return [
        {
            "variant": str(row["variant"]),
            "seeds": str(row["seeds"]),
            f"{found.metric}, step {found.step:g}": _with_interval(row, "at_step", ".3f"),
            "gain": _with_interval(row, "gain_at_step", "+.3f"),
            f"{found.metric}, {found.tokens:,.0f} tokens": _with_interval(row, "at_tokens", ".3f"),
            "gain at these": _with_interval(row, "gain_at_tokens", "+.3f"),
            f"tokens to {found.goal:.3f}": _cost(row, "tokens_to_goal"),
            "seconds": _cost(row, "seconds_to_goal"),
            "entropy": _with_interval(row, "entropy", ".3f"),
            "length": _with_interval(row, "length", ".1f"),
            "cut": _with_interval(row, "cut", ".3f"),
        }
        for row in found.variants.iter_rows(named=True)
    ]


def _with_interval(row: Mapping[str, Any], name: str, form: str) -> str:
    mean, around = row[name], row[f"{name}_±"]
    if mean is None:
        return "–"
    text = f"{mean:{form}}" + ("" if around is None else f" ± {around:{form.lstrip('+')}}")
    return text.replace("-", "−")


def _cost(row: Mapping[str, Any], name: str) -> str:
    """Mean over the seeds that reach the goal, and how many do where not all of them."""
    reached, seeds, mean = row["reached_goal"], row["seeds"], row[name]
    if not reached:
        return "never"
    text = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
    return text if reached == seeds else f"{text} ({reached} of {seeds})"


def reading(found: Comparison) -> str:
    """How the table is to be read, in words."""
    baseline = found.variants["variant"][0]
    return (
        f"Mean ± half of the {LEVEL:.0%} interval over the seeds, by Student's t; gains are over "
        f"{baseline}, seed by seed. {found.metric} is of held-out prompts, at equal updates (after "
        f"{found.step:g} steps, where the shortest run ends) and at equal cost (after "
        f"{found.tokens:,.0f} tokens generated to train on), on straight lines between "
        f"evaluations. Tokens and seconds of training, without evaluations, to {found.goal:.3f}, "
        f"which {baseline} has at its end: means over the seeds that get there (so many of them). "
        "Entropy is that of the last step, in nats; length, in tokens, and the share cut at the "
        "limit are of the last held-out samples. Runs side by side on one machine slow each other "
        "down: compare seconds within a sweep only."
    )


def markdown(found: Comparison) -> str:
    """The table and how it is to be read."""
    rows = cells(found)
    lines = [f"| {' | '.join(rows[0])} |", f"|---|{'---:|' * (len(rows[0]) - 1)}"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    return "\n".join(lines) + f"\n\n{reading(found)}\n"


def write(found: Comparison, out: Path) -> None:
    """Write `results`, `points` and `curves` to a directory, each file whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    tables = {"results": found.variants, "points": found.points, "curves": found.curves}
    for name, frame in tables.items():
        partial = out / f"{name}.partial"
        frame.write_parquet(partial)
        partial.rename(out / f"{name}.parquet")
    artifacts.write_durably(out / "results.csv", found.variants.write_csv())
    artifacts.write_durably(out / "results.md", markdown(found))
