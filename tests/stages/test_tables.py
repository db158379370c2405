"""One schema per table, on every write and every read."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import VECTORS, rows, save
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from stages import columns, tables
from stages.errors import InputError


def example(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return [example(kind.value_type)] * 3
    if pa.types.is_struct(kind):
        return {field.name: example(field.type) for field in kind}
    return "x" if pa.types.is_string(kind) else 1


def full_and_sparse_row(schema: pa.Schema) -> list[dict[str, Any]]:
    full = {field.name: example(field.type) for field in schema}
    return [full, full | {field.name: None for field in schema if field.nullable}]


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables that the foreign shards under vectors/ hold."""
    text, optional = pa.string(), (pa.string(), None)
    schemas = {
        "pq_listnull": tables._schema("prompt_id", token_ids=tables.TOKENS),
        "pq_int_drift": tables._schema("prompt_id", n=pa.int32(), err=optional),
        "pq_stray": tables._schema("prompt_id", r=pa.float64()),
        "narrow": tables._schema("key", n=pa.int32()),
        "wide": tables._schema("key", n=pa.int64()),
        "words": tables._schema("key", n=text),
    }
    for name, schema in schemas.items():
        monkeypatch.setitem(tables.SCHEMAS, name, schema)


@pytest.mark.parametrize("table", tables.SCHEMAS)
@pytest.mark.parametrize("count", [2, 1, 0])
def test_every_table_comes_back_as_it_was_written(table: str, count: int, tmp_path: Path) -> None:
    schema = tables.SCHEMAS[table]
    frame = pl.DataFrame(
        full_and_sparse_row(schema)[:count], schema=tables.polars_schema(table), orient="row"
    )
    save(tmp_path, table, frame)
    assert_frame_equal(tables.read(tmp_path, table), frame)
    on_disk = pq.read_schema(tmp_path / table / "part-00000.parquet")
    assert on_disk.equals(schema)  # the pyarrow types themselves: list<int32>, not large_list


def test_shards_with_empty_lists_read_together_with_full_ones(shards: None, tmp_path: Path) -> None:
    frame = pl.DataFrame({"prompt_id": ["a", "b", "c"], "token_ids": [[], [], [1, 2, 3]]})
    tables.write(tmp_path, "pq_listnull", frame[:2], shard=0)
    tables.write(tmp_path, "pq_listnull", frame[2:], shard=1)
    assert tables.read(tmp_path, "pq_listnull")["token_ids"].to_list() == [[], [], [1, 2, 3]]


def test_shards_without_errors_read_together_with_one_that_has_some(
    shards: None, tmp_path: Path
) -> None:
    frame = pl.DataFrame({"prompt_id": ["a", "b"], "n": [1, 2], "err": [None, "timeout"]})
    tables.write(tmp_path, "pq_int_drift", frame[:1], shard=0)
    tables.write(tmp_path, "pq_int_drift", frame[1:], shard=1)
    assert tables.read(tmp_path, "pq_int_drift").rows() == [("a", 1, None), ("b", 2, "timeout")]


def test_foreign_shards_of_drifting_types_are_cast_without_losing_a_value(shards: None) -> None:
    lists = tables.read(VECTORS / "pq_listnull", "pq_listnull")
    assert lists.rows() == [("a", []), ("b", []), ("c", [1, 2, 3])]
    assert lists.schema["token_ids"] == pl.List(pl.Int32)
    drift = tables.read(VECTORS / "pq_int_drift", "pq_int_drift")
    assert drift.rows() == [("a", 1, None), ("b", 2, "timeout")]


def test_files_that_are_not_parquet_are_not_read(shards: None) -> None:
    assert tables.read(VECTORS / "pq_stray", "pq_stray").rows() == [("a", 1.0)]


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, "prompts", rows("prompts", {"prompt_id": "p"}))
    file = tmp_path / "prompts" / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"part-00000\.parquet is not a readable Parquet file"):
        tables.scan(tmp_path, "prompts")


def test_a_wrong_type_names_file_column_expected_and_found(shards: None, tmp_path: Path) -> None:
    tables.write(tmp_path, "words", pl.DataFrame({"key": ["a"], "n": ["one"]}))
    file = tmp_path / "words" / "part-00000.parquet"
    with pytest.raises(InputError) as refused:
        tables.scan(file, "narrow")
    for part in (str(file), "'n'", "expected int32", "found string"):
        assert part in str(refused.value)


def test_numbers_are_not_taken_for_text_nor_decimals_for_integers(
    shards: None, tmp_path: Path
) -> None:
    pl.DataFrame({"key": ["a"], "n": [1.5]}).write_parquet(tmp_path / "decimals.parquet")
    for table in ("narrow", "words"):
        with pytest.raises(InputError, match="found double"):
            tables.scan(tmp_path / "decimals.parquet", table)


def test_every_missing_column_is_named(tmp_path: Path) -> None:
    pl.DataFrame({"prompt_id": ["p"], "answer": ["1"]}).write_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"'prompt' .* missing.*'task' .* missing"):
        tables.scan(tmp_path, "prompts")


def test_an_integer_beyond_int32_raises_rather_than_wraps(shards: None, tmp_path: Path) -> None:
    tables.write(tmp_path, "wide", pl.DataFrame({"key": ["a", "b"], "n": [1, 2**31]}))
    with pytest.raises(InputError, match="narrow"):
        tables.read(tmp_path / "wide", "narrow")
    tables.write(tmp_path, "wide", pl.DataFrame({"key": ["a", "b"], "n": [1, 2**31 - 1]}))
    assert tables.read(tmp_path / "wide", "narrow")["n"].to_list() == [1, 2**31 - 1]


def test_a_token_id_beyond_int32_inside_a_list_raises_too(shards: None, tmp_path: Path) -> None:
    frame = pl.DataFrame({"prompt_id": ["a"], "token_ids": [[1, 2**31]]})
    frame.write_parquet(tmp_path / "ids.parquet")
    with pytest.raises(InputError, match="pq_listnull"):
        tables.read(tmp_path, "pq_listnull")


def test_extra_columns_and_another_order_of_columns_are_no_matter(tmp_path: Path) -> None:
    frame = rows("prompts", {"prompt_id": "p"})
    turned = frame.with_columns(extra=1).select(reversed([*frame.columns, "extra"]))
    turned.write_parquet(tmp_path / "p.parquet")
    assert_frame_equal(tables.read(tmp_path, "prompts"), frame)


def test_several_sources_read_as_one_table_in_the_order_given(tmp_path: Path) -> None:
    paths = [
        save(tmp_path / name, "prompts", rows("prompts", {"prompt_id": name})) for name in "ba"
    ]
    assert tables.read(paths, "prompts")["prompt_id"].to_list() == ["b", "a"]


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent does not exist"):
        tables.scan(tmp_path / "absent", "prompts")
    with pytest.raises(InputError, match="holds no table 'prompts'"):
        tables.scan(tmp_path, "prompts")


def test_row_groups_are_small_enough_to_look_one_response_up(tmp_path: Path) -> None:
    ids = [{"response_id": f"r{i:04d}"} for i in range(2500)]
    save(tmp_path, "rollouts", rows("rollouts", *ids))
    file = pq.ParquetFile(tmp_path / "rollouts" / "part-00000.parquet")
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sum(sizes) == 2500
    assert max(sizes) <= 1024


@settings(max_examples=15)
@given(count=st.sampled_from([0, 1, 1024, 2500]), cuts=st.lists(st.integers(0, 2500), max_size=6))
def test_pieces_of_any_sizes_make_the_same_file_as_one_frame(count: int, cuts: list[int]) -> None:
    frame = rows("rollouts", *({"response_id": f"r{i:04d}", "seed": i} for i in range(count)))
    ends = sorted([0, *(min(cut, count) for cut in cuts), count])
    with TemporaryDirectory() as one, TemporaryDirectory() as many:
        tables.write(Path(one), "rollouts", frame)
        pieces = (frame[start:stop] for start, stop in pairwise(ends))
        assert tables.write_all(Path(many), "rollouts", pieces) == count
        whole, pieced = (Path(path) / "rollouts" / "part-00000.parquet" for path in (one, many))
        assert pieced.read_bytes() == whole.read_bytes()
        assert_frame_equal(tables.read(Path(many), "rollouts"), frame)


def test_pieces_that_fail_half_way_leave_no_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[pl.DataFrame]:
        yield rows("rollouts", *({"response_id": f"r{i:04d}"} for i in range(1025)))
        assert list(tmp_path.rglob("*.parquet"))  # it had begun
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        tables.write_all(tmp_path, "rollouts", pieces())
    assert not list(tmp_path.rglob("*.parquet"))


def test_null_in_a_required_column_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rollouts\.text: null"):
        tables.write(tmp_path, "rollouts", rows("rollouts", {"response_id": "r", "text": None}))
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_mean_leaves_out_what_is_not_there() -> None:
    assert tables.mean(pl.Series([1.0, None, 0.0])) == 0.5
    assert math.isnan(tables.mean(pl.Series([None], dtype=pl.Float32)))


def full_table(table: str, tmp_path: Path) -> Path:
    """A file of the table, as a stage writes it: a full row, and one with every null."""
    frame = pl.DataFrame(
        full_and_sparse_row(tables.SCHEMAS[table]),
        schema=tables.polars_schema(table),
        orient="row",
    )
    return save(tmp_path, table, frame) / table / "part-00000.parquet"


def leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if pa.types.is_list(kind):
        yield from leaves(kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from leaves(field.type)
    else:
        yield kind


@pytest.mark.parametrize("table", tables.SCHEMAS)
def test_every_column_says_what_it_means_in_the_file(table: str, tmp_path: Path) -> None:
    for field in pq.read_schema(full_table(table, tmp_path)):
        meaning = field.metadata[b"description"].decode()
        assert meaning == columns.meaning(table, field.name) and len(meaning) > 2


@pytest.mark.parametrize("table", tables.SCHEMAS)
def test_types_are_those_that_spark_reads(table: str, tmp_path: Path) -> None:
    plain = {pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()}
    file = full_table(table, tmp_path)
    assert {leaf for field in pq.read_schema(file) for leaf in leaves(field.type)} <= plain
    # as Parquet itself says, without the Arrow schema beside it: signed, and three-level lists
    for column in (
        pq.ParquetFile(file).schema.column(i) for i in range(len(tables.SCHEMAS[table]))
    ):
        assert column.physical_type in {
            *("BYTE_ARRAY", "INT32", "INT64", "FLOAT", "DOUBLE", "BOOLEAN"),
        }
        assert column.logical_type.type in {"NONE", "STRING"}
        assert column.max_repetition_level == 0 or ".list.element" in column.path


@pytest.mark.parametrize("table", tables.SCHEMAS)
def test_pandas_duckdb_and_polars_read_what_was_written(table: str, tmp_path: Path) -> None:
    file = full_table(table, tmp_path)
    frame = pl.read_parquet(file)
    assert_frame_equal(frame, tables.read(tmp_path, table))
    assert_frame_equal(duckdb.sql(f"from '{file}'").pl(), frame)
    read = pd.read_parquet(file)
    assert list(read.columns) == frame.columns and len(read) == 2
    key = frame.columns[0]
    assert read[key].tolist() == frame[key].to_list()


def test_hugging_face_datasets_reads_what_was_written(tmp_path: Path) -> None:
    file = full_table("rollouts", tmp_path)
    read = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))
    assert read.to_list() == pl.read_parquet(file).to_dicts()


def test_a_file_without_descriptions_is_read_as_ever(tmp_path: Path) -> None:
    file = full_table("scores", tmp_path)
    bare = pq.read_table(file)
    schema = pa.schema([field.remove_metadata() for field in bare.schema])
    pq.write_table(bare.cast(schema), tmp_path / "bare.parquet")
    assert_frame_equal(
        tables.read(tmp_path / "bare.parquet", "scores"), tables.read(file, "scores")
    )
    both = tables.read([file, tmp_path / "bare.parquet"], "scores")
    assert len(both) == 4


def test_a_response_is_looked_up_in_one_row_group(tmp_path: Path) -> None:
    ids = [{"response_id": f"r{i:05d}", "seed": i} for i in range(5000)]
    file = save(tmp_path, "rollouts", rows("rollouts", *ids)) / "rollouts/part-00000.parquet"
    plan = duckdb.sql(
        f"explain analyze select seed, text from '{file}' where response_id = 'r03333'"
    ).fetchall()[0][1]
    assert "Row Groups Scanned: 1 / 5" in plan
    groups = pq.ParquetFile(file).metadata
    for i in range(groups.num_row_groups):
        statistics = groups.row_group(i).column(0).statistics
        assert statistics.has_min_max and statistics.null_count == 0


def test_every_scalar_column_has_statistics(tmp_path: Path) -> None:
    for table in ("scores", "groups", "selection", "metrics"):
        group = pq.ParquetFile(full_table(table, tmp_path)).metadata.row_group(0)
        for i in range(group.num_columns):
            assert group.column(i).statistics.has_min_max, (table, group.column(i).path_in_schema)


def test_row_groups_that_cannot_hold_a_value_are_skipped(tmp_path: Path) -> None:
    late = [
        {"response_id": f"r{i:05d}", "finish_reason": "length" if i > 2500 else "stop"}
        for i in range(3000)
    ]
    file = save(tmp_path, "rollouts", rows("rollouts", *late)) / "rollouts/part-00000.parquet"
    query = f"explain analyze select count(text) from '{file}' where finish_reason = 'length'"
    assert "Row Groups Scanned: 1 / 3" in duckdb.sql(query).fetchall()[0][1]


def test_the_readme_of_data_says_what_the_files_say() -> None:
    readme = (Path(__file__).parents[2] / "data/README.md").read_text(encoding="utf-8")
    assert columns.markdown(tables.SCHEMAS) in readme, (
        "its tables are the output of `python -c 'from stages import columns, tables; "
        "print(columns.markdown(tables.SCHEMAS))'`"
    )
