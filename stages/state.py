"""The optimizer's state on disk, as torch.distributed.checkpoint writes it.

Every rank writes its part of each moment, and a run goes on with any other number of ranks.
The same state gives the same bytes.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from stages.errors import InputError

DIRECTORY = "optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTER = "counter"
PICKLED = {  # all that the description of tensors is made of
    "torch": ("Size", "float32", "int64"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}

Moments = dict[str, dict[str, Tensor]]


def save(out: Path, moments: Mapping[str, Mapping[str, Tensor]], counters: dict[str, int]) -> None:
    """Write `out/optimizer/`: AdamW's moments by parameter name and kind, and counters.

    Moments may be DTensors. With a process group every rank takes part, with equal counters.
    """
    state = {
        f"{kind}.{name}": pair[kind].detach() for name, pair in moments.items() for kind in MOMENTS
    }
    state |= {f"{COUNTER}.{name}": torch.tensor(count) for name, count in counters.items()}
    with _plain() as alone:
        checkpoint.save(state, storage_writer=_Writer(out / DIRECTORY), no_dist=alone)


def load(path: Path, parameters: Mapping[str, Tensor]) -> tuple[Moments, dict[str, int]]:
    """Moments and counters that `save` wrote to `path`; ({}, {}) if there are none.

    Moments have the device and the sharding of the parameters of their names; a parameter of which
    none are stored has none. With a process group every rank takes part.

    Raises `InputError` if the state is broken or belongs to other parameters.
    """
    directory = path / DIRECTORY
    if not directory.exists():
        return {}, {}
    with _understood(directory) as stored:
        kinds = (key.split(".", 1) for key in stored)
        names = sorted({name for kind, name in kinds if kind in MOMENTS})  # as on every rank
        moments: Moments = {}
        for name in names:
            _check(directory, name, [stored[f"{kind}.{name}"] for kind in MOMENTS], parameters)
            like = parameters[name].detach()
            moments[name] = {kind: torch.empty_like(like) for kind in MOMENTS}
        _read(
            directory, {f"{kind}.{name}": moments[name][kind] for name in names for kind in MOMENTS}
        )
    return {name: moments[name] for name in parameters if name in moments}, counters(path)


def counters(path: Path) -> dict[str, int]:
    """The counters alone, of any parameters; {} if there are none. Raises as `load` does."""
    directory = path / DIRECTORY
    if not directory.exists():
        return {}
    with _understood(directory) as stored:
        keys = [key for key in stored if key.startswith(f"{COUNTER}.")]
        found = {key: torch.tensor(0) for key in keys}
        _read(directory, found)
    return {key.partition(".")[2]: int(value) for key, value in found.items()}


@contextmanager
def _understood(directory: Path) -> Iterator[dict[str, Any]]:
    """What is stored, by key; whatever does not fit in the block is an `InputError`."""
    try:
        yield _Reader(directory).read_metadata().state_dict_metadata
    except InputError:
        raise
    except Exception as error:  # unpickling meets whatever there is
        raise InputError(
            f"{directory} is not an optimizer state that update wrote "
            f"({type(error).__name__}: {error}); "
            "restore it, or remove it to start the optimizer afresh"
        ) from error


def _read(directory: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` with what is stored under their keys."""
    with _plain() as alone:
        checkpoint.load(state, storage_reader=_Reader(directory), no_dist=alone)


def _check(directory: Path, name: str, pair: list[Any], parameters: Mapping[str, Tensor]) -> None:
    """Raise `InputError` unless there is such a parameter, of the shape of its moments."""
    for moment in pair:
        if not isinstance(moment, TensorStorageMetadata):
            raise TypeError(f"{name} has moments that are no tensors")
        if name not in parameters or parameters[name].shape != moment.size:
            raise InputError(
                f"{directory} knows a {name} that this model has not: it belongs to another "
                "policy; remove it to start the optimizer afresh"
            )


@contextmanager
def _plain() -> Iterator[bool]:
    """Whether there is no process group: no warning that this is so, and no BaseException."""
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield alone
    except checkpoint.CheckpointException as error:
        first, _ = error.failures[min(error.failures)]
        raise first from None


class _Writer(checkpoint.FileSystemWriter):
    """Leaves out what would differ between two saves: a random id, and the path."""

    def __init__(self, path: Path) -> None:
        # an artifact is published whole or not at all: no file needs a sync of its own
        super().__init__(path, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _Reader(checkpoint.FileSystemReader):
    """Unpickles what describes tensors and nothing else: a policy may come from anywhere."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in PICKLED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an optimizer state")
