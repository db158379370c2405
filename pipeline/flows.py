"""The training loop under Prefect: every stage a task, every step a page in the UI."""

import os
from collections.abc import Callable
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

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State
from prefect.utilities.annotations import opaque, quote

from pipeline import guard, loop, summary
from pipeline.artifacts import Artifact
from pipeline.config import composed
from pipeline.loop import Inputs, Step
from pipeline.runner import Runner
from stages.settings import Settings


@flow(name="train")
def train(overrides: list[str] | None = None, force: bool = False) -> str:
    """Train a policy with DAPO, or go on where the run stopped; returns the run's directory.

    Args:
        overrides: Hydra overrides, such as `experiment=demo` or `update.lr=1e-4`.
        force: rebuild artifacts of other settings instead of refusing them.
    """
    with loop.opened(composed(overrides or []), force=force) as (config, runner):
        evaluation = loop.train(
            config, _as_tasks(runner), stepped=lambda step: _publish(config.run, step)
        )
        _say(summary.result(config, evaluation))
        return str(config.directory)


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


def _publish(run: str, step: Step) -> None:
    """The step's page and some of its responses, each with its history under one key."""
    _say(summary.line(step))
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
