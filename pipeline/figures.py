"""The charts of a report: what they show, as a row per step, and Altair's drawing of it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.artifacts import Artifact
from pipeline.loop import Step
from pipeline.read import Run

if TYPE_CHECKING:
    import altair as alt

HEIGHT = 200  # of a chart, pixels
POINTS = 400  # of a curve, at most: longer ones are thinned out
MARKED = 60  # points up to which each has a mark of its own
DATA = "curves"  # the one table that all charts read
AGE, REASON, SECONDS = "age_", "reason_", "seconds_"
LABELS = {
    "held_out": "held-out",
    "acc": "training samples",
    "length": "all",
    "length_stopped": "ended by themselves",
    "clip_fraction_low": "low, under 1 − ε_low",
    "clip_fraction_high": "high, over 1 + ε_high",
    "gap_mean": "batch, mean",
    "gap_max": "batch, largest",
    "probe_gap_max": "probe, largest",
    "kl_k1": "from the old policy, k1",
    "kl_k3": "from the old policy, k3",
    "kl_reference": "from the reference policy",
    "sampler_speed": "sampling",
    "trainer_speed": "training",
    "sampled_tokens": "sampled to train on",
    "evaluated_tokens": "sampled to evaluate",
    "tokens": "trained on",
    "grad_norm": "gradient norm",
}
# the page's own colours: they change with its scheme
BLUE, ORANGE, GREEN, PURPLE, YELLOW, RED, GREY = (f"var(--series-{i})" for i in range(1, 8))
LINES = (BLUE, ORANGE, GREEN)
DASHES = ([1, 0], [6, 3], [2, 2])  # so that no line is told by its colour alone
REASONS = {
    "kept": BLUE,
    "reason_all_right": GREEN,
    "reason_all_wrong": ORANGE,
    "reason_all_equal": PURPLE,
    "reason_surplus": GREY,
    "reason_short": YELLOW,
}
STAGES = {
    "seconds_rollout": BLUE,
    "seconds_update": ORANGE,
    "seconds_evaluate": GREEN,
    "seconds_score": PURPLE,
    "seconds_filter": YELLOW,
    "seconds_select": GREY,
}
AGES = dict(zip((f"{AGE}{i}" for i in range(4)), (BLUE, ORANGE, GREEN, PURPLE), strict=True))
TOKENS = {"sampled_tokens": BLUE, "evaluated_tokens": GREEN, "tokens": ORANGE}
OTHER = RED  # of a stack: whatever has no colour of its own
# of a logarithmic axis: the grid has lines at powers of ten only
POWERS: dict[str, Any] = {
    "condition": {
        "test": "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) < 1e-6",
        "value": 1,
    },
    "value": 0,
}
TEXT, FAINT = "var(--text)", "var(--line)"
CONFIG = {  # of all charts, as Vega-Lite calls it
    "background": "transparent",
    "font": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif",
    "autosize": {"type": "fit-x", "contains": "padding"},
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": 400,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "gridColor": FAINT,
        "domainColor": FAINT,
        "tickColor": FAINT,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False},
    "legend": {
        "orient": "top",
        "labelColor": TEXT,
        "labelFontSize": 12,
        "labelLimit": 220,
        "symbolStrokeWidth": 2,
        "symbolSize": 220,
        "offset": 8,
    },
    "line": {"strokeWidth": 2},
    "point": {"size": 24, "filled": True},
}


@dataclass(frozen=True)
class Lines:
    """A line per column, all in one unit."""

    name: str
    section: str
    title: str
    reading: str  # one sentence: how to read it
    y: str
    columns: tuple[str, ...]
    format: str = ".3~g"
    log: bool = False
    interval: tuple[str, str] | None = None  # columns of the ends of bars around the first line


@dataclass(frozen=True)
class Stack:
    """A bar per step, of one part per column."""

    name: str
    section: str
    title: str
    reading: str
    y: str
    colours: Mapping[str, str]  # by column
    prefix: str | None = None  # further columns that belong to it, with another colour
    format: str = ".3~s"

    def found(self, names: Iterable[str]) -> dict[str, str]:
        """The columns that are there and their colours, from the bottom up."""
        names = list(names)
        more = [n for n in names if self.prefix and n.startswith(self.prefix)]
        known = {n: colour for n, colour in self.colours.items() if n in names}
        return known | {n: OTHER for n in more if n not in known}


PLAN: tuple[Lines | Stack, ...] = (
    Lines(
        name="accuracy",
        section="learning",
        title="Accuracy",
        reading="Held-out accuracy is the measure of success, with bars for its interval over the "
        "prompts; that of the training samples moves with the prompts that are asked.",
        y="accuracy",
        columns=("held_out", "acc"),
        format=".1~%",
        interval=("held_out_low", "held_out_high"),
    ),
    Lines(
        name="reward",
        section="learning",
        title="Reward",
        reading="Mean reward of the training samples, length penalty included: it should rise, and "
        "more slowly as prompts run out of mistakes.",
        y="reward",
        columns=("reward",),
    ),
    Lines(
        name="length",
        section="learning",
        title="Response length",
        reading="Where the lines are far apart, responses that were cut at the limit make up the "
        "difference.",
        y="tokens",
        columns=("length", "length_stopped"),
    ),
    Lines(
        name="truncated",
        section="learning",
        title="Responses cut at the limit",
        reading="Share of the training samples without an end: it should fall; a rise means that "
        "responses outgrow the limit.",
        y="share of responses",
        columns=("truncated",),
        format=".1~%",
    ),
    Stack(
        name="groups",
        section="sampling",
        title="Groups, and what became of them",
        reading="Only kept groups train; all right and all wrong ones teach nothing, and surplus "
        "ones were more than the batch needs.",
        y="groups",
        colours=REASONS,
        prefix=REASON,
    ),
    Stack(
        name="ages",
        section="sampling",
        title="Age of the groups trained on",
        reading="Steps between the policy that sampled a group and the one that trains on it: 0 is "
        "fresh, older ones were carried over.",
        y="groups kept",
        colours=AGES,
        prefix=AGE,
    ),
    Lines(
        name="entropy",
        section="update",
        title="Entropy",
        reading="How undecided the policy is at a token, on average: a slow fall is learning, a "
        "quick fall to zero is collapse.",
        y="nats",
        columns=("entropy",),
    ),
    Lines(
        name="clipping",
        section="update",
        title="Clipped tokens",
        reading="Share of tokens whose ratio left the trust region on either side, and so gave no "
        "gradient: usually well under a few per cent.",
        y="share of tokens",
        columns=("clip_fraction_low", "clip_fraction_high"),
        format=".2~%",
    ),
    Lines(
        name="gradient",
        section="update",
        title="Gradient norm",
        reading="Before it is clipped: spikes are steps that a few responses dominate.",
        y="norm",
        columns=("grad_norm",),
    ),
    Lines(
        name="kl",
        section="update",
        title="KL divergence",
        reading="How far an update moves the policy, and how far it is from the reference where "
        "there is one: estimates, which may be a little below zero.",
        y="nats per token",
        columns=("kl_k1", "kl_k3", "kl_reference"),
        format=".3~g",
    ),
    Lines(
        name="gap",
        section="update",
        title="Gap between sampler and trainer",
        reading="Distance of their log-probs for the same tokens, on a logarithmic scale: rounding "
        "alone is far below 0.01, and a jump means that they no longer have the same weights.",
        y="|difference|, nats",
        columns=("gap_mean", "gap_max", "probe_gap_max"),
        format=".0e",
        log=True,
    ),
    Stack(
        name="seconds",
        section="cost",
        title="Seconds per stage",
        reading="Where the time of a step goes, by the records of its stages.",
        y="seconds",
        colours=STAGES,
    ),
    Stack(
        name="tokens",
        section="cost",
        title="Tokens per stage",
        reading="Tokens of responses that were sampled, and that were trained on; the more of the "
        "former for one of the latter, the more dynamic sampling threw away.",
        y="tokens",
        colours=TOKENS,
    ),
    Lines(
        name="speed",
        section="cost",
        title="Tokens per second",
        reading="Speed of the engine over its responses, and of the trainer over prompts and "
        "responses; both grow with longer batches.",
        y="tokens per second",
        columns=("sampler_speed", "trainer_speed"),
        format=".3~s",
    ),
)


@dataclass(frozen=True)
class Figure:
    """A chart as Vega-Lite wants it, but for the rows of `DATA`."""

    plan: Lines | Stack
    columns: tuple[str, ...]  # that it shows
    spec: dict[str, Any]


def curves(run: Run) -> pl.DataFrame:
    """`Run.curves`, and what more the charts show: a row per step; what is not finite is null.

    Further columns: `held_out_low`, `held_out_high` (bootstrap interval over the prompts),
    `length_stopped` (mean tokens of responses that ended by themselves), `probe_gap_max`,
    `sampler_speed`, `trainer_speed` (tokens per second), `evaluated_tokens`, and `age_0`, `age_1`,
    … (groups trained on by their age in steps).
    """
    frame = run.curves.collect()
    steps = {step.number: step for step in run.steps()}
    evaluations = {
        found.place.step: found.artifact for found in run.found if found.place.stage == "evaluate"
    }
    recorded = pl.DataFrame(
        [
            {"step": number, **_recorded(steps.get(number), evaluations.get(number))}
            for number in frame["step"]
        ],
        schema={
            "step": pl.Int32,
            **dict.fromkeys(("probe_gap_max", "sampler_speed", "evaluated_tokens"), pl.Float64),
        },
    )
    for more in (recorded, _intervals(run), _lengths(run), _speeds(run), _ages(run)):
        frame = frame.join(more, on="step", how="left")
    ages = [name for name in frame.columns if name.startswith(AGE)]
    trained = pl.col("step") > 0
    number = pl.col(pl.Float64)
    return (
        frame.sort("step")
        .with_columns(pl.when(trained).then(pl.col(name).fill_null(0)).alias(name) for name in ages)
        .with_columns(pl.when(number.is_finite()).then(number))
    )


def _recorded(step: Step | None, evaluation: Artifact | None) -> dict[str, float | None]:
    """What the records of a step's engine say."""
    rollouts = [each.rollout for each in step.rounds] if step else []
    sampled = [*rollouts, *([evaluation] if evaluation else [])]
    gaps = [a.metrics.get("probe_gap_max") for a in sampled]
    known = [gap for gap in gaps if gap is not None]
    timed = [a.metrics for a in rollouts if a.metrics.get("tokens_per_second")]
    seconds = sum(m["tokens"] / m["tokens_per_second"] for m in timed)
    return {
        "probe_gap_max": max(known, default=None),
        "sampler_speed": sum(m["tokens"] for m in timed) / seconds if seconds else None,
        "evaluated_tokens": float(evaluation.metrics["tokens"]) if evaluation else None,
    }


def _intervals(run: Run) -> pl.DataFrame:
    """The bootstrap interval of avg@k on the first evaluation set, per evaluated step."""
    of_all = pl.col("task").is_null() & pl.col("difficulty").is_null()
    return (
        run.results.filter(of_all, pl.col("metric").str.starts_with("avg@"))
        .group_by("step")
        .agg(held_out_low=pl.col("low").first(), held_out_high=pl.col("high").first())
        .collect()
    )


def _lengths(run: Run) -> pl.DataFrame:
    stopped = run.rollouts.filter(pl.col("finish_reason") == "stop")
    return stopped.group_by("step").agg(length_stopped=pl.col("length").mean()).collect()


def _speeds(run: Run) -> pl.DataFrame:
    """Tokens per second of all mini-batches of a step together."""
    seconds, speed = pl.col("seconds"), pl.col("tokens_per_second")
    return (
        run.timings.group_by("step")
        .agg(trainer_speed=(seconds * speed).sum() / seconds.sum())
        .collect()
    )


def _ages(run: Run) -> pl.DataFrame:
    kept = run.groups.filter(pl.col("decision") == "kept").group_by("step", "age").len().collect()
    wide = kept.sort("age").pivot("age", index="step", values="len")
    return wide.select("step", pl.exclude("step").cast(pl.Float64).name.prefix(AGE))


def thinned(frame: pl.DataFrame, most: int = POINTS) -> tuple[pl.DataFrame, int]:
    """At most about `most` rows: means of so many neighbouring steps, each at its last step.

    Step 0, before training, stays alone.
    """
    size = max(1, -(-len(frame) // most))
    if size == 1:
        return frame, 1
    bins = (pl.col("step") + size - 1) // size
    return (
        frame.group_by(bins.alias("bin"))
        .agg(pl.col("step").max(), pl.exclude("step", "bin").mean())
        .sort("bin")
        .drop("bin"),
        size,
    )


def draw(frame: pl.DataFrame) -> tuple[list[Figure], list[str]]:
    """The figures that a run's curves have values for, and the titles of the others."""
    there = [name for name in frame.columns if frame[name].drop_nulls().len()]
    drawn, absent = [], []
    for plan in PLAN:
        chart: alt.LayerChart | alt.Chart
        if isinstance(plan, Stack):
            colours = plan.found(there)
            columns, chart = tuple(colours), _stack(plan, colours)
        else:
            columns = tuple(name for name in plan.columns if name in there)
            chart = _lines(plan, columns, marked=len(frame) <= MARKED, there=there)
        if not columns:
            absent.append(plan.title)
            continue
        spec = chart.properties(width="container", height=HEIGHT, description=plan.title).to_dict()
        del spec["$schema"], spec["config"]  # of the page, once for all
        drawn.append(Figure(plan, columns, spec))
    return drawn, absent


def label(column: str) -> str:
    """What a legend calls a column."""
    if column.startswith(AGE):
        age = column.removeprefix(AGE)
        return f"{age} step" if age == "1" else f"{age} steps"
    plain = column.removeprefix(REASON).removeprefix(SECONDS).replace("_", " ")
    return LABELS.get(column, plain)


def _folded(columns: tuple[str, ...]) -> "alt.Chart":
    import altair as alt

    return (
        alt.Chart(alt.NamedData(name=DATA))
        .transform_fold(list(columns), as_=["series", "value"])
        .transform_filter("isValid(datum.value)")
    )


def _legend(columns: Iterable[str], symbol: str) -> "alt.Legend | None":
    """A legend with the labels of the columns; none where there is one column only."""
    import altair as alt

    names = {name: label(name) for name in columns}
    if len(names) == 1:
        return None
    return alt.Legend(labelExpr=f"{json.dumps(names)}[datum.label]", symbolType=symbol)


def _tooltip(columns: Iterable[str], number: str) -> "list[alt.Tooltip]":
    import altair as alt

    return [
        alt.Tooltip("step:Q", format="d"),
        *(alt.Tooltip(f"{name}:Q", title=label(name), format=number) for name in columns),
    ]


def _lines(
    plan: Lines, columns: tuple[str, ...], *, marked: bool, there: Iterable[str]
) -> "alt.LayerChart":
    import altair as alt

    step = alt.Axis(format="d", tickMinStep=1)
    x = alt.X("step:Q", axis=step, scale=alt.Scale(nice=False, padding=8), title="step")
    scale = alt.Scale(type="log") if plan.log else alt.Scale(zero=False)
    shown = _folded(columns)
    if plan.log:  # which has no zero
        shown = shown.transform_filter("datum.value > 0")
    grid = POWERS if plan.log else alt.Undefined
    axis = alt.Axis(format=plan.format, tickCount=5, gridOpacity=grid)
    y = alt.Y("value:Q", title=plan.y, scale=scale, axis=axis)
    domain, legend = list(columns), _legend(columns, "stroke")
    line = shown.mark_line(point=marked).encode(
        x=x,
        y=y,
        color=alt.Color(
            "series:N",
            title=None,
            scale=alt.Scale(domain=domain, range=list(LINES[: len(domain)])),
            legend=legend,
        ),
        strokeDash=alt.StrokeDash(
            "series:N",
            title=None,
            scale=alt.Scale(domain=domain, range=list(DASHES[: len(domain)])),
            legend=legend,
        ),
    )
    whole = alt.Chart(alt.NamedData(name=DATA))
    hover = alt.selection_point(
        name="hover", fields=["step"], nearest=True, on="pointerover", empty=False
    )
    ruler = (
        whole.mark_rule(color=GREY)
        .encode(
            x=x,
            opacity=alt.condition(hover, alt.value(0.6), alt.value(0)),
            tooltip=_tooltip(columns, plan.format),
        )
        .add_params(hover)
    )
    layers = [line, ruler]
    if plan.interval and set(plan.interval) <= set(there):
        low, high = plan.interval
        bars = whole.mark_rule(strokeWidth=2, opacity=0.6, color=LINES[0])
        layers.insert(0, bars.encode(x=x, y=alt.Y(f"{low}:Q", title=plan.y), y2=f"{high}:Q"))
    return alt.layer(*layers)


def _stack(plan: Stack, colours: Mapping[str, str]) -> "alt.Chart":
    import altair as alt

    columns = tuple(colours)
    step = alt.Axis(labelOverlap=True, labelAngle=0, ticks=False, domain=False)
    return (
        _folded(columns)
        .transform_calculate(place=f"indexof({json.dumps(columns)}, datum.series)")
        .mark_bar()
        .encode(
            x=alt.X("step:O", axis=step, title="step"),
            y=alt.Y("value:Q", title=plan.y, stack="zero", axis=alt.Axis(format="~s", tickCount=5)),
            color=alt.Color(
                "series:N",
                title=None,
                scale=alt.Scale(domain=list(columns), range=list(colours.values())),
                legend=_legend(columns, "square"),
            ),
            order=alt.Order("place:Q"),
            tooltip=_tooltip(columns, plan.format),
        )
    )
