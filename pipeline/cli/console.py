"""What the commands have in common: their options, and how they print."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline import mirror, storage
from stages import progress
from stages.errors import InputError

if TYPE_CHECKING:
    import polars as pl

HEADLINES = {
    "prompts": ("prompts",),
    "warmstart": ("sampled_acc",),
    "rollout": ("tokens", "truncated"),
    "score": ("acc", "reward"),
    "filter": ("kept", "dropped", "carried"),
    "update": ("loss", "entropy", "grad_norm"),
    "evaluate": ("avg@", "truncated"),
    "prune": ("ratio", "loss"),
}
SHOWN_ITEMS, SHOWN_LETTERS = 6, 120

out = Console()
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Hydra overrides, such as experiment=demo update.lr=1e-4", metavar="KEY=VALUE"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
Run = Annotated[str, typer.Argument(help="A run's name, or its directory.", metavar="RUN")]


@contextmanager
def watched() -> Iterator[None]:
    """A bar for whatever reports progress; nothing where nobody watches."""
    if not err.is_terminal:
        yield
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    ) as bar:
        rows: dict[str, TaskID] = {}  # of stages: one may sample while another trains

        def listen(done: int, total: int, note: str) -> None:
            stage = note.partition(":")[0]
            if stage not in rows:
                rows[stage] = bar.add_task(note, total=total)
            bar.update(rows[stage], completed=done, total=total, description=note)
            if done >= total:
                bar.remove_task(rows.pop(stage))

        token = progress.listener.set(listen)
        try:
            yield
        finally:
            progress.listener.reset(token)


def place(text: str) -> Path | str:
    """A path, or a URL as it was typed: a path would lose one of its slashes."""
    return text if storage.is_url(text) else Path(text)


def local(text: str) -> Path:
    """A path to write to; `InputError` for a URL."""
    if storage.is_url(text):
        raise InputError(f"--out {text}: expected a local directory; only a run writes to a store")
    return Path(text).absolute()


def brought(text: str) -> Path:
    """The absolute path of an input, with its files; a URL is an artifact of a run in a store."""
    found = place(text)
    return mirror.looked_at(
        found.absolute() if isinstance(found, Path) else found, mirror.everything
    )


def say(text: str) -> None:
    print(text, flush=True)  # not by a console of its own: the bar has to make room


def describe(made: Any, *, served: bool = False) -> None:
    metrics = "  ".join(metric(name, value) for name, value in made.metrics.items())
    say(f"{'served' if served else 'built'} {made.path}\n{metrics}")


def comparison(frame: "pl.DataFrame") -> None:
    """A row per metric, a column per setting."""
    table(" ".join(frame.columns), frame.to_dicts(), as_json=False)


def section(title: str, rows: list[dict[str, Any]]) -> None:
    """A headline, and its rows below it."""
    out.print(f"[bold]{title}[/]" + ("" if rows else "  none"), highlight=False)
    if rows:
        table(" ".join(rows[0]), rows, as_json=False)


def because(what: str, why: str | None) -> str:
    return what if why is None else f"{what}: {why}"


def headlines(stage: str, metrics: dict[str, Any]) -> Iterator[str]:
    """The few metrics of a stage that a list has room for; `dapo show` has all of them."""
    wanted = HEADLINES.get(stage, ())
    return (metric(name, value) for name, value in metrics.items() if name.startswith(wanted))


def metric(name: str, value: Any) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def table(columns: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(header_style="bold")
    for name in columns.split():
        table.add_column(name, overflow="fold", no_wrap=name == "settings")
    for row in rows:
        table.add_row(*(cell(row[name]) for name in columns.split()))
    out.print(table)


def on_its_side(schema: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """A line per column, for tables have many of them: its type, and its value in each row."""
    table = Table("column", "type", *(f"row {i}" for i in range(len(rows))), header_style="bold")
    for name, kind in schema.items():
        table.add_row(name, f"[dim]{escape(kind)}[/]", *(cell(row[name]) for row in rows))
    out.print(table)


def cell(value: Any) -> str:
    """A value as text that fits a cell; what a model wrote steers neither markup nor terminal."""
    if isinstance(value, list) and len(value) > SHOWN_ITEMS:
        shown = ", ".join(cell(item) for item in value[:SHOWN_ITEMS])
        return f"{shown}, … {len(value)} in all"
    text = plain(f"{value:.4g}" if isinstance(value, float) else str(value))
    return escape(text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…")


def plain(text: str) -> str:
    """`text` without what a terminal would act on: it is a model's, and nobody has read it."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text.expandtabs(4))


def document(value: Any) -> str:
    """A JSON document; what is no finite number is null, as in a record."""
    return json.dumps(_finite(value), indent=1, default=str, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
