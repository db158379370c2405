"""Finished groups on disk while a stage samples, so that a crash costs only what was unfinished."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from stages import tables
from stages.errors import InputError

EVERY_S = 1.0  # seconds between two shards; a file for each group would slow a small engine down
TABLE = "rollouts"
# a row is whose it claims to be if all of these are what was asked
IDENTITY = ("group_id", "prompt_id", "sample", "prompt_ids", "seed", "temperature", "policy")


class Shards:
    """A directory of Parquet files of whole groups; where there is none, nothing is kept.

    The rows' order and the number of files mean nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._written = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time to write what is finished."""
        return time.monotonic() - self._written >= EVERY_S

    def recovered(self, asked: pl.DataFrame) -> pl.DataFrame:
        """The rows that an earlier attempt left of the groups in `asked`, whole groups only.

        Of a row in `asked`, all is known but the response. Files that cannot be read are ignored,
        and so are rows that are not of these requests to this policy.
        """
        found = [pl.DataFrame(schema=tables.polars_schema(TABLE)), *self._readable()]
        expected = asked.select("response_id", *IDENTITY).with_columns(
            _size=pl.len().over("group_id")
        )
        same = [pl.col(name).eq(pl.col(f"{name}_right")) for name in IDENTITY]
        return (
            pl.concat(found)
            .unique("response_id", keep="first", maintain_order=True)
            .join(expected, on="response_id", suffix="_right")
            .filter(pl.all_horizontal(same))
            .filter(pl.len().over("group_id") == pl.col("_size"))
            .select(tables.polars_schema(TABLE).names())
        )

    def write(self, rows: pl.DataFrame) -> None:
        """Keep the rows of some whole groups, durably enough for a killed process."""
        self._written = time.monotonic()
        if self.directory is None or rows.is_empty():
            return
        (self.directory / TABLE).mkdir(parents=True, exist_ok=True)
        number = len(list((self.directory / TABLE).iterdir()))
        with explained(self.directory):
            draft = self.directory / f"draft-{writer()}"
            draft.mkdir(exist_ok=True)
            tables.write(draft, TABLE, rows)
            file = draft / TABLE / "part-00000.parquet"
            file.rename(self.directory / TABLE / f"part-{number:05d}-{writer()}.parquet")

    def _readable(self) -> Iterator[pl.DataFrame]:
        """What can be read; a process that is killed may leave half a file."""
        if self.directory is None:
            return
        for file in sorted((self.directory / TABLE).glob("*.parquet")):
            try:
                yield tables.read(file, TABLE)
            except InputError:
                continue


def writer() -> str:
    """This process among all that write to one directory, from this machine or others."""
    return f"{socket.gethostname()}-{os.getpid()}"


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Say what a full disk costs, and what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{directory} cannot be written: {error}. Nothing was published; the groups that were "
            "finished are kept: make room and run the same command again"
        ) from error
