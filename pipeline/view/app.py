"""The pages of `dapo view`: runs and curves, responses, a group, a response, SQL.

NiceGUI keeps the state on the server and draws in the browser; all that it needs it serves itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

import polars as pl
from nicegui import ui
from nicegui.elements.table import Table
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pipeline import sql
from pipeline.view import charts, heat, reading
from pipeline.view.library import SQL_ROWS, Library, when
from pipeline.view.parts import (
    CHIP,
    LINK,
    Given,
    address,
    cell,
    column,
    frame,
    last,
    live,
    number,
    say,
)
from stages.errors import InputError

LONGEST_S = 60.0  # that a page may take to be made
ROWS_OF_RUNS = 15
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="7" fill="#4c6ef5"/>'
    '<path d="M6 22 L13 14 L18 18 L26 9" fill="none" stroke="#fff" stroke-width="3"/></svg>'
)
FIRST_QUERY = (
    "select verdict, count(*) as responses, avg(length) as length\nfrom responses\ngroup by verdict"
)


def build(library: Library) -> None:
    """Register the pages over these runs."""

    def page(path: str, show: Callable[[Library, Given], Awaitable[None]]) -> None:
        async def shown(request: Request) -> Response | None:
            try:
                await show(library, parse_qs(request.url.query))
            except InputError as error:  # the page's address names what is not here
                return PlainTextResponse(heat.visible(str(error)), status_code=404)
            return None

        ui.page(path, response_timeout=LONGEST_S)(shown)

    page("/", runs_page)
    page("/responses", reading.responses_page)
    page("/group", reading.group_page)
    page("/response", reading.response_page)
    page("/sql", sql_page)


async def runs_page(library: Library, given: Given) -> None:
    """All runs, and the curves of those that are chosen."""
    marks = await asyncio.to_thread(library.marks)
    overview = await asyncio.to_thread(library.overview)
    names = [row["run"] for row in overview]
    chosen = [library.directory(name).name for name in given.get("run", [])] or names[:1]
    curves = await asyncio.to_thread(library.curves, chosen)
    with frame("runs", given) as switch:
        if not names:
            ui.label("There are no runs here yet.").classes("title")
            ui.label("Start one with: dapo train experiment=demo").classes("label")
        with ui.column().classes("panel"):
            table = runs_table(overview, chosen)

        @ui.refreshable
        def legend() -> None:
            with ui.element("div").classes("head left title"):
                for i, name in enumerate(chosen):
                    with ui.element("div"):
                        if len(chosen) > 1:
                            ui.element("span").classes("dot").style(
                                f"background: {charts.colour(i)}"
                            )
                        ui.label(name).style("display: inline")

        legend()
        drawn = []
        with ui.element("div").classes("grid"):
            for panel in charts.PANELS:
                size = " wide" if panel.stacked else ""
                with ui.column().classes(f"panel{size}").style("gap: 4px"):
                    with ui.element("div").classes("head left"):
                        ui.label(panel.title)
                        lines = ui.label(charts.lines(panel, len(chosen))).classes("label")
                    chart = ui.echart(charts.options(panel, curves)).style("height: 220px")
                    drawn.append((panel, chart, lines))

        async def draw() -> None:
            found = await asyncio.to_thread(library.curves, chosen)
            legend.refresh()
            for panel, chart, lines in drawn:
                lines.set_text(charts.lines(panel, len(chosen)))
                chart.options.clear()
                chart.options.update(charts.options(panel, found))
                chart.update()

        async def choose() -> None:
            picked = {row["run"] for row in table.selected}
            chosen[:] = [row["run"] for row in table.rows if row["run"] in picked]
            ui.navigate.history.replace(address("/", {"run": chosen}))
            await draw()

        table.on_select(choose)
        known = [marks]

        async def news() -> bool:
            rows = [run_row(row) for row in await asyncio.to_thread(library.overview)]
            if rows != table.rows:
                table.rows = rows
            known.append(await asyncio.to_thread(library.marks))
            return known.pop(0) != known[0]

        live(switch, news, draw)


def runs_table(overview: list[dict[str, Any]], chosen: list[str]) -> Table:
    """A row per run; the chosen ones are marked."""
    columns = [
        column("run"),
        column("state"),
        column("steps", right=True),
        column("acc", "accuracy", right=True),
        column("held_out", "held-out", right=True),
        column("responses", right=True),
        column("when", "newest record"),
    ]
    rows = [run_row(row) for row in overview]
    table = ui.table(
        rows=rows, columns=columns, row_key="run", selection="multiple", pagination=ROWS_OF_RUNS
    )
    table.props("flat dense hide-selected-banner color=primary").classes("runs")
    if len(rows) <= ROWS_OF_RUNS:
        table.props("hide-bottom")
    table.add_slot("body-cell-run", LINK)
    table.add_slot("body-cell-state", CHIP)
    table.selected = [row for row in rows if row["run"] in chosen]
    return table


def run_row(row: dict[str, Any]) -> dict[str, Any]:
    planned = "" if row["planned"] is None else f" / {row['planned']}"
    return {
        "run": row["run"],
        "state": row["state"],
        "steps": f"{row['steps']}{planned}",
        "acc": number(row["acc"]),
        "held_out": number(row["held_out"]),
        "responses": f"{row['responses'] or 0:,}",
        "when": when(row["when"]),
        "link": address("/responses", {"run": [row["run"]]}),
    }


async def sql_page(library: Library, given: Given) -> None:
    """A query to DuckDB, as `dapo sql` takes it."""
    names = library.names()
    chosen = [library.directory(name).name for name in given.get("run", [])] or names[:1]
    with frame("sql", given):
        with ui.column().classes("panel"):
            box = ui.codemirror(
                last(given, "query") or FIRST_QUERY, language="SQLite", line_wrapping=True
            )
            with ui.element("div").classes("head left"):
                ask = ui.button("Run").props("unelevated dense no-caps padding='4px 16px'")
                runs = (
                    ui.select(names, value=chosen, multiple=True, label="runs")
                    .props("dense options-dense")
                    .style("min-width: 160px; max-width: 100%")
                )
                download = ui.link("Download as Parquet", "#").classes("plain")
                download.style("margin-left: auto").props("download")
        message = ui.label().classes("error")
        note = ui.label().classes("label")
        result = ui.column().classes("panel")
        message.visible = note.visible = result.visible = False

        async def answer() -> None:
            query, asked = box.value, list(runs.value)
            ask.props(add="loading")
            start = time.perf_counter()
            try:
                columns, rows = await asyncio.to_thread(library.ask, query, asked)
            except (InputError, pl.exceptions.PolarsError, OSError) as error:
                say(message, error)
                note.visible = result.visible = False
                return
            finally:
                ask.props(remove="loading")
            say(message, None)
            more = len(rows) > SQL_ROWS
            count = f"the first {SQL_ROWS:,} rows" if more else f"{len(rows):,} rows"
            note.set_text(f"{count} in {time.perf_counter() - start:.2f} s")
            note.visible = result.visible = True
            result.clear()
            with result:
                result_table(columns, rows[:SQL_ROWS])

        async def follow_box() -> None:
            where = {"run": list(runs.value), "query": [box.value or ""]}
            download.props["href"] = address("/download/sql", where)
            download.update()
            ui.navigate.history.replace(address("/sql", where))

        box.on_value_change(follow_box)
        runs.on_value_change(follow_box)
        box.map_key("Mod-Enter", answer)
        ask.on_click(answer)
        with ui.expansion("views and their columns").classes("panel"):
            catalogue_table()
        where = {"run": chosen, "query": [box.value]}
        download.props["href"] = address("/download/sql", where)
        if last(given, "query"):
            await answer()


def result_table(columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    shown = [{"_": i, **{name: cell(row[name]) for name in columns}} for i, row in enumerate(rows)]
    numbers = {name for name in columns if rows and isinstance(rows[0][name], int | float)}
    table = ui.table(
        rows=shown,
        columns=[column(name, right=name in numbers, sortable=False) for name in columns],
        row_key="_",
        pagination=25,
    )
    table.props("flat dense" + (" hide-bottom" if len(rows) <= 25 else "")).classes("result")


def catalogue_table() -> None:
    rows = [{"_": i, **row} for i, row in enumerate(sql.catalogue())]
    table = ui.table(
        rows=rows,
        columns=[column(name) for name in ("view", "column", "type", "meaning")],
        row_key="_",
        pagination=25,
    )
    table.props("flat dense wrap-cells")
