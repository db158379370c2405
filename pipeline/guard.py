"""Whatever this process starts, directly or not, ends with it: also after SIGKILL.

A child inherits a mark in its environment, however many sessions and process groups lie between.
A guardian process waits for the pipe from here to close, which only the kernel does for a killed
process, and then kills everything that carries the mark. What was bequeathed to it is run then.
"""

import json
import os
import subprocess
import sys
import threading
import time
import uuid

import psutil

MARK = "DAPO_GUARD"
PATIENCE_S = 5.0  # for processes that are just being started

_guardian: subprocess.Popen[bytes] | None = None
_installing = threading.Lock()


def install() -> None:
    """Start the guardian, once; what is started from now on carries the mark."""
    global _guardian
    with _installing:
        if _guardian is None:
            mark = uuid.uuid4().hex
            _guardian = subprocess.Popen(
                [sys.executable, "-m", "pipeline.guard", mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # who waits for our output's end is not to wait for it
                stderr=subprocess.DEVNULL,
                # that of whoever guards us: its guardian would kill ours before our children end
                env={name: value for name, value in os.environ.items() if name != MARK},
                start_new_session=True,  # Ctrl-C is for the guarded, not for the guardian
            )
            os.environ[MARK] = mark


def bequeath(command: list[str], environment: dict[str, str]) -> None:
    """Have the guardian run `command` should this process be killed; an empty one is none.

    It has our environment, as it was when the guardian started, and `environment` above it.
    """
    install()
    assert _guardian and _guardian.stdin
    will = json.dumps({"command": command, "environment": environment})
    _guardian.stdin.write(will.encode() + b"\n")
    _guardian.stdin.flush()


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that carry the mark."""
    return [p for p in psutil.process_iter() if _mark_of(p) == mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(MARK)
    except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
        return None


def _watch(mark: str) -> None:
    wills = list(sys.stdin.buffer)  # ends when the guarded process, the only writer, is gone
    deadline = time.monotonic() + PATIENCE_S
    while (alive := marked(mark)) and time.monotonic() < deadline:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)
    will = json.loads(wills[-1]) if wills else {"command": []}
    if will["command"]:
        environment = {**os.environ, **will["environment"]}
        subprocess.run(will["command"], env=environment, check=False)


if __name__ == "__main__":
    _watch(sys.argv[1])
