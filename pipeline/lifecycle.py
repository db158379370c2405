"""How a flow run begins and ends: it waits its turn, and is Running no longer than its process."""

import pipeline.prefect_defaults  # noqa: F401, I001  before Prefect

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect import get_client, runtime
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import Crashed, State

from pipeline import guard
from stages.errors import InputError

LEASE_S = 60.0  # after which a killed process' slot is free; the least that Prefect allows
POLL_S = 1.0
STARTED_BY_A_WORKER = "PREFECT__FLOW_RUN_ID"


@contextmanager
def supervised(limit: str | None) -> Iterator[None]:
    """Hold a slot of the concurrency limit `limit`, and leave nothing behind that says Running.

    A flow run whose process is killed is reported as crashed by the process that guards it; one
    whose worker is killed ends, for nobody could cancel it any more.

    Raises `InputError` if there is no such limit.
    """
    _end_with_the_worker()
    with _reported_when_killed(), _slot(limit):
        yield


@contextmanager
def _slot(limit: str | None) -> Iterator[None]:
    if limit is None:
        yield
        return
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(limit)
        except ObjectNotFound as error:
            raise InputError(
                f"there is no concurrency limit '{limit}'; `dapo deploy` makes it, or "
                "leave limit empty"
            ) from error
    # a server that restarts in the middle is no reason to end a run
    with concurrency(
        limit, strict=True, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False
    ):
        yield


@contextmanager
def _reported_when_killed() -> Iterator[None]:
    """Bequeath to the guardian to tell the server, if there is one that outlives this process.

    Of what ends in an ordinary way Prefect tells it; of a termination not always: without its
    worker, a run stays Running.
    """
    url, run = get_current_settings().api.url, runtime.flow_run.id
    if not url or not run:
        yield
        return
    guard.bequeath([sys.executable, "-m", "pipeline.lifecycle", run], {"PREFECT_API_URL": url})
    try:
        yield
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

    threading.Thread(target=watch, daemon=True).start()


def report_crash(flow_run: UUID) -> None:
    """Have the server say that the flow run has crashed, if it still takes it for running."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
        if state is not None and state.is_running():  # not Cancelling, not Paused, not ended
            crashed: State = Crashed(
                message="The flow's process was killed; a retry goes on from disk."
            )
            client.set_flow_run_state(flow_run, crashed, force=True)


if __name__ == "__main__":
    report_crash(UUID(sys.argv[1]))
