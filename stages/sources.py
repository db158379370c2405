"""Rows of somebody's own: Parquet, JSON-lines or CSV files, or a dataset on Hugging Face's hub."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import InputError

ROWS_AT_ONCE = 1024


class Row(NamedTuple):
    """`number` counts from 1: the line of a JSON-lines file, the record of any other.

    `values` is a text, saying why, where a line holds no JSON object.
    """

    file: str  # its name, or the dataset's
    number: int
    values: dict[str, Any] | str


class Columns(NamedTuple):
    """Dotted names: what every table must have, and what is taken if it is there."""

    required: Sequence[str]
    optional: Sequence[str]


def value(values: dict[str, Any], column: str) -> Any:
    """What `column` holds; a dot leads into a struct, a number after it to that item of a list.

    None where something on the way is null. Raises `KeyError` where it does not exist.
    """
    if column in values:
        return values[column]
    found: Any = values
    for part in column.split("."):
        if found is None:
            return None
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            raise KeyError(column)
    return found


def from_files(source: Path, columns: Columns) -> Iterator[Row]:
    """The rows of a file, or of all files in a directory in the order of their names.

    Raises `InputError` for what is not there, cannot be read, or lacks a required column.
    """
    for path in _shards(source):
        yield from READERS[path.suffix](path, columns)


def from_hub(
    name: str, columns: Columns, *, config: str | None, split: str, revision: str | None
) -> Iterator[Row]:
    """The rows of a dataset by its name on the hub, downloaded once and cached by `datasets`.

    Raises `InputError` if it cannot be had, or lacks a required column.
    """
    from datasets import load_dataset  # takes seconds, and few runs need it
    from datasets.exceptions import DatasetsError

    try:
        dataset = load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(
            f"the dataset '{name}' (config {config}, split {split}, revision {revision}) cannot be "
            f"loaded: {type(error).__name__}: {error}. Check the name and the network; or download "
            "its files elsewhere and give them as `file`, with dataset=null"
        ) from error
    wanted = _present(columns, dataset.column_names, name)
    batches = dataset.select_columns(wanted).with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
    yield from _numbered(name, (row for batch in batches for row in batch.to_pylist()))


def _shards(source: Path) -> list[Path]:
    kinds = ", ".join(READERS)
    if source.is_file():
        if source.suffix not in READERS:
            raise InputError(f"{source}: its name ends in none of {kinds}; convert or rename it")
        return [source]
    if not source.exists():
        raise InputError(f"{source} does not exist (looked for prompts)")
    inside = source / "prompts" if (source / "prompts").is_dir() else source  # an artifact
    found = sorted(path for path in inside.iterdir() if path.suffix in READERS)
    if not found:
        raise InputError(f"{source} holds no file whose name ends in one of {kinds}")
    return found


def _parquet(path: Path, columns: Columns) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            wanted = _present(columns, file.schema_arrow.names, str(path))
            batches = file.iter_batches(ROWS_AT_ONCE, columns=wanted)
            yield from _numbered(path.name, (row for batch in batches for row in batch.to_pylist()))
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path} is not a readable Parquet file ({error}); write it again or restore it"
        ) from error


def _csv(path: Path, columns: Columns) -> Iterator[Row]:
    try:
        # as text, or an id such as 007 would lose its zeros
        frame = pl.read_csv(path, infer_schema=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path} is not a readable CSV file with a header: {error}") from error
    wanted = _present(columns, frame.columns, str(path))
    yield from _numbered(path.name, frame.select(wanted).iter_rows(named=True))


def _json_lines(path: Path, columns: Columns) -> Iterator[Row]:
    del columns  # each line has its own
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Row(path.name, number, _object(line))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error


def _object(line: str) -> dict[str, Any] | str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"expected a JSON object: {error}"
    return (
        found if isinstance(found, dict) else f"expected a JSON object, found {line[:40].strip()}"
    )


def _numbered(file: str, rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    return (Row(file, number, values) for number, values in enumerate(rows, 1))


def _present(columns: Columns, names: list[str], where: str) -> list[str]:
    """Which of the table's columns to read; `InputError` if it lacks a required one."""

    def top(column: str) -> str:
        return column if column in names else column.partition(".")[0]

    if missing := [column for column in columns.required if top(column) not in names]:
        raise InputError(
            f"{where} has no column '{missing[0]}', only {', '.join(names)}; say which column is "
            "which with prompt_column, answer_column, id_column, task_column and meta_columns"
        )
    wanted = {top(column) for column in (*columns.required, *columns.optional)}
    return [name for name in names if name in wanted]


READERS: dict[str, Callable[[Path, Columns], Iterator[Row]]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
}
