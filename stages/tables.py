"""The tables that stages exchange: one explicit schema each, checked on every read and write."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from stages import columns
from stages.errors import InputError

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TOKENS = pa.list_(pa.int32())
LOGPROBS = pa.list_(pa.float32())
FLAGS = pa.list_(pa.bool_())

# small row groups let one response be looked up without reading its shard
ROWS_PER_GROUP, ROWS_OF_SCALARS = 1024, 65_536


def _schema(key: str, **columns: pa.DataType | tuple[pa.DataType, None]) -> pa.Schema:
    """The key comes first; a column given as `(type, None)` may hold nulls, all others may not."""
    fields = [pa.field(key, pa.string(), nullable=False)]
    for name, kind in columns.items():
        nullable = isinstance(kind, tuple)
        fields.append(pa.field(name, kind[0] if isinstance(kind, tuple) else kind, nullable))
    return pa.schema(fields)


_GENERATED = {
    "group_id": pa.string(),
    "prompt_id": pa.string(),
    "sample": pa.int32(),
    "prompt_ids": TOKENS,
    "response_ids": TOKENS,
    "sampler_logprobs": LOGPROBS,
    "text": pa.string(),
    "length": pa.int32(),
    "finish_reason": pa.string(),
    "seed": pa.int64(),
    "temperature": pa.float32(),
    "policy": pa.string(),
}
_JUDGED = {
    "acc": (pa.float32(), None),
    "extracted": (pa.string(), None),
    "verdict": pa.string(),
}

MEASURED = (
    "loss",
    "grad_norm",
    "entropy",
    "kl_k1",
    "kl_k3",
    "ratio_min",
    "ratio_mean",
    "ratio_max",
    "clip_fraction_low",
    "clip_fraction_high",
    "clip_fraction_dual",
    "importance_mean",
    "importance_capped",
    "importance_dropped",
    "gap_mean",
    "gap_max",
    "length_mean",
    "lr",
)
_SPEEDS = ("seconds", "tokens_per_second", "peak_memory_gib")

SCHEMAS: dict[str, pa.Schema] = {
    "prompts": _schema(
        "prompt_id",
        prompt=MESSAGES,
        answer=pa.string(),
        task=pa.string(),
        meta=(pa.string(), None),
    ),
    "selection": _schema(
        "group_id",
        step=pa.int32(),
        round=pa.int32(),
        position=pa.int64(),
        prompt_id=pa.string(),
        weight=pa.float64(),
        pass_rate=(pa.float64(), None),
        evidence=(pa.float64(), None),
        why=pa.string(),
        epoch=pa.int32(),
    ),
    "beliefs": _schema(
        "prompt_id", right=pa.float64(), wrong=pa.float64(), step=pa.int32(), asked=pa.int32()
    ),
    "rollouts": _schema("response_id", **_GENERATED),
    "skipped": _schema("group_id", prompt_id=pa.string(), reason=pa.string()),
    "scores": _schema(
        "response_id",
        penalty=pa.float32(),
        reward=(pa.float32(), None),
        **_JUDGED,
    ),
    "groups": _schema(
        "group_id",
        prompt_id=pa.string(),
        n=pa.int32(),
        n_scored=pa.int32(),
        acc_mean=(pa.float64(), None),
        metric_min=(pa.float64(), None),
        metric_max=(pa.float64(), None),
        reward_mean=(pa.float64(), None),
        reward_std=(pa.float64(), None),
        decision=pa.string(),
        reason=(pa.string(), None),
        policy=pa.string(),
        age=pa.int32(),
        sampled=pa.bool_(),
    ),
    "batch": _schema(
        "response_id",
        group_id=pa.string(),
        prompt_id=pa.string(),
        prompt_ids=TOKENS,
        response_ids=TOKENS,
        sampler_logprobs=LOGPROBS,
        temperature=pa.float32(),
        finish_reason=pa.string(),
        acc=(pa.float32(), None),
        reward=(pa.float32(), None),
        advantage=pa.float64(),
        policy=pa.string(),
        age=pa.int32(),
    ),
    "metrics": pa.schema(
        [pa.field(name, pa.int64(), nullable=False) for name in ("mini_batch", "optimizer_step")]
        + [pa.field("status", pa.string(), nullable=False)]
        + [pa.field(n, pa.int64(), nullable=False) for n in ("sequences", "tokens", "length_max")]
        + [pa.field(name, pa.float64(), nullable=False) for name in MEASURED]
        + [pa.field("kl_reference", pa.float64())]
    ),
    # beside the metrics, for no digest may depend on the hour
    "timings": pa.schema(
        [pa.field("mini_batch", pa.int64(), nullable=False)]
        + [pa.field(name, pa.float64(), nullable=False) for name in _SPEEDS]
        + [pa.field("mfu", pa.float64())]
    ),
    "tokens": _schema(
        "response_id",
        optimizer_step=pa.int64(),
        old_logprobs=LOGPROBS,
        new_logprobs=LOGPROBS,
        entropies=LOGPROBS,
        ratios=LOGPROBS,
        clipped_low=FLAGS,
        clipped_high=FLAGS,
        clipped_dual=FLAGS,
        weights=LOGPROBS,
    ),
    "samples": _schema("response_id", set=pa.string(), **_GENERATED, **_JUDGED),
    "evaluations": _schema(
        "set",
        prompt_id=pa.string(),
        task=pa.string(),
        difficulty=(pa.string(), None),
        answer=pa.string(),
        meta=(pa.string(), None),
        n=pa.int32(),
        n_scored=pa.int32(),
        n_right=pa.int32(),
        acc_mean=(pa.float64(), None),
        length_mean=pa.float64(),
        truncated_mean=pa.float64(),
    ),
    "results": _schema(
        "set",
        task=(pa.string(), None),
        difficulty=(pa.string(), None),
        metric=pa.string(),
        value=pa.float64(),
        low=(pa.float64(), None),
        high=(pa.float64(), None),
        n_prompts=pa.int32(),
        n_samples=pa.int64(),
        signature=(pa.string(), None),
    ),
    "ladder": _schema(
        "method",
        pattern=pa.string(),
        ratio=pa.float64(),
        reached=pa.float64(),
        metric=pa.string(),
        value=pa.float64(),
        loss=pa.float64(),
        low=(pa.float64(), None),
        high=(pa.float64(), None),
        within=pa.bool_(),
        chosen=pa.bool_(),
    ),
    "layers": _schema("layer", ratio=pa.float64(), weights=pa.int64(), zeros=pa.int64()),
    "ladder_samples": _schema("response_id", ratio=pa.float64(), **_GENERATED, **_JUDGED),
    "unusable": _schema(
        "file",
        row=pa.int64(),
        prompt_id=(pa.string(), None),
        column=(pa.string(), None),
        reason=pa.string(),
    ),
    "probe": _schema("probe_id", prompt_ids=TOKENS, response_ids=TOKENS, logprobs=LOGPROBS),
}
SCHEMAS["carried"] = SCHEMAS["batch"]  # whole groups that wait for the next step
SCHEMAS = {table: columns.described(table, schema) for table, schema in SCHEMAS.items()}


def polars_schema(table: str) -> pl.Schema:
    """The table's schema as Polars types."""
    return pl.Schema(SCHEMAS[table])


def _with(more: Sequence[str], table: str) -> pa.Schema:
    """The table's schema, and `more` float32 columns."""
    meaning = {"description": columns.PART}
    return pa.schema(
        [*SCHEMAS[table], *(pa.field(name, pa.float32(), metadata=meaning) for name in more)]
    )


def write(
    out: Path, table: str, frame: pl.DataFrame, *, shard: int = 0, more: Sequence[str] = ()
) -> None:
    """Write `frame` as `out/<table>/part-<shard>.parquet` with exactly the table's schema.

    `more`: nullable float32 columns after those of the schema, which no stage reads unasked.

    Also for zero rows, so that no reader ever has to guess a type. Null in a column that must be
    full is an `InputError`: it would be a bug of the stage that made the rows.
    """
    write_all(out, table, [frame], shard=shard, more=more)


def write_all(
    out: Path,
    table: str,
    frames: Iterable[pl.DataFrame],
    *,
    shard: int = 0,
    more: Sequence[str] = (),
) -> int:
    """`write` pieces of a table one after another; returns the number of rows.

    One row group of them is in memory at a time, and the file does not depend on their sizes.
    """
    schema = _with(more, table)
    (out / table).mkdir(exist_ok=True)
    path = out / table / f"part-{shard:05d}.parquet"
    rows = 0
    with (
        _whole_or_none(path),
        pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=1,
            # of values that are all different it would cost time and space
            use_dictionary=[n for n in schema.names[1:] if schema.field(n).type != LOGPROBS],
            use_byte_stream_split=[n for n in schema.names if schema.field(n).type == LOGPROBS],
            store_schema=True,
        ) as writer,
    ):
        for piece in _row_groups(frames, _rows_per_group(schema)):
            writer.write_table(_arrow(piece, table, schema))
            rows += len(piece)
    return rows


@contextmanager
def _whole_or_none(path: Path) -> Iterator[None]:
    """Half a file is none."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _rows_per_group(schema: pa.Schema) -> int:
    has_lists = any(pa.types.is_list(field.type) for field in schema)
    return ROWS_PER_GROUP if has_lists or "text" in schema.names else ROWS_OF_SCALARS


def _row_groups(frames: Iterable[pl.DataFrame], size: int) -> Iterator[pl.DataFrame]:
    """The same rows in pieces of `size`; the last may be shorter."""
    held: list[pl.DataFrame] = []
    for frame in frames:
        held.append(frame)
        if sum(map(len, held)) >= size:
            rows = pl.concat(held)
            whole = len(rows) // size * size
            yield from rows[:whole].iter_slices(size)
            held = [rows[whole:]]
    if any(map(len, held)):
        yield pl.concat(held)


def _arrow(frame: pl.DataFrame, table: str, schema: pa.Schema) -> pa.Table:
    for field in schema:  # before the cast, which would refuse it without naming the table
        if not field.nullable and frame[field.name].null_count():
            raise InputError(f"{table}.{field.name}: null where a value is required")
    return frame.select(schema.names).to_arrow().cast(schema)


def scan(source: Path | Sequence[Path], table: str, *, more: Sequence[str] = ()) -> pl.LazyFrame:
    """A lazy frame of `table` from an artifact, a Parquet file, a directory of them, or several.

    `more`: float32 columns beside those of the schema.

    Every file is checked against the schema before a row is read and cast column by column
    (int64 to int32, float64 to float32, large to small lists): what does not fit raises, no value
    is ever lost. Raises `InputError` with file, column, expected and found type.
    """
    return pl.concat([_scan_file(path, table, more) for path in _all_files(source, table)])


def count(source: Path | Sequence[Path], table: str) -> int:
    """The number of rows, from the files' footers."""
    paths = _all_files(source, table)
    return sum(_footer(path).num_rows for path in paths)


def read(source: Path | Sequence[Path], table: str) -> pl.DataFrame:
    """`scan`, collected."""
    return collect(scan(source, table), f"{table} in {source}")


def collect(query: pl.LazyFrame, what: str) -> pl.DataFrame:
    """The result of a query over scans of `what`; a value that does not fit is an `InputError`."""
    try:
        return query.collect()
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{what}: {error}") from error


def read_prompts(source: Path) -> pl.DataFrame:
    """The prompts table at `source`, whole and usable, or an `InputError` that names the row."""
    return check_prompts(read(source, "prompts"), source)


def check_prompts(frame: pl.DataFrame, source: Path) -> pl.DataFrame:
    """`frame` itself: at least one row, no null where a value is needed, ids that are unique."""
    if frame.is_empty():
        raise InputError(f"{source}: the prompts table has no rows")
    for column in ("prompt_id", "prompt", "answer", "task"):
        if nulls := frame[column].is_null().arg_true().to_list():
            raise InputError(f"{source}: column '{column}' is null in row {nulls[0]}")
    part = pl.element().struct
    incomplete = pl.col("prompt").list.eval(
        part.field("role").is_null() | part.field("content").is_null()
    )
    if bad := frame.select(incomplete.list.any()).to_series().arg_true().to_list():
        raise InputError(f"{source}: a message of row {bad[0]} lacks its role or content")
    if twice := frame.filter(pl.col("prompt_id").is_duplicated())["prompt_id"].to_list():
        raise InputError(
            f"{source}: prompt_id '{twice[0]}' occurs more than once; ids must be unique"
        )
    return frame


def mean(column: pl.Series) -> float:
    """The mean of the values that are there; NaN where there is none."""
    value = column.cast(pl.Float64).mean()
    return value if isinstance(value, float) else float("nan")


def files(source: Path, table: str) -> list[Path]:
    """The Parquet files that hold `table` at `source`, in name order."""
    if source.is_file():
        return [source]
    if not source.exists():
        raise InputError(f"{source} does not exist (looked for the table '{table}')")
    inside = source / table if (source / table).is_dir() else source
    found = sorted(inside.glob("*.parquet"))
    if not found:
        raise InputError(
            f"{source} holds no table '{table}': expected {table}/part-00000.parquet or *.parquet"
        )
    return found


def _all_files(source: Path | Sequence[Path], table: str) -> list[Path]:
    sources = [source] if isinstance(source, Path) else list(source)
    return [path for one in sources for path in files(one, table)]


def _scan_file(path: Path, table: str, more: Sequence[str]) -> pl.LazyFrame:
    found = _footer(path).schema.to_arrow_schema()
    wanted = _with(more, table)
    _check_columns(path, table, wanted, found)
    types = {**polars_schema(table), **dict.fromkeys(more, pl.Float32())}
    return pl.scan_parquet(path).select(
        pl.col(name).cast(dtype, strict=True) for name, dtype in types.items()
    )


def _footer(path: Path) -> pq.FileMetaData:
    status = path.stat()
    return _footer_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)  # of many row groups it is long
def _footer_of(path: Path, size: int, mtime_ns: int) -> pq.FileMetaData:
    try:
        return pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{path} is not a readable Parquet file ({error}); write it again or restore it"
        ) from error


def _check_columns(path: Path, table: str, wanted: pa.Schema, found: pa.Schema) -> None:
    problems = []
    for field in wanted:
        if field.name not in found.names:
            problems.append(f"column '{field.name}' ({field.type}) is missing")
        elif not _castable(found.field(field.name).type, field.type):
            have = found.field(field.name).type
            problems.append(f"column '{field.name}': expected {field.type}, found {have}")
    if problems:
        raise InputError(f"{path} is not a '{table}' table: " + "; ".join(problems))


def _castable(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether every value of `have` that fits `want` keeps its meaning when it is cast."""
    if pa.types.is_null(have) or have == want:
        return True
    if pa.types.is_list(want):
        listed = pa.types.is_list(have) or pa.types.is_large_list(have)
        return listed and _castable(have.value_type, want.value_type)
    if pa.types.is_struct(want):
        return pa.types.is_struct(have) and all(
            have.get_field_index(f.name) >= 0 and _castable(have.field(f.name).type, f.type)
            for f in want
        )
    if pa.types.is_string(want):
        return pa.types.is_large_string(have) or pa.types.is_string_view(have)
    if pa.types.is_floating(want):
        return pa.types.is_floating(have) or pa.types.is_integer(have)
    return pa.types.is_integer(want) and pa.types.is_integer(have)
