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
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import psutil

from pipeline import guard
from pipeline.logs import StageLog
from stages import progress
from stages.errors import OutOfMemory

GRACE_S = 5.0
CHUNK = 1 << 16  # bytes, as much as a pipe holds
ADVICE = {
    signal.SIGKILL: "most probably the system ran out of memory: lower machine.micro_batch_tokens, "
    "machine.max_num_seqs or rollout.n, or give it more",
}


class WorkerDied(RuntimeError):
    """The process ended without an answer: killed, out of memory, or crashed in native code."""


class StageTimeout(RuntimeError):
    """The stage did not end within its time limit; its process group was killed."""


class Worker:
    """A lazily started child process that runs one stage at a time.

    Args:
        environment: variables that the child has beside the parent's.
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._output: Output | None = None

    def call(
        self,
        stage: str,
        arguments: dict[str, Any],
        *,
        function: str = "run",
        listener: progress.Listener | None = None,
        timeout_s: float | None = None,
        log: StageLog | None = None,
    ) -> dict[str, float]:
        """Run `stages.<stage>.<function>(**arguments)` in the child and return its metrics.

        All that the child and its libraries print meanwhile goes to `log`, else to our stderr.

        Raises what the stage raised (with the child's traceback as a note), `WorkerDied` or
        `StageTimeout`; after the latter two the next call starts a new child.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            connection = self._started(log)
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
            raise WorkerDied(self._obituary(stage, log)) from error
        except BaseException:  # also Ctrl-C: the child is at work on an answer that nobody awaits
            self.close()
            raise
        finally:
            if self._output:
                self._output.drain()
                self._output.write = None
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
        if self._output:
            self._output.close()
        self._connection.close()
        self._process = self._connection = self._output = None

    def _started(self, log: StageLog | None) -> Connection:
        if self._connection is None:
            guard.install()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pipeline.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                    start_new_session=True,
                )
            assert self._process.stdout
            self._connection = Connection(ours.detach())
            self._output = Output(self._process.stdout)
        assert self._output
        self._output.write = log.write if log else _to_stderr
        return self._connection

    def _obituary(self, stage: str, log: StageLog | None) -> str:
        """How the child died, its last words, and what to do."""
        assert self._process and self._output
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE_S)
        code = self._process.returncode
        self._output.drain()
        self.close()
        killer = signal.Signals(-code) if code and code < 0 else None
        cause = f"signal {killer.name}" if killer else f"exit code {code}"
        words = f"; {log.path} ends:\n{log.tail()}\n" if log else "; "
        advice = ADVICE.get(killer, "the log says why") if killer else "the log says why"
        return (
            f"the process that ran {stage} ended with {cause}{words}{advice}; "
            "the same command goes on from here"
        )


class Output:
    """What a child prints, read as it comes and passed on to the log of the stage that it runs.

    What comes between two stages waits for the next one's log. The pipe's end is not awaited: a
    grandchild may hold it after the child is gone.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.write: Callable[[bytes], None] | None = None
        self._held = b""
        self._pipe = pipe
        self._lock = threading.Lock()
        os.set_blocking(pipe.fileno(), False)
        threading.Thread(target=self._pump, daemon=True).start()

    def drain(self) -> bool:
        """Pass on all that the pipe holds; False at its end."""
        with self._lock:
            while not self._pipe.closed:
                try:
                    output = os.read(self._pipe.fileno(), CHUNK)
                except BlockingIOError:
                    return True
                if not output:
                    break
                self._held += output
                if self.write:
                    self.write(self._held)
                    self._held = b""
            return False

    def close(self) -> None:
        """Pass on what is left, and listen no longer."""
        self.drain()
        with self._lock:
            self._pipe.close()

    def _pump(self) -> None:
        with suppress(ValueError, OSError):  # closed meanwhile
            while wait([self._pipe.fileno()], timeout=1.0) == [] or self.drain():
                pass


def _to_stderr(output: bytes) -> None:
    """As text: a progress bar puts something of its own in the place of stderr."""
    sys.stderr.write(output.decode(errors="replace"))


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
            answer = ("failed", _portable(error))
        sys.stdout.flush()  # what was printed is told before the answer is
        connection.send(answer)


def _portable(error: Exception) -> Exception:
    """The error as a process without torch or vLLM can read it."""
    if _out_of_memory(error):
        return OutOfMemory(str(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _out_of_memory(error: BaseException) -> bool:
    """Of torch on a GPU, of torch on a CPU, or of Python."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


if __name__ == "__main__":
    with suppress(EOFError):
        _serve(Connection(int(sys.argv[1])))
