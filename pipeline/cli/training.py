"""Commands that make something: train, rerun, config."""

import signal
import sys
from typing import Annotated

import typer

from pipeline import runner
from pipeline.cli.console import Overrides, comparison, describe, local, say, watched

DRY = "Only the loss, without a step, beside what it was: of update."


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
    from pipeline import loop, summary, trackers
    from pipeline.config import composed, parse

    text = composed(overrides or [])
    say(f"run {parse(text).run}: {parse(text).place}")
    # a plain SIGTERM would skip every `finally`: workers, drafts, Prefect's server
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with watched():
        if direct:
            with loop.opened(text, force=force) as (config, run):
                evaluation = trackers.train(
                    config,
                    loop.plainly(run),
                    stepped=lambda step: say(summary.line(step)),
                    say=say,
                    mirror=run.mirror,
                )
            say(summary.result(config, evaluation))
        else:
            from pipeline import flows
            from pipeline.requests import Train

            flows.train(Train(overrides=overrides or [], force=force))


def rerun(
    run: Annotated[str, typer.Option(help="The run's name or directory.")],
    step: Annotated[int, typer.Option(help="0 for what came before the first step.")],
    stage: Annotated[str, typer.Option(help=", ".join(runner.STAGES))],
    overrides: Overrides = None,
    round: Annotated[int | None, typer.Option(help="Default: the step's last.")] = None,
    replace: Annotated[
        bool, typer.Option(help="Put it in the original's place instead of aside.")
    ] = False,
    to: Annotated[
        str | None, typer.Option("--out", help="Where to, instead of beside.", metavar="PATH")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help=DRY)] = False,
) -> None:
    """Rebuild one artifact of a run on the inputs that it was made from, with other settings.

    Example: dapo rerun --run demo --step 3 --stage score score.overlong_factor=0.5
    """
    from pipeline import artifacts, mirror, runs
    from pipeline.rerun import Rerun

    directory = runs.find(run)
    if dry:
        again = Rerun.of(directory, step=step, stage=stage, round=round, overrides=overrides or [])
        comparison(again.dry())
        return
    with mirror.owned(directory) as stored, watched():
        again = Rerun.of(directory, step=step, stage=stage, round=round, overrides=overrides or [])
        artifacts.keep_environment(directory)
        made = again.build(out=local(to) if to else None, replace=replace, mirror=stored)
        describe(made)
        if replace and (stale := runs.stale_below(directory, made)):
            say(
                "stale now, until `dapo train … --force` rebuilds them:\n  "
                + "\n  ".join(str(path.relative_to(directory)) for path in stale)
            )


def config(overrides: Overrides = None) -> None:
    """Print the whole resolved configuration as YAML.

    Example: dapo config experiment=dapo_math_32b
    """
    from pipeline.config import composed, resolved

    sys.stdout.write(resolved(composed(overrides or [])))
