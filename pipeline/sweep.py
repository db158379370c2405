"""A sweep: one run per combination of swept settings, each in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import guard
from pipeline.config import GROUPS, RunConfig, combinations, load, parse
from pipeline.loop import CONFIG, check_same_settings
from stages.errors import InputError

SWEEPS = "sweeps"
SEED = "seed"  # runs that differ by it alone are repetitions of one variant
POLL_S = 0.2
PATIENCE_S = 30.0  # for a run to end by itself, with all its processes


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    sweep: str  # its name
    choices: Mapping[str, str]  # its value of each swept key, in the order given
    overrides: tuple[str, ...]  # all of them, its name among them
    config: RunConfig

    @property
    def run(self) -> str:
        return self.config.run

    @property
    def variant(self) -> str:
        """What it tries: its choices but for the seed, those of groups without their key."""
        tried = {key: value for key, value in self.choices.items() if key != SEED}
        labels = [f"{key}={value}" if key else value for key, value in _labelled(tried)]
        return " ".join(labels) or "all"


def points(overrides: Sequence[str], *, force: bool = False) -> list[Point]:
    """Every point of a sweep such as `run=clip update.eps_high=0.2,0.28 seed=0,1`, all checked.

    Raises `InputError` if nothing is swept, a setting is wrong in any point, two points would have
    one name, or a point's run is there already with other settings and `force` is off.
    """
    every = combinations(overrides)
    swept = [i for i, values in enumerate(zip(*every, strict=True)) if len(set(values)) > 1]
    if not swept:
        raise InputError(
            "nothing is swept: give a key several values, such as update.eps_high=0.2,0.28 or "
            "seed=range(0,3), or train one run with `dapo train`"
        )
    chosen = [dict(_assigned(one[i]) for i in swept) for one in every]
    if len(chosen[0]) < len(swept) or chosen[0].keys() & {"run", "data"}:
        raise InputError(
            f"cannot sweep {', '.join(_assigned(every[0][i])[0] for i in swept)}: each key once, "
            "and neither run, which names the whole sweep, nor data"
        )
    base = load(every[0]).run
    found = [_point(base, one, choices) for one, choices in zip(every, chosen, strict=True)]
    _check_names(found)
    for point in found:
        saved = point.config.directory / CONFIG
        if saved.is_file() and not force:
            check_same_settings(parse(saved.read_text()), point.config)
    return found


def _point(base: str, overrides: Sequence[str], choices: Mapping[str, str]) -> Point:
    named = (*overrides, f"run={name(base, choices)}")
    try:
        return Point(base, choices, named, load(named))
    except InputError as error:
        at = " ".join(f"{key}={value}" for key, value in choices.items())
        raise InputError(f"at {at}: {error}") from error


def name(base: str, choices: Mapping[str, str]) -> str:
    """A run's name, such as `clip-eps_high0.2-seed1`: letters that no name may have become `_`."""
    parts = (re.sub(r"[^A-Za-z0-9._+-]+", "_", key + value) for key, value in _labelled(choices))
    return "-".join([base, *parts])


def _labelled(choices: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each value with its key as short as it may be: a group's option says enough without one."""
    ends = [key.rpartition(".")[2] for key in choices]
    short = [end if ends.count(end) == 1 else key for key, end in zip(choices, ends, strict=True)]
    return [
        ("" if _is_group(key) else label, value)
        for (key, value), label in zip(choices.items(), short, strict=True)
    ]


def _is_group(key: str) -> bool:
    return key.partition("@")[0] in GROUPS


def _assigned(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _check_names(found: Sequence[Point]) -> None:
    names: dict[str, Point] = {}
    for point in found:
        if other := names.get(point.run):
            raise InputError(
                f"two points would both be the run '{point.run}': {dict(other.choices)} and "
                f"{dict(point.choices)}; give each value once, and only values that differ in more "
                "than the letters a name may not have"
            )
        names[point.run] = point


def default_directory(point: Point) -> Path:
    """Where a sweep's comparison goes: below the data root, or below here if that is a store."""
    data = point.config.data
    return (data if isinstance(data, Path) else Path.cwd()) / SWEEPS / point.sweep


def default_jobs(config: RunConfig) -> int:
    """How many runs at once: one for each core that a run's trainer needs; one where GPUs work."""
    if config.machine.device != "cpu":
        return 1
    return max(1, cores() // config.machine.threads)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def train(
    points: Sequence[Point],
    *,
    jobs: int,
    directory: Path,
    force: bool = False,
    started: Callable[[Point], None],
    ended: Callable[[Point, int], None],
) -> dict[str, int]:
    """Train every point, `jobs` at once, and return their exit codes by name.

    What a run says goes to `log_of` it. A run that is finished already is served; one that fails
    stops no other. No process of a run outlives this call, or this process.

    Args:
        ended: is told of a run's exit code as soon as it is known.
    """
    guard.install()
    waiting = deque(points)
    running: dict[str, tuple[Point, subprocess.Popen[bytes]]] = {}
    codes: dict[str, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                point = waiting.popleft()
                started(point)
                log = log_of(point, directory)
                running[point.run] = (point, _begun(point, log, force=force, jobs=jobs))
            for run, (point, process) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[run]
                    codes[run] = code
                    ended(point, code)
            time.sleep(POLL_S)
    finally:
        _end([process for _, process in running.values()])
    return codes


def log_of(point: Point, directory: Path) -> Path:
    """Where a point's run says what it does, below the sweep's directory."""
    return directory / "logs" / f"{point.run}.log"


def _begun(point: Point, log: Path, *, force: bool, jobs: int) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    options = ["--direct", *(["--force"] if force else [])]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", "train", *options, "--", *point.overrides],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            # OpenMP threads that outnumber the cores wait for each other: vLLM samples 8 × slower
            env={"OMP_NUM_THREADS": str(max(1, cores() // jobs)), **os.environ},
            start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs in good order
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End runs as SIGTERM does, and those that do not listen by SIGKILL."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log: why a run failed."""
    return "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-count:])
