"""The command that removes what nobody needs."""

import json
from contextlib import ExitStack
from typing import Annotated

import typer

from pipeline.cli.console import Json, out, table

KEPT = "Default: as the run's schedule says."


def gc(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Default: every run.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Remove it; else it is listed.")] = False,
    keep_policies: Annotated[
        int | None, typer.Option(min=1, help=f"Newest weights to keep. {KEPT}")
    ] = None,
    keep_optimizers: Annotated[
        int | None, typer.Option(min=1, help=f"Newest optimizer states to keep. {KEPT}")
    ] = None,
    variants: Annotated[
        bool, typer.Option("--variants", help="Also variants that nothing was made from.")
    ] = False,
    json_: Json = False,
) -> None:
    """List what of a run may go, why, and how many bytes it takes; with --apply, remove it.

    These are drafts and partial samples of processes that died, weights and optimizer states that
    the schedule no longer keeps, and lists of packages that no record names. Records and tables
    stay, the newest policy, and any that an unfinished step needs. What is not known is named.

    Example: dapo gc demo --keep-policies 2
    """
    from pipeline import garbage, mirror, runs

    chosen = [runs.find(run)] if run else runs.directories()
    with ExitStack() as stack:
        owned = [stack.enter_context(mirror.owned(each)) if apply else None for each in chosen]
        found = [
            garbage.find(
                each,
                keep_policies=keep_policies,
                keep_optimizers=keep_optimizers,
                variants=variants,
            )
            for each in chosen
        ]
        left = [
            each
            for findings, stored in zip(found, owned, strict=True)
            for each in (garbage.clear(findings, stored) if apply else ())
        ]
    going = [each for findings in found for each in findings.garbage if each not in left]
    unknown = [str(path) for findings in found for path in findings.unknown]
    total = sum(each.bytes for each in going)
    if json_:
        document = {
            "applied": apply,
            "bytes": total,
            "garbage": [each.document() for each in going],
            "in_use": [str(each.path) for each in left],
            "unknown": unknown,
        }
        print(json.dumps(document, indent=1))
        return
    if going:
        rows = [
            {**vars(each), "bytes": f"{each.bytes:,}", "path": each.path.relative_to(of.run.parent)}
            for of in found
            for each in of.garbage
            if each in going
        ]
        table("path how bytes why", rows, as_json=False)
    verb = "removed" if apply else "may go (nothing was removed; add --apply)"
    out.print(f"{len(going)} things, {total / 2**20:.1f} MiB {verb}", highlight=False)
    for title, paths in (("in use, left alone", [str(e.path) for e in left]), ("unknown", unknown)):
        for path in paths:
            out.print(f"{title}: {path}", highlight=False, soft_wrap=True, markup=False)
