"""Which policy of a run is the best: named beside the newest, and kept."""

from pathlib import Path
from typing import Any

import pytest
from small_run import run

from pipeline import artifacts, garbage, loop, runs, summary
from pipeline.artifacts import Artifact
from pipeline.config import RunConfig, parse
from stages.errors import InputError

STEP_ONE, STEP_TWO = Path("step_0001/update"), Path("step_0002/update")


def config_of(data: Path, **best: Any) -> RunConfig:
    """The saved settings of the run, with another idea of the best."""
    config = parse((data / "runs/small/config.yaml").read_text())
    chosen = config.evaluate.best
    assert chosen is not None
    evaluate = config.evaluate.model_copy(update={"best": chosen.model_copy(update=best)})
    return config.model_copy(update={"evaluate": evaluate, "data": data})


def evaluation(**metrics: float | None) -> Artifact:
    return Artifact(Path("evaluate"), {"metrics": metrics})


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", [0.5, 0.75], STEP_TWO),
        ("max", [0.75, 0.5], STEP_ONE),
        ("min", [0.75, 0.5], STEP_TWO),
        ("max", [0.5, 0.5], STEP_ONE),  # a tie: the earlier
        ("max", [None, 0.5], STEP_TWO),
        ("max", [0.5, None], STEP_ONE),
    ],
)
def test_the_best_has_the_best_figure_and_is_the_earlier_of_two(
    finished: Path, mode: str, values: list[float | None], best: Path
) -> None:
    config, found = config_of(finished, mode=mode), None
    for policy, value in zip((STEP_ONE, STEP_TWO), values, strict=True):
        found = loop.better(found, config, evaluation(**{"avg@2": value}), policy)
    assert found is not None and found.policy == best


def test_a_figure_of_another_set_may_decide(finished: Path) -> None:
    config = config_of(finished, set="hard", metric="maj@2")
    found = loop.better(None, config, evaluation(**{"hard/maj@2": 0.5, "maj@2": 0.1}), STEP_ONE)
    assert found == loop.Best(STEP_ONE, 0.5)


def lengths(data: Path) -> list[float]:
    """The mean length under each policy, by step."""
    found = sorted((data / "runs/small").glob("step_*/evaluate"))
    return [artifacts.load(path).metrics["length"] for path in found]


def test_the_best_policy_is_named_and_keeps_its_weights(data: Path) -> None:
    every = ["schedule.evaluate_every=1", "schedule.steps=5", "schedule.keep_policies=1"]
    run(data, [*every, "evaluate.best.metric=length", "evaluate.best.mode=min"])
    directory, found = data / "runs/small", lengths(data)
    best = f"step_{found.index(min(found)):04d}/update"
    assert best == "step_0003/update"  # neither the first nor the last: there is something to keep
    assert (directory / "best").read_text() == best
    kept = [str(p.parent.relative_to(directory)) for p in directory.glob("*/update/*.safetensors")]
    assert sorted(kept) == [best, "step_0005/update"]
    assert garbage.find(directory).garbage == []  # nor does gc take it
    assert garbage.find(directory).unknown == []
    (directory / "best").write_text("step_0000/warmstart")
    assert [each.path for each in garbage.find(directory).garbage] == [directory / best]


def test_a_resumed_run_names_no_best_of_old_steps_meanwhile(data: Path) -> None:
    directory, shortest = data / "runs/small", ["evaluate.best.metric=length"]
    run(data, [*shortest, "evaluate.best.mode=min"])
    assert (directory / "best").read_text() == "step_0002/update"
    early = loop.Best(directory / "step_0000/warmstart", 0.0)
    assert not loop._point_best(config_of(data), early, newest=1)  # latest is step 2
    assert run(data, [*shortest, "evaluate.best.mode=max"]) == []
    assert (directory / "best").read_text() == "step_0000/warmstart"


def test_runs_are_listed_with_their_best(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_DATA", str(finished))
    [row] = runs.overview()
    assert row["best"] == (finished / "runs/small/best").read_text()


def test_an_evaluation_that_is_no_longer_due_still_counts(data: Path) -> None:
    directory = data / "runs/small"
    last = artifacts.load(directory / "step_0002/update")
    step = loop.Step(2, [], last, None)
    found = loop._evaluation_of(config_of(data), step)
    assert found is not None and found.path == directory / "step_0002/evaluate"
    other = Artifact(last.path, {**last.record, "digest": "of another policy"})
    assert loop._evaluation_of(config_of(data), step._replace(update=other)) is None


def test_the_end_of_a_run_names_its_best_policy(finished: Path) -> None:
    config = config_of(finished)
    told = summary.result(config, artifacts.load(config.directory / "step_0002/evaluate"))
    named = (config.directory / "best").read_text()
    assert f"(avg@2; best by avg@2 on heldout: {named})" in told


def test_the_idea_of_the_best_is_no_setting_of_an_evaluation(data: Path) -> None:
    assert run(data, ["evaluate.best.metric=pass@2", "evaluate.best.mode=min"]) == []


def test_a_set_without_prompts_ends_the_run_before_the_warm_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sets\.hard: none of the 6 prompts"):
        run(tmp_path, ["evaluate.sets.hard={levels: [9]}"])
    assert not (tmp_path / "runs/small/step_0000").exists()
