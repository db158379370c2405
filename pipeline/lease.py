"""Who owns a run in a store: one process at a time, for as long as it gives signs of life.

The lock is an object, `.lock/<number>`: its owner, and when it was last heard of. Whoever wants a
run that nobody holds, or whose owner is dead, creates the next number, which only one can; the
highest number owns the run. An owner that finds a higher number than its own stops writing.

Where the store has no conditional writes, two hosts that start within the same instant may both
create a number; each reads it back, and only the last writer finds itself. What that leaves open is
a moment between two requests. Hosts' clocks have to agree to some seconds.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from pipeline.storage import Store
from stages.errors import InputError, StorageError

LOCK = ".lock"
BEAT_S, STALE_S = 15.0, 60.0  # seconds between signs of life; without one, the owner is dead
ATTEMPTS = 5


@dataclass(frozen=True)
class Owner:
    """A process that holds a run, and when it was last heard of."""

    token: str
    host: str
    boot: str  # the host's boot and the container: within one, pids can be looked up
    pid: int
    started: float  # of the process, for a pid is used again
    beat: float  # seconds since the epoch

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        process = psutil.Process()
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            boot=_boot(),
            pid=process.pid,
            started=process.create_time(),
            beat=time.time(),
        )

    @property
    def silent_s(self) -> float:
        return max(0.0, time.time() - self.beat)

    @property
    def dead(self) -> bool:
        """Its process is gone from this machine, or it was silent for too long."""
        if (self.host, self.boot) == (socket.gethostname(), _boot()):
            try:
                return abs(psutil.Process(self.pid).create_time() - self.started) > 1
            except psutil.NoSuchProcess:
                return True
        return self.silent_s > STALE_S


class Lease:
    """The right to write to a run in a store; see `held`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._owner = Owner.here()
        self._number = 0
        self._renewing = threading.Lock()
        self._ended = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Own the run while the block runs, and give signs of life.

        Raises `InputError` that names the owner when somebody else has it.
        """
        self._acquire()
        beating = threading.Thread(target=self._beat, daemon=True)
        beating.start()
        try:
            yield
        finally:
            self._ended.set()
            beating.join()
            # if the store is gone by now: a dead process's lock keeps nobody out for long
            with suppress(StorageError, InputError):
                self._release()

    def check(self) -> None:
        """Raise `StorageError` if the run is, or may be, somebody else's by now."""
        if self._owner.silent_s > 2 * BEAT_S:
            self._renew()

    def _acquire(self) -> None:
        for _ in range(ATTEMPTS):
            number, owner = self._newest()
            if owner and owner.token != self._owner.token and not owner.dead:
                raise InputError(
                    f"{self.store.url} is in use by pid {owner.pid} on {owner.host}, last heard of "
                    f"{owner.silent_s:.0f} s ago; wait for it, stop it, or choose another run. "
                    f"{STALE_S:.0f} s after its last sign of life the run is free"
                )
            self._number = number + 1
            self._owner = replace(self._owner, beat=time.time())
            # not created: somebody was faster, or a repeated request met its own success
            self.store.create(self._name(self._number), self._content())
            if self._newest() == (self._number, self._owner):
                self._remove_older()
                return
        raise StorageError(f"{self.store.url}: others keep taking it; try the same command again")

    def _renew(self) -> None:
        """Give a sign of life, if the run is still ours."""
        with self._renewing:
            _, owner = self._newest()
            if owner is None or owner.token != self._owner.token:
                taken = f"pid {owner.pid} on {owner.host} owns it now" if owner else "nobody has it"
                raise StorageError(
                    f"{self.store.url} was lost, for nothing was heard from here in {STALE_S:.0f} "
                    f"s: {taken}. What was made since stays here; the same command goes on"
                )
            self._owner = replace(self._owner, beat=time.time())
            self.store.write(self._name(self._number), self._content())

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            # `check` fails in the same way before anything is written
            with suppress(StorageError, InputError):
                self._renew()

    def _release(self) -> None:
        """Remove our number, also if there is a higher one by now."""
        owner = self._holder(self._number)
        if owner and owner.token == self._owner.token:
            self.store.remove([self._name(self._number)])

    def _newest(self) -> tuple[int, Owner | None]:
        """The highest number there is, and who holds it; none if it is gone meanwhile."""
        number = max(self._numbers(), default=0)
        return number, self._holder(number) if number else None

    def _holder(self, number: int) -> Owner | None:
        name = self._name(number)
        found = self.store.read([name])
        if name not in found:
            return None
        try:
            return Owner(**json.loads(found[name]))
        except (ValueError, TypeError) as error:
            raise InputError(f"{self.store.url}/{name} is no lock ({error}); delete it") from error

    def _remove_older(self) -> None:
        self.store.remove([self._name(n) for n in self._numbers() if n < self._number])

    def _numbers(self) -> list[int]:
        names = (name.rpartition("/")[2] for name in self.store.versions(LOCK))
        return sorted(int(name) for name in names if name.isdecimal())

    def _name(self, number: int) -> str:
        return f"{LOCK}/{number:08d}"

    def _content(self) -> bytes:
        return json.dumps(asdict(self._owner)).encode()


def _boot() -> str:
    """This boot of this machine, and the container: pids mean something only within both."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = boot.read_text().strip() if boot.exists() else f"{psutil.boot_time():.0f}"
    spaces = "/proc/self/ns/pid"
    return f"{known} {os.readlink(spaces) if os.path.exists(spaces) else ''}".strip()
