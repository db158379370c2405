"""Runs as views of DuckDB: typed, pruned by step, and closed to all that lies outside."""

import shutil
import time
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from pipeline import artifacts, sql
from pipeline.read import VIEWS, run
from stages import columns, tables
from stages.errors import InputError


def asked(directory: Path, query: str, *others: Path) -> list[tuple[object, ...]]:
    runs = [run(path) for path in (directory, *others)]
    connection = sql.connect(runs, root=directory.parents[1], query=query)
    return sql.ask(connection, query).fetchall()


@pytest.fixture
def small(data: Path) -> Path:
    return data / "runs/small"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that has made nothing yet."""
    directory = tmp_path / "runs" / "begun"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("run: begun\n")
    return directory


@pytest.mark.parametrize("view", [*VIEWS, "responses", "curves"])
def test_a_view_holds_what_the_frame_of_its_name_holds(finished: Path, view: str) -> None:
    directory = finished / "runs/small"
    connection = sql.connect([run(directory)], root=finished, query=view)
    found = connection.sql(f"select * exclude (run) from {view}").pl()
    frame = getattr(run(directory), view).collect()
    assert set(found.columns) == set(frame.columns)
    assert_frame_equal(found, frame.select(found.columns), check_row_order=False)


def test_the_catalogue_names_every_column_of_every_view_and_its_type(finished: Path) -> None:
    connection = sql.connect([run(finished / "runs/small")], root=finished)
    listed = sql.catalogue()
    assert all(row["meaning"] for row in listed)
    for view in (*VIEWS, "responses", "artifacts"):
        described = connection.execute(f"describe {view}").fetchall()
        ours = [(row["column"], row["type"]) for row in listed if row["view"] == view]
        theirs = [(name, kind.replace("TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ"))
                  for name, kind, *_ in described]  # fmt: skip
        assert sorted(each for each in ours if each[0] != "part_…") == sorted(theirs)


def test_views_of_a_run_that_has_only_begun_are_empty_and_typed(begun: Path) -> None:
    for view in (*VIEWS, "responses", "curves", "artifacts"):
        assert asked(begun, f"select count(*) from {view}") == [(0,)]
    assert asked(begun, "select avg(reward), max(step) from responses") == [(None, None)]
    assert asked(begun, "select acc from curves") == []


def test_several_runs_are_told_apart_by_their_names(finished: Path, begun: Path) -> None:
    query = "select run, count(*) from rollouts group by run order by run"
    assert asked(finished / "runs/small", query, begun) == [("small", 36)]
    with pytest.raises(InputError, match="two runs are named 'small'"):
        asked(finished / "runs/small", query, finished / "runs/small")


def test_a_reward_part_of_one_run_is_null_in_another(finished: Path, small: Path) -> None:
    other = small.rename(small.with_name("other"))
    score = artifacts.load(other / "step_0001/round_0/score")
    frame = tables.read(score.path, "scores").with_columns(part_form=pl.lit(0.5, pl.Float32))
    parts = {"form": {"task": "format", "weight": 1.0}}
    with artifacts.draft(score.path) as building:
        tables.write(building, "scores", frame, more=["part_form"])
        artifacts.publish(
            building,
            score.path,
            recipe=artifacts.Recipe("score", score.recipe.config | {"parts": parts}, {}),
            metrics=score.metrics,
            started=time.time(),
            replace_existing=True,
            sources=score.record["sources"],
        )
    query = "select run, step, avg(part_form) from responses group by all order by all"
    assert asked(finished / "runs/small", query, other) == [
        *(("other", 1, 0.5), ("other", 2, None), ("small", 1, None), ("small", 2, None)),
    ]


def test_artifacts_have_their_metrics_and_rows_by_name(finished: Path) -> None:
    directory = finished / "runs/small"
    query = "select metrics['acc'], rows['scores'], state from artifacts where stage = 'score'"
    acc = artifacts.load(directory / "step_0001/round_0/score").metrics["acc"]
    assert asked(directory, query)[0] == (acc, 24, "whole")


def test_the_fate_of_a_group_is_its_last_one(finished: Path) -> None:
    frame = run(finished / "runs/small").responses.collect()
    columns = ["response_id", "decision", "reason", "decided_in"]
    ours = asked(finished / "runs/small", f"select {', '.join(columns)} from responses")
    assert sorted(ours) == sorted(frame.select(columns).rows())


def scanned(directory: Path, query: str) -> list[str]:
    """The files that DuckDB opened for a query."""
    plan = asked(directory, f"explain analyze {query}")[0][1]
    cells = (cell.strip() for line in str(plan).splitlines() for cell in line.split("│"))
    return [cell for cell in cells if cell.startswith("/") and cell.endswith(".parquet")]


def test_a_step_and_a_verdict_are_looked_for_in_the_files_of_that_step_only(small: Path) -> None:
    query = "select count(*) from scores where step = 2 and verdict = 'wrong'"
    wrong = tables.read(small / "step_0002/round_0/score", "scores").filter(verdict="wrong")
    assert asked(small, query) == [(len(wrong),)]
    read = scanned(small, query)
    assert read and all("step_0002" in name for name in read)
    joined = scanned(
        small, "select avg(length) from responses where step = 2 and verdict = 'wrong'"
    )
    assert [name for name in joined if "rollouts" in name or "scores" in name]
    assert not [name for name in joined if "step_0001" in name and "groups" not in name]


def test_a_file_that_no_record_names_is_in_no_view(small: Path) -> None:
    shard = small / "step_0001/round_0/rollout/rollouts/part-00000.parquet"
    shutil.copy(shard, shard.with_name("part-00007.parquet"))
    assert asked(small, "select count(*) from rollouts") == [(36,)]


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('{outside}/secret.csv')",
        "select * from read_text('{outside}/secret.csv')",
        "select * from '{outside}/secret.csv'",
        "select * from read_text('{inside}/../../beside/secret.csv')",
        "select * from glob('{outside}/*')",
        "select * from read_text('/etc/hostname')",
    ],
)
def test_files_outside_the_data_root_are_closed(small: Path, query: str) -> None:
    data = small.parents[1]
    outside = data.with_name(data.name + "-beside")  # the root's name is the head of its own
    for directory in (outside, data.parent / "beside"):
        directory.mkdir()
        (directory / "secret.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="disabled by configuration"):
        asked(small, query.format(outside=outside, inside=data / "runs"))


@pytest.mark.parametrize("way", ["link.csv", "there/secret.csv", "*/secret.csv"])
def test_a_link_below_the_data_root_leads_nowhere_else(small: Path, way: str) -> None:
    data = small.parents[1]
    (data.parent / "beside").mkdir()
    (data.parent / "beside/secret.csv").write_text("a,b\n1,2\n")
    (data / "link.csv").symlink_to(data.parent / "beside/secret.csv")
    (data / "there").symlink_to(data.parent / "beside")
    with pytest.raises(InputError, match="disabled by configuration"):
        asked(small, f"select * from read_csv('{data}/{way}')")


def test_a_data_root_that_is_a_link_is_open(small: Path) -> None:
    link = small.parents[1].with_name("link")
    link.symlink_to(small.parents[1])
    file = link / "runs/small/step_0001/round_0/score/scores/part-00000.parquet"
    assert asked(link / "runs/small", f"select count(*) from '{file}'") == [(24,)]


def test_files_below_the_data_root_are_open(small: Path) -> None:
    file = small / "step_0001/round_0/score/scores/part-00000.parquet"
    assert asked(small, f"select count(*) from '{file}'") == [(24,)]


@pytest.mark.parametrize(
    "query",
    [
        "copy (select 1) to '{data}/x.csv'",
        "explain analyze copy (select 1) to '{data}/x.csv'",
        "export database '{data}/x'",
        "attach '{data}/x.db'",
        "create table '{data}/x.db' as select 1",
        "set enable_external_access = true",
        "install httpfs",
        "pragma version",
        "with a as (copy (select 1) to '{data}/x.csv') select 1",
        "explain analyze with a as (copy (select 1) to '{data}/x.csv') select 1",
        "explain (analyze, format json) copy (select 1) to '{data}/x.csv'",
        "-- so\nexplain analyze copy (select 1) to '{data}/x.csv'",
        "copy (pivot scores on verdict using count(*)) to '{data}/x.csv'",
        "with a as (copy (select 1) to '{data}/x.csv') "
        "from (pivot scores on verdict using count(*))",
        "with ä as (COPY (select 1) to '{data}/x.csv') from (pivot scores on verdict)",
        "from query('with a as (copy (select 1) to ''{data}/x.csv'') select 1')",
        "from enable_logging(storage = 'file', storage_path = '{data}/log')",
        "with a as (delete from artifacts returning *) select 1",
    ],
)
def test_nothing_but_a_query_is_taken(small: Path, query: str) -> None:
    before = sorted(small.parents[1].rglob("*"))
    with pytest.raises(InputError):
        asked(small, query.format(data=small.parents[1]))
    assert sorted(small.parents[1].rglob("*")) == before


def test_even_the_connection_itself_is_locked(finished: Path) -> None:
    connection = sql.connect([run(finished / "runs/small")], root=finished)
    for statement in ("set enable_external_access = true", "set allowed_directories = ['/']"):
        with pytest.raises(duckdb.Error):
            connection.execute(statement)


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("select verdit from responses", 'Candidate bindings: "verdict"'),
        ("select * from rolouts", 'Did you mean "rollouts"'),
        ("selec 1", "syntax error"),
        ("select cast(text as int) from rollouts", "Could not convert"),
        ("select 1,\n no", "LINE 2:  no"),
        ("from sqlite_scan('x.db', 't')", "not in the catalog"),
        ("select 1; select 2", "expected one query, found 2"),
        (" ", "expected one query, found 0"),
    ],
)
def test_a_mistake_is_explained_as_duckdb_does(finished: Path, query: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        asked(finished / "runs/small", query)


def test_queries_of_every_kind_are_answered(finished: Path) -> None:
    directory = finished / "runs/small"
    assert asked(directory, "with a as (select 1 as b) from a") == [(1,)]
    assert asked(directory, "pivot (select verdict from scores) on verdict using count(*)")
    assert asked(directory, "from (pivot (select verdict from scores) on verdict using count(*))")
    pivot = "from (pivot (from artifacts where stage = 'update') on state using count(*))"
    assert asked(directory, pivot)
    assert asked(directory, "describe scores")
    assert asked(directory, "explain select 1")
    assert asked(directory, "-- a plan\nexplain (format json) select 1")
    assert asked(directory, "select count(*) from query_table('rol' || 'louts')") == [(36,)]
    assert len(asked(directory, "show tables")) == len({row["view"] for row in sql.catalogue()})


def test_a_result_is_written_as_parquet_whole_or_not_at_all(finished: Path, tmp_path: Path) -> None:
    connection = sql.connect([run(finished / "runs/small")], root=finished)
    query = "select run, run, sum(length) as tokens, list(sample) from rollouts group by run"
    assert sql.write_parquet(connection, query, tmp_path / "out.parquet") == 1
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["run", "run_1", "tokens", 'list("sample")']
    with pytest.raises(InputError, match="Candidate"):
        sql.write_parquet(connection, "select nothing from rollouts", tmp_path / "no.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_a_data_root_with_letters_of_a_pattern_is_read(finished: Path, tmp_path: Path) -> None:
    odd = tmp_path / "it's [1] *"
    shutil.copytree(finished, odd)
    assert asked(odd / "runs/small", "select count(*) from rollouts") == [(36,)]


def test_every_view_has_a_meaning_for_what_a_row_is() -> None:
    assert {row["view"] for row in sql.catalogue()} == {*VIEWS, "responses", "curves", "artifacts"}
    assert set(columns.TABLES) == set(tables.SCHEMAS)
