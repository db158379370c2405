"""A Prefect server of the tests' own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MARK = "DAPO_GUARD"
# Without garbage collection, else a server on SQLite stands still for a minute now and then: the
# collector, in the thread of its event loop, resets a cursor of a connection that waits for a lock
# whose holder waits for the event loop.
SERVE = "import gc, runpy; gc.disable(); runpy.run_module('prefect', run_name='__main__')"


def home(path: Path) -> dict[str, str]:
    """An environment in which Prefect keeps everything below `path`."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_") and k != MARK},
        "PREFECT_HOME": str(path),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(path / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(path / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }


class Server:
    """A Prefect server that keeps everything below `home`; its address outlives a restart."""

    def __init__(self, path: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self._own = home(path)
        self.environment = {**self._own, "PREFECT_API_URL": self.url}

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "server", "start", "--port", str(self.port)],
            env=self._own,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=1)
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(timeout=30)

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._answer(request)

    def get(self, path: str) -> Any:
        return self._answer(urllib.request.Request(self.url + path))

    def _answer(self, request: urllib.request.Request) -> Any:
        """What it answers; asked again, as Prefect's client does, where it is too busy to."""
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=120) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def newest_flow_run(self) -> dict[str, Any]:
        found: dict[str, Any] = self.post("/flow_runs/filter", sort="START_TIME_DESC", limit=1)[0]
        return found

    def task_runs(self, flow_run: dict[str, Any]) -> dict[str, dict[str, Any]]:
        runs = self.post("/task_runs/filter", flow_runs={"id": {"any_": [flow_run["id"]]}})
        return {run["name"]: run for run in runs}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server
    server.stop()
