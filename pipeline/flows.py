"""The training loop under Prefect: every stage a task, every step a page in the UI."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast

# Prefect reads its settings when it is imported
for _name, _value in {
    # a cold home migrates its database for longer than the default limit
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # the ephemeral server flushes one batch of task runs when it stops, and loses the rest
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # the console belongs to the command; the UI's logs keep everything
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}.items():
    os.environ.setdefault(_name, _value)

from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.states import Completed, State
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import opaque, quote

from pipeline import guard, loop, mirror, parts, summary, trackers
from pipeline.artifacts import Artifact
from pipeline.config import composed
from pipeline.loop import Inputs, Step
from pipeline.runner import Runner
from pipeline.worker import StageTimeout
from stages.errors import InputError
from stages.settings import Machine, Settings


@flow(name="train")
def train(overrides: list[str] | None = None, force: bool = False) -> str:
    """Train a policy with DAPO, or go on where the run stopped; returns the run's directory.

    Args:
        overrides: Hydra overrides, such as `experiment=demo` or `update.lr=1e-4`.
        force: rebuild artifacts of other settings instead of refusing them.
    """
    with (
        loop.opened(composed(overrides or []), force=force) as (config, runner),
        _task_runner(config.machine) as task_runner,
    ):
        runner.spread = _as_parts(task_runner, config.machine)
        evaluation = trackers.train(
            config,
            _as_tasks(runner),
            stepped=lambda step: _publish(config.run, step, runner.mirror),
            say=_say,
            mirror=runner.mirror,
        )
        _say(summary.result(config, evaluation))
        return str(config.place)


# The artifact's record decides what is served; Prefect's cache would replay paths whose files are
# gone. A retry finds what was finished on disk.
@task(task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(label: str, build: Callable[[], tuple[Artifact, bool]]) -> Artifact | State[Any]:
    """One stage as a task; what was served instead of built shows as Cached."""
    artifact, served = build()
    if served:
        return Completed(name="Cached", message=f"served {artifact.path}", data=artifact)
    return artifact


def _as_tasks(runner: Runner) -> loop.Execute:
    """Execute every stage as a task that waits for the tasks which made its inputs."""

    def execute(label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs) -> Artifact:
        def build() -> tuple[Artifact, bool]:
            return runner.run(stage, out=out, config=config, inputs=loop.paths(inputs))

        flat = [
            v for value in inputs.values() for v in (value if isinstance(value, list) else [value])
        ]
        state = run_stage(
            # Prefect follows every object in a parameter to the task that made it, and finds
            # shared strings too: only the artifacts themselves are to draw edges
            quote(label),
            quote(build),
            wait_for=[opaque(artifact) for artifact in flat if isinstance(artifact, Artifact)],
            return_state=True,
        )
        return cast(Artifact, state.result())

    return execute


@task(task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def run_part(label: str, work: Callable[[], parts.Metrics]) -> parts.Metrics:
    """What one of several engines samples, as a task beside its stage's."""
    return work()


def _as_parts(task_runner: TaskRunner[Any], machine: Machine) -> parts.Spread:
    """Spread a stage's parts as tasks, on threads that wait for our workers or on Ray's workers."""
    # Prefect sends the context with a task; that of a stage's task holds what only lives here
    flow_context = copy_context()

    def submit(label: str, work: Callable[[], parts.Metrics]) -> PrefectFuture[parts.Metrics]:
        with _gpus(machine):
            return task_runner.submit(run_part, parameters={"label": label, "work": work})

    def spread(run: parts.Run, jobs: Sequence[parts.Job]) -> list[parts.Metrics]:
        if machine.task_runner == "ray":
            run = parts.in_this_process
        labels = [f"{runtime.task_run.name} / engine-{job.engine}" for job in jobs]
        futures = [
            # a partial is opaque: what else a parameter holds, Prefect takes apart and rebuilds
            flow_context.run(submit, label, partial(run, job))
            for label, job in zip(labels, jobs, strict=True)
        ]
        late = wait(futures, timeout=machine.timeout_s(jobs[0].stage)).not_done
        if late and machine.task_runner == "ray":  # our own workers have this limit themselves
            raise StageTimeout(
                f"{len(late)} of {len(jobs)} engines took longer than "
                f"{machine.timeout_s(jobs[0].stage)} s"
            )
        return [future.result() for future in futures]

    return spread


@contextmanager
def _task_runner(machine: Machine) -> Iterator[TaskRunner[Any]]:
    """What runs a stage's parts: threads, or the Ray cluster at RAY_ADDRESS, or one made here."""
    if machine.task_runner == "threads":
        threads: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=machine.engines)
        with threads:
            yield threads
        return
    try:
        from prefect_ray import RayTaskRunner
    except ImportError as error:
        raise InputError(
            f"machine.task_runner=ray: {error}; install the extra, pip install 'dapo-pipeline[ray]'"
        ) from error
    with RayTaskRunner(init_kwargs={"include_dashboard": False, "log_to_driver": False}) as ray:
        yield ray


@contextmanager
def _gpus(machine: Machine) -> Iterator[None]:
    """What is submitted to Ray in the block gets GPUs of its own."""
    if (machine.task_runner, machine.device) != ("ray", "cuda"):
        yield
        return
    from prefect_ray.context import remote_options

    with remote_options(num_gpus=machine.tensor_parallel_size * machine.pipeline_parallel_size):
        yield


def _publish(run: str, step: Step, stored: mirror.Mirror | None) -> None:
    """The step's page and some of its responses, each with its history under one key."""
    _say(summary.line(step))
    if stored:
        first = step.rounds[0]
        stored.bring([first.rollout.path, first.score.path], mirror.tables)
    key = "".join(c if c.isalnum() else "-" for c in run.lower())
    create_markdown_artifact(
        summary.markdown(step), key=f"{key}-step", description=f"{run}, step {step.number}"
    )
    create_table_artifact(
        summary.samples(step), key=f"{key}-samples", description=f"{run}, step {step.number}"
    )


def _say(text: str) -> None:
    """To whoever watches the console, and to the UI's logs."""
    print(text, flush=True)
    get_run_logger().info(text)


guard.install()  # Prefect's ephemeral server would outlive a killed flow
