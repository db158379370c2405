"""Look at runs: list them, show an artifact, verify that everything adds up. Changes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import artifacts
from pipeline.artifacts import RECORD, Artifact
from stages import tables
from stages.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One artifact of a run as `dapo ls` shows it."""

    place: str  # step_0003/round_0/score
    stage: str
    state: str  # whole, changed, pinned, retired, stale
    rows: dict[str, int]
    seconds: float
    metrics: dict[str, Any]
    digest: str


def run_directories(data: Path) -> list[Path]:
    """The runs below a data root, newest last."""
    found = (data / "runs").glob("*/config.yaml")
    return sorted((path.parent for path in found), key=lambda path: path.stat().st_mtime)


def artifacts_below(run: Path) -> Iterator[Artifact]:
    """Every artifact of a run, in the order in which a run makes them."""
    paths = {path.parent for path in run.rglob(RECORD) if ".draft-" not in str(path)}
    if not paths:
        raise InputError(f"{run} holds no artifacts; is it a run?")
    found = [artifacts.load(path) for path in paths]
    yield from sorted(found, key=lambda artifact: (artifact.record["started"], str(artifact.path)))


def entries(run: Path) -> list[Entry]:
    """The run's artifacts with their states, oldest first."""
    found = list(artifacts_below(run))
    return [
        Entry(
            place=str(artifact.path.relative_to(run)),
            stage=artifact.stage,
            state=state(artifact),
            rows=artifact.record["rows"],
            seconds=artifact.record["seconds"],
            metrics=artifact.metrics,
            digest=artifact.digest,
        )
        for artifact in found
    ]


def state(artifact: Artifact) -> str:
    """`changed`, `stale` (an input has another content by now), `pinned`, `retired` or `whole`."""
    if artifact.changed_files(full=False):
        return "changed"
    if stale_inputs(artifact):
        return "stale"
    return "pinned" if artifact.pinned else "retired" if artifact.retired else "whole"


def stale_inputs(artifact: Artifact) -> list[str]:
    """The inputs that no longer have the content that this artifact was made from."""
    stale = []
    for name, source in artifact.record["sources"].items():
        known = artifact.recipe.inputs[name]
        pairs = zip(source, known, strict=True) if isinstance(source, list) else [(source, known)]
        for path, digest in pairs:
            if (
                path
                and (Path(path) / RECORD).exists()
                and artifacts.load(Path(path)).digest != digest
            ):
                stale.append(f"{name} {path}")
    return stale


def downstream(run: Path, changed: Path) -> list[Path]:
    """The artifacts of a run that were made, directly or not, from the one at `changed`."""
    affected = {str(changed)}
    for artifact in artifacts_below(run):
        sources = artifact.record["sources"].values()
        named = {
            path
            for source in sources
            for path in (source if isinstance(source, list) else [source])
        }
        if named & affected:
            affected.add(str(artifact.path))
    return sorted(Path(path) for path in affected - {str(changed)})


def verify(run: Path) -> tuple[int, list[str]]:
    """How many artifacts were checked in full, and every problem found: hashes, inputs, rows."""
    found = list(artifacts_below(run))
    problems = []
    for artifact in found:
        problems += artifact.changed_files(full=True)
        problems += [f"{artifact.path} is stale: {which}" for which in stale_inputs(artifact)]
        if not problems:
            problems += conservation(artifact)
    return len(found), problems


def conservation(artifact: Artifact) -> list[str]:
    """Rows that were lost or invented between an artifact and what it was made from."""
    checks = {"rollout": _rollout_rows, "score": _score_rows, "filter": _filter_rows}
    check = checks.get(artifact.stage)
    return [f"{artifact.path}: {problem}" for problem in check(artifact)] if check else []


def _rollout_rows(artifact: Artifact) -> Iterator[str]:
    selected = _ids(Path(artifact.record["sources"]["selection"]), "selection", "group_id")
    sampled = _ids(artifact.path, "rollouts", "group_id")
    skipped = _ids(artifact.path, "skipped", "group_id")
    if sorted(selected) != sorted([*sampled.unique(), *skipped]):
        yield (
            f"{len(selected)} groups selected, but {sampled.n_unique()} sampled "
            f"+ {len(skipped)} skipped"
        )


def _score_rows(artifact: Artifact) -> Iterator[str]:
    sampled = _ids(Path(artifact.record["sources"]["rollouts"]), "rollouts", "response_id")
    scored = _ids(artifact.path, "scores", "response_id")
    if not sampled.sort().equals(scored.sort()):
        yield f"{len(sampled)} responses sampled, but {len(scored)} scored"


def _filter_rows(artifact: Artifact) -> Iterator[str]:
    groups = tables.read(artifact.path, "groups")
    decided = dict(groups["decision"].value_counts().iter_rows())
    sources = artifact.record["sources"]
    came = sum(_ids(Path(p), "rollouts", "group_id").n_unique() for p in sources["rollouts"])
    if sources["carried"]:
        came += _ids(Path(sources["carried"]), "carried", "group_id").n_unique()
    if came != sum(decided.values()):
        yield f"{came} groups came in, but {decided} were decided"
    for decision, table in (("kept", "batch"), ("carried", "carried")):
        promised = groups.filter(decision=decision)["n"].sum()
        rows = artifact.record["rows"][table]
        if promised != rows:
            yield f"{decision} groups hold {promised} responses, but {table} has {rows} rows"


def _ids(path: Path, table: str, column: str) -> pl.Series:
    return tables.scan(path, table).select(column).collect().to_series()
