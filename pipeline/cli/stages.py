"""A command for every stage, on saved data and without Prefect."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pipeline import runner
from pipeline.cli.console import Overrides, brought, comparison, describe, local, say, watched
from pipeline.cli.training import DRY
from stages.errors import InputError

UPDATED = "With --dry: the policy that an update made, for the new log-probs."
REQUIRED = inspect.Parameter.empty
NOTHING_TRAINED = 3  # exit code of an update whose batch had no token to learn from


def command(stage: str) -> Callable[..., None]:
    """`dapo <stage>`: its options are the inputs that the stage's `run` declares."""
    inputs = runner.stage_inputs(stage)

    def run_stage(
        out: str | None = None,
        overrides: list[str] | None = None,
        dry: bool = False,
        updated: str | None = None,
        **paths: Any,
    ) -> None:
        from pipeline.config import load

        settings = load(overrides or [])
        given = {
            name: [brought(p) for p in value]
            if isinstance(value, list)
            else value and brought(value)
            for name, value in paths.items()
        }
        if dry:
            from pipeline.rerun import dry_update

            made_by = brought(updated) if updated else None
            comparison(dry_update(load(), settings, updated=made_by, inputs=given))
            return
        if out is None:
            raise InputError("give --out DIR, where the policy is to be written, or --dry")
        with watched(), runner.Runner(settings.machine) as run:
            made, served = run.run(
                stage, out=local(out), config=getattr(settings, stage), inputs=given
            )
        describe(made, served=served)
        if stage == "update" and not made.metrics["optimizer_steps"]:
            say("nothing to train on: no response of the batch carries a token; weights unchanged")
            raise typer.Exit(NOTHING_TRAINED)
        if stage == "prune" and not made.metrics["ratio"]:
            say("nothing is pruned: every ratio loses more than max_loss; the policy is unpruned")

    example = " ".join(f"--{i.name} PATH" for i in inputs if i.required)
    run_stage.__doc__ = f"""{runner.purpose(stage)}

    Example: dapo {stage} {example} --out DIR
    """
    options = [*map(_input_option, inputs), *_output_options(stage)]
    run_stage.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*options, _parameter("overrides", Overrides, None)]
    )
    run_stage.__name__ = stage
    return run_stage


def _input_option(of: runner.StageInput) -> inspect.Parameter:
    kind: Any = list[str] if of.several else str if of.required else str | None
    often = "As often as needed." if of.several else None
    option = typer.Option(f"--{of.name}", help=often, metavar="PATH")
    return _parameter(of.name, Annotated[kind, option], REQUIRED if of.required else None)


def _output_options(stage: str) -> list[inspect.Parameter]:
    """Where to; an update may also be dry."""
    out = typer.Option(help="Must not exist.", metavar="PATH")
    if stage != "update":
        return [_parameter("out", Annotated[str, out], REQUIRED)]
    updated = typer.Option(help=UPDATED, metavar="PATH")
    return [
        _parameter("out", Annotated[str | None, out], None),
        _parameter("dry", Annotated[bool, typer.Option("--dry", help=DRY)], False),
        _parameter("updated", Annotated[str | None, updated], None),
    ]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
