"""Commands that schedule: deploy, serve."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.console import say


def deploy(
    file: Annotated[
        Path | None, typer.Option(help="Default: the repository's prefect.yaml.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Where workers start, on their machines. Default: here.")
    ] = None,
    kind: Annotated[
        Literal["process", "kubernetes"], typer.Option("--type", help="Of the work pool.")
    ] = "process",
    slots: Annotated[int, typer.Option(min=1, help="Runs that may use GPUs at once.")] = 1,
) -> None:
    """Set up a Prefect server for scheduled runs; again at any time, to bring it up to date.

    Made are a work pool, the concurrency limit `gpu`, an automation that marks runs as crashed of
    which nothing is heard any more, and the deployments of prefect.yaml.

    Example: dapo deploy --slots 2
    """
    from pipeline import deploy as deploying

    deploying.deploy(
        file=file or deploying.FILE,
        home=home or deploying.CHECKOUT,
        kind=kind,
        slots=slots,
        say=say,
    )


def serve() -> None:
    """Run what the Prefect UI asks for, in this process, until Ctrl-C: no pool, no worker.

    Example: dapo serve
    """
    from pipeline import deploy as deploying

    deploying.serve()
