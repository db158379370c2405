"""A sweep as one page that needs nothing else: the table, and a line per variant in every chart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipeline import page
from pipeline.figures import BLUE, DASHES, GREEN, GREY, HEIGHT, ORANGE, PURPLE, RED, YELLOW
from pipeline.sweep_table import ACCURACY, AXES, Comparison, cells, known, reading

Floats = NDArray[np.float64]

PAGE = "sweep.html"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, RED, GREY)
POINTS = 60  # of a line, at most
BAND = 0.15  # its opacity


@dataclass(frozen=True)
class Chart:
    """One figure of the runs over one axis."""

    name: str
    title: str
    reading: str  # one sentence: how to read it
    x: str  # a column of the curves, and so is y
    y: str
    x_title: str
    y_title: str
    format: str = ".3~g"


PLAN = (
    Chart(
        name="by-step",
        title="Held-out accuracy by updates",
        reading="What an update is worth, whatever its samples cost.",
        x="step",
        y="held_out",
        x_title="step",
        y_title="accuracy",
        format=".1~%",
    ),
    Chart(
        name="by-tokens",
        title="Held-out accuracy by generated tokens",
        reading="What a generated token is worth: groups that dynamic sampling drops are paid for.",
        x="tokens",
        y="held_out",
        x_title="tokens generated to train on",
        y_title="accuracy",
        format=".1~%",
    ),
    Chart(
        name="by-seconds",
        title="Held-out accuracy by time",
        reading="Seconds of all stages but evaluations, as the runs' records say; runs side by "
        "side on one machine slow each other down.",
        x="seconds",
        y="held_out",
        x_title="seconds",
        y_title="accuracy",
        format=".1~%",
    ),
    Chart(
        name="entropy",
        title="Entropy",
        reading="How undecided the policy is at a token of its own training samples; a quick fall "
        "to zero is collapse.",
        x="step",
        y="entropy",
        x_title="step",
        y_title="nats",
    ),
    Chart(
        name="length",
        title="Response length",
        reading="Mean tokens of the training samples.",
        x="step",
        y="length",
        x_title="step",
        y_title="tokens",
    ),
    Chart(
        name="cut",
        title="Responses cut at the limit",
        reading="Share of the training samples without an end.",
        x="step",
        y="cut",
        x_title="step",
        y_title="share of responses",
        format=".1~%",
    ),
)


def write(found: Comparison, out: Path, *, title: str, lacking: Sequence[str] = ()) -> int:
    """Write the page, whole or not at all; returns its bytes.

    Args:
        lacking: runs that are not finished.
    """
    return page.write(render(found, title=title, lacking=lacking), out)


def render(found: Comparison, *, title: str, lacking: Sequence[str] = ()) -> str:
    """The page as HTML."""
    lines = {chart.name: bands(found.curves, x=chart.x, y=chart.y) for chart in PLAN}
    drawn = [_of(chart, found) for chart in PLAN if len(lines[chart.name])]
    variants = found.variants["variant"].to_list()
    return page.filled(
        "sweep.html",
        charts={chart.name: spec(chart, variants) for chart in drawn},
        datasets={chart.name: lines[chart.name].to_dicts() for chart in drawn},
        title=title,
        variants=variants,
        runs=len(found.points),
        lacking=lacking,
        rows=cells(found),
        reading=reading(found),
        drawn=drawn,
        points=_points(found.points),
    )


def _points(points: pl.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The runs one by one, as text."""
    forms = {"at_end": ".3f", **dict.fromkeys(AXES, ",.0f")}
    forms |= dict.fromkeys(("entropy", "length", "cut"), ".3f")
    rows = [
        [row["run"], *("–" if row[n] is None else f"{row[n]:{form}}" for n, form in forms.items())]
        for row in points.iter_rows(named=True)
    ]
    return ["run", *forms], rows


def _of(chart: Chart, found: Comparison) -> Chart:
    """The chart of the metric that the sweep is compared by; BLEU and chrF go to 100."""
    if chart.y != "held_out" or found.metric == ACCURACY:
        return chart
    title = chart.title.replace(ACCURACY, found.metric)
    return replace(chart, title=title, y_title=found.metric, format=".3~g")


def bands(curves: pl.DataFrame, *, x: str, y: str) -> pl.DataFrame:
    """Mean, lowest and highest of a variant's runs where all of them have a value on both sides.

    Columns: `variant`, `x`, `mean`, `low`, `high`; the x are those of the runs' own values, at most
    `POINTS` of a variant, and a run is straight between two values of its own.
    """
    numbers = dict.fromkeys(("x", "mean", "low", "high"), pl.Float64)
    drawn = [pl.DataFrame(schema={"variant": pl.String, **numbers})]
    for (variant,), of_variant in curves.group_by("variant", maintain_order=True):
        runs = [known(run, y) for _, run in of_variant.group_by("run", maintain_order=True)]
        if any(run.is_empty() for run in runs):
            continue
        start, end = max(run[x][0] for run in runs), min(run[x][-1] for run in runs)
        every = np.unique(np.concatenate([run[x].to_numpy() for run in runs]).astype(float))
        grid = _thinned(every[(every >= start) & (every <= end)])
        values = np.stack([np.interp(grid, run[x], run[y]) for run in runs])
        ends = {"low": values.min(0), "high": values.max(0)}
        drawn.append(
            pl.DataFrame({"x": grid, "mean": values.mean(0), **ends}).select(
                pl.lit(variant).alias("variant"), pl.all()
            )
        )
    return pl.concat(drawn)


def _thinned(grid: Floats) -> Floats:
    """At most `POINTS` of them, the first and the last among them."""
    if len(grid) <= POINTS:
        return grid
    return grid[np.linspace(0, len(grid) - 1, POINTS).round().astype(int)]


def spec(chart: Chart, variants: Sequence[str]) -> dict[str, Any]:
    """A chart as Vega-Lite wants it, but for its rows: a line per variant in a band of its runs."""
    import altair as alt

    legend = (
        alt.Legend(symbolType="stroke", symbolOpacity=1, columns=3) if len(variants) > 1 else None
    )

    def by_variant(channel: Any, values: Sequence[Any]) -> Any:
        cycle = [values[i % len(values)] for i in range(len(variants))]
        scale = alt.Scale(domain=list(variants), range=cycle)
        return channel("variant:N", title=None, scale=scale, legend=legend)

    ticks = alt.Axis(format="~s", tickMinStep=1, labelOverlap=True)
    scale = alt.Scale(nice=False, padding=8)
    x = alt.X("x:Q", title=chart.x_title, scale=scale, axis=ticks)
    axis = alt.Axis(format=chart.format, tickCount=5)
    base = alt.Chart(alt.NamedData(name=chart.name)).encode(
        x=x, color=by_variant(alt.Color, COLOURS)
    )
    y = alt.Y("mean:Q", title=chart.y_title, scale=alt.Scale(zero=False), axis=axis)
    band = base.mark_area(opacity=BAND).encode(y=alt.Y("low:Q", title=chart.y_title), y2="high:Q")
    numbers = [alt.Tooltip(f"{name}:Q", format=chart.format) for name in ("mean", "low", "high")]
    line = base.mark_line(point=True).encode(
        y=y,
        strokeDash=by_variant(alt.StrokeDash, DASHES),
        tooltip=["variant:N", alt.Tooltip("x:Q", title=chart.x_title, format=",.0f"), *numbers],
    )
    whole = alt.layer(band, line).properties(
        width="container", height=HEIGHT, description=chart.title
    )
    drawn: dict[str, Any] = whole.to_dict()
    del drawn["$schema"], drawn["config"]  # of the page, once for all
    return drawn
