"""A slot of a concurrency limit of Prefect, so that two runs do not share a GPU.

Prefect's own `concurrency` keeps its lease to itself, so that the slot of a killed process is lost
until that expires. Here whoever finds the process dead can `free` the slot at once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectNotFound

from stages.errors import InputError

LEASE_S = 60.0  # the server frees a slot that nobody renews for so long; the least it allows
RENEW_S = LEASE_S / 4
ASK_S = 5.0
LOCKED, GONE, BROKEN = 423, 410, 500


class Slot:
    """A slot of the limit `limit` for a flow run; `leased` hears of every lease taken."""

    def __init__(self, limit: str, flow_run: UUID, leased: Callable[[UUID], None]) -> None:
        self.limit, self.leased = limit, leased
        self.holder = ConcurrencyLeaseHolder(type="flow_run", id=flow_run)
        self.lease: UUID | None = None

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Wait for the slot, and hold it inside.

        A server that is away is waited for. One that has forgotten the lease is asked for another
        one; where there is none the work goes on without, for it is under way.

        Raises `InputError` if there is no such limit.
        """
        with get_client(sync_client=True) as client:
            try:
                client.read_global_concurrency_limit_by_name(self.limit)
            except ObjectNotFound as error:
                raise InputError(
                    f"there is no concurrency limit '{self.limit}'; `dapo deploy` makes it, or "
                    "leave limit empty"
                ) from error
        if not self._taken():
            say(f"waits for a slot of the concurrency limit '{self.limit}'")
            while not self._taken():
                time.sleep(ASK_S)
        ended = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(ended, say), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join()
            if self.lease:
                with suppress(httpx.HTTPError):  # it expires, then
                    free(self.lease)

    def _taken(self) -> bool:
        """Ask for the slot once; False if there is none, or no answer."""
        with get_client(sync_client=True) as client:
            try:
                answer = client.increment_concurrency_slots_with_lease(
                    [self.limit], 1, "concurrency", LEASE_S, self.holder
                )
            except httpx.TransportError:
                return False
            except httpx.HTTPStatusError as error:
                if error.response.status_code == LOCKED or error.response.status_code >= BROKEN:
                    return False
                raise
        self.lease = UUID(answer.json()["lease_id"])
        self.leased(self.lease)
        return True

    def _renew(self, ended: threading.Event, say: Callable[[str], None]) -> None:
        while not ended.wait(RENEW_S):
            if self.lease and not _renewed(self.lease):
                self.lease = None
                say(f"the server has lost this run's slot of '{self.limit}'; another may start")
            if self.lease is None:
                self._taken()


def _renewed(lease: UUID) -> bool:
    """False if the server does not know the lease; a server that is away may know it later."""
    with get_client(sync_client=True) as client:
        try:
            client.renew_concurrency_lease(lease, LEASE_S)
        except httpx.HTTPStatusError as error:
            return error.response.status_code != GONE
        except httpx.TransportError:
            pass
    return True


def free(lease: UUID) -> None:
    """Give a slot back; one that is free already stays so."""
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots_with_lease(lease)
