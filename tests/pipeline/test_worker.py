"""A worker process runs stages, keeps what is expensive, and never outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.logs import StageLog
from pipeline.worker import StageTimeout, Worker, WorkerDied
from stages.errors import InputError

STAGE = """
import os, signal, subprocess, time
from stages.errors import InputError
from stages.progress import report

def run(*, what, out):
    if what == "count":
        report(1, 2, "halves")
        return {"pid": os.getpid()}
    if what == "bad input":
        raise InputError("row 3 is bad")
    if what == "unpicklable":
        raise type("Local", (Exception,), {})("odd")
    if what == "die":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    apart = subprocess.Popen(["sleep", "9999"], start_new_session=True)
    orphan = subprocess.check_output("sleep 9999 >/dev/null & echo $!", shell=True, text=True)
    out.write_text(f"{os.getpid()} {apart.pid} {orphan}")
    time.sleep(9999)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker that finds a stage named `pretended`."""
    (tmp_path / "pretended.py").write_text(STAGE)
    (tmp_path / "sitecustomize.py").write_text(
        f"import stages; stages.__path__.append({str(tmp_path)!r})"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    worker = Worker()
    yield worker
    worker.close()


def gone(pids: list[int], within_s: float = 10) -> bool:
    """Whether none of the processes is alive any more (zombies count as gone)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stats = [Path(f"/proc/{pid}/stat") for pid in pids]
        if not any(s.exists() and s.read_text().split()[2] != "Z" for s in stats):
            return True
        time.sleep(0.05)
    return False


def started(file: Path) -> list[int]:
    """The pids that the stage wrote, as soon as it did."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if file.exists() and len(file.read_text().split()) == 3:
            return [int(pid) for pid in file.read_text().split()]
        time.sleep(0.05)
    raise TimeoutError("the stage did not start")


def test_the_process_is_kept_between_calls_and_reports_progress(
    worker: Worker, tmp_path: Path
) -> None:
    heard: list[tuple[int, int, str]] = []
    arguments = {"what": "count", "out": tmp_path}
    pids = {
        worker.call("pretended", arguments, listener=lambda *told: heard.append(told))["pid"]
        for _ in range(2)
    }
    assert len(pids) == 1 and pids != {os.getpid()}
    assert heard == [(1, 2, "halves")] * 2


def test_an_error_of_the_stage_arrives_as_it_was_raised(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="row 3 is bad") as caught:
        worker.call("pretended", {"what": "bad input", "out": tmp_path})
    assert "pretended.py" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Local: odd"):
        worker.call("pretended", {"what": "unpicklable", "out": tmp_path})
    assert worker.call("pretended", {"what": "count", "out": tmp_path})


def test_a_killed_process_is_reported_with_its_signal_and_last_words_and_replaced(
    worker: Worker, tmp_path: Path
) -> None:
    log = StageLog(tmp_path / "stage.log")
    with log, pytest.raises(WorkerDied, match=r"SIGKILL(.|\n)*last words(.|\n)*out of memory"):
        worker.call("pretended", {"what": "die", "out": tmp_path}, log=log)
    assert worker.call("pretended", {"what": "count", "out": tmp_path})


def test_a_time_limit_ends_the_stage_and_its_children(worker: Worker, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(StageTimeout, match="longer than 2"):
        worker.call("pretended", {"what": "hang", "out": tmp_path / "pids"}, timeout_s=2)
    assert time.monotonic() - begin < 10
    assert gone(started(tmp_path / "pids"))


PARENT = """
import sys
from pathlib import Path
from pipeline.worker import Worker
here = Path(sys.argv[1])
Worker().call("pretended", {"what": "hang", "out": here / "pids"})
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_whole_tree_dies_with_its_parent(
    worker: Worker, tmp_path: Path, blow: signal.Signals
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stderr=subprocess.DEVNULL)
    pids = started(tmp_path / "pids")
    parent.send_signal(blow)
    parent.wait()
    assert gone(pids)
