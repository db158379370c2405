"""The pages on which responses are read: the table of all, a group, and one token by token.

What a model wrote gets onto a page as a text node, or through `heat.html`, which escapes it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
from nicegui import ui
from nicegui.elements.table import Table

from pipeline.view import heat
from pipeline.view.library import Library
from pipeline.view.parts import (
    CHIP,
    LINK,
    Given,
    address,
    because,
    chip,
    chosen_run,
    column,
    facts,
    follow,
    frame,
    last,
    live,
    named_text,
    number,
    one,
    say,
)
from pipeline.view.queries import SORTED_BY, WORDS, Filters, Order, Page, Snapshot
from stages.errors import InputError

ROWS_OF_PAGE = [25, 50, 100]
SHOWN_TOKENS = 20_000  # of one response
EXCERPT = '<q-td :props="props" class="excerpt"><div>{{ props.value }}</div></q-td>'


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
