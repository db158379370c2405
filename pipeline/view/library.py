"""The runs that the page shows: which there are, how far they have come, and SQL over them."""

import hashlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import psutil

from pipeline import runs, sql, storage
from pipeline.artifacts import RECORD
from pipeline.config import parse
from pipeline.loop import CONFIG
from pipeline.read import Run
from pipeline.view.queries import Snapshot
from stages.errors import InputError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SQL_ROWS, SQL_SECONDS, SQL_MEMORY = 1_000, 60.0, "4GB"  # of one query on the page


class Library:
    """The runs below a data root, or one of them alone. Nothing outside is found."""

    def __init__(self, root: Path, only: Path | None = None) -> None:
        self.root, self.only = root.resolve(), only and only.resolve()
        self._snapshots: dict[str, Snapshot] = {}
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}
        self._loading = threading.Lock()

    def names(self) -> list[str]:
        """Of the runs, the one begun last first."""
        if self.only is not None:
            return [self.only.name]
        begun = [
            (file.stat().st_mtime, file.parent.name)
            for file in (self.root / "runs").glob(f"*/{CONFIG}")
            if self._inside(file.parent)
        ]
        return [name for _, name in sorted(begun, reverse=True)]

    def directory(self, name: str) -> Path:
        """Of a run. Raises `InputError` for what is no run below the root, links included."""
        if self.only is not None and name == self.only.name:
            return self.only
        path = self.root / "runs" / name
        plain = name not in ("", ".", "..") and Path(name).name == name and "\0" not in name
        if self.only is None and plain and self._inside(path) and (path / CONFIG).is_file():
            return path
        raise InputError(f"there is no run {name!r} here")

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)

    def mark(self, name: str) -> str:
        """Changes when the run has published something else; costs a look at its records."""
        return _mark(self.directory(name))

    def marks(self) -> dict[str, str]:
        """The mark of every run."""
        return {name: self.mark(name) for name in self.names()}

    def snapshot(self, name: str) -> Snapshot:
        """What the run has published by now; the one before, if it is the same.

        Raises `InputError` if there is no such run, or a record cannot be read.
        """
        directory = self.directory(name)
        mark = _mark(directory)
        with self._loading:
            before = self._snapshots.get(name)
            if before is None or before.mark != mark:
                self._snapshots[name] = Snapshot(directory, mark, before.rounds if before else None)
            return self._snapshots[name]

    def overview(self) -> list[dict[str, Any]]:
        """A row per run: name, state, steps, accuracy, held-out accuracy, responses, when."""
        return [self._row(name) for name in self.names()]

    def _row(self, name: str) -> dict[str, Any]:
        directory, mark = self.directory(name), self.mark(name)
        if self._rows.get(name, ("",))[0] != mark:
            try:
                self._rows[name] = (mark, _facts(self.snapshot(name).run))
            except InputError:  # of one record; the other runs are shown all the same
                return {**dict.fromkeys(FACTS), "run": name, "steps": 0, "state": "unreadable"}
        row = self._rows[name][1]
        return {**row, "state": _state(directory, row)}

    def curves(self, names: Sequence[str]) -> dict[str, pl.DataFrame]:
        """The figures of each step of each of these runs."""
        return {name: self.snapshot(name).run.curves.collect() for name in names}

    def ask(self, query: str, names: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
        """The columns of a query's result, and its first `SQL_ROWS` + 1 rows.

        Raises `InputError` with DuckDB's message, and for what takes longer than `SQL_SECONDS`.
        """
        with self._connected(query, names) as connection:
            result = sql.ask(connection, query)
            return sql.names_of(result), sql.rows_of(result, SQL_ROWS + 1)

    def write(self, query: str, names: Sequence[str], path: Path) -> int:
        """Write a query's whole result as one Parquet file; returns the number of rows."""
        with self._connected(query, names) as connection:
            return sql.write_parquet(connection, query, path)

    @contextmanager
    def _connected(self, query: str, names: Sequence[str]) -> "Iterator[DuckDBPyConnection]":
        """A database over these runs, which is interrupted when its time is over."""
        found = [self.snapshot(name).run for name in names]
        connection = sql.connect(found, root=self.root, query=query, memory=SQL_MEMORY)
        late = threading.Event()

        def stop() -> None:
            late.set()
            connection.interrupt()

        timer = threading.Timer(SQL_SECONDS, stop)
        timer.start()
        try:
            yield connection
        except InputError as error:
            if late.is_set():
                raise InputError(
                    f"stopped after {SQL_SECONDS:g} s, the most that a query may take here; "
                    "`dapo sql` has no such limit"
                ) from error
            raise
        finally:
            timer.cancel()
            connection.close()


def library(target: str | None, data: Path | str) -> Library:
    """The runs below a data root, or one run alone.

    Args:
        target: a data root, a run's directory, or its name below `data`; None: all below `data`.
        data: the data root; of a store (a URL) only one run is shown, as it is at the moment.

    Raises `InputError` if it is none of these.
    """
    if isinstance(data, str) or storage.is_url(target):
        if target is None:
            raise InputError(f"{data} is a store, of which one run is shown: dapo view RUN")
        copy = runs.find(target)
        return Library(copy, only=copy)
    if target is None:
        return Library(data)
    for path in (Path(target), data / "runs" / target):
        if (path / CONFIG).is_file():
            return Library(path.resolve(), only=path)
    if (Path(target) / "runs").is_dir():
        return Library(Path(target))
    raise InputError(
        f"'{target}' is neither a data root (it would have runs/) nor a run; `dapo ls` lists runs"
    )


def _mark(directory: Path) -> str:
    """One for equal records: their paths, sizes and times of change."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob(RECORD)):
        try:
            stat = path.stat()
        except FileNotFoundError:  # replaced at this moment
            continue
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


FACTS = ("run", "steps", "planned", "acc", "held_out", "evaluated", "responses", "when")


def _facts(run: Run) -> dict[str, Any]:
    """What a run has come to, by its records."""
    found = [(place, artifact) for place, artifact in run.found if place.variant is None]

    def newest(stage: str, metric: str) -> float | None:
        values = [
            value
            for place, artifact in found
            if place.stage == stage
            for name, value in artifact.metrics.items()
            if name.startswith(metric) and value is not None
        ]
        return float(values[-1]) if values else None

    rollouts = [artifact for place, artifact in found if place.stage == "rollout"]
    started = [str(artifact.record["started"]) for _, artifact in found]
    evaluated = [place.step for place, _ in found if place.stage == "evaluate"]
    return {
        "run": run.name,
        "steps": sum(place.stage == "update" for place, _ in found),
        "planned": _planned(run.directory),
        "acc": newest("score", "acc"),
        "held_out": newest("evaluate", "avg@"),
        "evaluated": max((step for step in evaluated if step is not None), default=None),
        "responses": sum(a.record["rows"].get("rollouts", 0) for a in rollouts),
        "when": max(started, default=None),
    }


def _planned(directory: Path) -> int | None:
    """The steps that the settings ask for; None where they say nothing."""
    try:
        return parse((directory / CONFIG).read_text()).schedule.steps
    except (OSError, InputError):  # of another version of the pipeline
        return None


def _state(directory: Path, row: Mapping[str, Any]) -> str:
    """running: a process of this machine owns it; finished: all steps are made; else unfinished."""
    if _owned(directory / ".lock"):
        return "running"
    planned = row["planned"]
    done = planned is not None and row["steps"] >= planned and (row["evaluated"] or 0) >= planned
    return "finished" if done else "unfinished"


def _owned(lock: Path) -> bool:
    """Whether the process that wrote the lock still holds it open; the lock itself is not tried."""
    try:
        words = lock.read_text().split()
        if len(words) != 4 or words[3] != socket.gethostname():
            return False
        process = psutil.Process(int(words[1]))
        return str(lock.resolve()) in {file.path for file in process.open_files()}
    except psutil.AccessDenied:  # somebody else's, and alive
        return True
    except (OSError, ValueError, psutil.NoSuchProcess):
        return False


def when(started: str | None) -> str:
    """A record's time as people of this place read it."""
    return (
        datetime.fromisoformat(started).astimezone().strftime("%Y-%m-%d %H:%M") if started else ""
    )
