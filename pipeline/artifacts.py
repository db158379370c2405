"""What a stage made: a directory of files, and the record that says how they came to be.

The record, `artifact.json`, is written last and the directory is renamed into place, so that an
artifact is there whole or not at all. Nothing else decides whether it is valid.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline import environment
from stages.errors import InputError

RECORD = "artifact.json"
UPLOADED = ".uploaded"  # beside a record: a store has all files, also those that are missing here
WEIGHTS, OPTIMIZER = ".safetensors", "optimizer/"  # what `retire` may remove
TIMINGS = "timings/"  # recorded, but part of no digest: equal work is equal whatever the hour


@dataclass(frozen=True)
class Recipe:
    """All that decides an artifact's content: the stage, its config and its inputs' digests."""

    stage: str
    config: dict[str, Any]
    inputs: dict[str, Any]  # name -> digest, list of digests or None

    def flat(self) -> dict[str, Any]:
        """One value per dotted key."""
        config = {f"config.{key}": value for key, value in self.config.items()}
        inputs = {f"inputs.{key}": value for key, value in self.inputs.items()}
        return {"stage": self.stage} | config | inputs

    @property
    def digest(self) -> str:
        """One for equal recipes, another for others."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """`config.eps_high: 0.28 → 0.2` for every key in which they differ."""
    return "; ".join(
        f"{key}: {_short(ours.get(key))} → {_short(theirs.get(key))}"
        for key in sorted(ours | theirs)
        if ours.get(key) != theirs.get(key)
    )


@dataclass(frozen=True)
class Artifact:
    """A published artifact; `record` is the content of its `artifact.json`."""

    path: Path
    record: dict[str, Any]

    @property
    def stage(self) -> str:
        return str(self.record["stage"])

    @property
    def digest(self) -> str:
        return str(self.record["digest"])

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(self.record["metrics"])

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.stage, **self.record["recipe"])

    @property
    def sources(self) -> dict[str, Any]:
        """Where each input lay: a path, a list of them or None."""
        return {name: self._resolved(value) for name, value in self.record["sources"].items()}

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._resolved(item) for item in value]
        return value and Path(os.path.normpath(self.path / value))

    @property
    def pinned(self) -> bool:
        """Made with settings that somebody chose for this one artifact (`dapo rerun --replace`)."""
        return bool(self.record.get("pinned"))

    @property
    def retired(self) -> bool:
        """The weights were removed to save space; the record still vouches for them."""
        return any(name.endswith(WEIGHTS) for name in self._removed())

    @property
    def trimmed(self) -> bool:
        """The optimizer's state was removed: a policy to evaluate, not to train on."""
        return any(name.startswith(OPTIMIZER) for name in self._removed())

    def _removed(self) -> list[str]:
        return [name for name, file in self.record["files"].items() if file.get("retired")]

    def changed_files(self, *, full: bool) -> list[str]:
        """What is not as the record says, a line each.

        Without `full`, a file of unchanged size and modification time is believed. One that a
        store has need not be here, see pipeline/mirror.py.
        """
        problems = []
        for name, known in self.record["files"].items():
            path = self.path / name
            if known.get("retired"):
                continue
            if not path.is_file():
                if (self.path / UPLOADED).is_file():
                    continue
                problems.append(f"{path} is missing")
                continue
            stat = path.stat()
            same = (stat.st_size, stat.st_mtime_ns) == (known["bytes"], known["mtime_ns"])
            if (full or not same) and _sha256(path) != known["sha256"]:
                problems.append(f"{path} is not the file that the record describes")
        return problems


def load(path: Path) -> Artifact:
    """The artifact at `path`; `InputError` where there is no readable record."""
    try:
        record = json.loads((path / RECORD).read_text())
        return Artifact(path, {**record, "files": dict(record["files"])})
    except FileNotFoundError:
        raise InputError(
            f"{path} has no {RECORD}, so it is no finished artifact; move it away or delete it, "
            "then run again"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path / RECORD} cannot be read ({error}); delete {path}") from error


def load_unchanged(path: Path) -> Artifact:
    """`load`, and refuse it if a file is not as it was when the record was written."""
    artifact = load(path)
    if problems := artifact.changed_files(full=False):
        raise InputError(
            f"{problems[0]}: somebody changed it after it was made; "
            f"restore it, or delete {path} to have it built again"
        )
    return artifact


def address(path: Path, *, seen_from: Path) -> str:
    """How a record names an input: artifacts relatively, so that a run can be moved or copied."""
    return os.path.relpath(path, seen_from) if (path / RECORD).exists() else str(path)


def digest(path: Path) -> str:
    """The content digest of an artifact, or of any other file or directory."""
    if (path / RECORD).is_file():
        return load_unchanged(path).digest
    if path.is_file():
        return _sha256(path)
    if not path.is_dir():
        raise InputError(f"{path} does not exist")
    return _combined({str(f.relative_to(path)): _sha256(f) for f in _files_below(path)})


@contextmanager
def draft(out: Path) -> Iterator[Path]:
    """An empty directory beside `out` to build in; removed again unless it was published."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for leftover in out.parent.glob(f".draft-{out.name}-*"):
        if abandoned(leftover):
            shutil.rmtree(leftover)
    building = out.parent / f".draft-{out.name}-{os.getpid()}"
    building.mkdir()
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def partial(out: Path, recipe: Recipe) -> Path:
    """A directory beside `out` where a stage may keep what is finished, for the next attempt."""
    return out.parent / f".partial-{out.name}-{recipe.digest[:12]}"


def forget_partial(out: Path) -> None:
    """Remove what attempts to make `out` have kept, whatever their recipes."""
    for leftover in out.parent.glob(f".partial-{out.name}-{'[0-9a-f]' * 12}"):
        shutil.rmtree(leftover)


def publish(
    building: Path,
    out: Path,
    *,
    recipe: Recipe,
    metrics: dict[str, float],
    started: float,
    replace_existing: bool,
    **details: Any,
) -> Artifact:
    """Write the record of the draft `building` and rename it to `out`, whole or not at all."""
    files = {str(f.relative_to(building)): _describe(f) for f in _files_below(building)}
    record = {
        "stage": recipe.stage,
        "recipe": {"config": recipe.config, "inputs": recipe.inputs},
        "digest": _combined(
            {n: file["sha256"] for n, file in files.items() if not n.startswith(TIMINGS)}
        ),
        "files": files,
        "rows": _rows(files),
        "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
        "seconds": round(time.time() - started, 3),
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="milliseconds"),
        "host": socket.gethostname(),
        "code": environment.code(),
        "environment": environment.describe(),
        **details,
    }
    write_durably(building / RECORD, json.dumps(record, indent=1, ensure_ascii=False))
    if out.exists():
        if not replace_existing:
            raise InputError(f"{out} exists already; choose another --out or delete it")
        # a crash between these two renames leaves no artifact, which is built again: never half
        old = out.parent / f".draft-{out.name}-old-{os.getpid()}"
        out.rename(old)
        building.rename(out)
        shutil.rmtree(old)
    else:
        building.rename(out)
    _sync_directory(out.parent)
    return Artifact(out, record)


def retire(artifact: Artifact, *, keep_weights: bool = False) -> None:
    """Remove optimizer state, and weights unless they are kept; record and tables stay.

    An artifact that a stage is reading (see `reading`) stays as it is.
    """
    goes = set(retirable(artifact, keep_weights=keep_weights))
    files = {
        name: {**file, "retired": True} if name in goes else file
        for name, file in artifact.record["files"].items()
    }
    if files == artifact.record["files"]:
        return
    with flocked(artifact.path, fcntl.LOCK_EX | fcntl.LOCK_NB) as mine:
        if not mine:
            return
        # the record first: a crash in between leaves files too many, not a record that lies
        record = {**artifact.record, "files": files}
        write_durably(artifact.path / RECORD, json.dumps(record, indent=1, ensure_ascii=False))
        for name in goes:
            (artifact.path / name).unlink(missing_ok=True)


def retirable(artifact: Artifact, *, keep_weights: bool = False) -> list[str]:
    """The files that `retire` removes, gone already or not."""
    return [
        name
        for name in artifact.record["files"]
        if name.startswith(OPTIMIZER) or (name.endswith(WEIGHTS) and not keep_weights)
    ]


def remove(directory: Path) -> None:
    """Remove an artifact, whole or not at all, unless a stage is reading it."""
    with flocked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB) as mine:
        if mine:
            going = directory.parent / f".draft-{directory.name}-old-{os.getpid()}"
            directory.rename(going)
            shutil.rmtree(going)


def abandoned(draft: Path) -> bool:
    """Whether nobody builds in a draft any more: its owner is dead, or was a pid like ours."""
    owner = int(draft.name.rpartition("-")[2])
    # in a container the process that died often had the very pid that we have
    return owner == os.getpid() or not _alive(owner)


def keep_environment(run: Path) -> str | None:
    """Write the lock that this process's records name into the run's directory, once.

    Returns its name if it was not there.
    """
    name = environment.file_name(environment.describe()["packages"])
    path = run / environment.DIRECTORY / name
    if path.exists():
        return None
    path.parent.mkdir(exist_ok=True)
    write_durably(path, environment.lock())
    return f"{environment.DIRECTORY}/{name}"


@contextmanager
def reading(paths: Iterable[Path]) -> Iterator[None]:
    """While the block runs, nobody retires what lies in the directories among `paths`."""
    with ExitStack() as stack:
        for path in paths:
            if path.is_dir():
                stack.enter_context(flocked(path, fcntl.LOCK_SH))
        yield


@contextmanager
def flocked(directory: Path, kind: int) -> Iterator[bool]:
    """Whether the lock was had; the kernel frees it with the process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield _flock(descriptor, kind)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Own `directory` while the block runs; the kernel frees it even after SIGKILL.

    Raises `InputError` that names the owner's pid and host when somebody else has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read() or "another process"
            raise InputError(
                f"{directory} is in use by {owner}; wait for it, stop it, or choose another run"
            ) from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    stat = path.stat()
    described = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}
    if path.suffix == ".parquet":
        described["rows"] = pq.read_metadata(path).num_rows
    return described


def _rows(files: dict[str, Any]) -> dict[str, int]:
    """Rows per table: a table is a directory of Parquet shards."""
    rows: dict[str, int] = {}
    for name, file in files.items():
        if "rows" in file:
            table = Path(name).parent.name
            rows[table] = rows.get(table, 0) + file["rows"]
    return rows


def _files_below(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file() and f.name != RECORD)


def _combined(sha256_by_name: dict[str, str]) -> str:
    lines = "".join(f"{sha256} {name}\n" for name, sha256 in sorted(sha256_by_name.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: Path) -> str:
    stat = path.stat()
    return _sha256_of(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256_of(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Put `text` at `path`, whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _short(value: Any) -> str:
    """Digests by their first characters."""
    if isinstance(value, list):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return value[:12] if isinstance(value, str) and len(value) == 64 else f"{value}"
