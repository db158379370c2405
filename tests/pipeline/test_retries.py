"""What may end better at another try is tried again; nothing else is."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect_server import Server

from pipeline import retries
from pipeline.retries import tried
from pipeline.runner import Runner
from pipeline.worker import StageTimeout, Worker, WorkerDied
from stages import rollout, update
from stages.errors import InputError, NonFinite, OutOfMemory, StorageError
from stages.ranks import RankDied
from stages.settings import Machine, Settings

PASSING = (WorkerDied, RankDied, OutOfMemory, StorageError)
FINAL = (InputError, StageTimeout, NonFinite, ValueError)


def failing(*errors: Exception) -> Callable[[], str]:
    """Work that ends with each of the errors in turn, and then well."""
    left = list(errors)

    def work() -> str:
        if left:
            raise left.pop(0)
        return "made"

    return work


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "DELAY_S", 0)


@pytest.mark.parametrize("kind", PASSING)
def test_what_may_pass_is_tried_again_and_said(kind: type[Exception]) -> None:
    said: list[str] = []
    assert tried(failing(kind("once"), kind("twice")), retries=2, say=said.append) == "made"
    assert said == ["once; trying again", "twice; trying again"]


@pytest.mark.parametrize("kind", PASSING)
def test_after_the_last_try_the_error_is_raised(kind: type[Exception]) -> None:
    work = failing(kind("once"), kind("twice"), kind("three times"))
    with pytest.raises(kind, match="twice"):
        tried(work, retries=1, say=lambda _: None)


@pytest.mark.parametrize("kind", FINAL)
def test_what_would_end_in_the_same_way_is_not_tried_again(kind: type[Exception]) -> None:
    said: list[str] = []
    with pytest.raises(kind, match="once"):
        tried(failing(kind("once")), retries=9, say=said.append)
    assert said == []


class Full(Worker):
    """A worker whose device has room for so many tokens, or sequences, at once."""

    def __init__(self, knob: str, room: int) -> None:
        super().__init__()
        self.knob, self.room = knob, room

    def call(self, stage: str, arguments: dict[str, Any], **_: Any) -> dict[str, float]:
        if (asked := getattr(arguments["machine"], self.knob)) > self.room:
            raise OutOfMemory(f"no room for {asked}")
        return {"asked": asked}


@pytest.mark.parametrize(
    ("stage", "config", "knob"),
    [
        ("update", update.Config(), "micro_batch_tokens"),
        ("rollout", rollout.Config(), "max_num_seqs"),
    ],
)
def test_where_memory_ran_out_the_next_try_asks_for_half(
    stage: str, config: Settings, knob: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Full(knob, room=20)
    machine = Machine.model_validate({knob: 64})
    runner = Runner(machine, workers={"trainer": [worker], "engine": [worker], "tables": []})
    made: list[dict[str, float]] = []
    monkeypatch.setattr(
        "pipeline.artifacts.publish", lambda *_, metrics, **__: made.append(metrics)
    )
    said: list[str] = []
    tried(
        lambda: runner.build(stage, out=tmp_path / "out", config=config, inputs={}),
        retries=2,
        say=said.append,
    )
    assert said == ["no room for 64; trying again", "no room for 32; trying again"]
    assert made == [{"asked": 16}]


FLOW = """
import json
from prefect import flow
from pipeline import tasks
from pipeline.worker import WorkerDied
from stages.errors import InputError

tasks.DELAY_S = 0
tries = {}

def failing(label, *errors):
    left = list(errors)
    def build():
        tries[label] = tries.get(label, 0) + 1
        if left:
            raise left.pop(0)
        return "made", False
    return build

@flow
def trying():
    tasks.as_task("passes", failing("passes", WorkerDied("a"), WorkerDied("b")), {}, retries=2)
    for label, errors in {
        "turns": (WorkerDied("a"), InputError("b"), WorkerDied("c")),
        "bad": (InputError("a"), InputError("b")),
    }.items():
        try:
            tasks.as_task(label, failing(label, *errors), {}, retries=9)
        except InputError:
            continue
        raise AssertionError(label)

trying()
print(json.dumps(tries))
"""


@pytest.mark.slow
def test_a_task_is_retried_for_the_error_of_its_last_try(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FLOW], env=server.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"passes": 3, "turns": 2, "bad": 1}
