"""A sweep: its points are checked before any starts, trained apart, and compared over seeds."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import polars as pl
import psutil
import pytest
from small_run import SMALL

from pipeline import artifacts, guard, sweep, sweep_page, sweep_table
from pipeline.config import CONFIG_DIR, composed, load, parse
from pipeline.read import run
from pipeline.sweep import Point
from pipeline.sweep_table import CURVE
from stages.errors import InputError

LADDER = ("grpo", "overlong_filtering", "clip_higher", "soft_punishment", "token_loss", "dapo")


def dapo(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, on the runs below `data`."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env={**os.environ, "DAPO_DATA": str(data)},
        capture_output=True,
        text=True,
        check=False,
    )


def curves(
    *accuracies: Sequence[float | None], variant: str = "a", cost: float = 100
) -> pl.DataFrame:
    """Curves of a variant: one run per list of held-out accuracies, which begin at step 0."""
    rows = [
        {"variant": variant, "seed": seed, "run": f"{variant}{seed}", "step": step}
        | {"held_out": value, "tokens": cost * step, "seconds": 2.0 * step, "entropy": 0.5}
        for seed, values in enumerate(accuracies)
        for step, value in enumerate(values)
    ]
    return pl.DataFrame(rows, schema=CURVE)


def names(*overrides: str) -> list[str]:
    return [point.run for point in sweep.points(["run=r", *overrides])]


# the points


def test_a_point_is_named_by_what_was_chosen_in_letters_that_a_name_may_have() -> None:
    found = names("update=dapo,grpo", "update.betas=[0.9,0.95],[0.8,0.9]")
    assert len(found) == 4
    assert found[0] == "r-dapo-betas_0.9_0.95_"
    assert names("seed=range(0,2)") == ["r-seed0", "r-seed1"]
    assert names("seed=0,1", "update.seed=5,6")[0] == "r-seed0-update.seed5"


def test_points_that_differ_by_their_seed_alone_are_one_variant() -> None:
    points = sweep.points(["variant=grpo", "update.lr=1e-3,1e-4", "seed=0,1"])
    assert [point.variant for point in points] == ["lr=0.001"] * 2 + ["lr=0.0001"] * 2
    assert sweep.points(["variant=grpo,dapo"])[0].variant == "grpo"
    assert {point.variant for point in sweep.points(["seed=0,1"])} == {"all"}
    assert points[1].config.seed == 1 and points[1].config.update.eps_high == 0.2


def test_overrides_of_one_value_reach_every_point_as_they_were_typed() -> None:
    [one, _] = sweep.points(["~warmstart", "model.path=choice(/models/a,/models/b)"])
    assert one.config.warmstart is None and one.config.model.path == Path("/models/a")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "nothing is swept"),
        (["update.lr=1e-3,-1"], "at update.lr=-1: update.lr: .*greater than 0"),
        (["update.epshigh=0.2,0.3"], "did you mean 'update.eps_high'"),
        (["seed=0,1", "seed=2,3"], "cannot sweep seed, seed"),
        (["run=choice(a,b)"], "neither run"),
        (["rollout.stop=['!'],['?']"], "two points would both be the run"),
    ],
)
def test_a_sweep_is_refused_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sweep.points(overrides)


def test_a_run_that_is_there_with_other_settings_is_refused_unless_forced(
    tmp_path: Path,
) -> None:
    overrides = ["run=r", f"data={tmp_path}", "seed=0,1"]
    sweep.points(overrides)[0].config.directory.mkdir(parents=True)
    there = tmp_path / "runs/r-seed1/config.yaml"
    there.parent.mkdir()
    there.write_text(composed([*overrides[:2], "run=r-seed1", "seed=1", "update.lr=0.5"]))
    with pytest.raises(InputError, match=r"'r-seed1' has other settings .*update\.lr"):
        sweep.points(overrides)
    assert len(sweep.points(overrides, force=True)) == 2


# the ladder


def test_each_rung_of_the_ladder_adds_one_thing_up_to_dapo() -> None:
    assert {path.stem for path in (CONFIG_DIR / "variant").iterdir()} == set(LADDER)
    rungs = [load(["experiment=ablation", f"variant={name}"]).stage_settings() for name in LADDER]
    added = [
        {key: above[key] for key in above if above[key] != below[key]}
        for below, above in pairwise(rungs)
    ]
    assert added == [
        {"update.mask_truncated": True},
        {"update.eps_high": 0.28},
        {"score.overlong": True, "update.mask_truncated": False},
        {"update.aggregation": "token-mean"},
        {"filter.dynamic_sampling": True, "filter.max_age": 1, "select.size": 32},
    ]
    assert rungs[-1] == load(["experiment=demo"]).stage_settings()


def test_the_ladders_foot_is_grpo_and_samples_no_more_than_it_trains() -> None:
    grpo = load(["experiment=ablation", "variant=grpo"])
    assert grpo.update == load(["experiment=ablation", "update=grpo"]).update
    assert not grpo.score.overlong and not grpo.filter.dynamic_sampling
    assert grpo.select.size == grpo.filter.batch_groups


@pytest.mark.parametrize("name", ["sentiment_demo", "translation_demo"])
def test_the_ladder_stands_on_the_other_tasks_too(name: str) -> None:
    task = load([f"experiment={name}"])
    assert load([f"experiment={name}", "variant=grpo"]).score.tasks == task.score.tasks


# the comparison


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.30265), (9, 2.26216), (100, 1.98397)]
)
def test_students_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert sweep_table.student(freedom) == pytest.approx(t, rel=1e-5)


def test_an_interval_is_t_times_the_standard_error_and_one_seed_has_none() -> None:
    assert sweep_table.half([0.1, 0.2, 0.3]) == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-5)
    assert sweep_table.half([0.3]) is None


def test_runs_are_compared_at_the_updates_and_the_tokens_that_all_of_them_have() -> None:
    found = sweep_table.compare(
        pl.concat(
            [
                curves([0.2, 0.4, 0.6], [0.4, 0.6, 0.8], variant="a", cost=100),
                curves([0.2, None, 1.0, 1.0], variant="b", cost=200),
            ]
        )
    )
    a, b = found.variants.to_dicts()
    assert (found.step, found.tokens) == (2, 200)
    assert (a["at_step"], a["at_tokens"]) == pytest.approx((0.7, 0.7))
    assert b["at_step"] == pytest.approx(1.0)
    assert b["at_tokens"] == pytest.approx(0.6)  # between two evaluations
    assert (a["seeds"], b["seeds"], b["at_step_±"]) == (2, 1, None)


def test_a_gain_is_over_the_baselines_run_of_the_same_seed() -> None:
    found = sweep_table.compare(
        pl.concat([curves([0, 0.2], [0, 0.6]), curves([0, 0.3], [0, 0.7], variant="b")])
    )
    a, b = found.variants.to_dicts()
    assert a["gain_at_step"] is None
    assert b["gain_at_step"] == pytest.approx(0.1)
    assert b["gain_at_step_±"] == pytest.approx(0, abs=1e-12)  # though the seeds are far apart
    assert b["at_step_±"] > 1


def test_the_goal_is_the_baselines_end_and_is_first_reached_on_a_straight_line() -> None:
    slow = curves([0.0, 0.2, 0.4])
    fast = curves([0.0, 0.8, 0.1], [0.0, 0.1, 0.3], variant="fast", cost=300)
    never = curves([0.0, 0.1, 0.39], variant="never")
    found = sweep_table.compare(pl.concat([slow, fast, never]))
    assert found.goal == 0.4
    reached = found.variants.select("reached_goal", "step_to_goal", "tokens_to_goal").rows()
    assert reached == [(1, 2.0, 200.0), (1, 0.5, 150.0), (0, None, None)]
    costs = [row["tokens to 0.400"] for row in sweep_table.cells(found)]
    assert costs == ["200", "150 (1 of 2)", "never"]


def test_a_run_that_starts_at_the_goal_has_it_for_nothing() -> None:
    assert sweep_table.reached(curves([0.5, 0.4]), "tokens", 0.5) == 0


def test_a_band_reaches_from_the_lowest_run_to_the_highest_as_far_as_all_of_them_go() -> None:
    short, long = curves([0.0, 0.4]), curves([9, 9], [0.2, None, 0.8])
    found = sweep_page.bands(pl.concat([short, long.filter(seed=1)]), x="step", y="held_out")
    assert found["x"].to_list() == [0, 1]
    assert found["low"].to_list() == pytest.approx([0.0, 0.4])
    assert found["mean"].to_list() == pytest.approx([0.1, 0.45])
    assert found["high"].to_list() == pytest.approx([0.2, 0.5])


# real runs


def test_a_curve_adds_up_what_a_run_has_on_record(finished: Path) -> None:
    config = parse((finished / "runs/small/config.yaml").read_text())
    found = sweep_table.curve(Point("small", {"seed": "0"}, (), config))
    recorded = run(finished / "runs/small")
    assert found["step"].to_list() == [0, 1, 2]
    sampled = recorded.rollouts.group_by("step").agg(pl.col("length").sum()).sort("step").collect()
    assert found["tokens"].to_list() == [0, *sampled["length"].cum_sum()]
    steps = recorded.artifacts.filter(pl.col("step") > 0, pl.col("stage") != "evaluate").collect()
    assert found["seconds"][-1] == pytest.approx(steps["seconds"].sum())
    samples = recorded.samples.filter(pl.col("step") == 2).collect()
    cut = (samples["finish_reason"] == "length").mean()
    assert found["held_out_cut"].to_list() == [pytest.approx(found["held_out_cut"][0]), None, cut]
    assert sweep_table.is_finished(Point("small", {}, (), config), found)


def test_runs_are_compared_by_any_metric_that_they_were_evaluated_by(finished: Path) -> None:
    config = parse((finished / "runs/small/config.yaml").read_text())
    point = Point("small", {"seed": "0"}, (), config)
    found = sweep_table.compare(sweep_table.curve(point, "length_mean"), "length_mean")
    measured = [
        artifacts.load(finished / f"runs/small/step_000{step}/evaluate").metrics["length_mean"]
        for step in (0, 2)
    ]
    assert found.curves["held_out"].to_list() == [measured[0], None, measured[1]]
    assert "length_mean, step 2" in sweep_table.cells(found)[0]
    with pytest.raises(InputError, match=r"no metric 'blue'; choose among avg@2, .*pass@1"):
        sweep_table.curve(point, "blue")


EVALUATED = (
    *(given for given in SMALL if not given.startswith("warmstart.")),
    *("~warmstart", "schedule.steps=0"),
)


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_and_the_same_command_goes_on(
    policy: Path, tmp_path: Path
) -> None:
    good, bad, out = policy, tmp_path / "bad", tmp_path / "sweeps/small"
    bad.mkdir()
    arguments = ("sweep", *EVALUATED, f"model.path=choice({good},{bad})", "--jobs", "2")
    good_run, bad_run = (sweep.name("small", {"model.path": str(path)}) for path in (good, bad))
    said = dapo(tmp_path, *arguments)
    assert said.returncode == 1
    assert f"ended  {good_run}  held-out" in said.stdout
    assert f"failed {bad_run}  exit code 2" in said.stdout
    assert f"error: {bad}" in said.stdout.partition("the end of")[2]
    assert "1 of 2 runs failed" in said.stderr
    assert pl.read_parquet(out / "results.parquet")["variant"].to_list() == [f"path={good}"]
    assert bad_run in (out / "sweep.html").read_text()  # left out, by name
    made = (tmp_path / "runs" / good_run / "step_0000/evaluate").stat().st_mtime_ns

    shutil.copytree(good, bad, dirs_exist_ok=True)
    said = dapo(tmp_path, *arguments)
    assert (said.returncode, said.stderr) == (0, "")
    assert (tmp_path / "runs" / good_run / "step_0000/evaluate").stat().st_mtime_ns == made
    results = (out / "results.md").read_text()
    assert results.startswith("| variant | seeds |") and len(results.splitlines()) == 6

    (out / "results.md").unlink()
    said = dapo(tmp_path, *arguments, "--table-only")
    assert said.returncode == 0 and "began" not in said.stdout
    assert (out / "results.md").read_text() == results


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_of_a_run_outlives_its_sweep(
    policy: Path, tmp_path: Path, how: signal.Signals
) -> None:
    arguments = [*EVALUATED, f"model.path={policy}", "seed=0,1", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "sweep", *arguments],
        env={**os.environ, "DAPO_DATA": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while sum("pipeline.worker" in _words(child) for child in family) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(how)
        process.wait(timeout=2 * sweep.PATIENCE_S)
    _, alive = psutil.wait_procs(family, timeout=2 * guard.PATIENCE_S)
    assert alive == []


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it may be gone meanwhile
        return " ".join(process.cmdline())
    return ""


def test_jobs_follow_the_cores_and_a_gpu_is_for_one_run() -> None:
    cores = len(os.sched_getaffinity(0))
    assert sweep.default_jobs(load()) == cores
    assert sweep.default_jobs(load([f"machine.threads={2 * cores}"])) == 1
    assert sweep.default_jobs(load(["machine=gpu"])) == 1


def test_a_run_without_its_last_evaluation_is_not_finished() -> None:
    [point, _] = sweep.points(["seed=0,1", "schedule.steps=2"])
    assert isinstance(point, Point)
    assert sweep_table.is_finished(point, curves([0.1, None, 0.3]))
    assert not sweep_table.is_finished(point, curves([0.1, 0.2]))
    assert not sweep_table.is_finished(point, curves([0.1, 0.2, None]))
