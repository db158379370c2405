"""Keys come from the environment, and stay there: nothing that a run leaves behind has them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from small_run import SMALL
from test_flows import home

from pipeline.config import load
from stages.engine_endpoint import KEY
from stages.errors import InputError

NAMES = (KEY, "WANDB_API_KEY", "PREFECT_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD")
SECRETS = {name: f"sentinel{index}" * 5 for index, name in enumerate(NAMES)}


class Locked(BaseHTTPRequestHandler):
    """A server that takes no key, and notes those that it is shown."""

    shown: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.shown.append(self.headers["Authorization"])
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"Unauthorized")

    def log_message(self, *_: object) -> None:
        """The test's output is not its log."""


@pytest.fixture
def locked() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def dapo(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command under Prefect's own server, with secrets in its environment."""
    settings = [o for o in SMALL if "~warmstart" not in arguments or "warmstart." not in o]
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "train", *settings, *arguments],
        env=home(root / "prefect") | SECRETS,
        cwd=root,
        capture_output=True,
        check=False,
    )


def leaks(root: Path) -> list[str]:
    """The files below `root` in which one of the secrets stands."""
    return [
        f"{path}: {name}"
        for path in root.rglob("*")
        if path.is_file()
        for name, secret in SECRETS.items()
        if secret.encode() in path.read_bytes()
    ]


@pytest.mark.slow
def test_no_secret_of_the_environment_is_in_anything_that_runs_leave_behind(
    data: Path, locked: str
) -> None:
    root = data.parent
    trained = dapo(
        root, f"data={data}", "schedule.evaluate_every=1", "track=wandb", "track.mode=offline"
    )
    assert trained.returncode == 0, trained.stdout
    refused = dapo(
        root,
        *(f"data={data}", "run=elsewhere", "track=mlflow", "evaluate=endpoint"),
        *("--direct", "~warmstart", f"model.path={data / 'runs/small/step_0000/warmstart'}"),
        f"machine.endpoint={locked}",
    )
    assert refused.returncode == 2 and KEY in refused.stderr.decode(), refused.stderr
    assert Locked.shown and set(Locked.shown) == {f"Bearer {SECRETS[KEY]}"}

    assert list(root.glob("prefect/*.db")) and list(data.glob("runs/*/*/*.log"))
    assert list(data.glob("runs/small/tracker/wandb/offline-*/*.wandb"))
    (root / "output").write_bytes(trained.stdout + trained.stderr + refused.stdout + refused.stderr)
    assert leaks(root) == []
    (root / "planted").write_text(f"a line with {SECRETS[KEY]}")
    assert leaks(root) == [f"{root / 'planted'}: {KEY}"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("machine.endpoint=https://me:s3cret@host:8000", KEY),
        ("machine.endpoint=https://s3cret@host", KEY),
        ("track.uri=https://me:s3cret@host/mlflow", "MLFLOW_TRACKING_PASSWORD"),
        ("machine.endpoint_key=s3cret", "unknown key 'machine.endpoint_key'"),
    ],
)
def test_a_secret_in_a_setting_is_refused_and_not_repeated(override: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        load(["track=mlflow", override])
    assert "s3cret" not in str(refused.value)
