"""A round on several engines is the same round, to the byte; a lost engine costs its own groups."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import rows, save
from prefect_server import Server
from small_run import SMALL, digests, run, workers

from pipeline import parts
from pipeline.artifacts import Artifact
from pipeline.runner import Runner
from pipeline.worker import WorkerDied
from stages import evaluate, progress, rollout, tables
from stages.errors import InputError
from stages.settings import Machine

GROUPS = [f"g{i}" for i in range(7)]
SAMPLING: dict[str, Any] = {"engine": "hf", "n": 3, "max_tokens": 20}
PATIENCE_S = 60
ALONE = 1  # request in a batch: then nothing depends on its neighbours, to the last bit


@pytest.fixture(scope="module")
def inputs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Seven groups; the prompt of the last one is empty."""
    path = tmp_path_factory.mktemp("inputs")
    prompts = [
        {"prompt_id": g, "prompt": f"{i}+{i}", "answer": f"{2 * i}"} for i, g in enumerate(GROUPS)
    ]
    prompts[-1]["prompt"] = " "
    chosen = [{"group_id": g, "prompt_id": g, "position": i} for i, g in enumerate(GROUPS)]
    return {
        "selection": save(path / "selection", "selection", rows("selection", *chosen)),
        "prompts": save(path / "prompts", "prompts", rows("prompts", *prompts)),
        "policy": policy,
    }


def built(out: Path, inputs: dict[str, Path], *, engines: int, **changes: Any) -> Artifact:
    """A rollout on so many engines."""
    with Runner(
        Machine(engines=engines, max_num_seqs=ALONE), logged=True, workers=workers()
    ) as runner:
        config = rollout.Config(**SAMPLING | changes)
        return runner.build("rollout", out=out, config=config, inputs=inputs)


@pytest.fixture(scope="module")
def alone(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The round on one engine."""
    return built(tmp_path_factory.mktemp("alone") / "rollout", inputs, engines=1)


def test_the_artifact_is_the_same_whatever_the_number_of_engines(
    alone: Artifact, inputs: dict[str, Path], tmp_path: Path
) -> None:
    told: list[tuple[int, int, str]] = []
    token = progress.listener.set(lambda *report: told.append(report))
    try:
        shared = built(tmp_path / "rollout", inputs, engines=3)
    finally:
        progress.listener.reset(token)
    assert told[-1][:2] == (18, 18)  # of all engines together
    assert told[-1][2].startswith("rollout: ") and told[-1][2].count("tok/s") == 3
    assert shared.digest == alone.digest
    assert shared.record["rows"] == {"rollouts": 18, "skipped": 1}
    assert shared.metrics["generated"] == alone.metrics["generated"] == 18
    assert shared.metrics["recovered"] == 0
    assert {p.name for p in tmp_path.iterdir()} >= {"rollout.log", "rollout.engine-1.log"}
    assert not list(tmp_path.glob(".partial-*"))


def test_an_evaluation_is_the_same_whatever_the_number_of_engines(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    given = {name: inputs[name] for name in ("prompts", "policy")}
    config = evaluate.Config(**SAMPLING)
    made = set()
    for engines in (1, 2):
        with Runner(
            Machine(engines=engines, max_num_seqs=ALONE), logged=True, workers=workers()
        ) as runner:
            out = tmp_path / f"{engines}"
            made.add(runner.build("evaluate", out=out, config=config, inputs=given).digest)
    assert len(made) == 1


def test_more_engines_than_groups_are_no_error(
    alone: Artifact, inputs: dict[str, Path], tmp_path: Path
) -> None:
    few = save(tmp_path / "few", "selection", tables.read(inputs["selection"], "selection").tail(2))
    made = built(tmp_path / "rollout", inputs | {"selection": few}, engines=3)
    assert made.record["rows"] == {"rollouts": 3, "skipped": 1}


def test_a_lost_engine_costs_its_own_groups_and_a_rerun_samples_only_those(
    alone: Artifact, inputs: dict[str, Path], tmp_path: Path
) -> None:
    out, config = tmp_path / "rollout", rollout.Config(**SAMPLING)
    machine = Machine(engines=2, max_num_seqs=ALONE)
    with Runner(machine, logged=True, workers=workers()) as runner:
        runner.spread = losing(1)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            runner.build("rollout", out=out, config=config, inputs=inputs)
        assert not out.exists()
        runner.spread = parts.in_threads
        again = runner.build("rollout", out=out, config=config, inputs=inputs)
    assert again.digest == alone.digest
    # engine 0 had the groups 0, 2, 4; the last of its four prompts is empty
    assert (again.metrics["recovered"], again.metrics["generated"]) == (9, 9)


def losing(engine: int) -> parts.Spread:
    """Spread jobs over threads, and kill the worker of one of them when it is at work."""

    def spread(run: parts.Run, jobs: Sequence[parts.Job]) -> list[parts.Metrics]:
        killed = threading.Event()

        def lost(job: parts.Job) -> parts.Metrics:
            if job.engine == engine:
                threading.Thread(target=kill).start()
            else:
                assert killed.wait(PATIENCE_S)
            return run(job)

        def kill() -> None:
            worker = workers()["engine"][engine]
            while not worker._process:
                time.sleep(0.01)
            os.kill(worker._process.pid, signal.SIGKILL)
            killed.set()

        return parts.in_threads(lost, jobs)

    return spread


def test_groups_that_no_engine_completed_in_time_are_skipped_by_name(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="none of 6 groups was complete"):
        built(tmp_path / "rollout", inputs, engines=2, time_limit_s=1e-9)


def test_what_the_engines_left_undone_is_not_sampled_once_more_to_publish(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    with Runner(Machine(engines=2), logged=True, workers=workers()) as runner:
        runner.spread = lambda run, jobs: [{} for _ in jobs]
        with pytest.raises(InputError, match="none of 6 groups was complete"):
            config = rollout.Config(**SAMPLING, time_limit_s=60)
            runner.build("rollout", out=tmp_path / "rollout", config=config, inputs=inputs)


def test_what_engines_record_is_summed_or_the_worst_is_kept() -> None:
    fast = {"generated": 4, "tokens_per_second": 10.0, "probe_gap_max": 1e-6, "start_s": 3.0}
    slow = {"generated": 2, "tokens_per_second": 5.0, "probe_gap_max": 2e-6, "start_s": 4.0}
    assert parts.joined([fast, slow, {"generated": 0}]) == {
        "generated": 6,
        "tokens_per_second": 15.0,
        "probe_gap_max": 2e-6,
        "start_s": 4.0,
    }


def test_each_engine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    machine = Machine(device="cuda", engines=2, tensor_parallel_size=2)
    given = [w.environment["CUDA_VISIBLE_DEVICES"] for w in Runner(machine)._workers["engine"]]
    assert given == ["4,5", "6,7"]
    with pytest.raises(InputError, match="need 6, and CUDA_VISIBLE_DEVICES=4,5,6,7 names 4"):
        Runner(machine.model_copy(update={"engines": 3}))


ONCE = ["schedule.steps=1", "rollout.n=3", f"machine.max_num_seqs={ALONE}"]


def train_under_prefect(
    data: Path, server: Server, overrides: list[str]
) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own: Prefect and Ray change theirs for good."""
    told = [*SMALL, *ONCE, *overrides, f"data={data}"]
    code = f"from pipeline import flows, requests; flows.train(requests.Train(overrides={told}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=server.environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_run_on_two_workers_of_ray_makes_the_same_artifacts(
    server: Server, tmp_path: Path
) -> None:
    run(tmp_path / "alone", ONCE)
    done = train_under_prefect(tmp_path, server, ["machine.engines=2", "machine.task_runner=ray"])
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "runs") == digests(tmp_path / "alone" / "runs")
