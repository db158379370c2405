"""Runs as views of DuckDB: `select verdict, count(*) from responses group by 1`.

The database lives in memory, reads files below the data root only, and takes nothing but queries.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.read import (
    ARTIFACTS,
    CURVES,
    FATE,
    PLACE_COLUMNS,
    RENAMED,
    VIEWS,
    Run,
)
from stages import columns, tables
from stages.errors import InputError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# where a file's step and round stand in its path; a filter on them leaves the other files closed
PLACE_OF_FILE = r"/step_(\d+)/(?:round_(\d+)/)?[a-z]+/[a-z]+/part-\d+\.parquet$"
GROUP_OF = {"step": 1, "round": 2}
BATCH = 65_536  # rows that are written at a time
SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
COMMENTS = r"^(?:\s|--[^\n]*\n|/\*.*?\*/)*"
EXPLAIN = re.compile(
    rf"{COMMENTS}explain\b\s*(?:analyze\b|\(\s*(?:analyze|format)\b[\w\s,]*\))?",
    re.IGNORECASE | re.DOTALL,
)
PIVOT = re.compile(rf"{COMMENTS}(?:pivot|from|with|select|\()", re.IGNORECASE | re.DOTALL)
CHANGES = {"COPY", "CREATE", "DELETE", "INSERT", "MERGE", "UPDATE"}  # of operators, and keywords
JOINS = ("rollouts", "scores", "groups", "prompts")
RESPONSES = """
create view responses as
select * from rollouts
left join scores using (run, step, round, response_id)
left join (
    select run, group_id,
           last(decision order by step) as decision, last(reason order by step) as reason,
           max(step) as decided_in
    from groups group by run, group_id
) using (run, group_id)
left join (select run, prompt_id, task, answer, meta from prompts) using (run, prompt_id)
"""
ABOUT = {
    "heldout": "a held-out prompt",
    "responses": "a response: rollouts, scores, its group's fate and its prompt, joined",
    "curves": "a step that is finished",
    "artifacts": "an artifact",
}
JOINED = {"responses": FATE, "curves": CURVES, "artifacts": ARTIFACTS}
NUMBERS = {"step": "INTEGER", "decided_in": "INTEGER"}


def catalogue() -> list[dict[str, str]]:
    """Every column of every view: view, row (what one is), column, type, meaning."""
    return [
        {"view": view, "row": _row_of(view), "column": column, "type": kind, "meaning": meaning}
        for view in (*VIEWS, *JOINED)
        for column, kind, meaning in _columns(view)
    ]


def _row_of(view: str) -> str:
    return ABOUT[view] if view in ABOUT else columns.TABLES[VIEWS[view].table][1]


def _columns(view: str) -> Iterator[tuple[str, str, str]]:
    yield "run", "VARCHAR", "name of the run"
    if view in VIEWS:
        for column in VIEWS[view].place:
            yield column, "INTEGER", PLACE_COLUMNS[column]
        table = VIEWS[view].table
        for column, kind in _stored(view).items():
            original = _renamed(table, column)
            yield column, kind, columns.meaning(table, original)
        if table == "scores":
            yield "part_…", "FLOAT", columns.PART
    elif view == "responses":
        of_scores = [each for each in _columns("scores") if each[0] != "response_id"]
        yield from list(_columns("rollouts"))[1:]
        yield from of_scores[3:]
        for column, meaning in FATE.items():
            yield column, NUMBERS.get(column, "VARCHAR"), meaning
    elif view == "curves":
        for column, meaning in CURVES.items():
            yield column, NUMBERS.get(column, "DOUBLE"), meaning
        yield "…", "DOUBLE", "further counts of filter and figures of update, as `dapo ls` has them"
    else:
        for column, kind in ARTIFACT_TYPES.items():
            yield column, kind, ARTIFACTS[column]


ARTIFACT_TYPES = {
    "place": "VARCHAR",
    "step": "INTEGER",
    "round": "INTEGER",
    "stage": "VARCHAR",
    "state": "VARCHAR",
    "digest": "VARCHAR",
    "code": "VARCHAR",
    "packages": "VARCHAR",
    "seconds": "DOUBLE",
    "started": "TIMESTAMPTZ",
    "metrics": "MAP(VARCHAR, DOUBLE)",
    "rows": "MAP(VARCHAR, BIGINT)",
}


def connect(found: Sequence[Run], *, root: Path, query: str = "") -> "DuckDBPyConnection":
    """A database in memory with every view over these runs; it reads below `root` and the runs.

    Args:
        query: what is to be asked; made are the views that it names, all if it names none. Only
            their files are brought from a store.

    Raises `InputError` if two runs have one name.
    """
    import duckdb

    names = [run.name for run in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two runs are named '{twice[0]}'; give runs of different names")
    connection = duckdb.connect(":memory:", config=SETTINGS)
    views = _named(query)
    for view in (view for view in VIEWS if view in views):
        for run in found:
            run.bring(view)
        connection.execute(f"create view {view} as {_union(view, found)}")
    for name, make in (("responses", _responses), ("curves", _curves), ("artifacts", _artifacts)):
        if name in views:
            make(connection, found)
    paths = [str(path) for path in (root, *(run.directory for run in found))]
    directories = [*paths, *map(_no_glob, paths)]  # it looks at a pattern before what it matches
    connection.execute(f"set allowed_directories = {_literal(directories)}")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def _named(query: str) -> set[str]:
    """The views that a query names, and those that these are made of; all if it names none."""
    every = [*VIEWS, *JOINED]
    named = {name for name in every if re.search(rf"\b{name}\b", query, re.IGNORECASE)}
    return named | set(JOINS if "responses" in named else ()) or set(every)


def ask(connection: "DuckDBPyConnection", query: str) -> "DuckDBPyConnection":
    """The result of one query, to be fetched.

    Raises `InputError` with DuckDB's own message, and for anything but a query.
    """
    with _explained():
        _check_reads_only(connection, query)
        return connection.execute(query)


def rows_of(result: "DuckDBPyConnection", most: int | None = None) -> list[dict[str, Any]]:
    """The rows of a result as plain values, at most so many."""
    with _explained():
        found = result.fetchall() if most is None else result.fetchmany(most)
    names = names_of(result)
    return [dict(zip(names, row, strict=True)) for row in found]


def names_of(result: "DuckDBPyConnection") -> list[str]:
    """The columns of a result; one that occurs again has its number behind it."""
    return _unique([name for name, *_ in result.description or []])


def _unique(names: list[str]) -> list[str]:
    return [
        f"{name}_{names[:i].count(name)}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


@contextmanager
def _explained() -> Iterator[None]:
    """What DuckDB refuses is for the reader to mend; it says where and what was meant."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise InputError(f"{error}\n`dapo sql` lists the views and their columns") from error


def write_parquet(connection: "DuckDBPyConnection", query: str, path: Path) -> int:
    """Write a query's result as one Parquet file, whole or not at all; returns the row count."""
    count = 0
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _explained():
            _check_reads_only(connection, query)
            reader = connection.sql(query).to_arrow_reader(BATCH)
        assert reader is not None  # a query has a result
        names = _unique(reader.schema.names)
        schema = pa.schema([f.with_name(n) for f, n in zip(reader.schema, names, strict=True)])
        with _explained(), pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]).rename_columns(names))
                count += len(batch)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _check_reads_only(connection: "DuckDBPyConnection", query: str) -> None:
    """COPY and the like could write where runs lie, and a WITH may hold them too."""
    import duckdb

    explained = EXPLAIN.sub("", query)
    statements = connection.extract_statements(explained)
    if len(statements) != 1:
        raise InputError(f"expected one query, found {len(statements)} statements")
    kind = statements[0].type
    # a pivot is several statements; so is a COPY of one
    pivot = kind == duckdb.StatementType.MULTI and PIVOT.match(explained)
    if kind != duckdb.StatementType.SELECT and not pivot:
        raise _no_query(kind.name)
    if pivot and (changes := CHANGES.intersection(_keywords(explained))):
        raise _no_query(min(changes))  # to explain it would run a part of it
    for operator in _operators(_plan(connection, explained)):
        if CHANGES.intersection(operator.split("_")):
            raise _no_query(operator)


def _no_query(what: str) -> InputError:
    return InputError(
        f"{what} is no query: dapo sql only reads (select, from, with, describe, "
        "summarize, pivot, explain); --json, --csv and --parquet FILE write results"
    )


def _keywords(query: str) -> Iterator[str]:
    """The keywords of a query, in capitals; no names and no texts."""
    import duckdb

    letters = query.encode()  # in which tokens are counted
    for start, kind in duckdb.tokenize(query):
        found = re.match(rb"\w+", letters[start:])
        if kind == duckdb.token_type.keyword and found:
            yield found[0].decode().upper()


def _plan(connection: "DuckDBPyConnection", query: str) -> list[dict[str, Any]]:
    """What DuckDB would do. Raises its own error, about the lines of the query alone."""
    import duckdb

    try:
        found = connection.execute(f"explain (format json)\n{query}").fetchall()
    except duckdb.Error as error:
        line = re.compile(r"^LINE (\d+)", re.MULTILINE)
        raise type(error)(line.sub(lambda at: f"LINE {int(at[1]) - 1}", str(error))) from None
    return [operator for _, plan in found for operator in json.loads(plan)]


def _operators(plan: list[dict[str, Any]]) -> Iterator[str]:
    """The names of all operators of a plan."""
    for each in plan:
        yield each["name"]
        yield from _operators(each["children"])


def _union(view: str, found: Sequence[Run]) -> str:
    """The view over all runs, or over none: typed and empty."""
    selects = [_select(view, run) for run in found]
    return " union all by name ".join(selects) if selects else _empty(view, {}, "")


def _select(view: str, run: Run) -> str:
    """One run's rows: `run`, the place of the file, and the columns with the types of today."""
    files = run.files(view)
    parts = {name: "FLOAT" for name in run.schema(view) if name.startswith("part_")}
    if files.is_empty():
        return _empty(view, parts, run.name)
    table = VIEWS[view].table
    # a file of each version that wrote some of them
    samples = files.unique("code", keep="first", maintain_order=True)["path"].to_list()
    present = {name for path in samples for name in pq.read_schema(path).names}
    differ = len(samples) > 1 or parts
    pattern = _literal(PLACE_OF_FILE)
    place = [
        f"try_cast(regexp_extract(filename, {pattern}, {group}) as integer) as {name}"
        for name, group in GROUP_OF.items()
        if name in VIEWS[view].place
    ]
    stored = [
        f"cast({_quoted(original) if original in present else 'null'} as {kind}) as {_quoted(name)}"
        for name, kind in {**_stored(view), **parts}.items()
        if (original := _renamed(table, name))
    ]
    paths = _literal([_no_glob(path) for path in files["path"]])
    options = "filename = true, hive_partitioning = false" + (
        ", union_by_name = true" if differ else ""
    )
    what = ", ".join([f"{_literal(run.name)} as run", *place, *stored])
    return f"select {what} from read_parquet({paths}, {options})"


def _empty(view: str, parts: dict[str, str], run: str) -> str:
    place = dict.fromkeys(VIEWS[view].place, "INTEGER")
    typed = {"run": "VARCHAR"} | place | _stored(view) | parts
    return f"select {_nulls(typed)} where false"


def _nulls(typed: dict[str, str]) -> str:
    return ", ".join(f"cast(null as {kind}) as {_quoted(name)}" for name, kind in typed.items())


def _responses(connection: "DuckDBPyConnection", found: Sequence[Run]) -> None:
    connection.execute(RESPONSES)


def _curves(connection: "DuckDBPyConnection", found: Sequence[Run]) -> None:
    typed = {"run": "VARCHAR", **dict.fromkeys(CURVES, "DOUBLE"), "step": "INTEGER"}
    frames = [run.curves.select(pl.lit(run.name).alias("run"), pl.all()).collect() for run in found]
    if not frames:
        connection.execute(f"create view curves as select {_nulls(typed)} where false")
        return
    every = pl.concat(frames, how="diagonal")
    connection.register("_curves", every.to_arrow())
    connection.execute("create table curves as from _curves")
    connection.unregister("_curves")


def _artifacts(connection: "DuckDBPyConnection", found: Sequence[Run]) -> None:
    typed = {"run": "VARCHAR", **ARTIFACT_TYPES}
    connection.execute(
        f"create table artifacts ({', '.join(f'{_quoted(n)} {k}' for n, k in typed.items())})"
    )
    rows = [
        [run.name, *(row[name] for name in ARTIFACT_TYPES)]
        for run in found
        for row in run.artifact_rows()
    ]
    if rows:
        marks = ", ".join(f"cast(? as {kind})" for kind in typed.values())
        connection.executemany(f"insert into artifacts values ({marks})", rows)


def _stored(view: str) -> dict[str, str]:
    """The columns of a view's files, by the names that the view gives them, and their types."""
    table, place = VIEWS[view].table, VIEWS[view].place
    renamed = RENAMED.get(table, {})
    return {
        renamed.get(field.name, field.name): _sql_type(field.type)
        for field in tables.SCHEMAS[table]
        if field.name in renamed or field.name not in place
    }


def _renamed(table: str, column: str) -> str:
    """The name in the files of a view's column."""
    return {new: old for old, new in RENAMED.get(table, {}).items()}.get(column, column)


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    if pa.types.is_struct(kind):
        fields = ", ".join(f"{_quoted(field.name)} {_sql_type(field.type)}" for field in kind)
        return f"STRUCT({fields})"
    names = {"string": "VARCHAR", "int32": "INTEGER", "int64": "BIGINT"}
    return {**names, "float": "FLOAT", "double": "DOUBLE", "bool": "BOOLEAN"}[str(kind)]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "'" + value.replace("'", "''") + "'"


def _no_glob(path: str) -> str:
    """A path that stands for itself, whatever its letters."""
    return re.sub(r"([*?\[])", r"[\1]", path)
