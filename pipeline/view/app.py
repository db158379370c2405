"""The pages of `dapo view`: runs and curves, responses, a group, a response, SQL.

NiceGUI keeps the state on the server and draws in the browser; all that it needs it serves itself.
What a model wrote gets onto a page as a text node, or through `heat.html`, which escapes it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import polars as pl
from nicegui import ui
from nicegui.elements.table import Table
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pipeline import sql
from pipeline.view import charts, heat
from pipeline.view.queries import (
    SORTED_BY,
    SQL_ROWS,
    WORDS,
    Filters,
    Library,
    Order,
    Page,
    Snapshot,
    when,
)
from stages.errors import InputError

REFRESH_S = 3.0
LONGEST_S = 60.0  # that a page may take to be made
SHARE_OF_TIME = 0.05  # that looking for news may take
ROWS_OF_RUNS = 15
ROWS_OF_PAGE = [25, 50, 100]
SHOWN_TOKENS = 20_000  # of one response
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect width="32" height="32" rx="7" fill="#4c6ef5"/>'
    '<path d="M6 22 L13 14 L18 18 L26 9" fill="none" stroke="#fff" stroke-width="3"/></svg>'
)
FIRST_QUERY = (
    "select verdict, count(*) as responses, avg(length) as length\nfrom responses\ngroup by verdict"
)
STYLE = Path(__file__).with_name("style.css")
CHIP = """<q-td :props="props">
<span class="chip" :class="'is-' + props.value">{{ props.value }}</span>
<span class="label" v-if="props.col.name == 'decision' && props.row.reason">
{{ props.row.reason }}</span></q-td>"""
LINK = '<q-td :props="props"><a :href="props.row.link" @click.stop>{{ props.value }}</a></q-td>'
EXCERPT = '<q-td :props="props" class="excerpt"><div>{{ props.value }}</div></q-td>'

Given = dict[str, list[str]]


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
    page("/responses", responses_page)
    page("/group", group_page)
    page("/response", response_page)
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


@dataclass
class Shown:
    """What a page of responses shows at the moment."""

    snapshot: Snapshot
    wanted: Filters


async def responses_page(library: Library, given: Given) -> None:
    """A table of responses, filtered and paged here, not in the browser."""
    name = chosen_run(library, given)
    snapshot = library.snapshot(name)
    state = Shown(snapshot, Filters.of(given))
    words = await asyncio.to_thread(snapshot.words)
    with frame("responses", given) as switch:
        with ui.element("div").classes("head"):
            count = ui.label().classes("title")
            download = ui.link("Download as Parquet", "#").classes("plain").props("download")
            download.tooltip("of all that match, with texts, tokens and log-probs")
        message = ui.label().classes("error")
        message.visible = False

        async def narrowed(**changes: Any) -> None:
            state.wanted = replace(state.wanted, **changes)
            table.pagination = table.pagination | {"page": 1}
            ui.navigate.history.replace(
                address("/responses", {"run": [name], **state.wanted.query()})
            )
            await fill()

        with ui.column().classes("panel"), ui.element("div").classes("filters"):
            ui.select(
                library.names(),
                value=name,
                label="run",
                on_change=lambda e: ui.navigate.to(address("/responses", {"run": [e.value]})),
            ).props("dense")
            filter_inputs(state.wanted, words, narrowed)
        with ui.column().classes("panel"):
            table = responses_table()

        async def fill() -> None:
            paging = table.pagination
            size = paging.get("rowsPerPage") or ROWS_OF_PAGE[0]
            order = Order(paging.get("sortBy") or None, bool(paging.get("descending")))
            first = (max(paging.get("page", 1), 1) - 1) * size
            try:
                found: Page = await asyncio.to_thread(
                    lambda: state.snapshot.page(state.wanted, first=first, rows=size, order=order)
                )
            except (InputError, pl.exceptions.PolarsError, OSError) as error:
                say(message, error)
                return
            say(message, None)
            count.set_text(f"{found.total:,} responses of {name}")
            table.pagination = table.pagination | {"rowsNumber": found.total}
            table.rows = [response_row(name, row) for row in found.rows]
            query = {"run": [name], **state.wanted.query()}
            download.props["href"] = address("/download/responses", query)
            download.update()

        async def turn(event: Any) -> None:
            table.pagination = event.args["pagination"]
            await fill()

        def opened(event: Any) -> None:
            ui.navigate.to(event.args[1]["link"])

        table.on("request", turn)
        table.on("rowClick", opened, [[], ["link"], None])
        await fill()

        async def news() -> bool:
            before, state.snapshot = (
                state.snapshot,
                await asyncio.to_thread(library.snapshot, name),
            )
            return state.snapshot is not before

        live(switch, news, fill)


def filter_inputs(
    wanted: Filters, words: dict[str, list[str]], narrowed: Callable[..., Awaitable[None]]
) -> None:
    """An input for each filter; `narrowed` is called with the fields that change."""

    def range_of(label: str, name: str, kind: type[int] | type[float]) -> None:
        with ui.element("div").classes("range"):
            for end, sign in (("from", "≥"), ("to", "≤")):
                field = f"{name}_{end}"

                async def changed(event: Any, field: str = field) -> None:
                    value = event.value
                    await narrowed(**{field: None if value in (None, "") else kind(value)})

                box = ui.number(
                    f"{label} {sign}",
                    value=getattr(wanted, field),
                    precision=0 if kind is int else None,
                    on_change=changed,
                )
                box.props("dense debounce=400").classes(f"filter-{field}")

    def one_of(label: str, name: str) -> None:
        async def changed(event: Any) -> None:
            await narrowed(**{name: tuple(event.value)})

        chosen = list(getattr(wanted, name))
        options = {word: word if word != "-" else "none yet" for word in [*words[name], *chosen]}
        ui.select(options, value=chosen, label=label, multiple=True, on_change=changed).props(
            "dense clearable options-dense"
        ).classes(f"filter-{name}")

    async def text_changed(event: Any) -> None:
        await narrowed(text=event.value or "")

    ui.input("text contains", value=wanted.text, on_change=text_changed).props(
        "dense clearable debounce=500"
    ).classes("filter-text wide")
    one_of("verdict", "verdict")
    one_of("group decision", "decision")
    one_of("task", "task")
    one_of("finish reason", "finish_reason")
    range_of("step", "step", int)
    range_of("reward", "reward", float)
    range_of("length", "length", int)


def responses_table() -> Table:
    columns = [
        column("response_id", "response", sortable=False),
        column("step", right=True),
        column("verdict"),
        column("reward", right=True),
        column("length", right=True),
        column("finish_reason", "finish"),
        column("decision", "group"),
        column("text", sortable=False),
        column("task"),
    ]
    assert {each["name"] for each in columns if each["sortable"]} <= {*SORTED_BY, *WORDS}
    paging = {"page": 1, "rowsPerPage": ROWS_OF_PAGE[0], "rowsNumber": 0}
    table = ui.table(rows=[], columns=columns, row_key="response_id", pagination=paging)
    table.props(f'flat dense binary-state-sort :rows-per-page-options="{ROWS_OF_PAGE}"')
    table.classes("responses clicks")
    table.add_slot("body-cell-response_id", LINK)
    for name in ("verdict", "decision"):
        table.add_slot(f"body-cell-{name}", CHIP)
    table.add_slot("body-cell-text", EXCERPT)
    return table


def response_row(run: str, row: dict[str, Any]) -> dict[str, Any]:
    to = {"run": [run], "group": [row["group_id"]], "response": [row["response_id"]]}
    return {
        **{name: row[name] for name in ("response_id", "step", "length", "reason")},
        **{name: row[name] or "–" for name in ("verdict", "finish_reason", "decision", "task")},
        "reward": number(row["reward"]),
        "text": heat.visible(row["text"] or ""),
        "link": address("/group", to),
    }


async def group_page(library: Library, given: Given) -> None:
    """A group: its prompt, the gold answer, and its responses side by side."""
    name, group = chosen_run(library, given), one(given, "group")
    snapshot = await asyncio.to_thread(library.snapshot, name)
    rows = await asyncio.to_thread(snapshot.group, group)
    with frame("responses", given) as switch:
        ui.label(f"Group {group}").classes("title")

        @ui.refreshable
        def content(rows: list[dict[str, Any]]) -> None:
            first = rows[0]
            with ui.column().classes("panel"):
                facts(
                    run=name,
                    step=first["step"],
                    round=first["round"],
                    task=first["task"],
                    prompt_id=first["prompt_id"],
                    decision=because(first["decision"], first["reason"]),
                    decided_in_step=first["decided_in"],
                    right=f"{sum(row['verdict'] == 'right' for row in rows)} of {len(rows)}",
                    temperature=first["temperature"],
                    policy=(first["policy"] or "")[:12],
                )
                named_text("prompt", first["prompt"])
                named_text("gold answer", first["answer"])
            with ui.element("div").classes("cards"):
                for row in rows:
                    response_card(name, row, opened=row["response_id"] == last(given, "response"))

        content(rows)
        follow(switch, library, name, snapshot, lambda found: found.group(group), content.refresh)


def response_card(run: str, row: dict[str, Any], *, opened: bool) -> None:
    parts = {k: v for k, v in row.items() if k.startswith("part_")}
    with (
        ui.column()
        .classes("panel response")
        .style("gap: 10px" + ("; border-color: #4c6ef5" if opened else ""))
    ):
        with ui.row().classes("items-center").style("gap: 10px; width: 100%"):
            chip(row["verdict"] or "not judged yet")
            ui.label(row["response_id"]).classes("label")
            to = {"run": [run], "response": [row["response_id"]]}
            ui.link("tokens", address("/response", to)).classes("plain").style("margin-left: auto")
        facts(
            reward=row["reward"],
            acc=row["acc"],
            penalty=row["penalty"],
            **parts,
            advantage=row["advantage"],
            length=row["length"],
            finish=row["finish_reason"],
            extracted=row["extracted"],
        )
        ui.label(heat.visible(row["text"])).classes("text scrolls").style("width: 100%")


async def response_page(library: Library, given: Given) -> None:
    """A response: its tokens on colours of a chosen figure, and what happened to it."""
    name, response_id = chosen_run(library, given), one(given, "response")
    snapshot = await asyncio.to_thread(library.snapshot, name)
    found = await asyncio.to_thread(snapshot.response, response_id)
    kinds = heat.kinds(found.tokens)
    kind = last(given, "kind")
    state = {"kind": kind if kind in kinds else heat.most_telling(found.tokens)}
    with frame("responses", given) as switch:
        with ui.element("div").classes("head left"):
            ui.label(f"Response {response_id}").classes("title")
            to = {"run": [name], "group": [found.row["group_id"]], "response": [response_id]}
            ui.link("its group", address("/group", to)).classes("plain")

        @ui.refreshable
        def content(found: Any) -> None:
            with ui.column().classes("panel"):
                if not found.tokens:
                    ui.label("It has no tokens.")
                else:
                    heat_map(found, state)
            for number_, chapter in enumerate(found.chapters, 1):
                with ui.column().classes("panel").style("gap: 8px"):
                    ui.label(f"{number_}. {heat.visible(chapter.title)}").style("font-weight: 600")
                    facts(**chapter.facts)
                    for title, text in chapter.texts.items():
                        named_text(title, text)
                    if chapter.note:
                        ui.label(heat.visible(chapter.note)).classes("label")

        content(found)
        follow(
            switch, library, name, snapshot, lambda new: new.response(response_id), content.refresh
        )


def heat_map(found: Any, state: dict[str, Any]) -> None:
    """The tokens, with a choice of what their backgrounds show."""
    tokens = {name: values[:SHOWN_TOKENS] for name, values in found.tokens.items()}
    kinds = heat.kinds(tokens)

    def draw() -> None:
        kind = state["kind"]
        meaning.set_text(f"{kinds[kind]}: {heat.legend(kind, tokens[kind])}")
        shown.set_content(heat.html(tokens, kind))

    def choose(event: Any) -> None:
        state["kind"] = event.value
        draw()

    with ui.row().classes("items-center").style("gap: 14px"):
        ui.select(list(kinds), value=state["kind"], label="colour", on_change=choose).props(
            "dense options-dense"
        ).style("min-width: 150px").classes("kind")
        with ui.column().style("gap: 0"):
            meaning = ui.label()
            ui.label(heat.visible(found.source)).classes("label")
    shown = ui.html("", sanitize=True).classes("text tokens")
    if len(found.tokens["token"]) > SHOWN_TOKENS:
        ui.label(f"the first {SHOWN_TOKENS:,} tokens").classes("label")
    draw()


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


@contextmanager
def frame(here: str, given: Given) -> Iterator[ui.switch]:
    """What all pages have: their style, the way to the others, and whether they are live."""
    ui.add_css(STYLE.read_text())
    ui.colors(primary="#4c6ef5")
    with ui.header(elevated=False), ui.element("nav").classes("bar"):
        ui.label("DAPO").classes("name")
        for name, path in (("runs", "/"), ("responses", "/responses"), ("sql", "/sql")):
            runs = {"run": given.get("run", [])}
            link = ui.link(name if name != "sql" else "SQL", address(path, runs))
            link.classes("here" if name == here else "")
        switch = ui.switch("live", value=True).props("dense size=sm").classes("live")
        switch.tooltip("show what is published meanwhile")
        switch.visible = here != "sql"
    yield switch


def live(
    switch: ui.switch,
    news: Callable[[], Awaitable[bool]],
    refresh: Callable[[], Awaitable[None]],
) -> None:
    """Look for news every few seconds while the page is open, less often where looking is slow."""

    async def tick() -> None:
        start = time.perf_counter()
        try:
            if await news():
                await refresh()
        except (InputError, pl.exceptions.PolarsError, OSError) as error:
            # a run is being changed or removed under our hands; the next look may find it whole
            ui.notify(heat.visible(str(error)), type="warning")
        timer.interval = max(REFRESH_S, (time.perf_counter() - start) / SHARE_OF_TIME)

    timer = ui.timer(REFRESH_S, tick, immediate=False)
    switch.on_value_change(lambda event: setattr(timer, "active", event.value))


def follow(
    switch: ui.switch,
    library: Library,
    name: str,
    snapshot: Snapshot,
    ask: Callable[[Snapshot], Any],
    show: Callable[[Any], Any],
) -> None:
    """Ask the run again whenever it has published something."""
    known = [snapshot]

    async def news() -> bool:
        found = await asyncio.to_thread(library.snapshot, name)
        changed = found is not known[-1]
        known[:] = [found]
        return changed

    async def refresh() -> None:
        show(await asyncio.to_thread(ask, known[-1]))

    live(switch, news, refresh)


def chosen_run(library: Library, given: Given) -> str:
    """The run that the address names, else the newest. Raises `InputError` if it is not here."""
    asked = last(given, "run")
    names = [asked] if asked else library.names()[:1]
    if not names:
        raise InputError("there are no runs here yet; start with: dapo train experiment=demo")
    library.directory(names[0])
    return names[0]


def one(given: Given, name: str) -> str:
    value = last(given, name)
    if not value:
        raise InputError(f"the address names no {name}")
    return value


def last(given: Given, name: str) -> str:
    return given.get(name, [""])[-1]


def address(path: str, query: Given) -> str:
    return f"{path}?{urlencode(query, doseq=True)}" if any(query.values()) else path


def column(
    name: str, label: str | None = None, *, right: bool = False, sortable: bool = True
) -> dict[str, Any]:
    align = "right" if right else "left"
    named = {"name": name, "label": label or name, "field": name}
    return named | {"align": align, "sortable": sortable}


def facts(**given: Any) -> None:
    """Names and values in a row; what is not known is left out."""
    with ui.element("div").classes("facts"):
        for name, value in given.items():
            if value is not None:
                with ui.element("div"):
                    ui.label(name.replace("_", " ")).classes("label")
                    ui.label(cell(value)).classes("value")


def named_text(name: str, text: str | None) -> None:
    with ui.element("div").style("width: 100%"):
        ui.label(name).classes("label")
        ui.label(heat.visible(text or "–")).classes("text")


def chip(word: str) -> None:
    ui.label(word).classes(f"chip is-{word.split()[0]}")


def say(where: ui.label, error: Exception | None) -> None:
    where.set_text("" if error is None else heat.visible(str(error)))
    where.visible = error is not None


def because(what: str | None, why: str | None) -> str | None:
    return what if why is None else f"{what}: {why}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def cell(value: Any) -> str:
    """A value of a table as text that fits."""
    text = f"{value:.5g}" if isinstance(value, float) else "–" if value is None else str(value)
    return heat.visible(text if len(text) <= 400 else f"{text[:400]}…")
