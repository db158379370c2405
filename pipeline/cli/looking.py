"""Commands that look and change nothing: ls, view, show, verify, compare, simulate."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from pipeline import storage
from pipeline.cli.console import (
    Json,
    Run,
    because,
    headlines,
    metric,
    on_its_side,
    out,
    place,
    say,
    section,
    table,
)
from stages.errors import InputError


def ls(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]")] = None, json_: Json = False
) -> None:
    """List the runs, or the artifacts of one run with their states.

    Example: dapo ls demo
    """
    from pipeline import runs

    if run is None:
        table("run steps artifacts seconds best directory", runs.overview(), as_json=json_)
        return
    rows = runs.entries(runs.find(run))
    if json_:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        {
            **row,
            "rows": " ".join(f"{table} {count}" for table, count in row["rows"].items()),
            "metrics": "  ".join(headlines(row["stage"], row["metrics"])),
        }
        for row in rows
    ]
    table("place state rows seconds metrics", shown, as_json=False)


def view(
    target: Annotated[
        str | None,
        typer.Argument(help="A data root, or one run; default: all runs.", metavar="ROOT|RUN"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8420,
    host: Annotated[
        str, typer.Option(help="Another address than this one lets others read the runs.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
) -> None:
    """Look at runs in a browser: curves, responses, groups, tokens, SQL; also while they go on.

    Nothing is written, and nothing is asked of any other machine.

    Example: dapo view demo
    """
    from pipeline.config import load
    from pipeline.view import library, serve

    shown = library.library(target, load().data)
    serve.serve(shown, host=host, port=port, browser=browser, say=say)


def show(
    path: Annotated[
        str,
        typer.Argument(help="An artifact, a table in it, or a Parquet file.", metavar="PATH"),
    ],
    rows: Annotated[int, typer.Option(min=0, help="Rows of each table to show.")] = 3,
    json_: Json = False,
) -> None:
    """Show an artifact: its record, and the schema and first rows of its tables.

    Example: dapo show data/runs/demo/step_0001/round_0/score
    """
    from pipeline import mirror, runs

    shown = runs.contents(mirror.looked_at(place(path), mirror.tables), rows=rows)
    if json_:
        print(json.dumps(shown, indent=1, default=str))
        return
    if shown["record"]:
        out.print_json(json.dumps(shown["record"]))
    for name, each in shown["tables"].items():
        out.print(f"[bold]{name}[/]  {each['count']} rows")
        on_its_side(each["schema"], each["rows"])


def verify(run: Run, json_: Json = False) -> None:
    """Check a run in full: every hash, every input, and that no row was lost or invented.

    Example: dapo verify demo
    """
    from pipeline import mirror, runs

    count, problems = runs.verify(runs.find(run, mirror.everything))
    if json_:
        print(json.dumps({"artifacts": count, "problems": problems}, indent=1))
    else:
        for problem in problems:
            out.print(problem, highlight=False, soft_wrap=True)
        out.print(f"{count} artifacts, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def report(
    run: Run,
    out: Annotated[
        Path | None,
        typer.Option(help="Default: report.html in the run's directory; of a store: RUN.html."),
    ] = None,
) -> None:
    """Write a run as one HTML page that needs no network: charts, responses, settings, artifacts.

    Example: dapo report demo --out demo.html
    """
    from pipeline import mirror, read, runs
    from pipeline import report as reporting

    found = read.run(runs.find(run, mirror.tables))
    path = out or reporting.default_path(found)
    size = reporting.write(found, path)
    say(f"{path}  {size / 1e6:.2f} MB")


def compare(
    a: Annotated[str, typer.Argument(help="A run, or made by score or by evaluate.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The same.", metavar="B")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Of the filter, for scorings, such as filter.batch_groups=8", metavar="KEY=VALUE"
        ),
    ] = None,
    rollouts: Annotated[
        list[str] | None,
        typer.Option(help="Of scorings; default: those that they were made from.", metavar="PATH"),
    ] = None,
    prompts: Annotated[int, typer.Option(min=0, help="Of runs: prompts to name.")] = 10,
    json_: Json = False,
) -> None:
    """Compare two runs, two evaluations, or two scorings of the same rollouts.

    Runs: settings, the first artifact that differs down to the token, curves, prompts' pass rates,
    and their last evaluations.
    Evaluations: each figure of each set, the difference with an interval and a p-value, by paired
    bootstrap over the prompts that both have.
    Scorings: verdicts, groups kept, advantages, rewards; groups are decided on these rollouts
    alone: no other round, no carried rows.

    Example: dapo compare demo demo-2

    Example: dapo compare step_0000/evaluate step_0025/evaluate

    Example: dapo compare round_0/score round_0/score.variant-1 filter.batch_groups=8
    """
    scores = [given for given in (a, b) if _holds_scores(given)]
    if len(scores) == 1:
        raise InputError(f"{scores[0]} is no run: give two runs, or two scorings or evaluations")
    if not scores:
        from pipeline.cli.inspecting import compare_runs

        compare_runs(a, b, prompts=prompts, as_json=json_, of_scores=bool(overrides or rollouts))
        return
    from pipeline import compare as comparing
    from pipeline import mirror

    scores_a, scores_b, *given = (
        mirror.looked_at(place(path), mirror.tables) for path in (a, b, *(rollouts or []))
    )
    kinds = [_stage(path) for path in (scores_a, scores_b)]
    if "evaluate" in kinds:
        from pipeline.cli.inspecting import compare_evaluations

        if kinds[0] != kinds[1]:
            raise InputError(f"{a} and {b} are not both evaluations: give two of one kind")
        no_scores = bool(overrides or rollouts)
        compare_evaluations(scores_a, scores_b, as_json=json_, of_scores=no_scores)
        return
    made = comparing.compare(scores_a, scores_b, rollouts=given, overrides=overrides or [])
    if json_:
        print(json.dumps(made.document(), indent=1))
        return
    examples = [
        {
            "response_id": row["response_id"],
            **{x: because(row[f"verdict_{x}"], row[f"extracted_{x}"]) for x in "ab"},
            "text_end": " ".join(row["text_end"].split()),
        }
        for row in made.examples.to_dicts()
    ]
    groups = [
        {
            "group_id": row["group_id"],
            **{x: because(row[f"decision_{x}"], row[f"reason_{x}"]) for x in "ab"},
            **{f"acc_{x}": row[f"acc_{x}"] for x in "ab"},
        }
        for row in made.group_flips.to_dicts()
    ]
    rules = "  ".join(metric(name, value) for name, value in made.filter.items())
    say("settings: " + ("unknown" if made.settings is None else made.settings or "the same"))
    say(f"filter: {rules}  from {made.filter_from}")
    section("verdicts", made.verdict_flips.to_dicts())
    section("responses whose acc changes, some of them", examples)
    section("groups decided otherwise, of these rollouts alone, none carried", groups)
    flipped = "{responses} responses ({share:.1%}) flip".format(**made.flipped)
    section(f"signs of advantages in groups kept both times: {flipped}", made.sign_flips.to_dicts())
    section("mean reward by length in tokens", made.reward_by_length.to_dicts())


def _stage(path: Path) -> str | None:
    """The stage that made what lies there, if it is an artifact."""
    from pipeline import artifacts

    return artifacts.load(path).stage if (path / artifacts.RECORD).is_file() else None


def _holds_scores(given: str) -> bool:
    """Whether it is a path that a run's directory is not: a scoring, or what should be one."""
    from pipeline import mirror

    if storage.is_url(given):
        return mirror.split(given)[1] != ""
    path = Path(given)
    return (path.exists() or len(path.parts) > 1) and not (path / "config.yaml").is_file()


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
    from pipeline import mirror, runs
    from pipeline import simulate as simulating

    rows = simulating.simulate(runs.find(run, mirror.tables), settings or [], repeats=repeats)
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
    table(" ".join(shown[0]), shown, as_json=False)
    if plot is not None:
        say(f"drawn in {plot}")
