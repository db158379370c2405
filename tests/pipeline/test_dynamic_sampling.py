"""The loop's side of dynamic sampling: what is asked next, what waits, and when a run ends."""

import shutil
from pathlib import Path

import polars as pl
import pytest
from small_run import digests, run

from pipeline import artifacts, simulate
from pipeline.config import load, parse
from pipeline.loop import round_size
from stages import tables
from stages.errors import Exhausted, InputError

ADAPTIVE = [
    *("run=adaptive", "select=adaptive", "select.pool_by=level", "select.size=8", "select.rest=2"),
    *("filter=dynamic_sampling", "filter.batch_groups=3"),
    *("warmstart.plain_steps=250", "evaluate.n=1"),  # a policy that is right now and then
]


def groups_of(directory: Path) -> pl.DataFrame:
    """The groups of each step, as its last round decided on them."""
    steps = sorted(directory.glob("step_*[1-9]"))
    last = [sorted(step.glob("round_*/filter"))[-1] for step in steps]
    return pl.concat(
        [tables.read(path, "groups").with_columns(step=i) for i, path in enumerate(last, 1)]
    )


@pytest.fixture(scope="module")
def adaptive(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that chose its prompts by what it had seen; its directory."""
    data = tmp_path_factory.mktemp("adaptive")
    run(data, [*ADAPTIVE, "schedule.steps=6"])
    return data / "runs/adaptive"


def test_an_adaptive_run_remembers_every_prompt_that_it_asked(adaptive: Path) -> None:
    rounds = sorted(adaptive.glob("step_*/round_*/select"))
    asked: set[str] = set()
    for path in rounds:
        assert set(tables.read(path, "beliefs")["prompt_id"]) == asked
        asked |= set(tables.read(path, "selection")["prompt_id"])
    whys = tables.read(rounds, "selection")["why"]
    assert set(whys) <= {"explore", "unseen", "informative"}


def test_an_adaptive_run_that_is_resumed_chooses_the_same_prompts(
    adaptive: Path, tmp_path: Path
) -> None:
    again = tmp_path / "runs/adaptive"
    shutil.copytree(adaptive, again)
    for step in ("step_0004", "step_0005", "step_0006"):
        shutil.rmtree(again / step)
    run(tmp_path, [*ADAPTIVE, "schedule.steps=6"])
    assert digests(again) == digests(adaptive)


def test_the_accounts_of_a_whole_run_close(adaptive: Path) -> None:
    """What was sampled was trained, dropped by name, or still waits; nothing came twice."""
    groups = groups_of(adaptive)
    fresh = groups.filter("sampled")
    assert fresh["group_id"].is_unique().all()
    ends = groups.filter((pl.col("decision") != "carried") | (pl.col("step") == 6))
    assert sorted(ends["group_id"]) == sorted(fresh["group_id"])
    kept = groups.filter(decision="kept")["group_id"]
    assert kept.is_unique().all()
    for step in range(2, 7):
        before = groups.filter(step=step - 1, decision="carried")["group_id"]
        assert set(groups.filter(~pl.col("sampled"), step=step)["group_id"]) == set(before)


def test_a_simulation_of_the_settings_as_they_were_finds_what_happened(adaptive: Path) -> None:
    config = parse((adaptive / "config.yaml").read_text())
    outcome = simulate.simulated(simulate.Recorded(adaptive, config), config, seed=0)
    groups = groups_of(adaptive)
    kept = groups.filter(decision="kept")
    rollouts = tables.read(sorted(adaptive.glob("step_*/round_*/rollout")), "rollouts")
    assert outcome.groups == rollouts["group_id"].n_unique()
    assert outcome.tokens == rollouts["length"].sum()
    assert outcome.kept == len(kept)
    assert outcome.age == kept["age"].mean()
    assert outcome.rounds == len(list(adaptive.glob("step_*/round_*")))
    assert outcome.waiting == len(groups.filter(decision="carried", step=6))


def test_simulated_settings_have_a_row_each_and_a_picture(adaptive: Path, tmp_path: Path) -> None:
    rows = simulate.simulate(
        adaptive, ["select.policy=shuffle,adaptive", "rollout.n=2,4"], repeats=2
    )
    assert [row["settings"] for row in rows] == [
        "as it ran",
        "select.policy=shuffle rollout.n=2",
        "select.policy=shuffle rollout.n=4",
        "select.policy=adaptive rollout.n=2",
        "select.policy=adaptive rollout.n=4",
    ]
    # two responses are alike more often than four
    assert rows[1]["asked_per_kept"] > rows[2]["asked_per_kept"]
    for ending in ("svg", "html"):
        simulate.plot(rows, tmp_path / f"costs.{ending}")
        assert "tokens generated per trained group" in (tmp_path / f"costs.{ending}").read_text()
    with pytest.raises(InputError, match=r"costs\.gif: expected a name that ends in"):
        simulate.plot(rows, tmp_path / "costs.gif")


def test_a_simulation_refuses_what_no_record_can_tell(adaptive: Path) -> None:
    with pytest.raises(InputError, match=r"update\.lr=1: nothing recorded tells"):
        simulate.simulate(adaptive, ["update.lr=1"])


def test_discarding_the_surplus_wastes_what_carrying_it_trains(adaptive: Path) -> None:
    carried, discarded = (
        simulate.simulate(adaptive, [f"filter.max_age={age}", "select.size=16"])[1]
        for age in (1, 0)
    )
    assert discarded["wasted"] > carried["wasted"]


def test_a_round_is_as_large_as_what_is_lacking_needs() -> None:
    half = {"sampled": 8, "sampled_informative": 4}
    assert round_size(4, [], most=32) == 32
    assert round_size(4, [half], most=32) == 10  # 4 lacking ÷ ½, and a quarter to spare
    assert round_size(4, [half, {"sampled": 8, "sampled_informative": 0}], most=32) == 20
    assert round_size(4, [{"sampled": 8, "sampled_informative": 0}], most=32) == 32
    assert round_size(0, [half], most=32) == 1


def test_a_run_ends_by_name_when_its_prompts_are_used_up_and_goes_on_with_more_epochs(
    data: Path,
) -> None:
    # 6 asked, of which 2 are carried; then 3, 5
    used_up = "the prompts are used up: 1 epochs end before step 4 of 5 has its batch"
    finite = ["run=finite", "prompts.count=12", "schedule.steps=5", "evaluate.n=1"]
    with pytest.raises(Exhausted, match=used_up):
        run(data, [*finite, "schedule.epochs=1"])
    place = data / "runs/finite"
    chosen = tables.read(sorted(place.glob("step_*/round_*/select")), "selection")
    assert set(chosen.filter(epoch=0)["prompt_id"]) == set(
        tables.read(place / "prompts", "prompts")["prompt_id"]
    )
    assert artifacts.load(place / "step_0003/evaluate").metrics["avg@1"] >= 0
    with pytest.raises(Exhausted, match=used_up):  # nothing is built again
        run(data, [*finite, "schedule.epochs=1"])
    built = run(data, [*finite, "schedule.epochs=2"])
    assert built[0] == "step-4 / round-0 / select"


def test_what_was_accepted_before_the_prompts_ended_is_named(data: Path) -> None:
    ends = ["run=ends", "schedule.epochs=1", "filter.batch_groups=8", "prompts.count=5"]
    with pytest.raises(Exhausted, match="6 informative groups are saved and were not trained"):
        run(data, ends)


def test_only_a_shuffle_has_epochs() -> None:
    with pytest.raises(InputError, match=r"select\.policy=adaptive has no epochs"):
        load(["select=adaptive", "schedule.epochs=1"])


def test_a_shortage_that_is_carried_trains_nothing_and_fills_the_next_batch(data: Path) -> None:
    short = ["run=waits", "filter.batch_groups=10", "schedule.max_rounds=1", "filter.max_age=1"]
    run(data, [*short, "schedule.on_shortage=carry", "schedule.steps=2"])
    first, second = (data / f"runs/waits/step_000{i}" for i in (1, 2))
    groups = tables.read(first / "round_0/filter", "groups")
    assert groups["reason"].to_list() == ["short"] * 6
    assert artifacts.load(first / "update").metrics["optimizer_steps"] == 0
    batch = tables.read(second / "round_0/filter", "batch")
    assert batch["group_id"].n_unique() == 10
    assert set(groups["group_id"]) < set(batch["group_id"])
    assert set(batch["age"]) == {0}  # the policy has not moved
    assert artifacts.load(second / "update").metrics["optimizer_steps"] > 0
