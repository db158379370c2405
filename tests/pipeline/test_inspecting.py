"""dapo sql, samples, explain, metrics, and compare on two runs: as a person or a script asks."""

import csv
import io
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl
import pytest
from command import said

from pipeline import artifacts, compare_runs, samples, story
from pipeline.cli import console
from pipeline.cli.inspecting import spark
from pipeline.read import run
from stages import tables
from stages.errors import InputError

Dapo = Callable[..., tuple[int, str]]


@pytest.fixture
def small(data: Path) -> Path:
    return data / "runs/small"


@pytest.fixture
def dapo(finished: Path) -> Dapo:
    """The command on the finished run: exit code, and what it printed."""
    return partial(said, data=finished)


def rewrite(table: Path, *columns: pl.Expr) -> None:
    """Other values in a table, as a run of its own would have recorded them."""
    tables.write(table.parent, table.name, pl.read_parquet(table).with_columns(columns))


def test_sql_prints_a_table_json_or_csv(dapo: Dapo) -> None:
    query = "select verdict, count(*) as n, avg(reward) from responses group by 1 order by 1"
    code, shown = dapo("sql", query)
    assert code == 0 and "truncated" in shown
    rows = json.loads(dapo("sql", query, "--json")[1])
    assert sum(row["n"] for row in rows) == 36
    lines = list(csv.reader(io.StringIO(dapo("sql", query, "--csv", "--run", "small")[1])))
    assert lines[0] == ["verdict", "n", "avg(reward)"]
    assert [line[0] for line in lines[1:]] == [row["verdict"] for row in rows]


def test_sql_writes_parquet_that_polars_reads(dapo: Dapo, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert dapo("sql", "select * from responses where step = 1", "--parquet", out)[0] == 0
    assert len(pl.read_parquet(out)) == 24
    code, shown = dapo("sql", "select 1", "--parquet", tmp_path / "nowhere" / "x.parquet")
    assert code == 2 and "is no directory" in shown
    code, shown = dapo("sql", "select 1", "--parquet", out, "--json")
    assert code == 2 and "one of --json" in shown


def test_sql_alone_lists_the_views_and_an_error_is_duckdbs_own(dapo: Dapo) -> None:
    code, shown = dapo("sql")
    assert code == 0 and "curves" in shown and "sampler_logprobs" in shown
    code, shown = dapo("sql", "select verdit from responses")
    assert code == 2 and 'Candidate bindings: "verdict"' in shown and "Traceback" not in shown


def test_a_number_that_is_none_is_null_in_json(dapo: Dapo) -> None:
    rows = json.loads(
        dapo("sql", "select 'nan'::double as a, [1, 'inf'::double] as b", "--json")[1]
    )
    assert rows == [{"a": None, "b": [1.0, None]}]


def test_sql_asks_the_newest_run_or_those_that_are_named(dapo: Dapo, data: Path) -> None:
    shutil.copytree(data / "runs/small", data / "runs/other")
    saved = data / "runs/other/config.yaml"
    os.utime(saved, (saved.stat().st_mtime + 60,) * 2)
    query = "select distinct run from rollouts order by 1"
    assert json.loads(dapo("sql", query, "--json", data=data)[1]) == [{"run": "other"}]
    both = ("--run", "small", "--run", data / "runs/other")
    rows = json.loads(dapo("sql", query, "--json", *both, data=data)[1])
    assert [row["run"] for row in rows] == ["other", "small"]


def test_sql_without_any_run_says_how_to_begin(dapo: Dapo, tmp_path: Path) -> None:
    code, shown = dapo("sql", "select 1", data=tmp_path)
    assert code == 2 and "there are no runs yet" in shown


def test_samples_are_those_that_are_asked_for(dapo: Dapo, finished: Path) -> None:
    every = run(finished / "runs/small").responses.collect()

    def found(*arguments: str) -> set[str]:
        code, shown = dapo("samples", "small", "--json", "--limit", "99", *arguments)
        assert code == 0, shown
        return {row["response_id"] for row in json.loads(shown)}

    def those(predicate: pl.Expr) -> set[str]:
        return set(every.filter(predicate)["response_id"])

    assert found() == set(every["response_id"])
    step_2 = pl.col("step") == 2
    assert found("--step", "2") == those(step_2)
    assert found("--verdict", "truncated") == those(pl.col("verdict") == "truncated")
    assert found("--step", "2", "--length", ">=20") == those(step_2 & (pl.col("length") >= 20))
    assert found("--reward", "<-1") == those(pl.col("reward") < -1)
    assert found("--reward", "-1") == those(pl.col("reward") == -1)
    assert found("--text", "Answer: ?1") == those(pl.col("text").str.contains("Answer: ?1"))
    assert found("--decision", "kept") == those(pl.col("decision") == "kept")
    prompt = every["prompt_id"][0]
    assert found("--prompt", prompt) == those(pl.col("prompt_id") == prompt)
    group = every["group_id"][5]
    assert found("--group", group) == those(pl.col("group_id") == group)
    assert found("--group", group, "--verdict", "nothing") == set()


def test_samples_show_prompt_gold_text_and_how_many_there_are(dapo: Dapo, finished: Path) -> None:
    code, shown = dapo("samples", "small", "--step", "1", "--limit", "2")
    first = run(finished / "runs/small").responses.filter(pl.col("step") == 1).head(1).collect()
    assert code == 0 and "2 of 24 responses; --limit shows more" in shown
    assert first["text"][0].splitlines()[0] in shown and f"gold: {first['answer'][0]}" in shown
    assert first["response_id"][0] in shown
    _, nothing = dapo("samples", "small", "--verdict", "wrng")
    assert "0 of 0 responses" in nothing and "verdict: truncated" in nothing


@pytest.mark.parametrize(
    ("option", "value"),
    [("--reward", "high"), ("--length", "> "), ("--text", "("), ("--group", "s0009r0g0000")],
)
def test_a_filter_that_cannot_be_read_is_refused(dapo: Dapo, option: str, value: str) -> None:
    code, shown = dapo("samples", "small", option, value)
    assert code == 2 and value.strip() in shown and "Traceback" not in shown


def test_a_group_stands_side_by_side(
    dapo: Dapo, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = run(finished / "runs/small").groups.filter(decision="kept").collect()["group_id"][0]
    monkeypatch.setattr(console.out, "width", 160)
    code, shown = dapo("samples", "small", "--group", group)
    assert code == 0 and f"{group}  kept" in shown
    heads = [line for line in shown.splitlines() if line.count("╭") == 4]
    assert len(heads) == 1 and "advantage" in shown
    monkeypatch.setattr(console.out, "width", 40)
    narrow = dapo("samples", "small", "--group", group)[1]
    assert not [line for line in narrow.splitlines() if line.count("╭") > 1]


EVIL = "\x1b[2J\x1b]0;title\x07 [bold red]red[/] [/] \u202eright to left\r gone\tend"


@pytest.mark.parametrize("arguments", [("samples", "small"), ("samples", "small", "--group")])
def test_what_a_model_wrote_steers_neither_terminal_nor_markup(
    dapo: Dapo, small: Path, arguments: tuple[str, ...]
) -> None:
    rewrite(small / "step_0001/round_0/rollout/rollouts", pl.lit(EVIL).alias("text"))
    first = run(small).rollouts.head(1).collect()
    group = [first["group_id"][0]] if "--group" in arguments else []
    for command in ((*arguments, *group), ("explain", first["response_id"][0])):
        code, shown = dapo(*command, data=small.parents[1])
        assert code == 0 and "[bold red]red[/]" in " ".join(shown.replace("│", " ").split())
        assert not set(shown) & set("\x1b\x07\u202e\r\t")


def test_a_response_that_nobody_judged_is_shown_all_the_same(dapo: Dapo, small: Path) -> None:
    shutil.rmtree(small / "step_0002")
    shutil.rmtree(small / "step_0001/update")
    for stage in ("score", "filter"):
        shutil.rmtree(small / "step_0001/round_0" / stage)
    code, shown = dapo("samples", "small", data=small.parents[1])
    assert code == 0 and "not judged yet" in shown


def test_metrics_are_numbers_in_a_pipe_and_json_for_programs(dapo: Dapo, finished: Path) -> None:
    code, shown = dapo("metrics", "small", "--columns", "acc,lr")
    assert code == 0 and len([line for line in shown.splitlines() if "small" in line]) == 3
    rows = json.loads(dapo("metrics", "small", "--columns", "acc,kept", "--json")[1])
    curves = run(finished / "runs/small").curves.collect()
    assert [row["acc"] for row in rows] == curves["acc"].to_list()
    assert [set(row) for row in rows] == [{"run", "step", "acc", "kept"}] * 3
    assert len(json.loads(dapo("metrics", "small", "--columns", "all", "--json")[1])[0]) > 40
    code, shown = dapo("metrics", "small", "--columns", "accc")
    assert code == 2 and "there is no curve 'accc'" in shown


def test_metrics_are_sparks_on_a_terminal(finished: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"DAPO_DATA": str(finished), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "pipeline", "metrics", "small", "small", "--columns", "length"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        shown = b""
        while child.poll() is None or shown[-1:] != b"\n":
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert child.returncode == 0
    assert "█▁" in shown.decode() or "▁█" in shown.decode()


def test_sparks_follow_the_values() -> None:
    assert spark([0.0, 1.0, None, 0.5], 10) == "▁█ ▅"
    assert spark([2.0, 2.0], 10) == "▁▁"
    assert spark([0, 0, 4, 4, 8], 3) == "▁▅█"
    assert spark([None], 10) == spark([], 10) == ""


def titles(chapters: list[story.Chapter]) -> list[str]:
    return [chapter.title for chapter in chapters]


def test_a_trained_response_is_told_from_its_choice_to_its_step(finished: Path) -> None:
    small = finished / "runs/small"
    kept = run(small).responses.filter(decision="kept", decided_in=1)
    row = kept.head(1).collect().row(0, named=True)
    chosen, sampled, judged, decided, batch, trained = story.tell(small, row["response_id"])
    assert chosen.title.endswith("shuffle") and chosen.texts["gold"] == row["answer"]
    assert sampled.facts["policy"] == "step_0000/warmstart"
    assert sampled.facts["seed"] == row["seed"] and sampled.texts["text"] == row["text"]
    assert row["verdict"] in judged.title and judged.facts["reward"] == row["reward"]
    # the formula that is shown gives the reward
    assert judged.facts["reward_is"] == "-1 + acc · 2 + penalty"
    assert -1 + judged.facts["acc"] * 2 + judged.facts["penalty"] == pytest.approx(row["reward"])
    assert decided.title == "in step 1 its group was kept" and decided.facts["n"] == 4
    in_batch = run(small).batch.filter(response_id=row["response_id"]).collect()
    assert batch.facts["advantage"] == in_batch["advantage"][0]
    assert trained.note is not None and "update.record_tokens=true" in trained.note


def test_a_dropped_response_ends_where_it_ended(small: Path) -> None:
    row = run(small).responses.filter(decision="kept").head(1).collect().row(0, named=True)
    for step in (1, 2):
        rewrite(
            small / f"step_000{step}/round_0/filter/groups",
            pl.lit("dropped").alias("decision"),
            pl.lit("all_wrong").alias("reason"),
        )
        batch = small / f"step_000{step}/round_0/filter/batch"
        tables.write(batch.parent, "batch", pl.read_parquet(batch).clear())
    assert titles(story.tell(small, row["response_id"]))[-1] == (
        f"in step {row['decided_in']} its group was dropped (all_wrong)"
    )


def test_a_group_that_waited_is_decided_on_twice(finished: Path) -> None:
    small = finished / "runs/small"
    waited = run(small).groups.filter(step=1, decision="carried").collect()["group_id"][0]
    row = run(small).rollouts.filter(group_id=waited).head(1).collect().row(0, named=True)
    decided = [t for t in titles(story.tell(small, row["response_id"])) if "its group was" in t]
    assert decided[0] == "in step 1 its group was carried (surplus)"
    assert len(decided) == 2 and decided[1].startswith("in step 2")


def test_the_tokens_of_a_response_come_from_the_variant_that_recorded_them(
    small: Path, dapo: Dapo
) -> None:
    data = small.parents[1]
    row = run(small).batch.filter(step=2).head(1).collect().row(0, named=True)
    again = ("rerun", "--run", "small", "--step", "2", "--stage", "update")
    command = [sys.executable, "-m", "pipeline", *again, "update.record_tokens=true"]
    environment = os.environ | {"DAPO_DATA": str(data)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    made = small / "step_0002/update.variant-1"
    shutil.copytree(made, made.with_name("update.variant-2"))
    record = made.with_name("update.variant-2") / "artifact.json"
    record.write_text(record.read_text().replace('"eps_high": 0.28', '"eps_high": 0.5'))
    [told] = story.tell(small, row["response_id"])[-1:]
    assert told.facts["recorded_by"] == "update.variant-1"  # the other one is another update
    assert len(told.rows) == len(row["response_ids"])
    metrics = run(small).metrics.filter(step=2).collect()
    mini_batch = int(told.title.split()[-1])
    by_step = dict(metrics.select("optimizer_step", "mini_batch").iter_rows())
    assert by_step[told.facts["optimizer_step"]] == mini_batch
    for token in told.rows:
        ratio = token["ratio"]
        assert token["new_logprob"] - token["old_logprob"] == pytest.approx(
            pl.Series([ratio]).log()[0], abs=1e-5
        )
    assert "".join(token["piece"] for token in told.rows)
    code, shown = dapo("explain", row["response_id"], "--run", small, "--tokens", "2")
    assert code == 0 and f"{len(told.rows)} tokens in all" in shown
    document = json.loads(dapo("explain", row["response_id"], "--run", small, "--json")[1])
    assert [chapter["title"] for chapter in document][-1] == told.title


def test_an_unknown_response_is_refused(dapo: Dapo) -> None:
    code, shown = dapo("explain", "s9r9", "--run", "small")
    assert code == 2 and "sampled no response 's9r9'" in shown


@pytest.fixture
def pair(small: Path) -> tuple[Path, Path]:
    """A run, and a copy of it."""
    other = small.with_name("other")
    shutil.copytree(small, other)
    return small, other


def publish_other(run: Path, place: str, table: str, *columns: pl.Expr) -> None:
    """The artifact at `place` with other values in a table, and an honest record."""
    old = artifacts.load(run / place)
    frame = tables.read(old.path, table)
    with artifacts.draft(old.path) as building:
        for name in old.record["rows"]:
            shutil.copytree(old.path / name, building / name)
        tables.write(building, table, frame.with_columns(columns))
        artifacts.publish(
            building,
            old.path,
            recipe=old.recipe,
            metrics=old.metrics,
            started=0,
            replace_existing=True,
            sources=old.record["sources"],
        )


def test_equal_runs_have_no_first_difference(dapo: Dapo, pair: tuple[Path, Path]) -> None:
    made = compare_runs.compare(*pair)
    assert made.divergence is None and made.settings == "" and made.equal == made.in_common == 15
    assert set(made.prompts["change"]) == {0.0}
    code, shown = dapo("compare", "small", "other", data=pair[0].parents[1])
    assert code == 0 and "first difference: none" in shown


def test_the_first_difference_is_found_down_to_the_token(
    dapo: Dapo, pair: tuple[Path, Path]
) -> None:
    row = tables.read(pair[1] / "step_0002/round_0/rollout", "rollouts").row(3, named=True)
    changed = [*row["response_ids"]]
    changed[2] += 1
    mine = pl.col("response_id") == row["response_id"]
    ids = pl.when(mine).then(pl.lit(changed, pl.List(pl.Int32))).otherwise("response_ids")
    publish_other(pair[1], "step_0002/round_0/rollout", "rollouts", ids.alias("response_ids"))
    found = compare_runs.compare(*pair).divergence
    assert found is not None
    where = (found.place, found.table, found.key, found.column, found.position, found.rows)
    key = {"response_id": row["response_id"]}
    assert where == ("step_0002/round_0/rollout", "rollouts", key, "response_ids", 2, 1)
    assert (found.a, found.b) == (row["response_ids"][2], changed[2])
    code, shown = dapo("compare", "small", "other", data=pair[0].parents[1])
    assert code == 0 and "column response_ids, position 2" in shown
    document = json.loads(dapo("compare", "small", "other", "--json", data=pair[0].parents[1])[1])
    assert document["divergence"]["position"] == 2


def test_a_row_that_one_run_lacks_and_files_that_are_no_tables_are_differences(
    pair: tuple[Path, Path],
) -> None:
    selection = tables.read(pair[1] / "step_0001/round_0/select", "selection")
    record = pair[1] / "step_0001/update/artifact.json"
    content = json.loads(record.read_text())
    content["digest"] = "0" * 64
    content["files"]["config.json"]["sha256"] = "0" * 64
    record.write_text(json.dumps(content))
    found = compare_runs.compare(*pair).divergence
    assert found is not None
    assert (found.place, found.table, found.files) == ("step_0001/update", None, ["config.json"])
    first = pl.col("group_id") == selection["group_id"][0]
    renamed = pl.when(first).then(pl.lit("a_new_one")).otherwise("group_id").alias("group_id")
    publish_other(pair[1], "step_0001/round_0/select", "selection", renamed)
    found = compare_runs.compare(*pair).divergence
    assert found is not None and (found.column, found.rows) == (None, 2)
    assert (found.key, found.a, found.b) == ({"group_id": "a_new_one"}, False, True)


def test_pass_rates_that_changed_most_come_first(pair: tuple[Path, Path]) -> None:
    scores = pair[1] / "step_0001/round_0/score/scores"
    prompt = run(pair[1]).responses.filter(pl.col("step") == 1).head(1).collect()["prompt_id"][0]
    ids = run(pair[1]).rollouts.filter(prompt_id=prompt, step=1).collect()["response_id"]
    right = pl.when(pl.col("response_id").is_in(ids.implode())).then(1.0).otherwise("acc")
    rewrite(scores, right.cast(pl.Float32).alias("acc"))
    first = compare_runs.compare(*pair).prompts.row(0, named=True)
    assert (first["prompt_id"], first["pass_b"]) == (prompt, 1.0)
    assert first["change"] == 1.0 - first["pass_a"] > 0


def test_prompts_of_other_texts_are_not_compared(pair: tuple[Path, Path]) -> None:
    rewrite(pair[1] / "prompts/prompts", pl.lit("other").alias("answer"))
    assert compare_runs.compare(*pair).prompts.is_empty()


def test_places_that_one_run_lacks_are_named(dapo: Dapo, pair: tuple[Path, Path]) -> None:
    shutil.rmtree(pair[1] / "step_0002")
    made = compare_runs.compare(*pair)
    assert made.only["b"] == [] and "step_0002/update" in made.only["a"]
    assert made.curves["acc_b"].to_list()[-1] is None
    code, shown = dapo("compare", "small", "other", data=pair[0].parents[1])
    assert code == 0 and "only in a: 6, first step_0002/round_0/select" in shown


def test_compare_still_takes_two_scorings_and_no_mixture(dapo: Dapo, finished: Path) -> None:
    scores = finished / "runs/small/step_0001/round_0/score"
    code, shown = dapo("compare", scores, scores)
    assert code == 0 and "verdicts" in shown
    code, shown = dapo("compare", "small", scores)
    assert code == 2 and "give two runs, or two scorings" in shown
    code, shown = dapo("compare", "small", "small", "filter.batch_groups=2")
    assert code == 2 and "two scorings, not for two runs" in shown
    code, shown = dapo("compare", "small", "smal")
    assert code == 2 and "there is no run 'smal'" in shown


@pytest.mark.parametrize("text", [">0", ">= 1e-3", "<=-.5", "=2", "7", "!=0"])
def test_a_comparison_is_read(text: str) -> None:
    frame = pl.DataFrame({"reward": [2.0, 7.0, -1.0, 0.0, None]})
    assert 0 < len(frame.filter(samples.condition("reward", text))) < 5


@pytest.mark.parametrize("text", ["", ">", "a", "> 1 2", "=>1", "1;"])
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a comparison"):
        samples.condition("reward", text)


def test_looking_loads_nothing_heavy(finished: Path) -> None:
    script = (
        "import sys; from pipeline import cli; sys.argv = ['dapo', 'show', sys.argv[1]]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'prefect', 'duckdb', 'altair', 'transformers'} & {*sys.modules}))"
    )
    scores = finished / "runs/small/step_0001/round_0/score"
    command = [sys.executable, "-c", script, str(scores)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["sql", "samples", "explain", "metrics", "compare"])
def test_every_command_explains_itself_with_an_example(dapo: Dapo, command: str) -> None:
    code, shown = dapo(command, "--help")
    assert code == 0 and f"Example: dapo {command}" in shown
