"""Every step is in the tracker once, whatever happened to the run, the tracker or the network."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from small_run import SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from pipeline import artifacts, loop, summary, trackers
from pipeline.config import composed, load
from pipeline.loop import Step
from pipeline.rerun import Rerun

KINDS = ["tensorboard", "mlflow", "wandb"]
OFFLINE = {"wandb": ["track.mode=offline"]}
Series = dict[str, list[tuple[int, float]]]


def track(data: Path, kind: str, *overrides: str) -> tuple[list[Step], list[str]]:
    """Train on with a tracker; returns the steps and what was said about it."""
    steps, said = list[Step](), list[str]()
    text = composed([*SMALL, f"data={data}", f"track={kind}", *OFFLINE.get(kind, []), *overrides])
    with loop.opened(text) as (config, runner):
        trackers.train(config, loop.plainly(runner), stepped=steps.append, say=said.append)
    return steps, said


def local(data: Path) -> Path:
    return data / "runs/small/tracker"


def ledger(data: Path) -> Path:
    return data / "runs/small/tracker.json"


def held(data: Path, kind: str, name: str = "small") -> Series:
    """What the tracker holds of the run `name`, read by its own library: steps and values."""
    found: Series = {}
    if kind == "tensorboard":
        events = EventAccumulator(str(local(data) / name), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    elif kind == "mlflow":
        client, run = mlflow_run(data, name)
        for key in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, key)
            found[key.replace("avg_", "avg@")] = [(point.step, point.value) for point in points]
    else:
        for file in sorted(local(data).glob("wandb/*/*.wandb"), key=lambda f: f.stat().st_mtime_ns):
            records = list(wandb_records(file))
            if records[0].run.display_name == name:
                for row in (json_row(r) for r in records if r.HasField("history")):
                    for key, value in row.items():
                        found.setdefault(key, []).append((row["step"], value))
    return found


def mlflow_run(data: Path, name: str = "small") -> tuple[MlflowClient, Any]:
    client = MlflowClient(f"sqlite:///{local(data)}/mlflow.db")
    experiment = client.get_experiment_by_name("dapo").experiment_id
    (run,) = client.search_runs([experiment], f"attributes.run_name = '{name}'")
    return client, run


def wandb_records(file: Path) -> Iterator[Record]:
    """The library writes LevelDB's log format, and has no reader in Python."""
    content = file.read_bytes()
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or last
            record = Record.FromString(parts)
            if record.WhichOneof("record_type") != "header":
                yield record
            parts = b""


def json_row(record: Record) -> dict[str, float]:
    items = record.history.item
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def steps_of(series: Series, name: str) -> list[int]:
    return [step for step, _ in series[name]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_twice_is_one_series_of_all_its_figures(
    data: Path, kind: str
) -> None:
    for steps in (1, 2, 2):
        made, said = track(data, kind, f"schedule.steps={steps}")
        assert not said
    series = held(data, kind)
    assert steps_of(series, "rollout/length") == [1, 2]
    assert steps_of(series, "evaluate/avg@2") == [0, 1, 2]
    first, second = made
    for name, expected in trackers.figures(first).items():
        if expected == expected:
            assert series[name][0] == (1, pytest.approx(expected, rel=1e-6)), name
    tokens = [step.rounds[0].rollout.metrics["tokens"] for step in (first, second)]
    assert series["rollout/tokens_total"] == [(1, tokens[0]), (2, sum(tokens))]
    assert series["update/entropy"][1][1] == pytest.approx(summary.numbers(second)["entropy"])
    assert series["evaluate/avg@2"][2][1] == pytest.approx(summary.accuracy(second.evaluate))
    names = {"score/acc", "score/reward", "rollout/truncated", "rollout/rounds", "rollout/tokens"}
    names |= {f"filter/{name}" for name in ("kept", "dropped", "carried", "reason/surplus")}
    names |= {f"update/{name}" for name in ("loss", "grad_norm", "lr", "gap_mean", "gap_max")}
    names |= {"update/clip_fraction_low", "update/clip_fraction_high", "seconds/rollout"}
    assert names <= set(series)


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_are_there_too(data: Path, kind: str) -> None:
    track(data, kind)
    if kind == "tensorboard":
        events = EventAccumulator(str(local(data) / "small")).Reload()
        assert (
            b"update.eps_high"
            in events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        )
    elif kind == "mlflow":
        _, run = mlflow_run(data)
        assert (run.data.params["update.eps_high"], run.info.status) == ("0.28", "FINISHED")
    else:
        (file,) = local(data).glob("wandb/*/*.wandb")
        configs = [r.run.config for r in wandb_records(file) if r.HasField("run")]
        values = {item.key: item.value_json for config in configs for item in config.update}
        assert values["update.eps_high"] == "0.28"


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_was_logged_before_a_crash_and_not_written_down_is_no_duplicate(
    data: Path, kind: str
) -> None:
    track(data, kind, "schedule.steps=1")
    before = ledger(data).read_text()
    track(data, kind)
    ledger(data).write_text(before)
    track(data, kind)
    series = held(data, kind)
    assert steps_of(series, "rollout/length") == [1, 2]
    assert steps_of(series, "evaluate/avg@2") == [0, 1, 2]


def test_a_tracker_that_is_switched_on_later_gets_every_step_with_its_own_time(data: Path) -> None:
    track(data, "tensorboard")  # another one does not matter
    (_, second), _ = track(data, "mlflow")
    client, run = mlflow_run(data)
    points = client.get_metric_history(run.info.run_id, "update/loss")
    assert [point.step for point in points] == [1, 2]
    began = second.update.record["started"]
    assert points[1].timestamp / 1000 == pytest.approx(
        trackers.datetime.fromisoformat(began).timestamp() + second.update.record["seconds"]
    )
    assert {key.split()[0] for key in json.loads(ledger(data).read_text())} == {
        "tensorboard",
        "mlflow",
    }


def test_what_is_logged_already_costs_no_connection(data: Path) -> None:
    track(data, "tensorboard")
    files = sorted(local(data).rglob("*"))
    assert track(data, "tensorboard")[1] == []
    assert sorted(local(data).rglob("*")) == files


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_were_rebuilt_go_to_a_new_run_of_the_tracker(data: Path, kind: str) -> None:
    steps, _ = track(data, kind)
    config = load([*SMALL, f"data={data}", f"track={kind}", *OFFLINE.get(kind, [])])
    score = Rerun.of(
        data / "runs/small", step=2, stage="score", round=0, overrides=["score.overlong_factor=0.5"]
    ).build(out=None, replace=True)
    with trackers.opened(config) as log:
        log(steps[0])
        log(steps[1]._replace(rounds=[steps[1].rounds[0]._replace(score=score)]))
    old, new = held(data, kind), held(data, kind, "small.2")
    assert [steps_of(series, "score/reward") for series in (old, new)] == [[1, 2]] * 2
    assert steps_of(new, "evaluate/avg@2") == [0, 1, 2][::2]
    assert old["score/reward"][0] == new["score/reward"][0]
    assert new["score/reward"][1][1] == pytest.approx(score.metrics["reward"])


def test_an_evaluation_that_came_late_does_not_go_back_in_a_series(data: Path) -> None:
    shutil.move(data / "runs/small/step_0000/evaluate", data / "aside")
    with trackers.opened(load([*SMALL, f"data={data}", "track=tensorboard"])) as log:
        for step in saved_steps(data):
            log(step)
    shutil.move(data / "aside", data / "runs/small/step_0000/evaluate")
    track(data, "tensorboard")
    assert steps_of(held(data, "tensorboard"), "evaluate/avg@2") == [2]
    assert steps_of(held(data, "tensorboard", "small.2"), "evaluate/avg@2") == [0, 2]


def saved_steps(data: Path) -> list[Step]:
    run = data / "runs/small"
    return [
        Step(
            number,
            [
                loop.Round(
                    *(
                        artifacts.load(run / f"step_{number:04d}/round_0" / stage)
                        for stage in loop.Round._fields
                    )
                )
            ],
            artifacts.load(run / f"step_{number:04d}/update"),
            None,
        )
        for number in (1, 2)
    ]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_a_store_that_was_deleted_is_filled_again(data: Path, kind: str) -> None:
    track(data, kind)
    shutil.rmtree(local(data))
    _, said = track(data, kind)
    assert not said
    if kind == "tensorboard":  # nothing was missing by the ledger, so nothing was looked at
        assert not local(data).exists()
    ledger_of(data, kind)["logged"].popitem()


def ledger_of(data: Path, kind: str) -> dict[str, Any]:
    found = json.loads(ledger(data).read_text())
    (series,) = (series for key, series in found.items() if key.startswith(kind))
    return dict(series)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where connections are refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def silence() -> Iterator[str]:
    """The address of a server that takes requests and never answers."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(50)
        yield f"http://127.0.0.1:{mute.getsockname()[1]}"
