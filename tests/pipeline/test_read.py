"""A run as lazy frames: all of its tables, only its own artifacts, only the files asked for."""

import re
import shutil
from pathlib import Path

import polars as pl
import pytest
from conftest import rows
from polars.testing import assert_frame_equal

from pipeline import artifacts, read, runs
from pipeline.read import VIEWS, Place, run
from stages import tables
from stages.errors import InputError

STEP_2 = pl.col("step") == 2


@pytest.fixture
def small(data: Path) -> Path:
    return data / "runs/small"


def files_of(run: Path, table: str) -> list[Path]:
    found = sorted(run.glob(f"**/{table}/*.parquet"))
    assert found
    return found


def test_a_run_is_found_by_its_name_and_by_its_directory(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAPO_DATA", str(finished))
    assert run("small").directory == run(finished / "runs/small").directory
    with pytest.raises(InputError, match="there is no run 'smal'"):
        run("smal")


@pytest.mark.parametrize("name", VIEWS)
def test_every_table_is_the_rows_of_its_files_with_their_place(finished: Path, name: str) -> None:
    directory, view = finished / "runs/small", VIEWS[name]
    frame = getattr(run(directory), name)
    found = frame.collect()
    assert found.schema == frame.collect_schema()
    assert found.columns[: len(view.place)] == list(view.place)
    places = [p for stage in view.stages for p in directory.glob(f"**/{stage}/{view.table}")]
    assert len(found) == sum(len(pl.read_parquet(place)) for place in places)
    if "step" in view.place and places:
        numbers = {int(re.findall(r"step_(\d+)", str(place))[0]) for place in places}
        assert set(found["step"]) <= numbers


def test_a_step_is_the_one_of_the_directory(finished: Path) -> None:
    directory = finished / "runs/small"
    found = run(directory).rollouts.filter(STEP_2).drop("step", "round").collect()
    alone = tables.read(directory / "step_0002/round_0/rollout", "rollouts")
    assert_frame_equal(found, alone)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (STEP_2, 12),
        (STEP_2 & (pl.col("length") > 0) & (pl.col("round") == 0), 12),
        ((pl.col("step") > 1) & pl.col("text").is_not_null(), 12),
        (pl.col("step").is_in([2, 7]), 12),
        (pl.col("step") == 9, 0),
    ],
    ids=str,
)
def test_a_filter_on_the_step_leaves_the_files_of_other_steps_closed(
    small: Path, predicate: pl.Expr, expected: int
) -> None:
    r = run(small)
    for file in files_of(small / "step_0001", "rollouts"):
        file.write_bytes(b"not to be read")
    assert len(r.rollouts.filter(predicate).collect()) == expected
    with pytest.raises(pl.exceptions.PolarsError):
        r.rollouts.select(pl.col("length").sum()).collect()


def test_joined_responses_of_a_step_leave_other_steps_closed_too(small: Path) -> None:
    r = run(small)
    for table in ("rollouts", "scores"):
        for file in files_of(small / "step_0001", table):
            file.unlink()
    found = r.responses.filter(STEP_2, pl.col("verdict") != "right").collect()
    assert set(found["step"]) == {2} and found["verdict"].null_count() == 0


def test_a_predicate_that_may_hold_elsewhere_closes_no_file(finished: Path) -> None:
    r = run(finished / "runs/small")
    either = r.rollouts.filter(STEP_2 | (pl.col("sample") == 0)).collect()
    assert len(either) == 12 + 6
    newest = r.rollouts.filter(pl.col("step") == pl.col("step").max()).collect()
    assert len(newest) == 12
    # null is no reason to think that a file has no such row
    without = r.scores.filter(pl.col("extracted").is_null() & (pl.col("step") == 1)).collect()
    assert len(without) == r.scores.collect().filter(step=1)["extracted"].null_count()


def test_a_head_stops_reading(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "FILES_AT_A_TIME", 1)
    r = run(small)
    files_of(small / "step_0002", "rollouts")[0].unlink()
    assert len(r.rollouts.head(5).collect()) == 5


def test_a_file_that_no_record_names_is_not_read(small: Path) -> None:
    stray = files_of(small, "rollouts")[0].with_name("part-00009.parquet")
    shutil.copy(files_of(small, "rollouts")[0], stray)
    (small / "step_0003/round_0/rollout/rollouts").mkdir(parents=True)
    shutil.copy(stray, small / "step_0003/round_0/rollout/rollouts")  # no record at all
    assert len(run(small).rollouts.collect()) == 36


def test_variants_are_asked_for_and_have_their_number(small: Path) -> None:
    original = small / "step_0001/round_0/score"
    shutil.copytree(original, original.with_name("score.variant-2"))
    assert len(run(small).scores.collect()) == 36
    assert "variant" not in run(small).scores.collect_schema()
    r = run(small, variants=True)
    counts = dict(r.scores.group_by("variant").len().collect().iter_rows())
    assert counts == {None: 36, 2: 24}
    assert len(r.responses.collect()) == 36  # of the run's own chain
    assert r.artifacts.filter(variant=2).collect()["place"].to_list() == [
        "step_0001/round_0/score.variant-2"
    ]


def test_a_steps_last_round_decides_and_rounds_that_its_update_left_behind_do_not(
    small: Path,
) -> None:
    shutil.copytree(small / "step_0002/round_0", small / "step_0002/round_1")
    assert len(run(small).rollouts.collect()) == 36  # the update was made from round 0
    shutil.rmtree(small / "step_0002/update")
    r = run(small)
    assert len(r.rollouts.collect()) == 48
    assert set(r.groups.filter(STEP_2).collect()["round"]) == {1}


def test_responses_hold_their_score_their_groups_fate_and_the_gold_answer(finished: Path) -> None:
    r = run(finished / "runs/small")
    found = r.responses.sort("response_id").collect()
    scores = r.scores.sort("response_id").collect()
    assert found["response_id"].to_list() == scores["response_id"].to_list()
    assert found["verdict"].to_list() == scores["verdict"].to_list()
    groups = r.groups.collect()
    for row in found.iter_rows(named=True):
        last = groups.filter(group_id=row["group_id"]).sort("step").row(-1, named=True)
        fate = (row["decision"], row["reason"], row["decided_in"])
        assert fate == (last["decision"], last["reason"], last["step"])
    # a group that waited in step 1 is known by what became of it in step 2
    waited = groups.filter(step=1, decision="carried")["group_id"].to_list()
    assert waited and set(found.filter(pl.col("group_id").is_in(waited))["decided_in"]) == {2}
    answers = dict(r.prompts.select("prompt_id", "answer").collect().iter_rows())
    assert all(answers[p] == a for p, a in found.select("prompt_id", "answer").iter_rows())


def test_a_run_in_progress_gives_what_is_published(small: Path) -> None:
    shutil.rmtree(small / "step_0002/update")
    shutil.rmtree(small / "step_0002/evaluate")
    shutil.rmtree(small / "step_0002/round_0/score")
    shutil.rmtree(small / "step_0002/round_0/filter")
    r = run(small)
    assert r.curves.collect()["step"].to_list() == [0, 1]
    waiting = r.responses.filter(STEP_2).collect()
    assert len(waiting) == 12
    assert set(waiting["verdict"]) == set(waiting["decision"]) == {None}


def test_a_run_that_has_only_begun_has_empty_tables(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: begun\n")
    r = run(tmp_path)
    for name in (*VIEWS, "responses", "curves", "artifacts"):
        frame = getattr(r, name)
        assert frame.collect().is_empty()
        assert frame.collect().columns == frame.collect_schema().names()


def test_a_file_of_an_older_version_has_null_in_the_columns_that_it_lacks(small: Path) -> None:
    file = files_of(small, "selection")[0]
    pl.read_parquet(file).drop("evidence").write_parquet(file)
    found = run(small).selection.collect()
    assert found.schema["evidence"] == pl.Float64 and len(found) == 9


def test_further_parts_of_the_reward_are_columns(small: Path) -> None:
    score = artifacts.load(small / "step_0001/round_0/score")
    frame = tables.read(score.path, "scores").with_columns(part_form=pl.lit(0.5, pl.Float32))
    parts = {"form": {"task": "format", "weight": 1.0}}
    with artifacts.draft(score.path) as building:
        tables.write(building, "scores", frame, more=["part_form"])
        recipe = artifacts.Recipe("score", score.recipe.config | {"parts": parts}, {})
        artifacts.publish(
            building,
            score.path,
            recipe=recipe,
            metrics=score.metrics,
            started=0,
            replace_existing=True,
            sources=score.record["sources"],
        )
    found = run(small).scores.sort("step").collect()
    assert found["part_form"].to_list() == [0.5] * 24 + [None] * 12


def test_the_own_step_of_beliefs_has_a_name_of_its_own(small: Path) -> None:
    select = artifacts.load(small / "step_0002/round_0/select")
    known = {"prompt_id": ["p"], "right": [1.0], "wrong": [2.0], "step": [1], "asked": [1]}
    with artifacts.draft(select.path) as building:
        shutil.copytree(select.path / "selection", building / "selection")
        tables.write(
            building, "beliefs", pl.DataFrame(known, schema=tables.polars_schema("beliefs"))
        )
        artifacts.publish(
            building,
            select.path,
            recipe=select.recipe,
            metrics=select.metrics,
            started=0,
            replace_existing=True,
            sources=select.record["sources"],
        )
    [row] = run(small).beliefs.collect().to_dicts()
    assert (row["step"], row["faded_to"]) == (2, 1)


def test_curves_are_the_figures_of_the_records(finished: Path) -> None:
    directory = finished / "runs/small"
    first, second, third = run(directory).curves.collect().to_dicts()
    record = artifacts.load(directory / "step_0001/round_0/score").metrics
    assert (first["step"], first["acc"]) == (0, None)
    assert second["acc"] == record["acc"]
    assert second["reason_surplus"] == 2 and second["kept"] == 4
    assert second["held_out"] is None
    evaluated = artifacts.load(directory / "step_0002/evaluate").metrics["avg@2"]
    assert third["held_out"] == evaluated
    rollout = artifacts.load(directory / "step_0002/round_0/rollout")
    assert third["sampled_tokens"] == rollout.metrics["tokens"]
    assert third["seconds_rollout"] == rollout.record["seconds"]


def test_artifacts_are_the_records(finished: Path) -> None:
    directory = finished / "runs/small"
    found = run(directory).artifacts.collect()
    assert sorted(found["place"]) == sorted(row["place"] for row in runs.entries(directory))
    assert found["place"].to_list()[:2] == ["prompts", "heldout"]
    assert set(found["state"]) == {"whole"}
    by_place = found.filter(place="step_0001/round_0/rollout")
    tokens = pl.read_parquet(directory / "step_0001/round_0/rollout/rollouts")["length"].sum()
    assert by_place["metrics"].struct.field("tokens").item() == tokens
    assert by_place["rows"].struct.field("rollouts").item() == 24
    assert by_place["started"].dtype == pl.Datetime("us", "UTC")


def test_places_come_in_the_order_of_a_run() -> None:
    names = [
        *("prompts", "heldout", "step_0000/warmstart", "step_0000/evaluate"),
        *(f"step_0001/round_0/{stage}" for stage in read.ROUND),
        *("step_0001/round_1/select", "step_0001/update", "step_0001/evaluate"),
        "step_0002/round_0/select",
    ]
    places = [Place.of(Path("/r") / name, Path("/r")) for name in names]
    assert [str(place) for place in places] == names
    ordered = sorted(set(places), key=lambda place: place.order if place else ())
    assert ordered == places
    assert Place.of(Path("/r/step_0001/mine"), Path("/r")) is None


def test_a_prompt_of_several_messages_names_their_roles() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "3+5"}]
    frame = rows("prompts", {"prompt_id": "a", "prompt": messages}, {"prompt_id": "b"})
    frame = frame.with_columns(asked=read.asked())
    assert frame["asked"][0] == "system: Be short.\nuser: 3+5"
    assert "user:" not in frame["asked"][1]
