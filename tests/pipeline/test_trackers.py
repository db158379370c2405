"""Every step is in the tracker once, whatever happened to the run, the tracker or the network."""

import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from small_run import SMALL, digests
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from pipeline import artifacts, loop, summary, trackers
from pipeline.config import composed, load
from pipeline.loop import Step
from pipeline.rerun import Rerun
from stages.errors import InputError

KINDS = ["tensorboard", "mlflow", "wandb"]
OFFLINE = {"wandb": ["track.mode=offline"]}
Series = dict[str, list[tuple[int, float]]]


def settings(data: Path, kind: str, *overrides: str) -> list[str]:
    return [*SMALL, f"data={data}", f"track={kind}", *OFFLINE.get(kind, []), *overrides]


def train(data: Path, kind: str, *overrides: str) -> tuple[list[Step], list[str]]:
    """Train on with a tracker: all is served. Returns the steps, and what was said."""
    steps, said = list[Step](), list[str]()
    with loop.opened(composed(settings(data, kind, *overrides))) as (config, runner):
        trackers.train(config, loop.plainly(runner), stepped=steps.append, say=said.append)
    return steps, said


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow's, which takes seconds to make."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def data(data: Path, database: Path) -> Path:
    """The finished run, and a database for its tracker."""
    (data / "runs/small/tracker").mkdir()
    shutil.copy(database, data / "runs/small/tracker")
    return data


def track(data: Path, kind: str, steps: Sequence[Step], *overrides: str) -> list[str]:
    """Only what a run does with its tracker; returns what was said."""
    said = list[str]()
    with trackers.opened(load(settings(data, kind, *overrides)), say=said.append) as log:
        for step in steps:
            log(step)
    return said


def saved(data: Path) -> list[Step]:
    """The steps of the finished run, from its records."""

    def step(number: int) -> Step:
        place = data / "runs/small" / loop.step_name(number)
        stages = (artifacts.load(place / "round_0" / stage) for stage in loop.Round._fields)
        return Step(number, [loop.Round(*stages)], artifacts.load(place / "update"), None)

    return [step(1), step(2)]


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
            name = key.replace("avg_", "avg@")
            found[name] = sorted((point.step, point.value) for point in points)
    else:
        files = [[*wandb_records(f)] for f in sorted(local(data).glob("wandb/offline-*/*.wandb"))]
        mine = [r for file in files if file and file[0].run.display_name == name for r in file]
        rows = [json_row(record) for record in mine if record.HasField("history")]
        for row in {row["_step"]: row for row in rows}.values():
            for key in row.keys() - {"step", "_step", "_timestamp", "_runtime"}:
                found.setdefault(key, []).append((int(row["step"]), row[key]))
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
    first, second = saved(data)
    assert track(data, kind, [first]) == []
    assert train(data, kind)[1] == []
    assert train(data, kind)[1] == []
    series = held(data, kind)
    for name, points in series.items():
        steps = [0, 2] if "evaluate" in name else [1, 2]
        if name != "update/stale_gap_mean":  # there is none before the second step
            assert [step for step, _ in points] == steps, name
    for name, expected in trackers.figures(second).items():
        if not math.isnan(expected):
            assert series[name][-1] == (2, pytest.approx(expected, rel=1e-6)), name
    tokens = [step.rounds[0].rollout.metrics["tokens"] for step in (first, second)]
    assert series["rollout/tokens_total"] == [(1, tokens[0]), (2, sum(tokens))]
    assert series["update/entropy"][0][1] == pytest.approx(summary.numbers(first)["entropy"])
    evaluation = artifacts.load(data / "runs/small/step_0002/evaluate")
    assert series["evaluate/avg@2"][1][1] == pytest.approx(summary.accuracy(evaluation))
    names = {"score/acc", "score/reward", "rollout/truncated", "rollout/rounds", "rollout/tokens"}
    names |= {f"filter/{name}" for name in ("kept", "dropped", "carried", "reason/surplus")}
    names |= {f"update/{name}" for name in ("loss", "grad_norm", "lr", "gap_mean", "gap_max")}
    names |= {"update/clip_fraction_low", "update/clip_fraction_high", "seconds/rollout"}
    assert names <= set(series)
    assert_settings_are_held(data, kind)


def assert_settings_are_held(data: Path, kind: str) -> None:
    if kind == "tensorboard":
        events = EventAccumulator(str(local(data) / "small")).Reload()
        (tag, content), *_ = events.PluginTagToContent("hparams").items()
        assert tag == "_hparams_/session_start_info" and b"update.eps_high" in content
    elif kind == "mlflow":
        _, run = mlflow_run(data)
        assert (run.data.params["update.eps_high"], run.info.status) == ("0.28", "FINISHED")
    else:
        file = min(local(data).glob("wandb/offline-*/*.wandb"))
        configs = [r.run.config for r in wandb_records(file) if r.HasField("run")]
        values = {item.key: item.value_json for config in configs for item in config.update}
        assert values["update.eps_high"] == "0.28"


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_what_was_logged_before_a_crash_and_not_written_down_is_no_duplicate(
    data: Path, kind: str
) -> None:
    steps = saved(data)
    track(data, kind, steps[:1])
    before = ledger(data).read_text()
    track(data, kind, steps)
    ledger(data).write_text(before)
    track(data, kind, steps)
    series = held(data, kind)
    assert steps_of(series, "rollout/length") == [1, 2]
    assert steps_of(series, "evaluate/avg@2") == [0, 2]


def test_a_tracker_that_is_switched_on_later_gets_every_step_at_its_own_time(data: Path) -> None:
    steps = saved(data)
    track(data, "tensorboard", steps)  # another one does not matter
    track(data, "mlflow", steps)
    client, run = mlflow_run(data)
    points = client.get_metric_history(run.info.run_id, "update/loss")
    assert [point.step for point in points] == [1, 2]
    for point, step in zip(points, steps, strict=True):
        began = datetime.fromisoformat(step.update.record["started"]).timestamp()
        assert point.timestamp / 1000 == pytest.approx(began + step.update.record["seconds"])


def test_what_is_logged_already_costs_no_connection(data: Path) -> None:
    track(data, "tensorboard", saved(data))
    files = sorted(local(data).rglob("*"))
    track(data, "tensorboard", saved(data))
    assert sorted(local(data).rglob("*")) == files


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_were_rebuilt_go_to_a_new_run_of_the_tracker(data: Path, kind: str) -> None:
    track(data, kind, saved(data))
    Rerun.of(
        data / "runs/small", step=2, stage="score", round=0, overrides=["score.overlong_factor=0.5"]
    ).build(out=None, replace=True)
    track(data, kind, saved(data))
    old, new = held(data, kind), held(data, kind, "small.2")
    for series in (old, new):
        assert steps_of(series, "score/reward") == [1, 2]
        assert steps_of(series, "evaluate/avg@2") == [0, 2]
    assert old["score/reward"][0] == new["score/reward"][0]
    assert old["score/reward"][1] != new["score/reward"][1]


def test_an_evaluation_that_comes_late_goes_to_a_new_run_too_for_series_only_grow(
    data: Path,
) -> None:
    first = data / "runs/small/step_0000/evaluate"
    shutil.move(first, data / "aside")
    track(data, "tensorboard", saved(data))
    shutil.move(data / "aside", first)
    track(data, "tensorboard", saved(data))
    assert steps_of(held(data, "tensorboard"), "evaluate/avg@2") == [2]
    assert steps_of(held(data, "tensorboard", "small.2"), "evaluate/avg@2") == [0, 2]


def test_an_evaluation_of_a_policy_that_was_replaced_is_not_this_steps(data: Path) -> None:
    first, second = saved(data)
    other = second._replace(update=first.update)
    track(data, "tensorboard", [first, other])
    assert steps_of(held(data, "tensorboard"), "evaluate/avg@2") == [0]


def test_a_run_that_the_tracker_lost_is_logged_anew(data: Path) -> None:
    steps = saved(data)
    for kind in ("tensorboard", "mlflow"):
        track(data, kind, steps[:1])
        if kind == "tensorboard":
            shutil.rmtree(local(data) / "small")
        else:
            client, run = mlflow_run(data)
            client.delete_run(run.info.run_id)
        assert track(data, kind, steps) == []
        assert steps_of(held(data, kind), "rollout/length") == [1, 2]


def test_a_reason_that_drops_nothing_in_a_step_is_zero_not_a_gap(data: Path) -> None:
    first, second = saved(data)
    [made] = second.rounds
    metrics = {k: v for k, v in made.filter.metrics.items() if "reason" not in k}
    bare = artifacts.Artifact(made.filter.path, made.filter.record | {"metrics": metrics})
    track(data, "tensorboard", [first, second._replace(rounds=[made._replace(filter=bare)])])
    assert held(data, "tensorboard")["filter/reason/surplus"] == [(1, 2.0), (2, 0.0)]


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_trackers import load, saved, settings, trackers
data = Path(sys.argv[3])
with trackers.opened(load(settings(data, "wandb"))) as log:
    for step in saved(data):
        log(step)
    while len(log._scribe._series.logged) < 4:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_that_wandb_may_not_have_written_when_it_was_killed_are_logged_again(
    data: Path,
) -> None:
    here = Path(__file__).parent
    died = subprocess.run([sys.executable, "-c", KILLED, here, here.parent, data], check=False)
    assert died.returncode == -signal.SIGKILL
    assert track(data, "wandb", saved(data)) == []
    assert steps_of(held(data, "wandb"), "rollout/length") == [1, 2]
    assert steps_of(held(data, "wandb"), "evaluate/avg@2") == [0, 2]


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


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_tracker_that_cannot_be_reached_is_said_once_and_gets_its_steps_later(
    data: Path, kind: str, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nobody)
    monkeypatch.setenv("WANDB_BASE_URL", nobody)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    online = ["track.mode=online"] if kind == "wandb" else []
    steps, said = train(data, kind, "track.patience_s=1", *online)
    assert [step.number for step in steps] == [1, 2]
    (message,) = said
    assert message.startswith(f"track={kind}: ") and "the same command later" in message
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert train(data, kind)[1] == []
    assert steps_of(held(data, kind), "rollout/length") == [1, 2]


def test_a_tracker_that_comes_back_gets_what_it_missed_in_the_same_run(data: Path) -> None:
    """A file stands where its directory is to be, until the first attempt has failed."""
    steps = saved(data)
    shutil.rmtree(local(data))
    local(data).write_text("in the way")
    said: list[str] = []
    with trackers.opened(load(settings(data, "tensorboard")), say=said.append) as log:
        log(steps[0])
        while not log._scribe.problem:  # type: ignore[attr-defined]
            time.sleep(0.01)
        local(data).unlink()
        log(steps[1])
    assert len(said) == 1 and "NotADirectoryError" in said[0]
    assert steps_of(held(data, "tensorboard"), "rollout/length") == [1, 2]
    assert steps_of(held(data, "tensorboard"), "evaluate/avg@2") == [0, 2]


def test_a_server_that_never_answers_is_left_alone_in_the_end(data: Path, silence: str) -> None:
    said = track(data, "mlflow", saved(data), f"track.uri={silence}", "track.patience_s=1")
    assert len(said) == 1 and "within 1 s" in said[0]


def test_the_command_ends_well_without_its_tracker_and_says_so(data: Path, nobody: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipeline", "train", "--direct"),
            *settings(data, "mlflow", f"track.uri={nobody}", "track.patience_s=0.5"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("track=mlflow: ") == 1 and "held-out accuracy" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    data: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(data)])
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[-1]])
    monkeypatch.delitem(sys.modules, kind, raising=False)
    (data / kind).mkdir()  # as wandb itself makes one in the working directory
    with (
        pytest.raises(InputError, match=rf"track={kind}.*pip install 'dapo-pipeline\[{kind}\]'"),
        trackers.opened(load(settings(data, kind))),
    ):
        pass


def test_a_ledger_that_nobody_can_read_is_named(data: Path) -> None:
    ledger(data).write_text("{")
    with pytest.raises(InputError, match=r"tracker\.json cannot be read.*delete it"):
        track(data, "tensorboard", [])


def test_the_tracker_is_part_of_no_artifact(data: Path) -> None:
    before = digests(data)
    train(data, "tensorboard")
    assert digests(data) == before
    assert not [key for key in load(["track=mlflow"]).stage_settings() if key.startswith("track")]


def test_a_tracker_is_imported_only_when_it_is_chosen() -> None:
    code = (
        "import sys; from pipeline import trackers; "
        f"sys.exit(bool({{'torch', *{KINDS}}} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["track=mlflow", "track.uri=https://me:s3cret@host/api"], "MLFLOW_TRACKING_USERNAME"),
        (["track=tensorboard", "track.uri=http://host"], "uri is of track=mlflow"),
        (["track=neptune"], "Available options in 'track'"),
        (["track=mlflow", "track.experiment=x"], "unknown key 'track.experiment'"),
    ],
)
def test_a_setting_that_no_tracker_has_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        load(overrides)
    assert "s3cret" not in str(refused.value)
