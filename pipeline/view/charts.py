"""The curves of runs as options of ECharts: a panel per question."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from pipeline.read import ROUND

COLOURS = ("#4c6ef5", "#f08c00", "#2b8a3e", "#c2255c", "#7048e8", "#0c8599", "#868e96", "#a0522d")
LINES = ("solid", "dashed", "dotted")
GREY, FAINT = "#868e96", "rgba(134, 142, 150, 0.22)"  # seen on white and on black
STAGES = (*ROUND, "update", "evaluate")


class Panel(NamedTuple):
    """One chart: its title, and the columns of `curves` that it draws, with their labels."""

    title: str
    columns: dict[str, str]
    stacked: bool = False  # where one run is shown


PANELS = (
    Panel("accuracy", {"acc": "samples", "held_out": "held-out"}),
    Panel("reward", {"reward": "reward"}),
    Panel("response length, tokens", {"length": "mean length"}),
    Panel("entropy, nats", {"entropy": "entropy"}),
    Panel("share of tokens clipped", {"clip_fraction_low": "low", "clip_fraction_high": "high"}),
    Panel("groups", {"kept": "kept", "dropped": "dropped", "carried": "carried"}),
    Panel("seconds per stage", {f"seconds_{stage}": stage for stage in STAGES}, stacked=True),
)


def options(panel: Panel, curves: Mapping[str, pl.DataFrame]) -> dict[str, Any]:
    """One panel over all of these runs; where there are several, a colour is a run."""
    series = [
        _series(panel, run, column, colours=(i, j), alone=len(curves) == 1, frame=frame)
        for i, (run, frame) in enumerate(curves.items())
        for j, column in enumerate(_shown(panel, alone=len(curves) == 1))
        if column in frame.columns
    ]
    legend = len(curves) == 1 and len(series) > 1
    text = {"color": GREY, "fontSize": 11}
    return {
        "animation": False,
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 8, "right": 14, "top": 34 if legend else 14, "bottom": 4,
                 "containLabel": True},
        "legend": {"show": legend, "type": "scroll", "left": 0, "top": 0,
                   "icon": "roundRect", "itemWidth": 12, "itemHeight": 3, "textStyle": text,
                   "pageTextStyle": text},
        # as text on the canvas: names of runs are no markup
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},
        "xAxis": {"type": "value", "minInterval": 1, "min": "dataMin", "max": "dataMax",
                  "axisLabel": text | {"hideOverlap": True},
                  "axisLine": {"lineStyle": {"color": FAINT}},
                  "axisTick": {"show": False}, "splitLine": {"show": False}},
        "yAxis": {"type": "value", "scale": not panel.stacked, "splitNumber": 4, "axisLabel": text,
                  "axisLine": {"show": False}, "axisTick": {"show": False},
                  "splitLine": {"lineStyle": {"color": FAINT}}},
        "series": series,
    }  # fmt: skip


def colour(i: int) -> str:
    """Of the run, or the line, of this number."""
    return COLOURS[i % len(COLOURS)]


def lines(panel: Panel, runs: int) -> str:
    """What the kinds of line mean where a colour is a run; nothing where a legend says it."""
    shown = _shown(panel, alone=runs == 1)
    if runs == 1:
        return ""
    if len(shown) == 1:
        return next(iter(shown.values())) if panel.stacked else ""
    return ", ".join(f"{kind}: {label}" for kind, label in zip(LINES, shown.values(), strict=False))


def _shown(panel: Panel, *, alone: bool) -> dict[str, str]:
    """Stages of several runs would hide each other: then their sum is drawn."""
    return panel.columns if alone or not panel.stacked else {"seconds": "all stages"}


def _series(
    panel: Panel,
    run: str,
    column: str,
    *,
    colours: tuple[int, int],
    alone: bool,
    frame: pl.DataFrame,
) -> dict[str, Any]:
    label = _shown(panel, alone=alone)[column]
    several = len(_shown(panel, alone=alone)) > 1
    name = label if alone else f"{run} · {label}" if several else run
    points = [
        [step, None if value is None else round(value, 6)]
        for step, value in frame.select("step", pl.col(column).fill_nan(None)).rows()
        if value is not None or step > 0
    ]
    stack = {"stack": "all", "areaStyle": {"opacity": 0.55}} if panel.stacked and alone else {}
    return {
        "type": "line",
        "name": name,
        "data": points,
        "connectNulls": not panel.stacked,
        "showSymbol": len(points) < 3 or column == "held_out",
        "symbolSize": 5,
        "lineStyle": {
            "width": 0 if stack else 1.8,
            "type": "solid" if alone else LINES[colours[1] % len(LINES)],
        },
        "itemStyle": {"color": colour(colours[1] if alone else colours[0])},
        **stack,
    }
