"""One stage: served if its recipe is the same, refused if another's stands there, else built."""

from pathlib import Path

import pytest
from small_run import workers

from pipeline import artifacts
from pipeline.artifacts import Artifact, Recipe
from pipeline.runner import Outdated, Runner, StageInput, accepts, stage_inputs
from stages import prompts, rollout, select, tables
from stages.errors import InputError
from stages.settings import Machine

FEW = prompts.Config(count=4)


def test_the_inputs_of_a_stage_are_those_that_its_function_names() -> None:
    assert stage_inputs("filter") == [
        StageInput("rollouts", several=True, required=True),
        StageInput("scores", several=True, required=True),
        StageInput("carried", several=False, required=False),
        StageInput("policy", several=False, required=False),
    ]


def test_the_same_recipe_is_served_and_another_is_refused_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "prompts"
    more = prompts.Config(count=5)
    with Runner(Machine()) as runner:
        made, served = runner.run("prompts", out=out, config=FEW, inputs={"source": None})
        assert not served
        assert runner.run("prompts", out=out, config=FEW, inputs={"source": None}) == (made, True)
        with pytest.raises(Outdated, match=r"config\.count: 4 → 5"):
            runner.run("prompts", out=out, config=more, inputs={"source": None})
    with Runner(Machine(), force=True) as runner:
        rebuilt, served = runner.run("prompts", out=out, config=more, inputs={"source": None})
    assert not served and rebuilt.record["rows"] == {"prompts": 5}


def test_another_machine_does_not_make_another_recipe(tmp_path: Path) -> None:
    for threads in (1, 2):
        with Runner(Machine(threads=threads)) as runner:
            out = tmp_path / "prompts"
            _, served = runner.run("prompts", out=out, config=FEW, inputs={"source": None})
    assert served


def test_a_failed_stage_leaves_nothing_behind(tmp_path: Path) -> None:
    with Runner(Machine()) as runner, pytest.raises(InputError):
        inputs = {"prompts": tmp_path, "previous": None}
        runner.run("select", out=tmp_path / "select", config=select.Config(), inputs=inputs)
    assert not list(tmp_path.iterdir())


def test_a_moved_run_still_knows_where_its_inputs_lie(tmp_path: Path) -> None:
    with Runner(Machine()) as runner:
        there = tmp_path / "there"
        runner.run("prompts", out=there / "prompts", config=FEW, inputs={"source": None})
        inputs = {"prompts": there / "prompts", "previous": None}
        runner.run("select", out=there / "select", config=select.Config(size=2), inputs=inputs)
    there.rename(tmp_path / "moved")
    moved = artifacts.load(tmp_path / "moved" / "select")
    assert moved.sources == {"prompts": tmp_path / "moved" / "prompts", "previous": None}


def test_a_pinned_artifact_keeps_its_settings_but_not_for_other_inputs() -> None:
    def made(pinned: bool) -> Artifact:
        recipe = {"config": {"right": 2.0}, "inputs": {"rollouts": "a"}}
        return Artifact(Path("score"), {"stage": "score", "recipe": recipe, "pinned": pinned})

    assert accepts(made(pinned=True), Recipe("score", {"right": 1.0}, {"rollouts": "a"}))
    assert not accepts(made(pinned=True), Recipe("score", {"right": 1.0}, {"rollouts": "b"}))
    assert not accepts(made(pinned=False), Recipe("score", {"right": 1.0}, {"rollouts": "a"}))


def test_groups_that_a_killed_rollout_had_finished_are_not_generated_again(
    data: Path, tmp_path: Path
) -> None:
    original = artifacts.load(data / "runs" / "small" / "step_0001" / "round_0" / "rollout")
    rows = tables.read(original.path, "rollouts")
    finished = rows["group_id"].unique().sort()[:4]
    out = tmp_path / "again" / "rollout"
    kept = artifacts.partial(out, original.recipe)
    kept.mkdir(parents=True)
    tables.write(kept, "rollouts", rows.filter(rows["group_id"].is_in(finished.implode())))
    (kept / "rollouts" / "part-00001.parquet").write_bytes(b"PAR1 half a file")
    with Runner(Machine(), workers=workers()) as runner:
        made, served = runner.run(
            "rollout",
            out=out,
            config=rollout.Config(**original.recipe.config),
            inputs=original.sources,
        )
    assert not served
    assert (made.metrics["recovered"], made.metrics["generated"]) == (16, 8)
    assert made.record["rows"] == original.record["rows"]
    again = tables.read(out, "rollouts")
    assert again["response_id"].to_list() == rows["response_id"].to_list()
    assert again.filter(again["group_id"].is_in(finished.implode())).equals(
        rows.filter(rows["group_id"].is_in(finished.implode()))
    )
    assert not kept.exists()
