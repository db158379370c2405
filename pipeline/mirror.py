"""A run whose truth is in a store, such as `s3://bucket/prefix/runs/demo`, and its mirror here.

Training works on local files. The mirror has every record, and those files that were made here or
that something had to read; the rest stays in the store. An artifact is in the store as soon as its
record is, which goes last when it is published and first when it is removed: what a crash leaves
without a record counts for nothing, and the next publication overwrites it.

Beside a record here lies `.uploaded`, which says what the store has of it. With this, a run that
was killed between its work and the upload goes on with the upload.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline import artifacts, storage
from pipeline.artifacts import RECORD, UPLOADED
from pipeline.lease import LOCK, Lease
from pipeline.storage import Store
from stages.errors import InputError

CONFIG, LATEST, LEDGER = "config.yaml", "latest", "tracker.json"
BEST = "best"  # like latest: a file with the path of the best policy by now
REPORT = "report.html"  # that somebody had written of a run; no part of it
ORIGIN = ".store"  # in a run's mirror: the URL of the run
RUNS = "runs"

_BRINGING = threading.Lock()  # threads of a process would share a draft

Wanted = Callable[[str], bool]  # of the files of an artifact, by name


def everything(name: str) -> bool:
    return True


def tables(name: str) -> bool:
    return name.endswith(".parquet")


def nothing(name: str) -> bool:
    return False


def run_place(data: Path | str, run: str) -> Path | str:
    """Where a run below a data root is: a directory, or a URL."""
    return data / RUNS / run if isinstance(data, Path) else f"{data}/{RUNS}/{run}"


def directory(place: Path | str) -> Path:
    """A run's directory on this machine: where it is, or the mirror of its URL."""
    if isinstance(place, Path):
        return place
    data, _, run = place.rpartition(f"/{RUNS}/")
    return storage.cache(data) / RUNS / run


@dataclass
class Uploaded:
    """What the store is known to have of an artifact."""

    record: str = ""  # sha256 of its record
    version: str = ""  # the store's mark of the record


@dataclass
class Mirror:
    """A run in a store and its directory here. With a `lease`, changes go to the store too."""

    store: Store
    directory: Path
    lease: Lease | None = None

    def bring(self, paths: Collection[Path], wanted: Wanted = everything) -> None:
        """Have the wanted files of these artifacts here; paths elsewhere are left alone.

        Raises `InputError` if the store has a file that is not as the record says.
        """
        with _BRINGING:
            lacking = {
                path / name: known
                for path in paths
                if self.directory in path.parents and (path / UPLOADED).is_file()
                for name, known in artifacts.load(path).record["files"].items()
                if wanted(name) and not known.get("retired") and not (path / name).is_file()
            }
            if lacking:
                self._bring(lacking)

    def _bring(self, files: dict[Path, dict[str, Any]]) -> None:
        with artifacts.draft(self.directory / "brought") as draft:
            drafts = {path: draft / str(i) for i, path in enumerate(files)}
            self.store.download({self._name(path): draft for path, draft in drafts.items()})
            for path, known in files.items():
                if artifacts.digest(drafts[path]) != known["sha256"]:
                    raise InputError(
                        f"{self.store.url}/{self._name(path)} is not the file that the record "
                        f"describes; restore it, or delete the record beside it in the store, "
                        f"{RECORD}, to have the artifact built again"
                    )
                os.utime(drafts[path], ns=(known["mtime_ns"], known["mtime_ns"]))
                path.parent.mkdir(parents=True, exist_ok=True)
                drafts[path].rename(path)

    def push(self, place: Path) -> None:
        """Have the store hold the artifact as it is here: new, or with weights retired since.

        What lies elsewhere is none of the run's.
        """
        if self.directory not in place.parents:
            return
        record = (place / RECORD).read_bytes()
        known = _known(place)
        if known and known.record == _sha256(record):
            return
        self._check_owned()
        name = self._name(place)
        there = self.store.versions(name).keys()
        stays = {f"{name}/{file}" for file in _files(record)}
        superfluous = there - stays - {f"{name}/{RECORD}"}
        if known:  # its files were uploaded: only the record has changed since
            self.store.write(f"{name}/{RECORD}", record)
            self.store.remove(superfluous)
        else:
            self.store.remove(there & {f"{name}/{RECORD}"})
            self.store.remove(superfluous)
            self.store.upload({file: self.directory / file for file in stays})
            self._check_owned()  # an upload may take hours
            self.store.write(f"{name}/{RECORD}", record)
        _mark(place, Uploaded(_sha256(record)))

    def drop(self, place: Path) -> None:
        """Remove the artifact from the store, for another is to be published in its place."""
        if self.directory not in place.parents:
            return
        self._check_owned()
        name = self._name(place)
        there = self.store.versions(name).keys()
        self.store.remove(there & {f"{name}/{RECORD}"})
        self.store.remove(there - {f"{name}/{RECORD}"})

    def push_text(self, name: str) -> None:
        """Have the store hold a small file of the run, such as its configuration."""
        self._check_owned()
        self.store.write(name, (self.directory / name).read_bytes())

    def sync(self) -> None:
        """Have every record here that the store has; with a lease, upload what it lacks.

        Where both have an artifact and neither comes from the other, the store's counts.

        Raises `InputError` if the run, once uploaded, is gone from the store.
        """
        listed = self.store.versions()
        uploaded = [place for place in self._places() if _known(place)]
        if CONFIG not in listed and uploaded:
            raise InputError(
                f"{self.store.url} is gone, and {self.directory} has a part of it; delete that "
                "directory to start the run anew, or restore the store's objects"
            )
        if listed.keys() - {name for name in listed if name.startswith(LOCK)}:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / ORIGIN).write_text(self.store.url)
            self._bring_texts(listed.keys() & {CONFIG, LATEST, BEST, LEDGER})
            self._bring_records(
                {name: mark for name, mark in listed.items() if name.endswith(f"/{RECORD}")}
            )
        for place in uploaded:
            if f"{self._name(place)}/{RECORD}" not in listed:  # removed on purpose, so build it
                shutil.rmtree(place)
        if self.lease:
            self._push_all(listed.keys())

    def _bring_texts(self, names: Collection[str]) -> None:
        for name, content in self.store.read(names).items():
            here = self.directory / name
            if not here.exists() or here.read_bytes() != content:
                artifacts.write_durably(here, content.decode())

    def _bring_records(self, marks: dict[str, str]) -> None:
        """Those whose content is not known to be here, by the store's mark of each."""
        unknown = [
            name
            for name, mark in marks.items()
            if not mark or (_known(self._place(name)) or Uploaded()).version != mark
        ]
        for name, record in self.store.read(unknown).items():
            _install(self._place(name), record, Uploaded(_sha256(record), marks[name]))

    def _push_all(self, listed: Collection[str]) -> None:
        """Upload what was made here and is not in the store; remove what no record names."""
        found = [artifacts.load(place) for place in self._places()]
        for artifact in sorted(found, key=lambda artifact: str(artifact.record["started"])):
            self.push(artifact.path)
        stays = {
            self._name(artifact.path): _files((artifact.path / RECORD).read_bytes()) | {RECORD}
            for artifact in found
        }
        superfluous = {
            name
            for name in listed
            for place in map(str, PurePosixPath(name).parents)
            if place in stays and name.removeprefix(f"{place}/") not in stays[place]
        }
        if superfluous:  # for a push may have removed some
            self.store.remove(superfluous & self.store.versions().keys())

    def _places(self) -> list[Path]:
        """The directories here that hold a record."""
        return [p.parent for p in self.directory.rglob(RECORD) if ".draft-" not in str(p)]

    def _check_owned(self) -> None:
        assert self.lease, "only the owner of a run writes to it"
        self.lease.check()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.directory).as_posix()

    def _place(self, name: str) -> Path:
        return (self.directory / name).parent


@contextmanager
def owned(run: Path | str) -> Iterator[Mirror | None]:
    """Own a run's directory, and the run in its store, while the block runs; None: it has none.

    A directory that mirrors a run in a store means that run. Raises `InputError` that names the
    owner when somebody else has it.
    """
    here, url = directory(run), origin(run)
    with artifacts.locked(here):
        if url is None:
            yield None
            return
        lease = Lease(Store(url))
        # whoever only looks is not to change the records of a mirror whose owner is at work
        with artifacts.flocked(here, fcntl.LOCK_EX), lease.held():
            (here / ORIGIN).write_text(url)
            mirror = Mirror(lease.store, here, lease)
            mirror.sync()
            yield mirror


def looked_at(place: Path | str, wanted: Wanted = nothing) -> Path:
    """The local path of a run, an artifact or a file in one, to read: the wanted files are there.

    A place is a path, left as it is unless it lies in a mirror, or a URL such as
    `s3://bucket/prefix/runs/demo/step_0001/update`.
    """
    run, below = split(place)
    url = origin(run)
    here = directory(run)
    if url is None:
        return here / below
    mirror = Mirror(Store(url), here)
    if not here.exists():
        mirror.sync()
    else:
        with artifacts.flocked(here, fcntl.LOCK_SH | fcntl.LOCK_NB) as mine:
            if mine:  # else its owner is at work here, and has all records
                mirror.sync()
    path = here / below
    around = [p for p in (path, *path.parents) if here in p.parents and (p / RECORD).is_file()]
    mirror.bring(around or [found.parent for found in path.rglob(RECORD)], wanted)
    return path


def bring(run: Path, paths: Collection[Path], wanted: Wanted = everything) -> None:
    """Have the wanted files of a run's artifacts here, if the run is a mirror."""
    if url := origin(run):
        Mirror(Store(url), run).bring(paths, wanted)


def stored_runs(data: str) -> list[str]:
    """The URLs of what may be runs below a data root, by name."""
    return [f"{data}/{RUNS}/{name}" for name in Store(f"{data}/{RUNS}").children()]


def origin(run: Path | str) -> str | None:
    """The URL of a run in a store; None: it is local."""
    if isinstance(run, str):
        return run
    return (run / ORIGIN).read_text() if (run / ORIGIN).is_file() else None


def split(place: Path | str) -> tuple[Path | str, str]:
    """The run that a place lies in, and the rest of its name; a local path outside of any mirror
    is whole."""
    if isinstance(place, str):
        data, runs, rest = storage.checked(place).rpartition(f"/{RUNS}/")
        name, _, below = rest.partition("/")
        if not runs or not name:
            raise InputError(
                f"{place}: expected a run or what lies in one, as in s3://bucket/prefix/runs/demo"
            )
        return f"{data}/{RUNS}/{name}", below
    whole = place.absolute()
    for run in (whole, *whole.parents):
        if (run / ORIGIN).is_file():
            return run, str(whole.relative_to(run))
    return place, ""


def _known(place: Path) -> Uploaded | None:
    """What the store has of the artifact, as far as is known here."""
    try:
        return Uploaded(**json.loads((place / UPLOADED).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # a torn one knows nothing
        return None


def _mark(place: Path, uploaded: Uploaded) -> None:
    artifacts.write_durably(place / UPLOADED, json.dumps(vars(uploaded)))


def _install(place: Path, record: bytes, uploaded: Uploaded) -> None:
    """Have the store's record at `place`, unless what is there is newer."""
    path = place / RECORD
    ours = path.read_bytes() if path.is_file() else None
    known = _known(place)
    if ours and known and _sha256(ours) != known.record == uploaded.record:
        return  # changed here since it was uploaded
    if ours and (ours == record or (known and _same_files(ours, record))):
        artifacts.write_durably(path, record.decode())
        for name in _files(ours) - _files(record):
            (place / name).unlink(missing_ok=True)
        _mark(place, uploaded)
        return
    shutil.rmtree(place, ignore_errors=True)
    with artifacts.draft(place) as draft:
        (draft / RECORD).write_bytes(record)
        (draft / UPLOADED).write_text(json.dumps(vars(uploaded)))
        draft.rename(place)


def _same_files(ours: bytes, theirs: bytes) -> bool:
    """Whether two records are of one artifact, before and after it was retired."""

    def files(record: bytes) -> dict[str, str]:
        return {name: file["sha256"] for name, file in json.loads(record)["files"].items()}

    return files(ours) == files(theirs)


def _files(record: bytes) -> set[str]:
    """The files that a record vouches for and that were not retired."""
    return {n for n, file in json.loads(record)["files"].items() if not file.get("retired")}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
