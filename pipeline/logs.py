"""A stage's log: a file beside its artifact, and a listener that gets every line as it comes."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

Tell = Callable[[str], None]

listener: ContextVar[Tell | None] = ContextVar("listener", default=None)

PIECE = 100_000  # characters of a message; Prefect's server refuses one above a megabyte
TAIL = 2000  # bytes that an error quotes


class StageLog:
    """Where a stage's output goes, in whatever pieces it comes; several processes may write.

    Args:
        path: the file; what earlier attempts wrote stays in it.
        tell: gets each line without its end. A bar that redraws itself is told once, as it ended.
    """

    def __init__(self, path: Path, tell: Tell | None = None) -> None:
        self.path = path
        self._tell = tell
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._began = self._file.tell()
        self._unfinished = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._unfinished:
                self._told(self._unfinished)
            self._file.close()

    def write(self, output: bytes) -> None:
        """Some more of what a process printed."""
        with self._lock:
            self._file.write(output)
            *lines, self._unfinished = (self._unfinished + output).split(b"\n")
            for line in lines:
                self._told(line)

    def note(self, text: str) -> None:
        """A line of our own, with the time."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.write(f"{now} {text}\n".encode())

    def beside(self, name: str) -> "StageLog":
        """A log for one of several processes, `rollout.engine-1.log` beside `rollout.log`."""
        return StageLog(self.path.with_suffix(f".{name}.log"), self._tell)

    def tail(self) -> str:
        """The last of what this attempt printed."""
        with self._lock, self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self._began, end - TAIL))
            return file.read().decode(errors="replace").strip()

    def _told(self, line: bytes) -> None:
        if self._tell is None:
            return
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        for start in range(0, len(text), PIECE):
            self._tell(text[start : start + PIECE])
