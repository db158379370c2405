"""The command that tells where something came from and what became of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.tree import Tree

from pipeline.cli.console import Json, cell, headlines, metric, out, place

if TYPE_CHECKING:
    from pipeline.lineage import Branch, Gap, Lineage, Node

COLOURS = {"gone": "red", "stale": "red"}


def lineage(
    what: Annotated[
        str,
        typer.Argument(
            help="An artifact, a table or weights in it, or a response_id.",
            metavar="PATH|RESPONSE_ID",
        ),
    ],
    run: Annotated[
        str | None, typer.Option(help="Of the response: a run's name or directory.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All of what is long.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="A Mermaid flowchart.")] = False,
    json_: Json = False,
) -> None:
    """Trace an artifact, or one response: what it was made from and what was made of it.

    Example: dapo lineage s0001r0g0003n01 --run demo
    """
    from pipeline import lineage as tracing
    from pipeline import mirror, runs

    if run is None and (Path(what).exists() or "/" in what):
        found = tracing.trace(mirror.looked_at(place(what)), full=full)
    else:
        within = runs.find(run) if run else None
        found = tracing.trace_response(what, run=within, full=full)
    if json_:
        print(json.dumps(found.document(), indent=1))
    elif mermaid:
        print(tracing.mermaid(found), end="")
    else:
        out.print(tree(found), highlight=False)


def tree(lineage: "Lineage") -> Tree:
    """The whole of it, for a terminal."""
    root = Tree(_title(lineage.start), guide_style="dim")
    if lineage.response:
        root.add(f"[bold]{cell(lineage.response)}[/]: {cell(lineage.outcome)}")
    made_by = root.add("[bold]made by[/]")
    for line in _made_by(lineage):
        made_by.add(line)
    _grow(root.add("[bold]made from[/]"), lineage.made_from)
    later = "made of it" if lineage.made_of_it else "nothing was made of it yet"
    _grow(root.add(f"[bold]{later}[/]"), lineage.made_of_it)
    return root


def _grow(tree: Tree, branches: "Sequence[Branch | Gap]") -> None:
    from pipeline.lineage import Gap

    for branch in branches:
        if isinstance(branch, Gap):
            tree.add(f"[dim]{branch}[/]")
            continue
        below = tree.add(_line(branch))
        _grow(below, branch.branches)
        _grow(below, branch.chain)


def _line(branch: "Branch") -> str:
    role = f"[cyan]{branch.role}[/]  "
    mark = f"  [red]{branch.mark}[/]" if branch.mark else ""
    if branch.repeated:
        return f"{role}{escape(branch.node.place)}{mark}  [dim]as shown[/]"
    return role + _title(branch.node) + mark


def _title(node: "Node") -> str:
    """Place, marks and main figures; on a line of their own the facts of the response."""
    marks = "".join(f"  [yellow]{mark}[/]" for mark in node.marks)
    if node.artifact is None:
        return escape(node.place)
    figures = "  ".join(headlines(node.artifact.stage, node.artifact.metrics))
    facts = "  ".join(f"{name} {_value(value)}" for name, value in node.facts.items())
    return (
        f"[bold]{escape(node.place)}[/]{marks}  [dim]{escape(figures)}[/]"
        + (f"\n[green]{facts}[/]" if facts else "")
    ).rstrip()


def _value(value: Any) -> str:
    return cell(" ".join(value.split()) if isinstance(value, str) else value)


def _made_by(lineage: "Lineage") -> list[str]:
    """Settings, code and environment, and how many others have other ones."""
    from pipeline import environment
    from pipeline.lineage import packages

    artifact = lineage.start.artifact
    assert artifact
    settings = (metric(name, value) for name, value in artifact.recipe.config.items())
    lines = [f"config  [dim]{escape('  '.join(settings))}[/]"]
    lines.append(f"code  {_mine(artifact.record['code'], lineage.spread('code'))}")
    about = artifact.record.get("environment")
    if about:
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        device = about["device"].get("gpus", [about["device"]["cpu"]])
        mine = _mine(str(packages(artifact)), lineage.spread("packages"))
        lines.append(f"environment  python {about['python']}, {escape(versions)}")
        lines.append(f"device  {escape(f'{len(device)} × {device[0]}')}")
        lock = f"{environment.DIRECTORY}/{environment.file_name(about['packages'])}"
        known = lineage.run is not None and (lineage.run / lock).is_file()
        lines.append(f"packages  {mine}  [dim]{lock if known else 'no lock was kept'}[/]")
    return lines


def _mine(ours: str, spread: dict[str, int]) -> str:
    """Our own value, and those of others that are shown."""
    others = {value: count for value, count in spread.items() if value != ours}
    shown = ", ".join(f"{escape(value[:24])} ({count})" for value, count in others.items())
    return escape(ours[:24]) + (f"  [yellow]others: {shown}[/]" if others else "")
