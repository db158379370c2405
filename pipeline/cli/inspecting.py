"""Commands that answer questions about what runs recorded: sql, samples, explain, metrics."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pipeline.cli.console import Json, Run, cell, document, out, plain, say, table
from stages.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from pipeline.compare_runs import Divergence
    from pipeline.paired import EvaluationComparison

ROWS_SHOWN, SIDE = 100, 38  # rows of a result; letters of a response beside others
UNBOUNDED = 10_000
OF_SCORES = "filter settings and --rollouts are for two scorings, not for two {}"
BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"right": "green", "partial": "yellow", "wrong": "red", "no_answer": "magenta"}
CURVES = "acc,held_out,reward,length,truncated,entropy,clip_fraction_high,kept,seconds"
Runs = Annotated[
    list[str] | None, typer.Option("--run", help="Its name, directory or URL; default: the newest.")
]


def sql(
    query: Annotated[
        str | None, typer.Argument(help="Without one: the views and their columns.")
    ] = None,
    run: Runs = None,
    json_: Json = False,
    csv_: Annotated[bool, typer.Option("--csv", help="Comma-separated, on stdout.")] = False,
    parquet: Annotated[Path | None, typer.Option(help="Write the result to a file.")] = None,
) -> None:
    """Ask DuckDB about runs: every table is a view, with `run`, `step` and `round`.

    Example: dapo sql "select verdict, count(*), avg(length) from responses group by 1"

    Example: dapo sql "select run, step, held_out from curves" --run demo --run other --csv
    """
    from pipeline import sql as asking

    if query is None:
        _catalogue(asking.catalogue(), as_json=json_)
        return
    if json_ + csv_ + (parquet is not None) > 1:
        raise InputError("give one of --json, --csv and --parquet FILE")
    if parquet is not None and not parquet.absolute().parent.is_dir():
        raise InputError(f"{parquet.absolute().parent} is no directory to write to")
    from pipeline import read, runs

    found = [read.Run(directory) for directory in _directories(run)]
    connection = asking.connect(found, root=runs.root(), query=query)
    if parquet is not None:
        say(f"{asking.write_parquet(connection, query, parquet)} rows in {parquet}")
        return
    result = asking.ask(connection, query)
    if json_:
        print(document(asking.rows_of(result)))
    elif csv_:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        names = asking.names_of(result)
        writer.writerow(names)
        while rows := asking.rows_of(result, asking.BATCH):
            writer.writerows(row.values() for row in rows)
    else:
        rows = asking.rows_of(result, ROWS_SHOWN + 1)
        _rows(asking.names_of(result), rows[:ROWS_SHOWN])
        if len(rows) > ROWS_SHOWN:
            say(f"the first {ROWS_SHOWN} rows; --json, --csv and --parquet FILE have all")


def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Of this step.")] = None,
    verdict: Annotated[str | None, typer.Option(help="Such as wrong.")] = None,
    reward: Annotated[str | None, typer.Option(help="Such as '>0' or '-1'.")] = None,
    length: Annotated[str | None, typer.Option(help="Tokens, such as '>50'.")] = None,
    text: Annotated[str | None, typer.Option(help="Regular expression, found anywhere.")] = None,
    group: Annotated[str | None, typer.Option(help="All of a group, side by side.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Of this prompt_id.")] = None,
    decision: Annotated[str | None, typer.Option(help="kept, dropped or carried.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Responses to show.")] = 10,
    json_: Json = False,
) -> None:
    """Read responses of a run: those with a verdict, a reward, a text; or a whole group.

    Example: dapo samples demo --step 3 --verdict wrong --length '>50'
    """
    from pipeline import read
    from pipeline import samples as sampled

    found = read.Run(_directory(run))
    wanted = sampled.Wanted(
        step=step,
        verdict=verdict,
        decision=decision,
        group=group,
        prompt=prompt,
        reward=reward,
        length=length,
        text=text,
    )
    alone = group is not None and wanted == sampled.Wanted(group=group)
    if alone and group is not None:
        rows = sampled.of_group(found, group)
        count = len(rows)
    else:
        rows, count = sampled.find(found, wanted, limit=limit)
    if json_:
        print(document(rows.to_dicts()))
    elif alone:
        _side_by_side(rows.to_dicts())
    else:
        for row in rows.iter_rows(named=True):
            out.print(_response(row))
        _say_how_many(len(rows), count)
        for column, value in (("verdict", verdict), ("decision", decision)):
            if not count and value is not None:
                say(f"{column}: {_pairs(sampled.counts(found, column))}")


def explain(
    response: Annotated[str, typer.Argument(help="A response_id.", metavar="RESPONSE_ID")],
    run: Annotated[str | None, typer.Option(help="Default: the newest.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of each update to list.")] = 40,
    json_: Json = False,
) -> None:
    """Tell what happened to a response, from the choice of its prompt to each token's weight.

    Example: dapo explain s0003r0g0001n02 --run demo
    """
    from pipeline import story

    chapters = story.tell(_directories([run] if run else None)[0], response)
    if json_:
        print(document([vars(chapter) for chapter in chapters]))
        return
    for number, chapter in enumerate(chapters, 1):
        out.print(Text(f"{number}. {plain(chapter.title)}", style="bold"))
        for name, value in chapter.texts.items():
            out.print(Panel(Text(plain(value)), title=name, title_align="left"))
        for name, value in chapter.facts.items():
            out.print(Text(f"   {name}  {_value(value)}"), highlight=False)
        if chapter.note:
            out.print(Text(f"   {chapter.note}"), soft_wrap=True)
        if shown := chapter.rows[:tokens]:
            _rows(list(shown[0]), shown)
            if len(chapter.rows) > len(shown):
                say(f"   {len(chapter.rows)} tokens in all: --tokens {len(chapter.rows)}")


def metrics(
    run: Annotated[list[str], typer.Argument(help="Names or directories.", metavar="RUN…")],
    columns: Annotated[str, typer.Option(help="With commas; `all`: every one.")] = CURVES,
    json_: Json = False,
) -> None:
    """Show curves over the steps of one or several runs: sparks on a terminal, else numbers.

    Example: dapo metrics demo --columns acc,entropy
    """
    from pipeline import read

    frames = {
        directory.name: read.Run(directory).curves.collect() for directory in _directories(run)
    }
    known = list(dict.fromkeys(name for frame in frames.values() for name in frame.columns))
    chosen = known if columns == "all" else columns.split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise InputError(f"there is no curve '{unknown[0]}'; there are {', '.join(known)}")
    chosen = [name for name in chosen if name != "step"]
    rows = [
        {"run": name, **{each: row.get(each) for each in ("step", *chosen)}}
        for name, frame in frames.items()
        for row in frame.iter_rows(named=True)
    ]
    if json_:
        print(document(rows))
    elif out.is_terminal:
        _sparks(frames, chosen)
    else:
        _rows(["run", "step", *chosen], rows)


def compare_runs(a: str, b: str, *, prompts: int, as_json: bool, of_scores: bool) -> None:
    """Show what differs between two runs; options of scorings are refused."""
    from pipeline import compare_runs as comparing

    if of_scores:
        raise InputError(OF_SCORES.format("runs"))
    made = comparing.compare(_directory(a), _directory(b), prompts=prompts)
    if as_json:
        print(document(made.document()))
        return
    say("settings: " + (made.settings or "the same"))
    say(f"artifacts: {made.equal} of {made.in_common} in common are equal")
    for name, places in made.only.items():
        if places:
            say(f"only in {name}: {len(places)}, first {places[0]}")
    _divergence(made.divergence)
    for title, frame in (
        ("curves", made.curves),
        ("prompts whose pass rate changed most, over all steps", made.prompts),
    ):
        say(title)
        _rows(frame.columns, frame.to_dicts())
    if made.evaluations is None:
        say("evaluations: none with a prompt in common")
    else:
        _paired(made.evaluations)


def compare_evaluations(a: Path, b: Path, *, as_json: bool, of_scores: bool) -> None:
    """Show what differs between two evaluations; options of scorings are refused."""
    from pipeline import artifacts, paired

    if of_scores:
        raise InputError(OF_SCORES.format("evaluations"))
    made = paired.compare(*(artifacts.load_unchanged(path.absolute()) for path in (a, b)))
    if as_json:
        print(document(made.document()))
    else:
        _paired(made)


def _paired(made: "EvaluationComparison") -> None:
    say(f"evaluations: a {made.a}, b {made.b}")
    _rows(made.prompts.columns, made.prompts.to_dicts())
    say(f"b - a with its {made.level:.0%} interval, by {made.resamples} resamples of prompts")
    _rows(made.figures.columns, made.figures.to_dicts())


def _divergence(found: "Divergence | None") -> None:
    if found is None:
        say("first difference: none")
        return
    say(f"first difference: {found.place}")
    say("  because of: " + (found.recipe or "nothing in its settings or inputs"))
    if found.table is None:
        say(f"  in {', '.join(map(plain, found.files))}, which is no table, or only in its bytes")
        return
    key = " ".join(f"{name}={plain(str(value))}" for name, value in (found.key or {}).items())
    say(f"  table {found.table}: {found.rows} rows differ, first {key}")
    if found.column is None:
        say(f"  only in {'a' if found.a else 'b'}")
        return
    where = "" if found.position is None else f", position {found.position}"
    a, b = (plain(_value(value)) for value in (found.a, found.b))
    say(f"  column {found.column}{where}: {a} → {b}")


def _directory(run: str) -> Path:
    from pipeline import runs

    return runs.find(run)


def _directories(given: Sequence[str] | None) -> list[Path]:
    from pipeline import runs

    return [runs.find(run) for run in given] if given else [runs.newest()]


def _catalogue(rows: list[dict[str, str]], *, as_json: bool) -> None:
    if as_json:
        print(document(rows))
        return
    for view in dict.fromkeys(row["view"] for row in rows):
        its = [row for row in rows if row["view"] == view]
        out.print(f"[bold]{view}[/]: a row is {its[0]['row']}", highlight=False)
        table("column type meaning", its, as_json=False)


def _rows(names: list[str], rows: list[dict[str, Any]]) -> None:
    """A table whose columns may have any name."""
    shown = Table(*(escape(plain(name)) for name in names), header_style="bold")
    for row in rows:
        shown.add_row(*("" if row[name] is None else cell(row[name]) for name in names))
    (out if out.is_terminal else Console(width=UNBOUNDED)).print(shown)  # a pipe has no edge


def _response(row: dict[str, Any]) -> Panel:
    """A response below its prompt and gold answer, in the colour of its verdict."""
    fate = " ".join(filter(None, [row["decision"], row["reason"]]))
    title = f"{row['response_id']}  {row['verdict'] or 'not judged yet'}  {fate}"
    return Panel(
        Group(
            Text(plain(_judged(row)), style="dim"),
            Text(plain(row["prompt"] or row["prompt_id"]), style="dim"),
            Text(f"gold: {plain(str(row['answer']))}", style="dim"),
            Rule(style="dim"),
            Text(plain(row["text"])),
        ),
        title=Text(plain(title)),
        title_align="left",
        border_style=_colour(row["verdict"]),
    )


def _judged(row: dict[str, Any]) -> str:
    advantage = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.3f}"
    reward = "none" if row["reward"] is None else f"{row['reward']:+.3f}"
    return f"reward {reward}{advantage}  {row['length']} tokens, {row['finish_reason']}"


def _side_by_side(rows: list[dict[str, Any]]) -> None:
    """The responses of one group, as many beside each other as the terminal carries."""
    first = rows[0]
    fate = " ".join(filter(None, [first["decision"], first["reason"]]))
    out.print(
        Panel(
            Group(
                Text(plain(first["prompt"] or first["prompt_id"])),
                Text(f"gold: {plain(str(first['answer']))}"),
            ),
            title=Text(plain(f"{first['group_id']}  {fate or 'not decided yet'}")),
            title_align="left",
        )
    )
    width = out.width // max(1, min(len(rows), out.width // SIDE))
    panels = [
        Panel(
            Group(Text(plain(_judged(row)), style="dim"), Text(plain(row["text"]))),
            title=Text(plain(f"{row['sample']}  {row['verdict']}")),
            title_align="left",
            border_style=_colour(row["verdict"]),
            width=width,
        )
        for row in rows
    ]
    out.print(Columns(panels, padding=0))


def _sparks(frames: "dict[str, pl.DataFrame]", chosen: list[str]) -> None:
    shown = Table("curve", "run", "", "first", "last", "least", "most", header_style="bold")
    room = max(8, out.width - 80)
    for name in chosen:
        for run, frame in frames.items():
            values = frame[name].to_list() if name in frame.columns else []
            there = [value for value in values if value is not None]
            ends = [there[0], there[-1], min(there), max(there)] if there else []
            shown.add_row(name, escape(run), spark(values, room), *map(cell, ends))
    out.print(shown)


def spark(values: Sequence[float | None], width: int) -> str:
    """A letter for each value, or for the mean of several where there are more than `width`."""
    size = max(1, -(-len(values) // width))
    means = [_mean(values[i : i + size]) for i in range(0, len(values), size)]
    there = [value for value in means if value is not None]
    if not there:
        return ""
    least, span = min(there), max(there) - min(there)
    top = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[round((value - least) / span * top) if span else 0]
        for value in means
    )


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _say_how_many(shown: int, count: int) -> None:
    say(f"{shown} of {count} responses" + ("; --limit shows more" if shown < count else ""))


def _pairs(counts: dict[str, int]) -> str:
    return ", ".join(f"{plain(str(name))} {count}" for name, count in counts.items()) or "none yet"


def _colour(verdict: str | None) -> str:
    return COLOURS.get(verdict or "", "cyan")


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else plain(str(value))
