"""The training loop under Prefect: every stage a task, every step a page in the UI."""

import os

# Prefect reads its settings at import. A cold home migrates its database for longer than the
# default limit; the recorder would lose the last task runs of a flow to its batching.
for _name, _value in {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)

from pathlib import Path  # noqa: E402

from prefect import flow, task  # noqa: E402
from prefect.artifacts import create_markdown_artifact, create_table_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.states import Completed, State  # noqa: E402

from pipeline import loop, summary  # noqa: E402
from pipeline.artifacts import Artifact  # noqa: E402
from pipeline.config import composed  # noqa: E402
from pipeline.runner import Runner  # noqa: E402
from stages.settings import Settings  # noqa: E402


@flow(name="train", validate_parameters=True)
def train(overrides: list[str] | None = None, force: bool = False) -> str:
    """Train a policy with DAPO, or go on where the run stopped.

    Args:
        overrides: Hydra overrides, such as `experiment=demo` or `update.lr=1e-4`.
        force: rebuild artifacts of other settings instead of refusing them.
    """
    with loop.opened(composed(overrides or []), force=force) as (config, runner):
        print(f"run {config.run}: {config.directory}")
        evaluation = loop.train(config, _as_tasks(runner), stepped=_publish(config.run))
        print(f"held-out {summary.accuracy(evaluation):.3f}  {config.directory}")
    return str(config.directory)
