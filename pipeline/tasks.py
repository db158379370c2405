"""Stages as Prefect's tasks."""

import pipeline.prefect_defaults  # noqa: F401, I001  before Prefect

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.states import Completed, State
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import opaque, quote

from pipeline import logs, loop, parts
from pipeline.artifacts import Artifact
from pipeline.loop import Inputs
from pipeline.retries import DELAY_S, may_pass
from pipeline.runner import Runner
from pipeline.worker import StageTimeout
from stages.errors import InputError
from stages.settings import Machine, Settings


# The artifact's record decides what is served; Prefect's cache would replay paths whose files are
# gone. A retry finds what was finished on disk.
@task(task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(label: str, build: Callable[[], tuple[Artifact, bool]]) -> Artifact | State[Any]:
    """One stage as a task; what was served instead of built shows as Cached."""
    listening = logs.listener.set(get_run_logger().info)
    try:
        artifact, served = build()
    finally:
        logs.listener.reset(listening)
    if served:
        return Completed(name="Cached", message=f"served {artifact.path}", data=artifact)
    return artifact


def as_tasks(runner: Runner) -> loop.Execute:
    """Execute every stage as a task that waits for the tasks which made its inputs."""

    def execute(label: str, stage: str, *, out: Path, config: Settings, inputs: Inputs) -> Artifact:
        build = partial(runner.run, stage, out=out, config=config, inputs=loop.paths(inputs))
        return as_task(label, build, inputs, retries=runner.machine.retries)

    return execute


def as_task(
    label: str, build: Callable[[], tuple[Artifact, bool]], inputs: Inputs, *, retries: int
) -> Artifact:
    """What `build` makes, in a task that waits for the tasks which made the inputs."""
    last: list[BaseException] = []

    def remembered() -> tuple[Artifact, bool]:
        try:
            return build()
        except BaseException as error:
            last[:] = [error]
            raise

    flat = [v for value in inputs.values() for v in (value if isinstance(value, list) else [value])]
    retried = run_stage.with_options(
        retries=retries,
        retry_delay_seconds=DELAY_S,
        retry_condition_fn=lambda *_: may_pass(last[0]),
    )
    state = retried(
        # Prefect follows every object in a parameter to the task that made it, and finds
        # shared strings too: only the artifacts themselves are to draw edges
        quote(label),
        quote(remembered),
        wait_for=[opaque(artifact) for artifact in flat if isinstance(artifact, Artifact)],
        return_state=True,
    )
    return cast(Artifact, state.result())


@task(task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def run_part(label: str, work: Callable[[], parts.Metrics]) -> parts.Metrics:
    """What one of several engines samples, as a task beside its stage's."""
    return work()


def as_parts(task_runner: TaskRunner[Any], machine: Machine) -> parts.Spread:
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
def made_task_runner(machine: Machine) -> Iterator[TaskRunner[Any]]:
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
