"""What the pages have in common: their frame, what keeps them up to date, and small pieces."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import polars as pl
from nicegui import ui

from pipeline.view import heat
from pipeline.view.library import Library
from pipeline.view.queries import Snapshot
from stages.errors import InputError

REFRESH_S = 3.0
SHARE_OF_TIME = 0.05  # that looking for news may take
STYLE = Path(__file__).with_name("style.css")
CHIP = """<q-td :props="props">
<span class="chip" :class="'is-' + props.value">{{ props.value }}</span>
<span class="label" v-if="props.col.name == 'decision' && props.row.reason">
{{ props.row.reason }}</span></q-td>"""
LINK = '<q-td :props="props"><a :href="props.row.link" @click.stop>{{ props.value }}</a></q-td>'

Given = dict[str, list[str]]


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
    ui.label(word).classes(f"chip is-{word}")


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
