"""The command that trains many runs and holds them side by side: sweep."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pipeline.cli.console import Overrides, cell, err, out, say

if TYPE_CHECKING:
    from pipeline.sweep import Point

ACCURACIES = 6  # columns of the first of two tables: one of all would be too wide for a terminal


def sweep(
    overrides: Overrides = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at once; default: the cores over machine.threads, and 1 where GPUs work.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Default: sweeps/RUN below the data root; of a store: below here."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Rebuild artifacts of other settings instead of refusing them.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(help="Of the held-out samples, such as bleu; default: avg@k.")
    ] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Train nothing: compare the finished runs.")
    ] = False,
) -> None:
    """Train a run for each combination of settings with several values, and compare them.

    Values are Hydra's: a,b or range(0,3) or choice(/models/A,/models/B), also of groups. Runs that
    differ by their seed alone are repetitions; the first variant is the baseline. What is finished
    is served: after a failure, a crash or Ctrl-C the same command goes on.

    Example: dapo sweep run=clip experiment=demo update.eps_high=0.2,0.28 seed=0,1,2
    """
    from pipeline import sweep as sweeping

    points = sweeping.points(overrides or [], force=force)
    directory = (to or sweeping.default_directory(points[0])).absolute()
    failed: list[Point] = []
    if not table_only:
        # a plain SIGTERM would skip the `finally` that ends the runs
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        failed = _trained(points, jobs=jobs, directory=directory, force=force)
    _compared(points, directory, metric)
    for point in failed:
        log = sweeping.log_of(point, directory)
        say(f"\nfailed {point.run}, the end of {log}:\n{sweeping.last_lines(log)}")
    if failed:
        err.print(f"{len(failed)} of {len(points)} runs failed; the same command tries them again")
        raise typer.Exit(1)


def _trained(
    points: Sequence["Point"], *, jobs: int | None, directory: Path, force: bool
) -> list["Point"]:
    """Train every point with a line as each begins and ends; returns those that failed."""
    from pipeline import sweep as sweeping
    from pipeline import sweep_table

    begun: dict[str, float] = {}
    jobs = jobs or sweeping.default_jobs(points[0].config)
    say(f"{len(points)} runs, {min(jobs, len(points))} at once; logs: {directory / 'logs'}")

    def started(point: "Point") -> None:
        begun[point.run] = time.monotonic()
        say(f"began  {point.run}")

    def ended(point: "Point", code: int) -> None:
        spent = f"{time.monotonic() - begun[point.run]:.0f} s"
        if code:
            say(f"failed {point.run}  exit code {code}  {spent}")
            return
        held_out = sweep_table.known(sweep_table.curve(point), "held_out")["held_out"]
        say(f"ended  {point.run}  held-out {held_out[0]:.3f} → {held_out[-1]:.3f}  {spent}")

    codes = sweeping.train(
        points, jobs=jobs, directory=directory, force=force, started=started, ended=ended
    )
    return [point for point in points if codes[point.run]]


def _compared(points: Sequence["Point"], directory: Path, metric: str | None) -> None:
    """Compare the finished runs, on the terminal and in files."""
    import polars as pl

    from pipeline import sweep_page, sweep_table

    curves = {point.run: sweep_table.curve(point, metric) for point in points}
    done = [point for point in points if sweep_table.is_finished(point, curves[point.run])]
    lacking = [point.run for point in points if point not in done]
    if not any(point.variant == points[0].variant for point in done):
        say(f"no run of the baseline, {points[0].variant}, is finished: nothing to compare with")
        return
    found = sweep_table.compare(pl.concat(curves[point.run] for point in done), metric)
    sweep_table.write(found, directory)
    page = directory / sweep_page.PAGE
    sweep_page.write(found, page, title=directory.name, lacking=lacking)
    rows = sweep_table.cells(found)
    names = list(rows[0])
    for columns in (names[:ACCURACIES], names[:1] + names[ACCURACIES:]):
        shown = Table(*columns, header_style="bold")
        for row in rows:
            shown.add_row(*(cell(row[name]) for name in columns))
        out.print(shown)
    say(sweep_table.reading(found))
    if lacking:
        say(f"not finished, and left out: {', '.join(lacking)}")
    say(f"page, tables and logs: {directory}")
