"""A Prefect server of the tests' own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MARK = "DAPO_GUARD"


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
    """A Prefect server of the tests' own."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self.url = url
        self.environment = {**environment, "PREFECT_API_URL": url}

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=120) as response:
            return json.load(response)

    def newest_flow_run(self) -> dict[str, Any]:
        found: dict[str, Any] = self.post("/flow_runs/filter", sort="START_TIME_DESC", limit=1)[0]
        return found

    def task_runs(self, flow_run: dict[str, Any]) -> dict[str, dict[str, Any]]:
        runs = self.post("/task_runs/filter", flow_runs={"id": {"any_": [flow_run["id"]]}})
        return {run["name"]: run for run in runs}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = home(tmp_path_factory.mktemp("prefect"))
    process = subprocess.Popen(
        [*(sys.executable, "-m", "prefect", "server", "start"), "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Server(f"http://127.0.0.1:{port}/api", environment)
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(server.url + "/health", timeout=1)
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
    yield server
    process.terminate()
    process.wait(timeout=30)
