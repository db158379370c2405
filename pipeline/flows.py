"""The flows: each run of one shows in Prefect's UI with its stages as tasks and a page per step."""

import pipeline.prefect_defaults  # noqa: F401, I001  before Prefect

from functools import partial
from pathlib import Path

from prefect import flow, get_run_logger, pause_flow_run, runtime, suspend_flow_run
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from pipeline import guard, lifecycle, lineage, loop, mirror, runs, summary, trackers
from pipeline.config import parse
from pipeline.loop import Step
from pipeline.requests import Evaluate, Prepare, RerunStage, Train
from pipeline.rerun import Rerun, evaluated
from pipeline.tasks import as_parts, as_task, as_tasks, made_task_runner

APPROVAL_S = 7 * 24 * 3600  # a run that nobody resumes for so long fails


@flow(name="train")
def train(request: Train = Train()) -> str:  # noqa: B008  frozen
    """Train a policy with DAPO, or go on where the run stopped; returns the run's place."""
    with (
        lifecycle.supervised(request.limit),
        loop.opened(_wanted(request), force=request.force) as (config, runner),
        made_task_runner(config.machine) as task_runner,
    ):
        runner.spread = as_parts(task_runner, config.machine)

        def stepped(step: Step) -> None:
            _publish(config.run, step, runner.mirror)
            last = step.number == config.schedule.steps
            if last:
                _publish_lineage(config.run, step)
            if request.approve_every and step.number % request.approve_every == 0 and not last:
                _await_approval(step)

        evaluation = trackers.train(
            config, as_tasks(runner), stepped=stepped, say=_say, mirror=runner.mirror
        )
        _say(summary.result(config, evaluation))
        return str(config.place)


@flow(name="prepare")
def prepare(request: Prepare = Prepare()) -> str:  # noqa: B008  frozen
    """Check the prompts and the held-out prompts of a run and publish them."""
    text = Train(run=request.run, overrides=request.overrides).text()
    with (
        lifecycle.supervised(request.limit),
        loop.opened(text) as (config, runner),
    ):
        prompts, heldout = loop.prepared(config, as_tasks(runner))
        for made in (prompts, heldout):
            _say(f"{made.path.name}: {made.metrics}")
        return str(config.place)


@flow(name="evaluate")
def evaluate(request: Evaluate) -> str:
    """Measure a policy of a run; with settings of its own, beside what the run has measured."""
    with lifecycle.supervised(request.limit), mirror.owned(_place(request.run)) as stored:
        directory = runs.find(request.run)
        made = evaluated(
            directory,
            step=request.step,
            overrides=request.overrides,
            mirror=stored,
            execute=as_tasks,
        )
        _say(f"{made.path}: {summary.accuracy(made):.3f}")
        return str(made.path)


@flow(name="rerun-stage")
def rerun_stage(request: RerunStage) -> str:
    """Rebuild one artifact of a run; beside the original, or in its place."""
    with lifecycle.supervised(request.limit), mirror.owned(_place(request.run)) as stored:
        again = Rerun.of(
            runs.find(request.run),
            step=request.step,
            stage=request.stage,
            round=request.round,
            overrides=request.overrides,
        )
        build = partial(again.build, out=None, replace=request.replace, mirror=stored)
        made = as_task(
            f"step-{request.step} / {request.stage}",
            lambda: (build(), False),
            {},
            retries=again.run.machine.retries,
        )
        _say(f"{made.path}: {made.metrics}")
        return str(made.path)


def _wanted(request: Train) -> str:
    """The configuration; how many more steps is settled when the run begins, not by a retry."""
    if request.steps is None:
        return request.text()
    config = parse(request.text())
    directory = mirror.looked_at(config.place)
    if (runtime.flow_run.run_count or 1) > 1 and (directory / loop.CONFIG).exists():
        until = parse((directory / loop.CONFIG).read_text()).schedule.steps
    else:
        until = loop.newest_step(directory) + request.steps
    return request.text(until=until)


def _place(run: str) -> Path | str:
    directory = runs.find(run)
    return mirror.origin(directory) or directory


def _await_approval(step: Step) -> None:
    """Stop until somebody resumes the run in the UI; once per step, however often it is retried.

    Of a deployment, the process ends meanwhile and gives its slot and its device back.
    """
    key = f"step-{step.number}"
    if runtime.deployment.id:
        suspend_flow_run(timeout=APPROVAL_S, key=key)
    else:
        pause_flow_run(timeout=APPROVAL_S, key=key)


def _publish(run: str, step: Step, stored: mirror.Mirror | None) -> None:
    """The step's page and some of its responses, each with its history under one key."""
    _say(summary.line(step))
    if stored:
        first = step.rounds[0]
        stored.bring([first.rollout.path, first.score.path], mirror.tables)
    key = _key(run)
    create_markdown_artifact(
        summary.markdown(step), key=f"{key}-step", description=f"{run}, step {step.number}"
    )
    create_table_artifact(
        summary.samples(step), key=f"{key}-samples", description=f"{run}, step {step.number}"
    )


def _publish_lineage(run: str, step: Step) -> None:
    """What the last policy was made from, as a graph."""
    graph = lineage.mermaid(lineage.trace(step.update.path))
    create_markdown_artifact(
        f"# Lineage of step {step.number}\n\n```mermaid\n{graph}```\n",
        key=f"{_key(run)}-lineage",
        description=f"{run}, step {step.number}",
    )


def _key(run: str) -> str:
    """The run's name as Prefect wants keys."""
    return "".join(c if c.isalnum() else "-" for c in run.lower())


def _say(text: str) -> None:
    """To whoever watches the console, and to the UI's logs."""
    print(text, flush=True)
    get_run_logger().info(text)


guard.install()  # Prefect's ephemeral server would outlive a killed flow
