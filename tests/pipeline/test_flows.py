"""Under Prefect: every stage a task, failures that fail, and nothing that outlives its run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect_server import Server, home
from small_run import SMALL

from stages import tables

pytestmark = pytest.mark.slow


def train(data: Path, environment: dict[str, str], *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*(sys.executable, "-m", "pipeline", "train"), *SMALL, f"data={data}", *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def settled(server: Server) -> dict[str, dict[str, Any]]:
    """The task runs of the newest flow run, once the server has written down all of them."""
    deadline = time.monotonic() + 20
    runs: dict[str, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        runs = server.task_runs(server.newest_flow_run())
        states = {run["state"] and run["state"]["type"] for run in runs.values()}
        if runs and states <= {"COMPLETED", "FAILED"}:
            before, runs = runs, server.task_runs(server.newest_flow_run())
            if len(before) == len(runs):
                return runs
        time.sleep(0.5)
    return runs


def test_every_stage_is_a_task_with_its_inputs_as_edges_and_a_page_per_step(
    server: Server, tmp_path: Path
) -> None:
    run = train(tmp_path, server.environment)
    output = run.communicate()[0]
    assert run.returncode == 0, output
    assert server.newest_flow_run()["state_name"] == "Completed"
    tasks = settled(server)
    assert tasks["step-1 / round-0 / rollout"]["state_name"] == "Completed"
    names = {task["id"]: name for name, task in tasks.items()}
    parents = [
        names[parent["id"]]
        for parents in tasks["step-2 / round-0 / rollout"]["task_inputs"].values()
        for parent in parents
    ]
    assert sorted(parents) == ["prompts", "step-1 / update", "step-2 / round-0 / select"]
    pages = server.post("/artifacts/latest/filter")
    assert {page["key"] for page in pages} >= {"small-step", "small-samples", "small-lineage"}
    (page,) = (page for page in pages if page["key"] == "small-step")
    (graph,) = (page for page in pages if page["key"] == "small-lineage")
    assert "```mermaid\nflowchart" in graph["data"] and "step_0001/update" in graph["data"]
    assert page["data"].startswith("# Step 2") and "clipped low / high" in page["data"]


def test_a_round_that_two_engines_sample_ahead_is_a_task_beside_the_update(
    server: Server, data: Path
) -> None:
    changes = ["run=ahead", "schedule=one_step_off", "schedule.steps=2", "machine.engines=2"]
    run = train(data, server.environment, *changes)
    output = run.communicate()[0]
    assert run.returncode == 0, output
    flow = server.newest_flow_run()
    found = server.post("/task_runs/filter", flow_runs={"id": {"any_": [flow["id"]]}})
    states = [t["state_name"] for t in found if t["name"] == "step-2 / round-0 / rollout"]
    assert sorted(states) == ["Cached", "Completed"]  # sampled, and later taken up
    names = {task["name"] for task in found}
    assert names >= {f"step-2 / round-0 / rollout / engine-{engine}" for engine in (0, 1)}
    batch = tables.read(data / "runs/ahead/step_0002/round_0/filter", "batch")
    assert batch["age"].unique().to_list() == [1]


def test_what_was_done_before_shows_as_cached(server: Server, data: Path) -> None:
    assert train(data, server.environment).wait() == 0
    assert {task["state_name"] for task in settled(server).values()} == {"Cached"}


def test_a_failed_stage_fails_the_flow_and_the_exit_code(server: Server, data: Path) -> None:
    shard = data / "runs/small/step_0001/round_0/rollout/rollouts/part-00000.parquet"
    shard.write_bytes(b"broken")
    run = train(data, server.environment)
    output = run.communicate()[0]
    assert run.returncode == 2
    assert "is not the file that the record describes" in " ".join(output.split())
    assert "Traceback" not in output
    assert server.newest_flow_run()["state_name"] == "Failed"


def test_a_flow_can_run_twice_in_one_process(server: Server, data: Path) -> None:
    code = (
        "import sys; from pipeline import flows, requests\n"
        "request = requests.Train(overrides=sys.argv[1:])\n"
        "print(len({flows.train(request) for _ in range(2)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *SMALL, f"data={data}"],
        env=server.environment,
        capture_output=True,
        text=True,
        cwd="/",
        check=True,
    )
    assert done.stdout.endswith("1\n")


def guarded(pid: int) -> list[psutil.Process]:
    """The processes that the guarded process `pid` has started, directly or not."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "pipeline.guard" not in child.cmdline()]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_run_that_is_killed_not_even_prefects_own_server(
    tmp_path: Path, blow: signal.Signals
) -> None:
    run = train(tmp_path / "data", home(tmp_path / "home"))
    deadline = time.monotonic() + 120
    while not list((tmp_path / "data/runs/small").glob("step_0000/.draft-*")):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    started = guarded(run.pid)
    assert any("uvicorn" in " ".join(process.cmdline()) for process in started)
    assert any("pipeline.worker" in process.cmdline() for process in started)
    os.kill(run.pid, blow)
    run.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    assert run.returncode == (-signal.SIGKILL if blow == signal.SIGKILL else 128 + signal.SIGTERM)
