"""Set up what scheduled runs need on a Prefect server: pool, limits, automation, deployments.

Everything is made or brought up to date, so that the same command may run again at any time.
"""

import pipeline.prefect_defaults  # noqa: F401, I001  before Prefect

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast

from prefect import get_client, serve as serve_flows
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from pipeline import flows, pools
from pipeline.config import CHECKOUT
from pipeline.pools import HEARTBEAT_S
from pipeline.requests import LIMIT
from stages.errors import InputError

FILE = CHECKOUT / "prefect.yaml"
POOL = "dapo"
PoolType = Literal["process", "kubernetes"]
SILENT_S = 3 * HEARTBEAT_S  # then a run has crashed
ZOMBIES = "dapo: a run without heartbeats has crashed"
ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused", "AwaitingRetry")


def deploy(
    *,
    file: Path = FILE,
    home: Path = CHECKOUT,
    kind: PoolType = "process",
    slots: int = 1,
    say: Callable[[str], None],
) -> None:
    """Make the pool, the limit, the automation, and the deployments that `file` describes.

    Args:
        home: the directory that workers start in, on their machines.
        kind: of work pool.
        slots: runs that may hold the limit at once: the GPUs, or groups of them, there are.

    Raises `InputError` if there is no server to reach, or no such file.
    """
    if not file.is_file():
        raise InputError(f"{file} does not exist; give --file, such as the one of the repository")
    url = get_current_settings().api.url
    if not url:
        raise InputError(
            "there is no Prefect server to deploy to: start one (prefect server start) and set "
            "PREFECT_API_URL, such as http://127.0.0.1:4200/api"
        )
    with get_client(sync_client=True) as client:
        if problem := client.api_healthcheck():
            raise InputError(f"the Prefect server at {url} does not answer: {problem}")
        say(_pool(client, kind))
        say(_limit(client, slots))
        say(_automation(client))
    _deployments(file, home, say)
    say(f"a worker takes the runs: prefect worker start --pool {POOL} --type {kind}")


def serve() -> None:
    """The flows as deployments of this very process, which runs what it is asked, until Ctrl-C."""
    os.environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = str(HEARTBEAT_S)
    every = (flows.train, flows.prepare, flows.evaluate, flows.rerun_stage)
    made = [flow.to_deployment(name="here", concurrency_limit=1) for flow in every]
    serve_flows(*cast(list[RunnerDeployment], made))


def _pool(client: SyncPrefectClient, kind: PoolType) -> str:
    try:
        pool, made = client.read_work_pool(POOL), "is there"
    except ObjectNotFound:
        pool, made = client.create_work_pool(WorkPoolCreate(name=POOL, type=kind)), "made"
    if pool.type != kind:
        raise InputError(
            f"the work pool {POOL} is of type {pool.type}, not {kind}; "
            f"`prefect work-pool delete {POOL}` first, if nobody needs it"
        )
    template = pools.TEMPLATES[kind](pool.base_job_template)
    client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    return f"work pool {POOL} ({kind}): {made}"


def _limit(client: SyncPrefectClient, slots: int) -> str:
    client.upsert_global_concurrency_limit_by_name(LIMIT, slots)
    return f"concurrency limit {LIMIT}: {slots} at once, the others wait their turn"


def _automation(client: SyncPrefectClient) -> str:
    """As Prefect's own documentation of zombie flows has it, and for suspended runs, too."""
    automation = AutomationCore(
        name=ZOMBIES,
        description="Its machine or its process is gone. A retry goes on from disk.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{end}" for end in ENDINGS)},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"Nothing was heard of it for {SILENT_S} s; a retry goes on from disk.",
            )
        ],
    )
    found = client.read_automations_by_name(ZOMBIES)
    for old in found:
        client.delete_automation(old.id)
    client.create_automation(automation)
    return f"automation '{ZOMBIES}': {'brought up to date' if found else 'made'}"


def _deployments(file: Path, home: Path, say: Callable[[str], None]) -> None:
    """By Prefect's own command, which reads its own file."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "prefect", "--no-prompt"),
            *("deploy", "--all", "--prefect-file", str(file)),
        ],
        cwd=file.parent,
        env={**os.environ, "DAPO_HOME": str(home), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputError(f"{file} was not deployed:\n{done.stdout}{done.stderr}")
    for line in done.stdout.splitlines():
        if "successfully created with id" in line:
            say("deployment " + line.strip(" │").partition("'")[2].partition("'")[0])
