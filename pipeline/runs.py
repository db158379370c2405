"""Look at runs: list them, show an artifact, verify that everything adds up. Changes nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import artifacts, mirror, storage
from pipeline.artifacts import RECORD, Artifact
from pipeline.config import load
from pipeline.loop import BEST, CONFIG
from stages import tables
from stages.errors import InputError


def find(run: str, wanted: mirror.Wanted = mirror.nothing) -> Path:
    """The directory of a run, given by name (below the data root), by path or by URL.

    Of a run in a store it is the mirror, with every record and the wanted files.
    """
    data = load().data
    if storage.is_url(run) or "/" in run:
        places: list[Path | str] = [run if storage.is_url(run) else Path(run).absolute()]
    else:
        places = [mirror.run_place(data, run), Path(run).absolute()]
    for place in places:
        path = mirror.looked_at(place, wanted)
        if (path / CONFIG).is_file():
            return path
    raise InputError(f"there is no run '{run}' in {data}/{mirror.RUNS}; `dapo ls` lists the runs")


def root() -> Path:
    """The data root on this machine; of a store, where its mirrors are."""
    data = load().data
    return storage.cache(data) if isinstance(data, str) else data


def overview() -> list[dict[str, Any]]:
    """Every run below the data root, the newest last; of a store by name."""
    data = load().data
    if isinstance(data, str):
        mirrors = {url: mirror.looked_at(url) for url in mirror.stored_runs(data)}
        there = {url: path for url, path in mirrors.items() if (path / CONFIG).is_file()}
        return [_run_row(path) | {"directory": url} for url, path in there.items()]
    return [_run_row(run) for run in directories()]


def directories(wanted: mirror.Wanted = mirror.nothing) -> list[Path]:
    """Of every run below the data root, the newest last; of a store their mirrors, by name."""
    data = load().data
    if isinstance(data, str):
        mirrors = [mirror.looked_at(url, wanted) for url in mirror.stored_runs(data)]
        return [path for path in mirrors if (path / CONFIG).is_file()]
    found = sorted((data / mirror.RUNS).glob(f"*/{CONFIG}"), key=lambda p: p.stat().st_mtime)
    return [path.parent for path in found]


def newest() -> Path:
    """The directory of the run that was begun last; of a store the mirror of the last by name.

    Raises `InputError` where there is none.
    """
    found = directories()
    if not found:
        raise InputError("there are no runs yet; start with: dapo train experiment=demo")
    return found[-1]


def _run_row(run: Path) -> dict[str, Any]:
    records = list(artifacts_below(run))
    return {
        "run": run.name,
        "steps": sum(a.stage == "update" and a.path.name == "update" for a in records),
        "artifacts": len(records),
        "seconds": round(sum(a.record["seconds"] for a in records), 1),
        "best": (run / BEST).read_text() if (run / BEST).is_file() else None,
        "directory": str(run),
    }


def artifacts_below(run: Path) -> Iterator[Artifact]:
    """Every artifact of a run, in the order in which a run makes them."""
    paths = {path.parent for path in run.rglob(RECORD) if ".draft-" not in str(path)}
    found = [artifacts.load(path) for path in paths]
    yield from sorted(found, key=lambda artifact: (artifact.record["started"], str(artifact.path)))


def entries(run: Path) -> list[dict[str, Any]]:
    """The run's artifacts with their states, oldest first."""
    return [
        {
            "place": str(artifact.path.relative_to(run)),
            "stage": artifact.stage,
            "state": state(artifact),
            "rows": artifact.record["rows"],
            "seconds": artifact.record["seconds"],
            "metrics": artifact.metrics,
            "digest": artifact.digest,
        }
        for artifact in artifacts_below(run)
    ]


def contents(path: Path, *, rows: int) -> dict[str, Any]:
    """The record (None for anybody's Parquet), and schema, count and first rows of each table."""
    record = artifacts.load(path).record if (path / RECORD).is_file() else None
    found = sorted([path] if path.is_file() else path.rglob("*.parquet"))
    if not found:
        raise InputError(f"{path} holds no artifact and no Parquet file")
    tables_found = {file.parent.name if path.is_dir() else file.name: file.parent for file in found}
    return {
        "record": record,
        "tables": {
            name: _first_rows(found if path.is_file() else sorted(where.glob("*.parquet")), rows)
            for name, where in tables_found.items()
        },
    }


def _first_rows(shards: list[Path], rows: int) -> dict[str, Any]:
    try:
        frame = pl.scan_parquet(shards)
        schema = frame.collect_schema()
        head = frame.head(rows).collect()
        count = frame.select(pl.len()).collect().item()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{shards[0]} is not a readable Parquet file: {error}") from error
    return {
        "schema": {name: str(kind) for name, kind in schema.items()},
        "count": count,
        "rows": head.to_dicts(),
    }


def state(artifact: Artifact) -> str:
    """What became of it since it was made.

    `changed`; `stale`: an input has another content by now; `retired`: its weights are gone, or
    `trimmed`: its optimizer's state is; `pinned`: made with settings of its own; else `whole`.
    """
    if artifact.changed_files(full=False):
        return "changed"
    if stale_inputs(artifact):
        return "stale"
    marks = ("retired", "trimmed", "pinned")
    return next((mark for mark in marks if getattr(artifact, mark)), "whole")


def stale_inputs(artifact: Artifact) -> list[str]:
    """The inputs that no longer have the content that this artifact was made from."""
    return [
        f"{name} {path}"
        for name, path, digest in inputs(artifact)
        if (path / RECORD).exists() and artifacts.load(path).digest != digest
    ]


def inputs(artifact: Artifact) -> Iterator[tuple[str, Path, str]]:
    """Name, path and digest of every input."""
    for name, source in artifact.sources.items():
        known = artifact.recipe.inputs[name]
        if isinstance(source, list):
            yield from ((name, path, digest) for path, digest in zip(source, known, strict=True))
        elif source:
            yield name, source, known


def stale_below(run: Path, changed: Artifact) -> list[Path]:
    """The artifacts made, directly or not, from what stood where `changed` stands now."""
    affected = {changed.path}
    if not any(stale_inputs(artifact) for artifact in artifacts_below(run)):
        return []  # other settings, same content
    for artifact in artifacts_below(run):
        if affected.intersection(path for _, path, _ in inputs(artifact)):
            affected.add(artifact.path)
    return sorted(affected - {changed.path})


def verify(run: Path) -> tuple[int, list[str]]:
    """How many artifacts were checked in full, and every problem found: hashes, inputs, rows."""
    found = list(artifacts_below(run))
    problems = []
    for artifact in found:
        mine = artifact.changed_files(full=True)
        mine += [f"{artifact.path} is stale: {which}" for which in stale_inputs(artifact)]
        problems += mine or conservation(artifact)
    return len(found), problems


def conservation(artifact: Artifact) -> list[str]:
    """Rows that were lost or invented between an artifact and what it was made from."""
    checks = {"rollout": _rollout_rows, "score": _score_rows, "filter": _filter_rows}
    check = checks.get(artifact.stage)
    return [f"{artifact.path}: {problem}" for problem in check(artifact)] if check else []


def _rollout_rows(artifact: Artifact) -> Iterator[str]:
    selected = _ids(artifact.sources["selection"], "selection", "group_id")
    sampled = _ids(artifact.path, "rollouts", "group_id")
    skipped = _ids(artifact.path, "skipped", "group_id")
    if sorted(selected) != sorted([*sampled.unique(), *skipped]):
        yield (
            f"{len(selected)} groups selected, but {sampled.n_unique()} sampled "
            f"+ {len(skipped)} skipped"
        )


def _score_rows(artifact: Artifact) -> Iterator[str]:
    sampled = _ids(artifact.sources["rollouts"], "rollouts", "response_id")
    scored = _ids(artifact.path, "scores", "response_id")
    if not sampled.sort().equals(scored.sort()):
        yield f"{len(sampled)} responses sampled, but {len(scored)} scored"


def _filter_rows(artifact: Artifact) -> Iterator[str]:
    groups = tables.read(artifact.path, "groups")
    decided = dict(groups["decision"].value_counts().iter_rows())
    sources = artifact.sources
    came = sum(_ids(p, "rollouts", "group_id").n_unique() for p in sources["rollouts"])
    if sources["carried"]:
        came += _ids(sources["carried"], "carried", "group_id").n_unique()
    if came != sum(decided.values()):
        yield f"{came} groups came in, but {decided} were decided"
    for decision, table in (("kept", "batch"), ("carried", "carried")):
        promised = groups.filter(decision=decision)["n"].sum()
        rows = artifact.record["rows"][table]
        if promised != rows:
            yield f"{decision} groups hold {promised} responses, but {table} has {rows} rows"


def _ids(path: Path, table: str, column: str) -> pl.Series:
    return tables.scan(path, table).select(column).collect().to_series()
