"""A run's figures in an experiment tracker: TensorBoard, MLflow or Weights & Biases, by config.

A thread of its own talks to the tracker and catches whatever that raises, so that a tracker
neither stops nor slows a run. `tracker.json` in the run's directory says what the tracker holds;
the rest is logged from the records, at its own step and time, as soon as the tracker takes it. A
run of the tracker only grows: where a step was rebuilt, or evaluated after a later one was logged,
all steps go to a new one, such as `demo.2`.
"""

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter, ValidationError

from pipeline import artifacts, loop, summary
from pipeline.artifacts import RECORD, Artifact
from pipeline.config import RunConfig, Track
from pipeline.loop import Execute, Step, step_name
from pipeline.mirror import LEDGER, Mirror
from stages.errors import InputError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from wandb import Run

DIRECTORY = "tracker"  # of a run
MOST_SKIPPED = 64  # points that come before the next attempt, after many that failed
INTERRUPTED_S = 5.0  # who interrupts a run does not wait for its tracker
MLFLOW_PARAMS = 100  # in one request
Scalar = str | int | float | bool


class Point(NamedTuple):
    """The figures of one step, or of the evaluation of its policy."""

    place: str  # of the artifact that they end with
    step: int
    digest: str  # another one when what they come from was rebuilt
    time: float  # when that was made, in seconds since 1970
    metrics: dict[str, float]


class Series(BaseModel):
    """What a tracker holds of a run."""

    run: str | None = None  # the tracker's own id
    number: int = 1  # of its runs, which begin anew when steps are rebuilt
    logged: dict[str, str] = {}  # the digest of each point, by place, in their order

    @property
    def last(self) -> int:
        """The last step that is logged; -1 if none is."""
        place = next(reversed(self.logged), None)
        return -1 if place is None else int(place.partition("/")[0].removeprefix("step_"))


LEDGERS = TypeAdapter(dict[str, Series])  # by tracker and place


class Gone(Exception):
    """The tracker does not have the run any more."""


class Tracker(Protocol):
    """A run in a tracker; all of it is called by one thread.

    `settles_s`: a point that is taken may be lost with the process for so long, until `finish`.
    """

    settles_s: float

    def start(
        self, run: str | None, *, name: str, last: int, settings: Mapping[str, Scalar]
    ) -> str:
        """Begin a run, or go on with `run` after step `last`; returns its id.

        Raises `Gone` if there is no such run.
        """

    def log(self, point: Point, *, row: int) -> None:
        """Take the run's point number `row`."""

    def finish(self, *, completed: bool) -> None:
        """Flush, and mark the run as ended."""

    def abandon(self) -> None:
        """Let go of what an error left behind; `start` may be called again."""


def train(
    config: RunConfig,
    execute: Execute,
    *,
    stepped: Callable[[Step], None],
    say: Callable[[str], None],
    mirror: Mirror | None = None,
) -> Artifact:
    """`loop.train`, with every step in the run's tracker as well.

    Args:
        say: is told once, if the tracker fails.
    """
    try:
        with opened(config, say=say) as track:

            def both(step: Step) -> None:
                stepped(step)
                track(step)

            return loop.train(config, execute, stepped=both, mirror=mirror)
    finally:
        if mirror and (mirror.directory / LEDGER).exists():
            mirror.push_text(LEDGER)


@contextmanager
def opened(
    config: RunConfig, *, say: Callable[[str], None] = print
) -> Iterator[Callable[[Step], None]]:
    """A function that takes the run's steps, served ones too, in their order.

    Raises `InputError` if the tracker's library is not installed or `tracker.json` is unreadable.
    """
    if config.track.kind == "off":
        yield lambda step: None
        return
    tracking = Tracking(config, _tracker(config), say=say)
    try:
        yield tracking
    except Exception:
        tracking.close(completed=False, patience_s=config.track.patience_s)
        raise
    except BaseException:
        tracking.close(completed=False, patience_s=min(INTERRUPTED_S, config.track.patience_s))
        raise
    tracking.close(completed=True, patience_s=config.track.patience_s)


class Tracking:
    """Turns a run's steps into points and hands them to the thread that logs them."""

    def __init__(self, config: RunConfig, tracker: Tracker, *, say: Callable[[str], None]) -> None:
        self._run = config.directory
        self._kind = config.track.kind
        self._say = say
        self._said = False
        self._scribe = Scribe(config, tracker)
        self._scribe.start()
        self._last: Step | None = None
        self._tokens = 0.0
        self._reasons: dict[str, float] = {}

    def __call__(self, step: Step) -> None:
        """Take a step. Returns at once."""
        if self._last is None:
            self._take_evaluation(0, None)
        self._last = step
        self._scribe.inbox.put(self._point(step))
        self._take_evaluation(step.number, step.update)
        self._tell()

    def close(self, *, completed: bool, patience_s: float) -> None:
        """Wait for the tracker, but not longer than `patience_s`."""
        # an evaluation may have come after its step: of a run that ends without prompts
        number, policy = (self._last.number, self._last.update) if self._last else (0, None)
        self._take_evaluation(number, policy)
        if not self._scribe.ended(completed=completed, patience_s=patience_s):
            self._scribe.problem = f"it has not taken everything within {patience_s:g} s"
        self._tell()

    def _point(self, step: Step) -> Point:
        """A step's figures. Reasons that drop no group in it are 0 once they have been seen."""
        self._tokens += sum(r.rollout.metrics["tokens"] for r in step.rounds)
        self._reasons |= {name: 0.0 for name in figures(step) if name.startswith("filter/reason/")}
        made = [artifact for r in step.rounds for artifact in r] + [step.update]
        return Point(
            place=str(step.update.path.relative_to(self._run)),
            step=step.number,
            digest=sha256("".join(artifact.digest for artifact in made).encode()).hexdigest()[:12],
            time=_ended(step.update),
            metrics=_finite(self._reasons | figures(step) | {"rollout/tokens_total": self._tokens}),
        )

    def _take_evaluation(self, number: int, policy: Artifact | None) -> None:
        """The evaluation of a step's policy, if there is one on disk: it may be due no more."""
        place = self._run / step_name(number) / "evaluate"
        if not (place / RECORD).exists():
            return
        found = artifacts.load(place)
        if policy is not None and found.recipe.inputs["policy"] != policy.digest:
            return  # of another policy, which stood there before
        point = Point(
            place=str(place.relative_to(self._run)),
            step=number,
            digest=found.digest[:12],
            time=_ended(found),
            metrics=_finite(_grouped("evaluate", found.metrics))
            | {"seconds/evaluate": float(found.record["seconds"])},
        )
        self._scribe.inbox.put(point)

    def _tell(self) -> None:
        if self._scribe.problem and not self._said:
            self._said = True
            self._say(
                f"track={self._kind}: {self._scribe.problem}; the run goes on without. What the "
                "tracker lacks is logged from the records as soon as it takes it, by this run or "
                f"by the same command later{self._scribe.hint()}"
            )


class Scribe(threading.Thread):
    """The thread that logs points, and keeps the ledger of what is logged.

    `problem` is what failed last, if anything did.
    """

    def __init__(self, config: RunConfig, tracker: Tracker) -> None:
        super().__init__(name="tracker", daemon=True)  # a process that ends does not wait for it
        self.inbox: SimpleQueue[Point | None] = SimpleQueue()
        self.problem: str | None = None
        self._tracker = tracker
        self._run = config.run
        self._settings = flat_settings(config)
        self._file = config.directory / LEDGER
        self._ledger = _read_ledger(self._file)
        self._key = _destination(config)
        self._series = self._ledger.setdefault(self._key, Series())
        self._points: list[Point] = []  # that came in this session
        self._next = 0  # the first of them that may not be logged
        self._taken: dict[str, float] = {}  # when each place was, by the monotonic clock
        self._open = False
        self._completed = False
        self._saving = threading.Lock()
        self._left = False  # nobody waits for this thread, and the run may be somebody else's

    def ended(self, *, completed: bool, patience_s: float) -> bool:
        """End the thread; returns whether it had the time to log everything it could."""
        self._completed = completed
        self.inbox.put(None)
        self.join(patience_s)
        with self._saving:
            self._left = self.is_alive()
        return not self._left

    def hint(self) -> str:
        """How to bring over what the library itself has kept."""
        offline = isinstance(self._tracker, Wandb) and self._tracker.files
        return f" (`wandb sync {offline}` for what it keeps itself)" if offline else ""

    def run(self) -> None:
        """Log what comes in. After each failure, twice as many points come before the next try."""
        skip = failures = 0
        while (point := self.inbox.get()) is not None:
            self._points.append(point)
            if skip:
                skip -= 1
            elif not self._guarded(self._catch_up):
                failures += 1
                skip = min(2**failures, MOST_SKIPPED) - 1
        if self._guarded(self._catch_up):
            self._guarded(lambda: self._finish(completed=self._completed))

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Whether `work` succeeded: here end the errors of trackers."""
        try:
            work()
            return True
        except Exception as error:
            self.problem = f"{type(error).__name__}: {str(error)[:300]}".strip(": ")
            self._open = False
            if not self._left:  # a library may have one state for all the process
                with suppress(Exception):
                    self._tracker.abandon()
            return False

    def _catch_up(self) -> None:
        while self._next < len(self._points):
            point, logged = self._points[self._next], self._series.logged
            if logged.get(point.place) != point.digest:
                if point.place in logged or point.step < self._series.last:
                    self._begin_anew(self._series.number + 1)
                    continue
                try:
                    self._log(point)
                except Gone:
                    self._begin_anew(self._series.number)
                    continue
            self._next += 1

    def _begin_anew(self, number: int) -> None:
        """A new run of the tracker, for all the points of this session."""
        self._finish(completed=False)
        self._series = self._ledger[self._key] = Series(number=number)
        newest = {point.place: point for point in self._points}
        self._points = sorted(newest.values(), key=lambda point: point.step)
        self._next = 0

    def _log(self, point: Point) -> None:
        series = self._series
        if not self._open:
            name = self._run if series.number == 1 else f"{self._run}.{series.number}"
            series.run = self._tracker.start(
                series.run, name=name, last=series.last, settings=self._settings
            )
            self._open = True
            self._save()
        self._tracker.log(point, row=len(series.logged))
        series.logged[point.place] = point.digest
        self._taken[point.place] = time.monotonic()
        self._save()

    def _finish(self, *, completed: bool) -> None:
        if self._open:
            self._tracker.finish(completed=completed)
            self._open = False
            self._taken = {}
            self._save()

    def _unsettled(self) -> set[str]:
        """The places of the points that might be lost with this process."""
        settled = time.monotonic() - self._tracker.settles_s
        return {place for place, taken in self._taken.items() if taken > settled}

    def _save(self) -> None:
        """Write down what would outlive this process."""
        fresh = self._unsettled()
        safe = {k: v for k, v in self._series.logged.items() if k not in fresh}
        ledger = {**self._ledger, self._key: self._series.model_copy(update={"logged": safe})}
        with self._saving:
            if self._left:
                raise TimeoutError("the run has ended")
            artifacts.write_durably(self._file, LEDGERS.dump_json(ledger).decode())


def figures(step: Step) -> dict[str, float]:
    """The step's figures by the stage that they speak of, without its evaluation."""
    n = summary.numbers(step)
    seconds = summary.seconds(step._replace(evaluate=None))
    del seconds["evaluate"]
    return {
        "rollout/length": n["length"],
        "rollout/truncated": n["truncated"],
        "rollout/rounds": n["rounds"],
        "rollout/tokens": sum(r.rollout.metrics["tokens"] for r in step.rounds),
        "score/acc": n["acc"],
        "score/reward": n["reward"],
        **_grouped("filter", step.rounds[-1].filter.metrics),
        **_grouped("update", step.update.metrics),
        **_grouped("seconds", seconds),
    }


def flat_settings(config: RunConfig) -> dict[str, Scalar]:
    """The run's settings by their dotted keys; what is no plain value is JSON."""

    def flat(prefix: str, value: object) -> Iterator[tuple[str, Scalar]]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from flat(f"{prefix}.{key}" if prefix else key, item)
        else:
            yield prefix, value if isinstance(value, str | int | float) else json.dumps(value)

    return dict(flat("", config.model_dump(mode="json", exclude={"track"})))


class TensorBoard:
    """Event files in a directory of the run's name."""

    settles_s = 0.0

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None

    def start(
        self, run: str | None, *, name: str, last: int, settings: Mapping[str, Scalar]
    ) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if run is not None and not (self._directory / run).is_dir():
            raise Gone
        self._writer = EventFileWriter(str(self._directory / name))
        # readers discard what was written after `last`: by a process that died before it said so
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=last + 1, session_log=restart))
        if run is None:
            self._writer.add_event(Event(summary=_hparams(name, settings)))
        return name

    def log(self, point: Point, *, row: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self._writer
        values = [Summary.Value(tag=k, simple_value=v) for k, v in point.metrics.items()]
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=point.time, step=point.step, summary=summary))
        self._writer.flush()

    def finish(self, *, completed: bool) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def abandon(self) -> None:
        self.finish(completed=False)


def _hparams(name: str, settings: Mapping[str, Scalar]) -> object:
    """A summary for TensorBoard's table of hyper-parameters."""
    from google.protobuf.struct_pb2 import Value
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    begun = plugin_data_pb2.SessionStartInfo(group_name=name)
    for key, value in settings.items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        begun.hparams[key].CopyFrom(Value(**{kind: value}))
    about = plugin_data_pb2.HParamsPluginData(session_start_info=begun)
    return Summary(
        value=[
            Summary.Value(
                tag=metadata.SESSION_START_INFO_TAG,
                metadata=metadata.create_summary_metadata(about),
                tensor=metadata.NULL_TENSOR,
            )
        ]
    )


class MLflow:
    """A run in a server or a database of MLflow's. A point that it has already stays one point."""

    settles_s = 0.0

    def __init__(self, uri: str | None, directory: Path, experiment: str) -> None:
        self._directory = directory
        self._uri = uri or f"sqlite:///{directory / 'mlflow.db'}"
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._run = ""

    def start(
        self, run: str | None, *, name: str, last: int, settings: Mapping[str, Scalar]
    ) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # as it stands, a server that is gone costs four minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        if self._uri.startswith("sqlite:"):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(self._uri)
        if run is None:
            self._run = self._create(self._client, name, settings)
            return self._run
        try:
            if self._client.get_run(run).info.lifecycle_stage == "deleted":
                raise Gone
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise Gone from error
            raise
        self._run = run
        self._client.update_run(run, status="RUNNING")
        return run

    def _create(self, client: "MlflowClient", name: str, settings: Mapping[str, Scalar]) -> str:
        """A new run with its parameters, which MLflow keeps as they are at its beginning."""
        from mlflow.entities import Param

        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            # of a database of ours, artifacts would go to the working directory
            ours = self._uri.startswith("sqlite:")
            place = (self._directory / "artifacts").as_uri() if ours else None
            number = client.create_experiment(self._experiment, artifact_location=place)
        else:
            number = experiment.experiment_id
        run: str = client.create_run(number, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            client.log_batch(run, params=params[start : start + MLFLOW_PARAMS])
        return run

    def log(self, point: Point, *, row: int) -> None:
        from mlflow.entities import Metric

        assert self._client
        metrics = [
            # it has no @ in its names: avg@8 is avg_8
            Metric(re.sub(r"[^\w\-. :/]", "_", k), v, round(point.time * 1000), point.step)
            for k, v in point.metrics.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, *, completed: bool) -> None:
        assert self._client
        self._client.set_terminated(self._run, status="FINISHED" if completed else "FAILED")

    def abandon(self) -> None:
        self._client = None


class Wandb:
    """A run in Weights & Biases, or its files; what it is given, its own process uploads.

    A row that is given twice has the same number both times.
    """

    settles_s = 30.0  # its process writes files every 15 s

    def __init__(self, project: str, mode: str, directory: Path, patience_s: float) -> None:
        self.files: Path | None = None  # of the run, as `wandb sync` takes them
        self._project = project
        self._mode = mode
        self._directory = directory
        self._patience_s = patience_s
        self._run: Run | None = None

    def start(
        self, run: str | None, *, name: str, last: int, settings: Mapping[str, Scalar]
    ) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")  # nor does it ask for a key
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            name=name,
            id=run or uuid4().hex[:12],
            resume="allow",
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(
                mode=self._mode,
                root_dir=str(self._directory),
                init_timeout=self._patience_s,
                finish_timeout=self._patience_s,
                finish_timeout_raises=True,
                # figures and settings only: of the rest, the records know more
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self.files = Path(self._run.dir).parent
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, point: Point, *, row: int) -> None:
        assert self._run
        # its own counter may not stand still, where a step and its evaluation are two rows
        self._run.log({"step": point.step, **point.metrics}, step=row, commit=True)

    def finish(self, *, completed: bool) -> None:
        assert self._run
        import wandb

        self._run.finish(exit_code=0 if completed else 1)
        wandb.teardown()  # waits for the process that writes the file

    def abandon(self) -> None:
        import wandb

        self._run = None
        wandb.teardown(exit_code=1)  # else the run's id stays in use


def _tracker(config: RunConfig) -> Tracker:
    """The tracker of the run's settings. Raises `InputError` if its library is not installed."""
    track = config.track
    spec = find_spec(track.kind)
    if spec is None or spec.origin is None:  # a directory of that name is no library
        raise InputError(
            f"track={track.kind}: its library is not installed; install the extra, "
            f"pip install 'dapo-pipeline[{track.kind}]', or leave track=off"
        )
    directory = track.directory or config.directory / DIRECTORY
    if track.kind == "tensorboard":
        return TensorBoard(directory)
    if track.kind == "mlflow":
        return MLflow(track.uri, directory, track.project)
    return Wandb(track.project, track.mode, directory, track.patience_s)


def _destination(config: RunConfig) -> str:
    """Names what holds the run: another tracker, or another place, is given all steps."""
    track: Track = config.track
    project = None if track.kind == "tensorboard" else track.project
    where = track.uri or (track.directory if track.kind != "wandb" else None)
    return " ".join(str(part) for part in (track.kind, config.run, project, where) if part)


def _read_ledger(path: Path) -> dict[str, Series]:
    try:
        return LEDGERS.validate_json(path.read_bytes()) if path.exists() else {}
    except ValidationError as error:
        raise InputError(
            f"{path} cannot be read ({error.errors()[0]['msg']}); delete it, and every step is "
            "logged to a new run of the tracker"
        ) from error


def _grouped(group: str, metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {f"{group}/{name}": summary.number(value) for name, value in metrics.items()}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the figures that a step does not have, such as the loss of an update of no token."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _ended(artifact: Artifact) -> float:
    """When it was finished, in seconds since 1970."""
    began = datetime.fromisoformat(artifact.record["started"]).timestamp()
    return began + float(artifact.record["seconds"])
