"""Scheduled and submitted runs: a real server, a real worker, and what goes wrong with them."""

import os
import subprocess
import sys
import time
import urllib.error
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_server import Server
from small_run import SMALL

from pipeline import artifacts, deploy
from pipeline.requests import Train
from stages.errors import InputError

pytestmark = pytest.mark.slow
PATIENCE_S = 240


def dapo(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env=server.environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def deployed(server: Server) -> list[str]:
    """What `dapo deploy` said, the second time."""
    assert dapo(server, "deploy", "--slots", "2").returncode == 0
    again = dapo(server, "deploy")
    assert again.returncode == 0, again.stderr
    return again.stdout.splitlines()


@contextmanager
def working(server: Server, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker that asks for runs each second."""
    with log.open("w") as told:
        process = subprocess.Popen(
            [*(sys.executable, "-m", "prefect", "worker", "start"), "--pool", "dapo"],
            env={**server.environment, "PREFECT_WORKER_QUERY_SECONDS": "1"},
            stdout=told,
            stderr=told,
            text=True,
        )
    yield process
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture(scope="module")
def worker(
    server: Server, deployed: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    with working(server, tmp_path_factory.mktemp("worker") / "log") as process:
        yield process


def until(happened: Callable[[], Any], what: Callable[[], Any] = lambda: "nothing") -> Any:
    """Wait for what is true in the end, and return it; `what` tells what is true instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"it did not happen, but {what()}"
        time.sleep(0.1)
    return found


class Submitted:
    """A flow run on the worker, of the small run below `data`."""

    def __init__(self, server: Server, data: Path, deployment: str, **request: Any) -> None:
        self.server, self.data = server, data
        found = server.get(f"/deployments/name/{deployment}")
        overrides = [*SMALL[1:], f"data={data}"]
        wanted = {"run": "small", "overrides": overrides, **request}
        self.id = server.post(
            f"/deployments/{found['id']}/create_flow_run",
            parameters={"request": wanted},
            job_variables={"env": {"DAPO_DATA": str(data)}},
            state={"type": "SCHEDULED"},
        )["id"]

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.server.get(f"/flow_runs/{self.id}")["state"]
        return state

    def ends(self, *names: str) -> dict[str, Any]:
        """Its state, once that is one of the names."""
        until(lambda: self.state["name"] in {*names, "Failed"}, what=lambda: self.state["name"])
        state = self.state
        assert state["name"] in names, state["message"]
        return state

    def ask(self, name: str, kind: str) -> None:
        self.server.post(
            f"/flow_runs/{self.id}/set_state", state={"type": kind, "name": name}, force=True
        )

    def resumed(self) -> bool:
        """Resume it, as the UI does; False while a busy server does not take that."""
        with suppress(OSError):  # 503, or no answer in time
            self.server.post(f"/flow_runs/{self.id}/resume")
        return bool(self.state["name"] != "Suspended")

    def samples(self, step: int) -> None:
        """Wait until a rollout of this step is under way."""
        place = self.data / f"runs/small/step_{step:04d}/round_0"
        until(lambda: list(place.glob(".draft-rollout-*")))

    def tasks(self) -> set[str | None]:
        """The kinds of its tasks' states; None of one that the server has only heard of."""
        tasks = self.server.post("/task_runs/filter", flow_runs={"id": {"any_": [self.id]}})
        return {task["state"] and task["state"]["type"] for task in tasks}

    def processes(self) -> list[psutil.Process]:
        """Those that were started for it, directly or not."""
        return [p for p in psutil.process_iter() if _flow_run(p) == self.id]


def _flow_run(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or "pipeline.guard" in process.cmdline():
            return None
        return process.environ().get("PREFECT__FLOW_RUN_ID")
    except (psutil.Error, OSError):
        return None


def steps(data: Path) -> Sequence[str]:
    return sorted(p.parent.name for p in (data / "runs/small").glob("step_*/update"))


def test_deploying_twice_sets_everything_up_once(server: Server, deployed: list[str]) -> None:
    assert "deployment train/train-nightly" in deployed
    assert server.get("/work_pools/dapo")["type"] == "process"
    assert server.get("/v2/concurrency_limits/gpu")["limit"] == 1
    [automation] = server.post("/automations/filter")
    assert automation["actions"][0]["state"] == "CRASHED"
    names = {found["name"] for found in server.post("/deployments/filter")}
    assert names >= {"train-nightly", "evaluate-weekly", "rerun-stage", "prepare-data"}
    nightly = server.get("/deployments/name/train/train-nightly")
    assert nightly["schedules"][0]["schedule"]["timezone"] == "UTC"
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"


def test_a_run_that_gives_no_signs_of_life_any_more_has_crashed(
    server: Server, deployed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = server.get("/deployments/name/train/train")["flow_id"]
    run, lively = (
        server.post("/flow_runs/", flow_id=flow, state={"type": "RUNNING"})["id"] for _ in range(2)
    )
    with SyncPrefectClient(server.url) as client:
        monkeypatch.setattr(deploy, "SILENT_S", 10)  # the least that Prefect allows
        deploy._automation(client)
        beat(server, run)

        def crashed() -> bool:
            beat(server, lively)
            return bool(server.get(f"/flow_runs/{run}")["state"]["type"] == "CRASHED")

        until(crashed)
        monkeypatch.undo()
        deploy._automation(client)
    assert server.get(f"/flow_runs/{lively}")["state"]["type"] == "RUNNING"
    [automation] = server.post("/automations/filter")
    assert automation["trigger"]["within"] == 90


def beat(server: Server, run: str) -> None:
    """A sign of life of a flow run, as its process sends one."""
    resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    event = {"event": "prefect.flow-run.heartbeat", "resource": resource, "payload": {}}
    now = datetime.now(UTC).isoformat()
    with httpx.Client() as client:
        told = [{**event, "id": str(uuid.uuid4()), "occurred": now}]
        client.post(f"{server.url}/events", json=told).raise_for_status()


@pytest.mark.parametrize(
    ("url", "given", "said"),
    [
        (None, {"file": Path("nowhere.yaml")}, "nowhere.yaml does not exist; give --file"),
        (None, {"kind": "kubernetes"}, "work pool dapo is of type process, not kubernetes"),
        ("http://127.0.0.1:9/api", {}, "http://127.0.0.1:9/api does not answer"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_the_reason(
    server: Server, deployed: list[str], url: str | None, given: dict[str, Any], said: str
) -> None:
    there = temporary_settings({PREFECT_API_URL: url or server.url})
    with there, pytest.raises(InputError, match=said):
        deploy.deploy(**given, say=print)


def test_a_file_that_prefect_refuses_is_refused_in_its_words(
    server: Server, deployed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    bad = tmp_path / "prefect.yaml"
    bad.write_text("deployments: [{name: night, entrypoint: pipeline.flows.nap}]")
    there = temporary_settings({PREFECT_API_URL: server.url})
    with there, pytest.raises(InputError, match=r"prefect\.yaml was not deployed:[^$]*nap"):
        deploy.deploy(file=bad, say=print)


def test_deploying_without_a_server_is_one_clear_message(tmp_path: Path) -> None:
    nowhere = Server(tmp_path)
    del nowhere.environment["PREFECT_API_URL"]
    refused = dapo(nowhere, "deploy")
    assert refused.returncode == 2
    assert "there is no Prefect server to deploy to" in refused.stderr


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"steps": 0}, "less than the minimum"),
        ({"stop": 3, "steps": 4}, "should not be valid"),
        ({"colour": 1}, "'colour' was unexpected"),
    ],
)
def test_bad_values_are_refused_before_a_process_starts(
    server: Server, deployed: list[str], tmp_path: Path, request_: dict[str, Any], said: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        Submitted(server, tmp_path, "train/train", **request_)
    assert said in caught.value.read().decode()


def test_the_form_and_the_command_line_make_one_configuration() -> None:
    form = Train.model_validate({"run": "a", "overrides": ["experiment=demo"], "stop": 7})
    assert form.text() == Train(overrides=["experiment=demo", "run=a", "schedule.steps=7"]).text()
    with pytest.raises(ValueError, match="not both"):
        Train(stop=3, steps=4)
    with pytest.raises(InputError, match="unknown key"):
        Train(overrides=["update.epshigh=1"]).text()


def test_a_killed_flow_has_crashed_and_its_retry_goes_on_to_the_very_end_it_had(
    server: Server, worker: object, data: Path
) -> None:
    run = Submitted(server, data, "train/train", steps=2, limit="gpu")
    run.samples(4)  # a retry that began to count anew would end at 5
    assert server.get("/v2/concurrency_limits/gpu")["active_slots"] == 1
    [engine] = [p for p in run.processes() if "prefect" in " ".join(p.cmdline())]
    started = run.processes()
    engine.kill()
    run.ends("Crashed")
    assert not psutil.wait_procs(started, timeout=10)[1]
    until(lambda: server.get("/v2/concurrency_limits/gpu")["active_slots"] == 0)
    run.ask("AwaitingRetry", "SCHEDULED")
    run.ends("Completed")
    assert steps(data) == ["step_0001", "step_0002", "step_0003", "step_0004"]


def test_a_cancelled_run_leaves_no_process(server: Server, worker: object, data: Path) -> None:
    run = Submitted(server, data, "train/train", steps=50)
    run.samples(3)
    until(lambda: len(run.processes()) >= 2)
    started = run.processes()
    run.ask("Cancelling", "CANCELLING")
    run.ends("Cancelled")
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_a_run_waits_for_approval_without_a_process_and_goes_on(
    server: Server, worker: object, data: Path
) -> None:
    run = Submitted(server, data, "train/train", stop=2, approve_every=1, limit="gpu")
    run.ends("Suspended")
    until(lambda: not run.processes())
    until(run.resumed)
    run.ends("Completed")


def test_the_newest_policy_is_measured_anew_beside_what_the_run_has_measured(
    server: Server, worker: object, data: Path
) -> None:
    for _ in range(2):
        run = Submitted(server, data, "evaluate/evaluate-weekly", overrides=["evaluate.n=3"])
        run.ends("Completed")
        until(lambda run=run: run.tasks() <= {"COMPLETED"}, what=run.tasks)
    made = artifacts.load(data / "runs/small/step_0002/evaluate.variant-1")
    assert made.recipe.config["n"] == 3
    assert not (data / "runs/small/step_0002/evaluate.variant-2").exists()


def test_an_unknown_limit_fails_the_run_and_says_what_makes_it(
    server: Server, worker: object, data: Path
) -> None:
    run = Submitted(server, data, "train/train", limit="gpus")
    assert "there is no concurrency limit 'gpus'; `dapo deploy`" in run.ends("Failed")["message"]


@pytest.mark.parametrize(("state", "then"), [("RUNNING", "CRASHED"), ("CANCELLING", "CANCELLING")])
def test_what_was_killed_without_its_worker_has_crashed_unless_somebody_cancels_it(
    server: Server, deployed: list[str], state: str, then: str
) -> None:
    flow = server.get("/deployments/name/train/train")["flow_id"]
    run = server.post("/flow_runs/", flow_id=flow, state={"type": state})["id"]
    with SyncPrefectClient(server.url) as client:
        slot = ConcurrencyLeaseHolder(type="flow_run", id=run)
        taken = client.increment_concurrency_slots_with_lease(["gpu"], 1, "concurrency", 900, slot)
    assert server.get("/v2/concurrency_limits/gpu")["active_slots"] == 1
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    subprocess.run(
        [sys.executable, "-m", "pipeline.lifecycle", run, str(gone.pid), taken.json()["lease_id"]],
        env=server.environment,
        check=True,
    )
    assert server.get(f"/flow_runs/{run}")["state"]["type"] == then
    assert server.get("/v2/concurrency_limits/gpu")["active_slots"] == 0


def test_a_killed_worker_takes_its_run_along(server: Server, worker: object, data: Path) -> None:
    run = Submitted(server, data, "train/train", steps=50)
    run.samples(3)
    started = run.processes()
    [flow] = [p for p in started if "prefect" in " ".join(p.cmdline())]
    flow.parent().kill()
    assert not psutil.wait_procs(started, timeout=20)[1]
    assert "Nothing was heard of it" not in run.ends("Crashed")["message"]  # but sooner


HUNG = """
import signal, time
from pipeline import lifecycle
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lifecycle.POLL_S = lifecycle.GRACE_S = 0.1
lifecycle._end_with_the_worker()
print("watched", flush=True)
time.sleep(600)
"""
WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_run_whose_clean_up_hangs_ends_with_its_worker_all_the_same() -> None:
    environment = {**os.environ, "PREFECT__FLOW_RUN_ID": str(uuid.uuid4())}
    command = [sys.executable, "-c", WORKER, HUNG]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as worker:
        assert worker.stdout and worker.stdout.readline() == b"watched\n"
        [run] = psutil.Process(worker.pid).children()
        worker.kill()
        try:
            run.wait(timeout=10)
        finally:
            with suppress(psutil.NoSuchProcess):
                run.kill()
