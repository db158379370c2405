"""Contenders of a benchmark: a process each, and their runs in turn."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VENV = HERE / ".venv"  # TRL's
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
Run = dict[str, float]  # what a gradient took: see `sides.serve`


@dataclass(frozen=True)
class Contender:
    """A side of the comparison: its script, and the options that the script reads."""

    name: str
    script: str
    options: Mapping[str, Any]
    rounds: int

    @property
    def python(self) -> Path:
        return VENV / "bin/python" if self.script == "side_trl.py" else Path(sys.executable)


class Running:
    """A contender's process."""

    def __init__(self, contender: Contender, folder: Path, log: Path) -> None:
        self.contender, self.log = contender, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [contender.python, HERE / contender.script, folder, json.dumps(contender.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT,
            )

    def ask(self, *, first: int | None = None, times: int = 1) -> Run:
        """One gradient, of the first samples (none: all), repeated."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"first": first, "times": times}) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Run:
        """The answer; the first says that the policy is loaded."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.contender.name} died:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def started(contenders: Sequence[Contender], folder: Path) -> Iterator[list[Running]]:
    """All of them ready; they end with the block."""
    with ExitStack() as stack:
        running: list[Running] = []
        for i, contender in enumerate(contenders):
            running.append(Running(contender, folder, folder / f"{i}.log"))
            stack.callback(running[-1].end)
        for each in running:
            each.read()
        yield running


def contest(running: Sequence[Running], *, warm_up: int) -> dict[str, Run]:
    """What each measured, by its name: of its rounds' seconds the least, of memory the most."""
    for each in running:
        each.ask(first=warm_up)
    runs: dict[str, list[Run]] = {each.contender.name: [] for each in running}
    for turn in range(max(each.contender.rounds for each in running)):
        for each in running:
            if turn < each.contender.rounds:
                runs[each.contender.name].append(each.ask())
    return {name: best(of) for name, of in runs.items()}


def best(runs: Sequence[Run]) -> Run:
    most = {kind: max(run[kind] for run in runs) for kind in ("peak", "above")}
    return runs[0] | most | {"seconds": min(run["seconds"] for run in runs)}


def make_environment() -> None:
    """TRL's, unless it is there as requirements-trl.txt has it."""
    wanted, made = HERE / "requirements-trl.txt", VENV / "installed"
    if made.exists() and made.read_text() == wanted.read_text():
        return
    print("making TRL's environment …", flush=True)
    # the CPU build of torch, from where the Makefile finds it
    settings = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")} | dict(os.environ)
    torch = [] if settings["UV_FIND_LINKS"] else ["--torch-backend=cpu"]
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], check=True)
    uv, python = Path(sys.executable).parent / "uv", VENV / "bin/python"
    install: list[str | Path] = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        *torch,
        "-r",
        wanted,
    ]
    subprocess.run(install, check=True, env=settings)
    shutil.copyfile(wanted, made)
