"""The command `dapo`, as a person or a script uses it."""

import json
from pathlib import Path

import polars as pl
import pytest
from command import dapo, dapo_alone
from small_run import SMALL

from pipeline import artifacts
from stages import tables


def round_of(data: Path, step: int = 1) -> Path:
    return data / "runs" / "small" / f"step_{step:04d}" / "round_0"


@pytest.mark.parametrize(
    "command",
    [
        *("train", "sweep", "rerun", "export", "config", "ls", "show", "verify", "score"),
        *("filter", "update", "prune"),
    ],
)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    helped = dapo(command, "--help")
    assert helped.returncode == 0
    assert f"Example: dapo {command}" in helped.stdout


def test_an_unknown_setting_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    refused = dapo_alone("train", "update.epshigh=0.3", data=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "did you mean 'update.eps_high'?" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not list(tmp_path.iterdir())


def test_config_prints_what_can_be_read_back() -> None:
    printed = dapo("config", "experiment=demo", "update.eps_high=0.3")
    assert printed.returncode == 0
    assert "eps_high: 0.3\n" in printed.stdout and "${" not in printed.stdout


def test_a_stage_runs_on_saved_data_with_another_setting(data: Path, tmp_path: Path) -> None:
    rollouts = round_of(data) / "rollout"
    prompts = data / "runs" / "small" / "prompts"
    out = tmp_path / "halved"
    arguments = ("score", "--rollouts", rollouts, "--prompts", prompts, "--out", out, *SMALL)
    built = dapo(*arguments, "score.overlong_factor=0.5")
    assert built.returncode == 0, built.stderr
    theirs, ours = (tables.read(p, "scores") for p in (round_of(data) / "score", out))
    assert ours["penalty"].sum() == pytest.approx(theirs["penalty"].sum() / 2)
    assert ours["penalty"].sum() < 0
    again = dapo(*arguments, "score.overlong_factor=0.5")
    assert again.returncode == 0 and again.stdout.startswith("served")
    other = dapo(*arguments, "score.overlong_factor=0.25")
    assert other.returncode == 2
    assert "config.overlong_factor: 0.5 → 0.25" in " ".join(other.stderr.split())


def test_a_parquet_file_that_somebody_else_wrote_is_accepted(data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for stage, table in (("rollout", "rollouts"), ("score", "scores")):
        frame = tables.read(round_of(data) / stage, table)
        frame.with_columns(pl.col("^length|sample$").cast(pl.Int64)).write_parquet(
            mine / f"{table}.parquet"
        )
    built = dapo(
        *("filter", "--rollouts", mine / "rollouts.parquet"),
        *("--scores", mine / "scores.parquet", "--out", tmp_path / "out", *SMALL),
    )
    assert built.returncode == 0, built.stderr
    ours = tables.read(tmp_path / "out", "groups")
    assert ours.equals(tables.read(round_of(data) / "filter", "groups"))


def test_a_file_without_the_tables_columns_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    tables.read(round_of(data) / "score", "scores").drop("reward").with_columns(
        acc=pl.lit("yes")
    ).write_parquet(tmp_path / "bad.parquet")
    refused = dapo(
        *("filter", "--rollouts", round_of(data) / "rollout"),
        *("--scores", tmp_path / "bad.parquet", "--out", tmp_path / "out", *SMALL),
    )
    message = " ".join(refused.stderr.split())
    assert refused.returncode == 2
    assert "bad.parquet" in message and "column 'reward' (float) is missing" in message
    assert "column 'acc': expected float, found large_string" in message
    assert not (tmp_path / "out").exists()


def test_an_update_on_an_empty_batch_changes_nothing_and_says_so(
    data: Path, tmp_path: Path
) -> None:
    batch = pl.DataFrame(schema=tables.polars_schema("batch"))
    batch.write_parquet(tmp_path / "batch.parquet")
    policy = data / "runs" / "small" / "step_0001" / "update"
    ended = dapo(
        *("update", "--batch", tmp_path / "batch.parquet", "--policy", policy),
        *("--out", tmp_path / "out", *SMALL),
    )
    assert ended.returncode == 3 and "nothing to train on" in ended.stdout
    names = ("model.safetensors", "optimizer/.metadata", "optimizer/__0_0.distcp")
    assert all((tmp_path / "out" / n).read_bytes() == (policy / n).read_bytes() for n in names)


def test_a_dry_update_shows_both_losses_and_makes_nothing(data: Path, tmp_path: Path) -> None:
    step = data / "runs" / "small" / "step_0002"
    before = sorted(data.rglob("*"))
    asked = dapo(
        *("rerun", "--run", "small", "--step", "2", "--stage", "update", "--dry"),
        *("update.eps_high=0", "update.eps_low=0"),
        data=data,
    )
    assert asked.returncode == 0, asked.stderr
    rows = {
        name: [float(x) for x in (original, changed)]
        for _, name, original, changed, _ in (
            [cell.strip() for cell in line.split("│")]
            for line in asked.stdout.splitlines()
            if line.startswith("│")
        )
    }
    assert rows["clip_fraction_high"][1] > rows["clip_fraction_high"][0]
    assert rows["ratio_max"][0] == rows["ratio_max"][1] > 1
    plain = dapo(
        *("update", "--dry", "--batch", step / "round_0" / "filter"),
        *("--policy", data / "runs/small/step_0001/update", *SMALL, "update.aggregation=token-sum"),
    )
    assert plain.returncode == 0 and "default" in plain.stdout, plain.stderr
    assert sorted(data.rglob("*")) == before
    refused = dapo("rerun", "--run", "small", "--step", "2", "--stage", "score", "--dry", data=data)
    assert refused.returncode == 2 and "--dry is for update" in refused.stderr


def test_ls_is_a_table_for_people_and_json_for_programs(data: Path) -> None:
    (run,) = json.loads(dapo("ls", "--json", data=data).stdout)
    assert (run["run"], run["steps"]) == ("small", 2)
    rows = json.loads(dapo("ls", "small", "--json", data=data).stdout)
    assert {row["state"] for row in rows} == {"whole"}
    assert any(row["place"] == "step_0002/update" for row in rows)
    assert "step_0002/update" in dapo("ls", "small", data=data).stdout


def test_show_prints_record_schema_and_rows(data: Path) -> None:
    shown = dapo("show", round_of(data) / "score", "--rows", "2")
    assert shown.returncode == 0
    assert '"stage": "score"' in shown.stdout and "verdict" in shown.stdout
    found = json.loads(dapo("show", round_of(data) / "score", "--rows", "2", "--json").stdout)
    assert found["tables"]["scores"]["count"] == 24
    assert len(found["tables"]["scores"]["rows"]) == 2
    shard = round_of(data) / "score" / "scores" / "part-00000.parquet"
    assert json.loads(dapo("show", shard, "--json").stdout)["record"] is None


def test_show_refuses_what_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    refused = dapo("show", tmp_path / "broken.parquet")
    assert refused.returncode == 2 and "not a readable Parquet file" in refused.stderr


def test_verify_passes_a_whole_run_and_finds_a_lost_row(data: Path) -> None:
    assert dapo("verify", "small", data=data).returncode == 0
    shard = round_of(data) / "score" / "scores" / "part-00000.parquet"
    tables.write(shard.parents[1], "scores", pl.read_parquet(shard)[1:])
    failed = dapo("verify", "small", data=data)
    assert failed.returncode == 1
    assert "is not the file that the record describes" in " ".join(failed.stdout.split())


def test_verify_counts_rows_over_the_stages_not_only_bytes(data: Path) -> None:
    rollout = artifacts.load(round_of(data) / "rollout")
    frame = tables.read(rollout.path, "rollouts")
    with artifacts.draft(rollout.path) as building:  # an honest record of a table that lost a group
        tables.write(building, "rollouts", frame.filter(pl.col("group_id") != frame["group_id"][0]))
        tables.write(building, "skipped", tables.read(rollout.path, "skipped"))
        artifacts.publish(
            building,
            rollout.path,
            recipe=rollout.recipe,
            metrics={},
            started=0,
            replace_existing=True,
            sources=rollout.record["sources"],
        )
    failed = dapo("verify", "small", data=data)
    assert failed.returncode == 1
    assert "6 groups selected, but 5 sampled + 0 skipped" in " ".join(failed.stdout.split())


def test_a_run_that_has_only_begun_is_listed(data: Path) -> None:
    (data / "runs" / "begun").mkdir()
    (data / "runs" / "begun" / "config.yaml").write_text("run: begun\n")
    listed = {
        row["run"]: row["steps"] for row in json.loads(dapo("ls", "--json", data=data).stdout)
    }
    assert listed == {"small": 2, "begun": 0}


def test_an_unknown_run_is_refused_by_name(data: Path) -> None:
    refused = dapo("verify", "smal", data=data)
    assert refused.returncode == 2 and "there is no run 'smal'" in refused.stderr


def test_a_rerun_stands_beside_the_original(data: Path) -> None:
    before = artifacts.load(round_of(data) / "score").digest
    made = dapo(
        *("rerun", "--run", "small", "--step", "1", "--stage", "score"),
        "score.overlong_factor=0.5",
        data=data,
    )
    assert made.returncode == 0, made.stderr
    assert artifacts.load(round_of(data) / "score").digest == before
    variant = artifacts.load(round_of(data) / "score.variant-1")
    assert variant.recipe.config["overlong_factor"] == 0.5 and variant.digest != before
    assert dapo("verify", "small", data=data).returncode == 0


def test_a_replaced_artifact_makes_what_follows_stale_until_it_is_rebuilt(data: Path) -> None:
    train = ("train", "--direct", *SMALL)
    made = dapo(
        *("rerun", "--run", "small", "--step", "2", "--stage", "score", "--replace"),
        "score.overlong_factor=0.5",
        data=data,
    )
    assert made.returncode == 0, made.stderr
    assert "stale now" in made.stdout and "step_0002/update" in made.stdout
    assert "step_0001" not in made.stdout.partition("stale now")[2]
    states = {
        r["place"]: r["state"] for r in json.loads(dapo("ls", "small", "--json", data=data).stdout)
    }
    assert states["step_0002/round_0/score"] == "pinned"
    assert states["step_0002/round_0/filter"] == "stale"
    refused = dapo(*train, data=data)
    assert refused.returncode == 2 and "inputs.scores" in refused.stderr
    assert dapo(*train, "--force", data=data).returncode == 0
    score = artifacts.load(round_of(data, 2) / "score")
    assert score.recipe.config["overlong_factor"] == 0.5  # chosen on purpose, so it stays
    assert dapo("verify", "small", data=data).returncode == 0


def test_a_rerun_of_a_middle_round_is_refused_for_another_stages_setting(data: Path) -> None:
    refused = dapo(
        *("rerun", "--run", "small", "--step", "1", "--stage", "score", "update.lr=1"), data=data
    )
    assert refused.returncode == 2 and "update.lr does not concern score" in refused.stderr


def test_a_stage_that_exceeds_its_time_limit_ends_the_command(data: Path, tmp_path: Path) -> None:
    batch, policy = round_of(data) / "filter", data / "runs/small/step_0000/warmstart"
    ended = dapo_alone(
        *("update", "--batch", batch, "--policy", policy, "--out", tmp_path / "out"),
        *(*SMALL, "machine.stage_timeout_s=0.2"),
    )
    assert ended.returncode == 1 and "longer than 0.2 s" in ended.stderr
    assert "Traceback" not in ended.stderr and not (tmp_path / "out").exists()
