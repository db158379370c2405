"""Two evaluations held side by side, by their own prompts."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command import said
from small_run import run

from pipeline import artifacts, paired
from pipeline.artifacts import Artifact
from stages import tables
from stages.errors import InputError

STEPS = ("step_0000/evaluate", "step_0002/evaluate")


def both(data: Path) -> list[Artifact]:
    return [artifacts.load(data / "runs/small" / step) for step in STEPS]


def of_all(found: paired.EvaluationComparison, metric: str) -> dict[str, Any]:
    """The one row of a metric over all prompts of its set."""
    every = pl.col("task").is_null() & pl.col("difficulty").is_null()
    [row] = found.figures.filter(every, metric=metric).to_dicts()
    return row


def change(artifact: Artifact, table: str, frame: pl.DataFrame) -> None:
    tables.write(artifact.path, table, frame)


def test_the_figures_are_those_of_the_evaluations_and_their_difference(finished: Path) -> None:
    a, b = both(finished)
    found = paired.compare(a, b)
    assert found.prompts.rows() == [("heldout", 6, 0, 0)]
    for metric in ("avg@2", "pass@2", "maj@2", "truncated", "length"):
        row = of_all(found, metric)
        assert (row["a"], row["b"]) == pytest.approx((a.metrics[metric], b.metrics[metric]))
        assert row["difference"] == pytest.approx(row["b"] - row["a"])
        assert row["low"] <= row["difference"] <= row["high"] and 0 < row["p"] <= 1


def test_a_policy_does_not_differ_from_itself(finished: Path) -> None:
    a, _ = both(finished)
    for row in paired.compare(a, a).figures.to_dicts():
        if row["n_prompts"] > 1:
            assert (row["difference"], row["low"], row["high"], row["p"]) == (0, 0, 0, 1)


def test_a_constant_gain_on_every_prompt_is_no_chance(data: Path) -> None:
    a, b = both(data)
    length = pl.col("length") + 10
    longer = tables.read(a.path, "samples").with_columns(length)
    change(b, "samples", longer)
    row = of_all(paired.compare(a, b), "length")
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((10, 10, 10))
    assert row["p"] == pytest.approx(1 / 1001)


def test_prompts_that_one_of_them_lacks_are_said_and_count_nowhere(data: Path) -> None:
    a, b = both(data)
    rows = tables.read(b.path, "evaluations")
    other = pl.when(pl.int_range(pl.len()) == 1).then(pl.lit("other")).otherwise("answer")
    change(b, "evaluations", rows[1:].with_columns(answer=other))
    found = paired.compare(a, b)
    assert found.prompts.rows() == [("heldout", 4, 2, 1)]
    row = of_all(found, "avg@2")
    assert row["n_prompts"] == 4
    matched = rows["prompt_id"].to_list()[1:2] + rows["prompt_id"].to_list()[3:]
    of_a = tables.read(a.path, "evaluations").filter(pl.col("prompt_id").is_in(matched))
    assert row["a"] == pytest.approx(of_a["acc_mean"].mean())


def test_nothing_in_common_is_said(data: Path) -> None:
    a, b = both(data)
    rows = tables.read(b.path, "evaluations")
    change(b, "evaluations", rows.with_columns(answer=pl.lit("other")))
    with pytest.raises(paired.NotComparable, match="no prompt in common"):
        paired.compare(a, b)


def test_the_command_takes_two_evaluations(finished: Path) -> None:
    places = [finished / "runs/small" / step for step in STEPS]
    code, shown = said("compare", *places)
    assert code == 0 and "95% interval, by 1000 resamples" in shown and "avg@2" in shown
    code, shown = said("compare", *places, "--json")
    made = json.loads(shown)
    assert made["prompts"] == [{"set": "heldout", "matched": 6, "only_a": 0, "only_b": 0}]
    assert {"metric", "a", "b", "difference", "low", "high", "p"} < made["figures"][0].keys()


def test_an_evaluation_is_compared_with_evaluations_only(finished: Path) -> None:
    run_directory = finished / "runs/small"
    scores = run_directory / "step_0001/round_0/score"
    code, shown = said("compare", run_directory / STEPS[0], scores)
    assert code == 2 and "not both evaluations" in shown
    places = [run_directory / step for step in STEPS]
    code, shown = said("compare", *places, "filter.batch_groups=8")
    assert code == 2 and "not for two evaluations" in shown


def test_two_runs_are_compared_by_their_last_evaluations(data: Path) -> None:
    run(data, ["run=other", "evaluate.n=3", "schedule.steps=0"])
    code, shown = said("compare", data / "runs/small", data / "runs/other", "--json")
    assert code == 0
    made = json.loads(shown)["evaluations"]
    assert made["a"].endswith("small/step_0002/evaluate")
    assert made["b"].endswith("other/step_0000/evaluate")
    names = {row["metric"] for row in made["figures"]}
    assert {"avg@2 → avg@3", "pass@1", "pass@2"} < names and "pass@3" not in names


def test_what_is_no_evaluation_is_refused(finished: Path) -> None:
    update = artifacts.load(finished / "runs/small/step_0002/update")
    with pytest.raises(InputError, match="holds no table results"):
        paired.compare(update, update)
