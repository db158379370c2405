"""A rollout that dies halfway costs what was unfinished, and ends in the very bytes."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import fresh
from small_run import workers

from pipeline import artifacts
from pipeline.artifacts import Artifact
from pipeline.runner import Runner
from pipeline.worker import WorkerDied
from stages import prompts, rollout, select, tables
from stages.errors import InputError
from stages.settings import Machine

N, GROUPS = 8, 48
CONFIG = rollout.Config(engine="hf", n=N, max_tokens=64)
MACHINE = Machine(max_num_seqs=N)  # a group at a time


@pytest.fixture
def inputs(policy: Path, tmp_path: Path) -> dict[str, Path]:
    """What a rollout of many groups reads."""
    some, chosen = fresh(tmp_path, "prompts"), fresh(tmp_path, "selection")
    prompts.run(out=some, config=prompts.Config(count=GROUPS), machine=MACHINE)
    select.run(prompts=some, out=chosen, config=select.Config(size=GROUPS), machine=MACHINE)
    return {"selection": chosen, "prompts": some, "policy": policy}


def build(out: Path, runner: Runner, inputs: dict[str, Any]) -> Artifact:
    return runner.build("rollout", out=out, config=CONFIG, inputs=inputs)


def kept(out: Path) -> int:
    """How many rows lie beside `out`, finished."""
    files = out.parent.glob(f".partial-{out.name}-*/rollouts/*.parquet")
    return sum(len(tables.read(file, "rollouts")) for file in files)


def kill_at_half(runner: Runner, out: Path) -> None:
    """SIGKILL for the engine's process as soon as half of the rows are kept."""
    deadline = time.monotonic() + 120
    while kept(out) < GROUPS * N / 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process = runner._workers["engine"][0]._process
    assert process
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_rollout_killed_halfway_generates_the_other_half_and_ends_in_the_same_bytes(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "killed" / "rollout"
    with Runner(MACHINE, logged=True, workers=workers()) as runner:
        killer = threading.Thread(target=kill_at_half, args=(runner, out))
        killer.start()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            build(out, runner, inputs)
        killer.join()
        assert not out.exists()
        saved = kept(out)
        assert GROUPS * N / 2 <= saved < GROUPS * N
        again = build(out, runner, inputs)
        undisturbed = build(tmp_path / "undisturbed" / "rollout", runner, inputs)
    assert again.metrics["recovered"] == saved
    assert again.metrics["generated"] == GROUPS * N - saved
    assert undisturbed.metrics["recovered"] == 0
    assert again.digest == undisturbed.digest
    assert not list(out.parent.glob(".*"))  # what was kept is gone, now that it is published


def test_what_attempts_kept_goes_with_the_publication_whatever_their_recipes(
    tmp_path: Path,
) -> None:
    out = tmp_path / "rollout"
    recipes = [artifacts.Recipe("rollout", {"seed": seed}, {}) for seed in (0, 1)]
    partials = {artifacts.partial(out, recipe) for recipe in recipes}
    other = artifacts.partial(tmp_path / "rollout-2", recipes[0])
    for directory in (*partials, other):
        directory.mkdir()
    assert len(partials) == 2
    assert artifacts.partial(out, recipes[0]) in partials  # equal recipes, one place
    artifacts.forget_partial(out)
    assert list(tmp_path.iterdir()) == [other]


def test_a_stage_that_fails_before_it_samples_leaves_nothing_but_its_log(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "failed" / "rollout"
    (tmp_path / "empty").mkdir()
    with Runner(MACHINE, logged=True, workers=workers()) as runner, pytest.raises(InputError):
        build(out, runner, inputs | {"policy": tmp_path / "empty"})
    assert [path.name for path in out.parent.iterdir()] == ["rollout.log"]
    log = (out.parent / "rollout.log").read_text()
    assert "rollout begins, recipe" in log and "InputError:" in log and "Traceback" in log


class Called:
    """A worker that writes down what is asked of it."""

    def __init__(self, *, dead: bool = False) -> None:
        self.running, self.dead = True, dead
        self.log: list[str] = []

    def call(
        self, stage: str, arguments: object, *, function: str = "run", **_: object
    ) -> dict[str, float]:
        self.log.append(f"{stage}.{function}")
        if self.dead:
            raise WorkerDied("killed while it slept")
        return {}

    def close(self) -> None:
        self.running = False
        self.log.append("closed")


@pytest.mark.parametrize(
    ("between", "engine", "trainer"),
    [
        ("stay", ["rollout.run"], ["update.run"]),
        ("sleep", ["engines.sleep", "rollout.run"], ["update.run", "closed"]),
        ("exit", ["closed", "rollout.run"], ["update.run", "closed"]),
    ],
)
def test_engine_and_trainer_make_room_for_each_other_as_the_machine_says(
    between: str, engine: list[str], trainer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine.model_validate({"device": "cuda", "engine_between": between})
    runner, sampling, training = Runner(machine), Called(), Called()
    monkeypatch.setattr(runner, "_workers", {"engine": [sampling], "trainer": [training]})
    runner._call("update", {})
    sampling.running = True
    runner._call("rollout", {})
    assert (sampling.log, training.log) == (engine, trainer)


def test_an_engine_that_is_dead_already_does_not_keep_the_trainer_from_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(Machine(device="cuda", engine_between="sleep"))
    training = Called()
    monkeypatch.setattr(runner, "_workers", {"engine": [Called(dead=True)], "trainer": [training]})
    runner._call("update", {})
    assert training.log == ["update.run"]
