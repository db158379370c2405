"""One step off: the next step's first round is sampled while this step's batch is trained on."""

import shutil
import threading
from pathlib import Path

import pytest
from small_run import SMALL, digests, workers

from pipeline import artifacts, loop
from pipeline.artifacts import Artifact
from pipeline.config import composed, load
from pipeline.loop import Inputs
from stages import policy, tables
from stages.errors import InputError
from stages.settings import Settings

AHEAD = ["schedule=one_step_off", "schedule.steps=3"]
PATIENCE_S = 60


class Spy:
    """Executes stages; can be told to fail one, or to have one wait for another's start."""

    def __init__(self, execute: loop.Execute) -> None:
        self.execute = execute
        self.started: dict[str, threading.Event] = {}
        self.waits: tuple[str, str] | None = None
        self.fails: str | None = None

    def event(self, label: str) -> threading.Event:
        return self.started.setdefault(label, threading.Event())

    def __call__(
        self, label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs
    ) -> Artifact:
        self.event(label).set()
        if self.waits and label == self.waits[0]:
            assert self.event(self.waits[1]).wait(PATIENCE_S), f"{self.waits[1]} did not start"
        if label == self.fails:
            raise InputError(f"{label} failed")
        return self.execute(label, stage, out=out, config=config, inputs=inputs)


def train(
    data: Path,
    *overrides: str,
    waits: tuple[str, str] | None = None,
    fails: str | None = None,
) -> Path:
    """Train below `data`; returns the run's directory."""
    text = composed([*SMALL, *AHEAD, f"data={data}", *overrides])
    with loop.opened(text, workers=workers()) as (config, runner):
        spy = Spy(loop.plainly(runner))
        spy.waits, spy.fails = waits, fails
        loop.train(config, spy)
    return data / "runs" / "small"


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps in which every update waited for the next round to be under way."""
    data = tmp_path_factory.mktemp("ahead")
    return train(data, waits=("step-1 / update", "step-2 / round-0 / rollout"))


@pytest.fixture
def begun(ahead: Path, tmp_path: Path) -> Path:
    """The data root of a run that has its first policy, and nothing else."""
    for made in ("config.yaml", "prompts", "heldout", "step_0000"):
        source, copy = ahead / made, tmp_path / "runs" / "small" / made
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy)
    return tmp_path


def test_each_first_round_is_sampled_by_the_policy_before_the_one_that_it_trains(
    ahead: Path,
) -> None:
    samplers = ("step_0000/warmstart", "step_0000/warmstart", "step_0001/update")
    for number, sampler in enumerate(samplers, start=1):
        rollouts = tables.read(ahead / f"step_000{number}/round_0/rollout", "rollouts")
        assert rollouts["policy"].unique().to_list() == [policy.digest(ahead / sampler)]


def test_the_age_of_what_was_sampled_ahead_is_on_record_and_weighed(ahead: Path) -> None:
    ages = []
    for number in (1, 2, 3):
        batch = tables.read(ahead / f"step_000{number}/round_0/filter", "batch")
        ages.append(batch["age"].unique().sort().to_list())
    assert ages == [[0], [1], [1]]
    first, second = (
        artifacts.load(ahead / f"step_000{number}/update").metrics for number in (1, 2)
    )
    assert first["gap_mean"] < 1e-5 and first["stale_gap_mean"] is None
    assert second["gap_mean"] is None and second["stale_gap_mean"] > 1e-4


def test_a_round_that_is_not_sampled_ahead_is_the_same(ahead: Path, begun: Path) -> None:
    train(begun, "schedule.steps=1")  # the last step has none to sample for
    again, before = digests(train(begun, "schedule.steps=2")), digests(ahead)
    assert "step_0002/update" in again
    assert all(again[place] == before[place] for place in again if place in before)


def test_a_failed_update_keeps_the_round_that_was_sampled_meanwhile(begun: Path) -> None:
    with pytest.raises(InputError, match="step-1 / update failed"):
        train(begun, fails="step-1 / update")
    assert artifacts.load(begun / "runs/small/step_0002/round_0/rollout").metrics["responses"]


def test_a_failed_round_ahead_fails_the_run_and_keeps_the_update(begun: Path) -> None:
    with pytest.raises(InputError, match="step-2 / round-0 / rollout failed"):
        train(begun, fails="step-2 / round-0 / rollout")
    assert artifacts.load(begun / "runs/small/step_0001/update").metrics["optimizer_steps"]


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("filter.max_age=0", "filter.max_age>=1: responses are one step old"),
        ("update.tis=off", "update.tis=token or sequence"),
        ("schedule.keep_policies=1", "schedule.keep_policies>=2"),
        ("machine.engine_between=exit", "machine.engine_between=stay"),
    ],
)
def test_what_one_step_off_needs_is_checked_before_anything_starts(
    override: str, needed: str
) -> None:
    with pytest.raises(InputError, match=f"one_step_off needs {needed}"):
        load([*AHEAD, override])


def test_a_run_does_not_change_its_schedule_in_silence(ahead: Path) -> None:
    with pytest.raises(InputError, match=r"schedule\.one_step_off: True → False"):
        train(ahead.parents[1], "schedule.one_step_off=false")
