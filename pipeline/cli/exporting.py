"""The command that hands a policy to others: export."""

from typing import Annotated

import typer

from pipeline.cli.console import local, say

WHICH = "Of a run: best, newest or a step. Default: the best, or the newest where none is named."


def export(
    source: Annotated[
        str, typer.Argument(help="A run, or a policy's directory.", metavar="RUN|POLICY")
    ],
    out: Annotated[str, typer.Option(help="Must not exist.", metavar="DIR")],
    policy: Annotated[str | None, typer.Option(help=WHICH, metavar="best|newest|STEP")] = None,
) -> None:
    """Write a policy as a Hugging Face directory, with a model card made from the records.

    Example: dapo export demo --out demo-policy
    """
    from pipeline import export as exporting

    chosen = exporting.policy_of(source, which=policy)
    target = local(out)
    exporting.export(chosen, target)
    say(f"exported {chosen} to {target}")
