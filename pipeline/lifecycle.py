"""How a flow run begins and ends: it waits its turn, and is Running no longer than its process."""

import pipeline.prefect_defaults  # noqa: F401, I001  before Prefect

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import psutil
from prefect import get_client, get_run_logger, runtime
from prefect.settings import get_current_settings
from prefect.states import Crashed, State

from pipeline import guard, slots
from pipeline.slots import Slot

POLL_S = 1.0
WORKER_S = 10.0  # in which a living worker reports what became of its process
GRACE_S = 10.0  # for a run to end in good order
STARTED_BY_A_WORKER = "PREFECT__FLOW_RUN_ID"


@contextmanager
def supervised(limit: str | None) -> Iterator[None]:
    """Hold a slot of the concurrency limit `limit`, and leave nothing behind that says Running.

    A flow run whose process is killed is reported as crashed by the process that guards it, and
    its slot is free; one whose worker is killed ends, for nobody could cancel it any more.

    Raises `InputError` if there is no such limit.
    """
    _end_with_the_worker()
    with _reported_when_killed() as reported:
        if limit is None:
            yield
            return
        slot = Slot(limit, UUID(runtime.flow_run.id), reported)
        with slot.held(get_run_logger().info):
            yield


@contextmanager
def _reported_when_killed() -> Iterator[Callable[[UUID], None]]:
    """Bequeath to the guardian to tell the server, if there is one that outlives this process.

    Yields what to tell of a slot's lease, which is given back then. Of what ends in an ordinary
    way Prefect tells the server; of a termination not always: without its worker, a run stays
    Running.
    """
    url, run = get_current_settings().api.url, runtime.flow_run.id
    if not url or not run:
        yield lambda _lease: None
        return

    def will(*lease: UUID) -> None:
        worker = str(os.getppid()) if STARTED_BY_A_WORKER in os.environ else "0"
        command = [sys.executable, "-m", "pipeline.lifecycle", run, worker, *map(str, lease)]
        guard.bequeath(command, {"PREFECT_API_URL": url})

    will()
    try:
        yield will
    except Exception:
        guard.bequeath([], {})
        raise
    guard.bequeath([], {})


def _end_with_the_worker() -> None:
    """Where a worker has started this process: terminate it when the worker is gone."""
    if STARTED_BY_A_WORKER not in os.environ:
        return
    worker = os.getppid()

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)  # what it interrupts may never come to its end
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def report_crash(flow_run: UUID, worker: int) -> None:
    """Have the server say that the flow run has crashed, if it still takes it for running.

    A living worker says so itself, and would say it a second time of a run that is retried before.
    `worker` is its process; 0 of a run that none has started.
    """
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + WORKER_S
        while (state := client.read_flow_run(flow_run).state) and state.is_running():
            # not Cancelling, not Paused, not ended
            if not worker or not psutil.pid_exists(worker) or time.monotonic() > deadline:
                crashed: State = Crashed(
                    message="The flow's process was killed; a retry goes on from disk."
                )
                client.set_flow_run_state(flow_run, crashed, force=True)
                return
            time.sleep(POLL_S)


if __name__ == "__main__":
    _, killed, its_worker, *leases = sys.argv
    for each in leases:
        slots.free(UUID(each))
    report_crash(UUID(killed), int(its_worker))
