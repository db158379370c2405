"""A process of its own for stages that need torch or vLLM, kept between calls.

A stage keeps there what was expensive (an import, an engine) for the next call. The child leads its
own process group, so that it can be ended with all that it started; and it is guarded, so that it
never outlives its parent.
"""

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from pipeline import guard
from stages import progress

GRACE_S = 5.0


class WorkerDied(RuntimeError):
    """The process ended without an answer: killed, out of memory, or crashed in native code."""


class StageTimeout(RuntimeError):
    """The stage did not end within its time limit; its process group was killed."""


class Worker:
    """A lazily started child process that runs one stage at a time.

    Args:
        log: file for all that the child and its libraries print; None: the parent's stderr.
        environment: variables that the child has beside the parent's.
    """

    def __init__(
        self, log: Path | None = None, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self.environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(
        self,
        stage: str,
        arguments: dict[str, Any],
        *,
        function: str = "run",
        listener: progress.Listener | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, float]:
        """Run `stages.<stage>.<function>(**arguments)` in the child and return its metrics.

        Raises what the stage raised (with the child's traceback as a note), `WorkerDied` or
        `StageTimeout`; after the latter two the next call starts a new child.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            connection = self._started()
            connection.send((stage, function, arguments))
            while connection.poll(deadline and max(0.0, deadline - time.monotonic())):
                kind, value = connection.recv()
                if kind == "done":
                    return value
                if kind == "failed":
                    break
                if listener:
                    listener(*value)
            else:
                raise StageTimeout(f"{stage} took longer than {timeout_s} s and was ended")
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(self._obituary(stage)) from error
        except BaseException:  # also Ctrl-C: the child is at work on an answer that nobody awaits
            self.close()
            raise
        raise value

    @property
    def running(self) -> bool:
        """Whether there is a child."""
        return self._process is not None

    def close(self) -> None:
        """End the child and all its descendants."""
        if self._process is None or self._connection is None:
            return
        with suppress(psutil.NoSuchProcess):
            for descendant in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    descendant.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._process = self._connection = None

    def _started(self) -> Connection:
        if self._connection is None:
            guard.install()
            ours, theirs = socket.socketpair()
            with theirs, self._output() as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pipeline.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                )
            self._connection = Connection(ours.detach())
        return self._connection

    @contextmanager
    def _output(self) -> Iterator[Any]:
        if self.log is None:
            yield sys.stderr.fileno()
        else:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                yield file

    def _obituary(self, stage: str) -> str:
        """How the child died, and its last words."""
        assert self._process
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE_S)
        code = self._process.returncode
        self.close()
        cause = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        words = (
            f"; {self.log} ends:\n{self.log.read_text(errors='replace')[-1000:]}"
            if self.log
            else ""
        )
        return f"the process that ran {stage} ended with {cause}{words}"


def _serve(connection: Connection) -> None:
    """The child: run what is asked, answer with metrics or the exception, until the pipe closes."""

    def tell(done: int, total: int, note: str) -> None:
        connection.send(("progress", (done, total, note)))

    progress.listener.set(tell)
    while True:
        stage, function, arguments = connection.recv()
        try:
            metrics = getattr(importlib.import_module(f"stages.{stage}"), function)(**arguments)
            answer = ("done", metrics)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = ("failed", _picklable(error))
        connection.send(answer)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    with suppress(EOFError):
        _serve(Connection(int(sys.argv[1])))
