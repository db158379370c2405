"""Runs wait for a slot of a limit, and what a server forgets does not stop them."""

import threading
import time
import uuid
from collections.abc import Callable

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect_server import Server

from pipeline import slots
from pipeline.slots import Slot
from stages.errors import InputError

pytestmark = pytest.mark.slow
PATIENCE_S = 60


@pytest.fixture
def limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A limit of one slot, of which much is asked within a second."""
    monkeypatch.setattr(slots, "ASK_S", 0.1)
    monkeypatch.setattr(slots, "RENEW_S", 0.1)
    # of this server in all threads; a setting would be the main one's only
    monkeypatch.setattr(slots, "get_client", lambda **_: SyncPrefectClient(server.url))
    name = f"limit-{uuid.uuid4()}"
    with SyncPrefectClient(server.url) as client:
        client.upsert_global_concurrency_limit_by_name(name, 1)
    return name


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def slot(limit: str, leases: list[uuid.UUID] | None = None) -> Slot:
    """One of a flow run of its own; `leases` gets those that it takes."""
    return Slot(limit, uuid.uuid4(), [].append if leases is None else leases.append)


def taken(server: Server, limit: str) -> int:
    found: int = server.get(f"/v2/concurrency_limits/{limit}")["active_slots"]
    return found


def test_a_second_run_says_that_it_waits_and_begins_when_the_first_has_ended(
    server: Server, limit: str
) -> None:
    events: list[str] = []

    def second() -> None:
        with slot(limit).held(events.append):
            events.append("second")

    waiting = threading.Thread(target=second)
    with slot(limit).held(events.append):
        waiting.start()
        until(lambda: bool(events))
        assert taken(server, limit) == 1
        time.sleep(0.5)
        events.append("first has ended")
    waiting.join(PATIENCE_S)
    waits = f"waits for a slot of the concurrency limit '{limit}'"
    assert events == [waits, "first has ended", "second"]
    assert taken(server, limit) == 0


def test_a_slot_that_the_server_lost_is_taken_again(server: Server, limit: str) -> None:
    said: list[str] = []
    leases: list[uuid.UUID] = []
    with slot(limit, leases).held(said.append):
        slots.free(leases[0])
        until(lambda: len(leases) == 2)
        assert taken(server, limit) == 1
    assert said == [f"the server has lost this run's slot of '{limit}'; another may start"]
    assert taken(server, limit) == 0


def test_a_slot_outlives_the_time_that_its_lease_is_given(
    server: Server, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[bool] = []
    honest = slots._renewed
    monkeypatch.setattr(slots, "_renewed", lambda lease: renewed.append(honest(lease)) or True)
    with slot(limit).held(print):
        until(lambda: len(renewed) >= 2)
    assert all(renewed)


def test_a_server_that_is_away_has_not_lost_the_slot(
    server: Server, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(*given: object) -> None:
        asked.append(given)
        raise httpx.ConnectError("refused")

    said: list[str] = []
    leases: list[uuid.UUID] = []
    with slot(limit, leases).held(said.append):
        monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", refuse)
        until(lambda: len(asked) >= 2)
        assert taken(server, limit) == 1
    assert (said, len(leases), taken(server, limit)) == ([], 1, 0)


def test_a_limit_that_nobody_made_is_refused_with_the_way_out(limit: str) -> None:
    refused = pytest.raises(InputError, match="no concurrency limit 'gpus'; `dapo deploy` makes it")
    with refused, slot("gpus").held(print):
        pass
