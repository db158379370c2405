"""The command `dapo`."""

import inspect
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline import runner
from pipeline.worker import StageTimeout, WorkerDied
from stages import progress
from stages.errors import EngineMismatch, InputError, NonFinite, Shortage

if TYPE_CHECKING:
    import polars as pl

MENDABLE = (InputError, Shortage, NonFinite, EngineMismatch)
HEADLINES = {
    "prompts": ("prompts",),
    "warmstart": ("sampled_acc",),
    "rollout": ("tokens", "truncated"),
    "score": ("acc", "reward"),
    "filter": ("kept", "dropped", "carried"),
    "update": ("loss", "entropy", "grad_norm"),
    "evaluate": ("avg@", "truncated"),
}
SHOWN_ITEMS, SHOWN_LETTERS = 6, 120
DRY = "Only the loss, without a step, beside what it was: of update."
UPDATED = "With --dry: the policy that an update made, for the new log-probs."
REQUIRED = inspect.Parameter.empty
NOTHING_TRAINED = 3  # exit code of an update whose batch had no token to learn from

out = Console()
err = Console(stderr=True)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train a language model with DAPO, stage by stage, and see everything that happened.",
    epilog="Start with: dapo train experiment=demo",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Hydra overrides, such as experiment=demo update.lr=1e-4", metavar="KEY=VALUE"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
Run = Annotated[str, typer.Argument(help="A run's name, or its directory.", metavar="RUN")]


def main() -> None:
    """Run the command; an error that explains itself is one message without a traceback."""
    try:
        app()
    except (WorkerDied, StageTimeout, *MENDABLE) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, MENDABLE) else 1)
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on from here")
        sys.exit(128 + signal.SIGINT)


@app.command()
def train(
    overrides: Overrides = None,
    force: Annotated[
        bool, typer.Option(help="Rebuild artifacts of other settings instead of refusing them.")
    ] = False,
    direct: Annotated[bool, typer.Option(help="Without Prefect.")] = False,
) -> None:
    """Train, or go on where a run stopped: what is on disk already is served.

    Example: dapo train experiment=demo schedule.steps=40
    """
    from pipeline import loop, summary
    from pipeline.config import composed, parse

    text = composed(overrides or [])
    _say(f"run {parse(text).run}: {parse(text).directory}")
    # a plain SIGTERM would skip every `finally`: workers, drafts, Prefect's server
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with _progress():
        if direct:
            with loop.opened(text, force=force) as (config, run):
                evaluation = loop.train(
                    config, loop.plainly(run), stepped=lambda step: _say(summary.line(step))
                )
            _say(summary.result(config, evaluation))
        else:
            from pipeline import flows

            flows.train(overrides=overrides or [], force=force)


@app.command()
def rerun(
    run: Annotated[str, typer.Option(help="The run's name or directory.")],
    step: Annotated[int, typer.Option(help="0 for what came before the first step.")],
    stage: Annotated[str, typer.Option(help=", ".join(runner.STAGES))],
    overrides: Overrides = None,
    round: Annotated[int | None, typer.Option(help="Default: the step's last.")] = None,
    replace: Annotated[
        bool, typer.Option(help="Put it in the original's place instead of aside.")
    ] = False,
    to: Annotated[Path | None, typer.Option("--out", help="Where to, instead of beside.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help=DRY)] = False,
) -> None:
    """Rebuild one artifact of a run on the inputs that it was made from, with other settings.

    Example: dapo rerun --run demo --step 3 --stage score score.overlong_factor=0.5
    """
    from pipeline import artifacts, runs
    from pipeline.rerun import Rerun

    directory = runs.find(run)
    if dry:
        again = Rerun.of(directory, step=step, stage=stage, round=round, overrides=overrides or [])
        _comparison(again.dry())
        return
    with artifacts.locked(directory), _progress():
        again = Rerun.of(directory, step=step, stage=stage, round=round, overrides=overrides or [])
        made = again.build(out=to, replace=replace)
        _describe(made)
        if replace and (stale := runs.stale_below(directory, made)):
            _say(
                "stale now, until `dapo train … --force` rebuilds them:\n  "
                + "\n  ".join(str(path.relative_to(directory)) for path in stale)
            )


@app.command()
def compare(
    scores_a: Annotated[Path, typer.Argument(help="Made by score.", metavar="SCORES_A")],
    scores_b: Annotated[Path, typer.Argument(help="The same.", metavar="SCORES_B")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Of the filter, such as filter.batch_groups=8", metavar="KEY=VALUE"),
    ] = None,
    rollouts: Annotated[
        list[Path] | None, typer.Option(help="Default: those that the scores were made from.")
    ] = None,
    json_: Json = False,
) -> None:
    """Compare two scorings of the same rollouts: verdicts, groups kept, advantages, rewards.

    Groups are decided on these rollouts alone: no other round, no carried rows.

    Example: dapo compare round_0/score round_0/score.variant-1 filter.batch_groups=8
    """
    from pipeline import compare as comparing

    made = comparing.compare(scores_a, scores_b, rollouts=rollouts or [], overrides=overrides or [])
    if json_:
        print(json.dumps(made.document(), indent=1))
        return
    examples = [
        {
            "response_id": row["response_id"],
            **{x: _because(row[f"verdict_{x}"], row[f"extracted_{x}"]) for x in "ab"},
            "text_end": " ".join(row["text_end"].split()),
        }
        for row in made.examples.to_dicts()
    ]
    groups = [
        {
            "group_id": row["group_id"],
            **{x: _because(row[f"decision_{x}"], row[f"reason_{x}"]) for x in "ab"},
            **{f"acc_{x}": row[f"acc_{x}"] for x in "ab"},
        }
        for row in made.group_flips.to_dicts()
    ]
    rules = "  ".join(_metric(name, value) for name, value in made.filter.items())
    _say("settings: " + ("unknown" if made.settings is None else made.settings or "the same"))
    _say(f"filter: {rules}  from {made.filter_from}")
    _section("verdicts", made.verdict_flips.to_dicts())
    _section("responses whose acc changes, some of them", examples)
    _section("groups decided otherwise, of these rollouts alone, none carried", groups)
    flipped = "{responses} responses ({share:.1%}) flip".format(**made.flipped)
    _section(
        f"signs of advantages in groups kept both times: {flipped}", made.sign_flips.to_dicts()
    )
    _section("mean reward by length in tokens", made.reward_by_length.to_dicts())


@app.command()
def simulate(
    run: Run,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Of select, filter, rollout.n or schedule; several values: select.size=16,32",
            metavar="KEY=VALUE",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Seeds; the rows are their means.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="A .svg, .png, .html or .json file.")] = None,
    json_: Json = False,
) -> None:
    """Run the loop of dynamic sampling again on what a run recorded, under other settings.

    Nothing is generated and nothing trains: the recorded responses answer for their prompts. Shown
    are the tokens and the prompts asked per trained group, how many informative groups were wasted,
    rounds per step, mean age, steps that fell short, and how many different prompts were trained.

    Example: dapo simulate demo select.policy=shuffle,adaptive select.size=28,56
    """
    from pipeline import runs
    from pipeline import simulate as simulating

    rows = simulating.simulate(runs.find(run), settings or [], repeats=repeats)
    if plot is not None:
        simulating.plot(rows, plot)
    if json_:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {
            "settings": re.sub(" (?=\\S+=)", "\n", str(row["settings"])),
            "tokens": f"{row['tokens_per_kept']:.0f} ± {row['±']:.0f}",
            "asked": f"{row['asked_per_kept']:.3g}",
            "wasted": f"{row['wasted']:.3g}",
            "rounds": f"{row['rounds_per_step']:.3g}",
            "age": f"{row['age']:.3g}",
            "short": f"{row['short_steps']:.3g}",
            "prompts": f"{row['prompts']:.3g}",
        }
        for row in rows
    ]
    _table(" ".join(shown[0]), shown, as_json=False)
    if plot is not None:
        _say(f"drawn in {plot}")


@app.command()
def config(overrides: Overrides = None) -> None:
    """Print the whole resolved configuration as YAML.

    Example: dapo config experiment=dapo_math_32b
    """
    from pipeline.config import composed, resolved

    sys.stdout.write(resolved(composed(overrides or [])))


@app.command()
def ls(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]")] = None, json_: Json = False
) -> None:
    """List the runs, or the artifacts of one run with their states.

    Example: dapo ls demo
    """
    from pipeline import runs

    if run is None:
        _table("run steps artifacts seconds directory", runs.overview(), as_json=json_)
        return
    rows = runs.entries(runs.find(run))
    if json_:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {
            **row,
            "rows": " ".join(f"{table} {count}" for table, count in row["rows"].items()),
            "metrics": "  ".join(_headlines(row["stage"], row["metrics"])),
        }
        for row in rows
    ]
    _table("place state rows seconds metrics", shown, as_json=False)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="An artifact, a table in it, or a Parquet file.")],
    rows: Annotated[int, typer.Option(min=0, help="Rows of each table to show.")] = 3,
    json_: Json = False,
) -> None:
    """Show an artifact: its record, and the schema and first rows of its tables.

    Example: dapo show data/runs/demo/step_0001/round_0/score
    """
    from pipeline import runs

    shown = runs.contents(path, rows=rows)
    if json_:
        print(json.dumps(shown, indent=1, default=str))
        return
    if shown["record"]:
        out.print_json(json.dumps(shown["record"]))
    for name, table in shown["tables"].items():
        out.print(f"[bold]{name}[/]  {table['count']} rows")
        _on_its_side(table["schema"], table["rows"])


@app.command()
def verify(run: Run, json_: Json = False) -> None:
    """Check a run in full: every hash, every input, and that no row was lost or invented.

    Example: dapo verify demo
    """
    from pipeline import runs

    count, problems = runs.verify(runs.find(run))
    if json_:
        print(json.dumps({"artifacts": count, "problems": problems}, indent=1))
    else:
        for problem in problems:
            out.print(problem, highlight=False, soft_wrap=True)
        out.print(f"{count} artifacts, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def _stage_command(stage: str) -> None:
    """Add `dapo <stage>`: its options are the inputs that the stage's `run` declares."""
    inputs = runner.stage_inputs(stage)

    def command(
        out: Path | None = None,
        overrides: list[str] | None = None,
        dry: bool = False,
        updated: Path | None = None,
        **paths: Any,
    ) -> None:
        from pipeline.config import load

        settings = load(overrides or [])
        given = {
            name: [Path(p).absolute() for p in value]
            if isinstance(value, list)
            else value and value.absolute()
            for name, value in paths.items()
        }
        if dry:
            from pipeline.rerun import dry_update

            _comparison(dry_update(load(), settings, updated=updated, inputs=given))
            return
        if out is None:
            raise InputError("give --out DIR, where the policy is to be written, or --dry")
        with _progress(), runner.Runner(settings.machine) as run:
            made, served = run.run(
                stage, out=out.absolute(), config=getattr(settings, stage), inputs=given
            )
        _describe(made, served=served)
        if stage == "update" and not made.metrics["optimizer_steps"]:
            _say("nothing to train on: no response of the batch carries a token; weights unchanged")
            raise typer.Exit(NOTHING_TRAINED)

    example = " ".join(f"--{i.name} PATH" for i in inputs if i.required)
    command.__doc__ = f"""{runner.purpose(stage)}

    Example: dapo {stage} {example} --out DIR
    """
    options = [*map(_input_option, inputs), *_output_options(stage)]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*options, _parameter("overrides", Overrides, None)]
    )
    app.command(stage, rich_help_panel="Stages, each on saved data and without Prefect")(command)


def _input_option(of: runner.StageInput) -> inspect.Parameter:
    kind: Any = list[Path] if of.several else Path if of.required else Path | None
    option = typer.Option(f"--{of.name}", help="Once per round." if of.several else None)
    return _parameter(of.name, Annotated[kind, option], REQUIRED if of.required else None)


def _output_options(stage: str) -> list[inspect.Parameter]:
    """Where to; an update may also be dry."""
    out = typer.Option(help="Must not exist.")
    if stage != "update":
        return [_parameter("out", Annotated[Path, out], REQUIRED)]
    return [
        _parameter("out", Annotated[Path | None, out], None),
        _parameter("dry", Annotated[bool, typer.Option("--dry", help=DRY)], False),
        _parameter("updated", Annotated[Path | None, typer.Option(help=UPDATED)], None),
    ]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


for _stage in runner.STAGES:
    _stage_command(_stage)


@contextmanager
def _progress() -> Iterator[None]:
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


def _say(text: str) -> None:
    print(text, flush=True)  # not by a console of its own: the bar has to make room


def _describe(made: Any, *, served: bool = False) -> None:
    metrics = "  ".join(_metric(name, value) for name, value in made.metrics.items())
    _say(f"{'served' if served else 'built'} {made.path}\n{metrics}")


def _comparison(frame: "pl.DataFrame") -> None:
    """A row per metric, a column per setting."""
    _table(" ".join(frame.columns), frame.to_dicts(), as_json=False)


def _section(title: str, rows: list[dict[str, Any]]) -> None:
    """A headline, and its rows below it."""
    out.print(f"[bold]{title}[/]" + ("" if rows else "  none"), highlight=False)
    if rows:
        _table(" ".join(rows[0]), rows, as_json=False)


def _because(what: str, why: str | None) -> str:
    return what if why is None else f"{what}: {why}"


def _headlines(stage: str, metrics: dict[str, Any]) -> Iterator[str]:
    """The few metrics of a stage that a list has room for; `dapo show` has all of them."""
    wanted = HEADLINES.get(stage, ())
    return (_metric(name, value) for name, value in metrics.items() if name.startswith(wanted))


def _metric(name: str, value: Any) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _table(columns: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(header_style="bold")
    for name in columns.split():
        table.add_column(name, overflow="fold", no_wrap=name == "settings")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns.split()))
    out.print(table)


def _on_its_side(schema: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """A line per column, for tables have many of them: its type, and its value in each row."""
    table = Table("column", "type", *(f"row {i}" for i in range(len(rows))), header_style="bold")
    for name, kind in schema.items():
        table.add_row(name, f"[dim]{escape(kind)}[/]", *(_cell(row[name]) for row in rows))
    out.print(table)


def _cell(value: Any) -> str:
    """A value as text that fits a cell; what a model wrote steers neither markup nor terminal."""
    if isinstance(value, list) and len(value) > SHOWN_ITEMS:
        shown = ", ".join(_cell(item) for item in value[:SHOWN_ITEMS])
        return f"{shown}, … {len(value)} in all"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    return escape(text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…")
