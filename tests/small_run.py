"""A finished run of the smallest kind, made once: real stages, no vLLM, no Prefect."""

import atexit
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from pipeline import loop, runs
from pipeline.artifacts import Artifact
from pipeline.config import composed
from pipeline.runner import Workers, new_workers
from stages.settings import Machine

SMALL = (
    "run=small",
    "rollout=hf",
    "evaluate=hf",
    "evaluate.n=2",
    "prompts.count=40",
    "prompts.levels=[3]",
    "heldout.count=6",
    "warmstart.plain_steps=60",
    "warmstart.mixed_steps=20",
    "warmstart.eval_prompts=0",
    "warmstart.hidden_size=32",
    "warmstart.heads=1",
    "warmstart.mlp_size=64",
    "rollout.n=4",
    "rollout.max_tokens=24",
    "warmstart.max_response_tokens=24",
    "score.l_cache=8",
    "select.size=6",
    "filter=off",
    "filter.batch_groups=4",
    "filter.max_age=1",
    "update.mini_batch=8",
    "update.warmup_steps=2",
    "schedule.steps=2",
)


@cache
def workers() -> Workers:
    """Processes that all runs of a session share, up to three engines: each imports torch first."""
    made = new_workers(Machine(engines=3))
    atexit.register(lambda: [worker.close() for each in made.values() for worker in each])
    return made


def run(data: Path | str, overrides: Sequence[str] = (), *, force: bool = False) -> list[str]:
    """Train below a directory or a URL; returns the labels of stages that were built."""
    built: list[str] = []
    text = composed([*SMALL, f"data={data}", *overrides])
    with loop.opened(text, force=force, workers=workers()) as (config, runner):

        def execute(label: str, stage: str, *, out, config, inputs) -> Artifact:  # type: ignore[no-untyped-def]
            made, served = runner.run(stage, out=out, config=config, inputs=loop.paths(inputs))
            if not served:
                built.append(label)
            return made

        loop.train(config, execute, mirror=runner.mirror)
    return built


def digests(directory: Path) -> dict[str, str]:
    """The digest of every artifact below a directory, by its place."""
    return {str(a.path.relative_to(directory)): a.digest for a in runs.artifacts_below(directory)}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data root of a finished run `small`; not to be changed."""
    data = tmp_path_factory.mktemp("finished")
    run(data)
    return data


@pytest.fixture
def data(finished: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    shutil.copytree(finished, tmp_path / "data")
    return tmp_path / "data"
