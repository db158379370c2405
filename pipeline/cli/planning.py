"""Commands about a run before it starts: plan, rehearse."""

import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.console import Json, Overrides, document, out, say, table, watched
from stages.errors import InputError

if TYPE_CHECKING:
    from pipeline.plan import Plan


def plan(
    overrides: Overrides = None,
    gpu_gib: Annotated[float, typer.Option(min=1, help="Memory of a GPU, in GiB.")] = 80,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="In all. Default: as many as the settings ask for.")
    ] = None,
    json_: Json = False,
) -> None:
    """Say what trainer and engine take of each GPU; refuse, with exit code 2, what cannot fit.

    Parameters and KV cache are exact, activations are what autograd saves; what CUDA itself takes
    is an estimate. A step is counted as if every response were as long as it may be.

    Example: dapo plan experiment=dapo_math_7b --gpu-gib 80 --gpus 8
    """
    from pipeline.config import load
    from pipeline.plan import Plan

    made = Plan.of(load(overrides or []), gpu_gib=gpu_gib, gpus=gpus)
    if json_:
        print(document(made.document()))
    else:
        _show(made)
    made.check()


def _show(made: "Plan") -> None:
    """Both tables, and the lines that the recipes quote."""
    say(made.source)
    gib = 2**30
    parts = {"trainer": made.trainer}
    if made.engine:
        parts["engine"] = {**made.engine.parts, "KV cache": made.engine.kv_bytes}
    rows = [
        {"phase": phase, "part": name, "GiB": f"{size / gib:.2f}"}
        for phase, sizes in parts.items()
        for name, size in {**sizes, "total": sum(sizes.values()), "free": made.free(phase)}.items()
    ]
    table("phase part GiB", rows, as_json=False)
    for name, value in made.work().items():
        bytes_ = "bytes" in name
        shown = f"{value / gib:.1f} GiB" if bytes_ else f"{value:,.0f}"
        out.print(f"{name.replace(', bytes', '')}: {shown}", highlight=False)
    for line in made.summary():
        say(line)


def rehearse(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="A new directory to keep the run in.", metavar="DIR")
    ] = None,
) -> None:
    """Run all stages of a run on this CPU, with a scaled-down model of random weights.

    The model has the kind, the grouping of heads and the biases of the run's own; stages have its
    options. Lengths and batches are small, prompts are generated, and no network is needed. What
    was made is removed unless it is kept.

    Example: dapo rehearse experiment=dapo_math_7b
    """
    from pipeline import rehearse as rehearsing
    from pipeline.config import load

    config = load(overrides or [])
    if keep is not None and keep.exists():
        raise InputError(f"--keep {keep}: exists already; name a new directory")
    # a plain SIGTERM would skip every `finally`: workers, and the directory
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as scratch, watched():
        data = keep.absolute() if keep else Path(scratch) / "data"
        rehearsing.rehearse(config, data=data, steps=steps, say=say)
    say(f"rehearsed {steps} step{'s' * (steps > 1)} of {config.run}")
