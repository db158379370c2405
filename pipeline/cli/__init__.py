"""The command `dapo`."""

import signal
import sys
from collections.abc import Callable, Iterable

import typer
from rich.markup import escape

from pipeline import runner
from pipeline.cli import (
    exporting,
    garbage,
    inspecting,
    lineage,
    looking,
    operating,
    planning,
    stages,
    sweeping,
    training,
)
from pipeline.cli.console import err
from pipeline.worker import StageTimeout, WorkerDied
from stages.errors import EngineMismatch, InputError, NonFinite, Shortage, StorageError

MENDABLE = (InputError, Shortage, NonFinite, EngineMismatch)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train a language model with DAPO, stage by stage, and see everything that happened.",
    epilog="Start with: dapo train experiment=demo",
)
PANELS: dict[str, Iterable[Callable[..., None]]] = {
    "Make": (
        *(training.train, sweeping.sweep, training.rerun, exporting.export),
        *(training.config, planning.plan, planning.rehearse),
    ),
    "Operate": (operating.deploy, operating.serve, garbage.gc),
    "Look": (
        *(looking.ls, looking.view, looking.show, lineage.lineage, looking.verify),
        *(inspecting.sql, inspecting.samples, inspecting.explain, inspecting.metrics),
        *(looking.report, looking.compare, looking.simulate),
    ),
    "Stages, each on saved data and without Prefect": map(stages.command, runner.STAGES),
}
for _panel, _commands in PANELS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)


def main() -> None:
    """Run the command; an error that explains itself is one message without a traceback."""
    try:
        app()
    except (WorkerDied, StageTimeout, StorageError, *MENDABLE) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, MENDABLE) else 1)
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on from here")
        sys.exit(128 + signal.SIGINT)
