"""Faults at random moments of every stage, and what becomes of the run: a table.

    python tests/bench/faults.py [--times 10] [--seed 0]

A small run is trained again and again by `dapo train`; each time a signal ends it at a random
moment of the stage whose turn it is. In the end it goes on undisturbed, and every artifact's digest
must be that of a run that nobody disturbed. Then a disk fills up, two processes want one run, and
runs on a Prefect worker are cancelled and killed in each stage, with their worker, and under a
server that restarts.
"""

import argparse
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from prefect_server import Server
from small_run import SMALL as OF_TESTS
from small_run import digests

SMALL = (*OF_TESTS, "schedule.evaluate_every=1")
STAGES = ("select", "rollout", "score", "filter", "update", "evaluate")
PATIENCE_S = 300
Row = dict[str, Any]


def main() -> None:
    """Inject the faults and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=10, help="signals per stage")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    rows = list(killed(place / "direct", given.times, dice))
    rows += [two_at_once(place), *full_disk(place)]
    with worked(place) as (server, worker):
        rows += list(on_a_worker(server, worker, place))
    table(rows)
    shutil.rmtree(place)


def train(data: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """`dapo train`, without Prefect, of the small run below `data`."""
    command = [sys.executable, "-m", "pipeline", "train", "--direct", *SMALL, f"data={data}"]
    log = (data.parent / f"{data.name}.log").open("ab")
    return subprocess.Popen([*command, *overrides], stdout=log, stderr=log)


def killed(place: Path, times: int, dice: random.Random) -> Iterator[Row]:
    """Signals in each stage of one run, in turns of SIGKILL and SIGTERM."""
    place.mkdir(parents=True)
    data = place / "disturbed"
    outcomes: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    lasts = dict.fromkeys(STAGES, 0.5)
    for turn, stage in itertools.product(range(times), STAGES):
        sent = signal.SIGKILL if turn % 2 else signal.SIGTERM
        process = train(data, "schedule.steps=1000")
        began = entered(data / "runs/small", stage, process)
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(dice.uniform(0, lasts[stage]))
        asked = time.monotonic()
        process.send_signal(sent)
        process.wait()
        left = psutil.wait_procs([c for c in children if not guards(c)], timeout=10)[1]
        outcomes[stage, sent.name].append((time.monotonic() - asked, len(left)))
        lasts[stage] = max(0.05, min(lasts[stage], time.monotonic() - began))
    steps = len(list((data / "runs/small").glob("step_*/update")))
    assert train(data, f"schedule.steps={steps + 1}").wait() == 0, "the last go failed"
    assert train(place / "calm", f"schedule.steps={steps + 1}").wait() == 0
    same = digests(data / "runs/small") == digests(place / "calm/runs/small")
    for (stage, name), each in sorted(outcomes.items()):
        yield {
            "fault": f"{name} in {stage}",
            "times": len(each),
            "seconds": f"{median(s for s, _ in each):.1f}, at most {max(s for s, _ in each):.1f}",
            "processes left": sum(n for _, n in each),
            "then": f"{steps + 1} steps, digests {'equal' if same else 'DIFFER'}",
        }


def entered(run: Path, stage: str, process: subprocess.Popen[bytes]) -> float:
    """Wait until the stage is under way."""
    old = drafts(run, stage)

    def there() -> bool:
        assert process.poll() is None, f"it ended by itself: {process.returncode}"
        return bool(drafts(run, stage) - old)

    until(there)
    return time.monotonic()


def drafts(run: Path, stage: str) -> set[Path]:
    """What the stage builds in, in the newest steps."""
    steps = sorted(run.glob("step_*"))[-2:]
    patterns = (f".draft-{stage}-*", f"round_*/.draft-{stage}-*")
    return {draft for step in steps for pattern in patterns for draft in step.glob(pattern)}


def guards(process: psutil.Process) -> bool:
    """Whether it is the guardian, which ends what is left and then itself."""
    try:
        return "pipeline.guard" in process.cmdline()
    except psutil.Error:
        return False


def until(happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
    return found


def two_at_once(place: Path) -> Row:
    """A second owner of a run."""
    first = train(place / "twice", "schedule.steps=1000")
    entered(place / "twice/runs/small", "rollout", first)
    asked = time.monotonic()
    second = train(place / "twice", "schedule.steps=1000")
    second.wait()
    alone = first.poll() is None
    first.terminate()
    first.wait()
    return {
        "fault": "two starts of one run",
        "times": 1,
        "seconds": f"{time.monotonic() - asked:.1f}",
        "then": f"the second ends with exit code {second.returncode}, the first "
        + ("goes on" if alone else "ENDS TOO"),
    }


def full_disk(place: Path) -> Iterator[Row]:
    """A file system that fills up, and is made larger. Needs the right to mount one."""
    data = place / "full"
    data.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "faults", data]).returncode:
        print("no right to mount a file system: the full disk is left out", file=sys.stderr)
        return
    try:
        began = time.monotonic()
        code = train(data, "schedule.steps=6").wait()
        seconds = time.monotonic() - began
        subprocess.run(["mount", "-o", "remount,size=1g", data], check=True)
        assert train(data, "schedule.steps=6").wait() == 0
        assert train(place / "roomy", "schedule.steps=6").wait() == 0
        same = digests(data / "runs/small") == digests(place / "roomy/runs/small")
    finally:
        subprocess.run(["umount", data], check=True)
    yield {
        "fault": "full disk",
        "times": 1,
        "seconds": f"{seconds:.1f}",
        "then": f"exit code {code}; with room again, digests {'equal' if same else 'DIFFER'}",
    }


@contextmanager
def worked(place: Path) -> Iterator[tuple[Server, Callable[[], subprocess.Popen[bytes]]]]:
    """A server with our deployments, and what starts a worker."""
    server = Server(place / "prefect")
    server.environment["PREFECT_WORKER_QUERY_SECONDS"] = "1"
    server.start()
    workers = []

    def worker() -> subprocess.Popen[bytes]:
        log = (place / "worker.log").open("ab")
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "dapo"]
        workers.append(subprocess.Popen(command, env=server.environment, stdout=log, stderr=log))
        return workers[-1]

    try:
        command = [sys.executable, "-m", "pipeline", "deploy"]
        subprocess.run(command, env=server.environment, check=True, stdout=subprocess.DEVNULL)
        yield server, worker
    finally:
        for each in workers:
            each.terminate()
            each.wait()
        server.stop()


class Run:
    """A flow run of `train`, of the small run below `data`."""

    def __init__(self, server: Server, data: Path, steps: int) -> None:
        self.server, self.run = server, data / "runs/small"
        deployment = server.get("/deployments/name/train/train")["id"]
        overrides = [*SMALL[1:], f"data={data}", f"schedule.steps={steps}"]
        self.id = server.post(
            f"/deployments/{deployment}/create_flow_run",
            parameters={"request": {"run": "small", "overrides": overrides, "limit": "gpu"}},
            state={"type": "SCHEDULED"},
        )["id"]

    def state(self) -> str:
        try:
            name: str = self.server.get(f"/flow_runs/{self.id}")["state"]["name"]
        except OSError:  # the server restarts
            return ""
        return name

    def ask(self, name: str, kind: str) -> None:
        self.server.post(
            f"/flow_runs/{self.id}/set_state", state={"type": kind, "name": name}, force=True
        )

    def enters(self, stage: str) -> None:
        old = drafts(self.run, stage)
        until(lambda: drafts(self.run, stage) - old)

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if flow_run(p) == self.id]

    def flow(self) -> psutil.Process:
        """The process that runs the flow."""
        return next(p for p in self.processes() if "prefect" in " ".join(p.cmdline()))

    def ends(self, name: str) -> Row:
        """Wait until it is in that state and has no process left."""
        asked = time.monotonic()
        until(lambda: not self.processes())
        gone = time.monotonic() - asked
        until(lambda: self.state() == name)
        free = self.server.get("/v2/concurrency_limits/gpu")["active_slots"] == 0
        return {
            "seconds": f"{gone:.1f} to the last process, {time.monotonic() - asked:.1f} to {name}",
            "processes left": 0,
            "then": f"slot {'free' if free else 'HELD'}",
        }


def flow_run(process: psutil.Process) -> str | None:
    """The flow run that a process was started for, directly or not."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE or guards(process):
            return None
        return process.environ().get("PREFECT__FLOW_RUN_ID")
    except (psutil.Error, OSError):
        return None


def on_a_worker(
    server: Server, worker: Callable[[], subprocess.Popen[bytes]], place: Path
) -> Iterator[Row]:
    """Cancel and kill runs in each stage, their worker and their server."""
    working, data = worker(), place / "worked"
    for stage in STAGES:
        run = Run(server, data, 1000)
        run.enters(stage)
        run.ask("Cancelling", "CANCELLING")
        yield {"fault": f"cancel in {stage}", "times": 1} | run.ends("Cancelled")
    for stage in STAGES:
        run = Run(server, data, 1000)
        run.enters(stage)
        run.flow().kill()
        yield {"fault": f"SIGKILL of the flow in {stage}", "times": 1} | run.ends("Crashed")
    run = Run(server, data, 1000)
    run.enters("rollout")
    working.kill()
    yield {"fault": "SIGKILL of the worker", "times": 1} | run.ends("Crashed")
    worker()
    steps = len(list((data / "runs/small").glob("step_*/update"))) + 4
    run = Run(server, data, steps)
    run.enters("rollout")
    server.stop()
    time.sleep(5)
    server.start()
    yield {"fault": "restart of the server, 5 s away", "times": 1} | run.ends("Completed")
    assert train(place / "undisturbed", f"schedule.steps={steps}").wait() == 0
    same = digests(data / "runs/small") == digests(place / "undisturbed/runs/small")
    yield {
        "fault": "all of these, on one run",
        "times": 14,
        "then": f"{steps} steps, digests {'equal' if same else 'DIFFER'}",
    }


def table(rows: Sequence[Row]) -> None:
    """Print rows as Markdown."""
    columns = ("fault", "times", "seconds", "processes left", "then")
    print("|" + "|".join(columns) + "|\n|" + "---|" * len(columns))
    for row in rows:
        print("|" + "|".join(str(row.get(name, "")) for name in columns) + "|")


if __name__ == "__main__":
    main()
