"""A directory of objects anywhere that fsspec reaches, such as `s3://bucket/prefix`.

Credentials and endpoints are the environment's business (AWS_PROFILE, AWS_ENDPOINT_URL, a role of
the machine …): none is ever part of a URL, a configuration or a record. What is transient is tried
again by the library below, s3fs and botocore with growing pauses (AWS_MAX_ATTEMPTS raises their
number); what remains is one error that names the URL.
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stages.errors import InputError, StorageError

URL = re.compile(r"[a-z][a-z0-9+.-]*://")
CACHE = "DAPO_CACHE"
VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")


def is_url(place: object) -> bool:
    """Whether this names a place in a store, not a local path."""
    return isinstance(place, str) and URL.match(place) is not None


def checked(url: str) -> str:
    """The URL without slashes at its end; `InputError` if it carries credentials or a pattern."""
    scheme = urlsplit(url).scheme
    if "@" in url or "?" in url:  # a URL is saved and printed, and so would they be
        raise InputError(
            f"data={scheme}://…: a URL must not carry a user, a secret or a query; give the "
            "credentials in the environment, such as AWS_PROFILE or AWS_ACCESS_KEY_ID"
        )
    if found := re.search(r"[*\[\]#]", url):
        raise InputError(f"data={url}: {found[0]} has a meaning of its own in URLs; choose another")
    if not url.partition("://")[2].strip("/"):
        raise InputError(f"data={url}: expected a bucket or a directory, as in s3://bucket/prefix")
    return url.rstrip("/")


def cache(url: str) -> Path:
    """Where the local mirror of what lies below a URL is kept: below $DAPO_CACHE or ~/.cache/dapo.

    One place for one URL, whatever else is kept there.
    """
    root = os.environ.get(CACHE)
    home = Path(root).absolute() if root else Path.home() / ".cache" / "dapo"
    return home / hashlib.sha256(url.encode()).hexdigest()[:12]


class Store:
    """The objects below a URL, by their names relative to it.

    Raises `InputError` for what a person can mend (no such bucket, no access, no library), else
    `StorageError`.
    """

    def __init__(self, url: str) -> None:
        self.url = checked(url)
        local = URL.match(url)[0] in ("file://", "local://")  # type: ignore[index]
        options: dict[str, Any] = {"auto_mkdir": True} if local else {}
        with self._explained():
            from fsspec.core import url_to_fs

            # what is listed must be what is there
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False, **options)

    def versions(self, below: str = "") -> dict[str, str]:
        """Every object below a name, and a mark that changes with its content."""
        path = self._path(below) if below else self._root
        with self._explained():
            found = self._fs.find(path, detail=True)
        return {name[len(self._root) + 1 :]: _version(info) for name, info in found.items()}

    def children(self) -> list[str]:
        """The names directly below, those of objects and those of directories."""
        with self._explained():
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return sorted(self.versions())  # nothing, or there is not even a bucket
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        """The objects' contents; one that is gone meanwhile is left out."""
        paths = {self._path(name): name for name in names}
        if not paths:
            return {}
        with self._explained():
            found = self._fs.cat(list(paths), on_error="return")
            for content in found.values():
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return {paths[p]: data for p, data in found.items() if isinstance(data, bytes)}

    def write(self, name: str, content: bytes) -> None:
        """Put one object, in the place of what was there."""
        with self._explained():
            self._fs.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Put one object unless there is one; whether there was none.

        One request, and so safe among many hosts, where the store has conditional writes
        (`If-None-Match`; S3, MinIO, R2 and others do). Elsewhere two hosts may both be told yes, so
        read it back.
        """
        path = self._path(name)
        with self._explained():
            try:
                self._fs.pipe_file(path, content, mode="create")
            except OSError:
                if not self._fs.exists(path):
                    raise
                return False
        return True

    def remove(self, names: Collection[str]) -> None:
        """Remove objects that are there."""
        if names:
            with self._explained():
                self._fs.rm([self._path(name) for name in names])

    def upload(self, files: Mapping[str, Path]) -> None:
        """Put local files under the names given."""
        if files:
            with self._explained():
                self._fs.put([str(p) for p in files.values()], [*map(self._path, files)])

    def download(self, files: Mapping[str, Path]) -> None:
        """Bring objects to the local files given; raises also if one is not there."""
        if files:
            with self._explained():
                self._fs.get([*map(self._path, files)], [str(p) for p in files.values()])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (InputError, StorageError):
            raise
        except ImportError as error:
            raise InputError(
                f"{self.url}: {error}; for s3:// install the extra, pip install 'dapo-pipeline[s3]'"
            ) from error
        except Exception as error:  # every backend has errors of its own
            what = f"{self.url}: {type(error).__name__}: {error}"
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                raise InputError(
                    f"{what}; the credentials come from the environment, such as AWS_PROFILE or "
                    "AWS_ACCESS_KEY_ID, and need to list, read, write and delete"
                ) from error
            if isinstance(error, FileNotFoundError):
                raise InputError(f"{what}; make the bucket, or restore the object") from error
            if isinstance(error, ValueError) and "Protocol not known" in str(error):
                raise InputError(f"{what}; expected s3://bucket/prefix, or a path") from error
            raise StorageError(
                f"{what}; nothing was published half: the same command goes on from here"
            ) from error


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in VERSIONS if info.get(key)), "")
