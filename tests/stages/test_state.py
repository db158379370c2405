"""The optimizer's state: the same bytes, other numbers of ranks, foreign and broken states."""

import hashlib
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stages import ranks, state
from stages.errors import InputError
from stages.settings import Machine

COUNTERS = {"optimizer_steps": 7, "skipped": 1}


class Small(nn.Module):
    """Shapes that two ranks share unevenly, and two parameters without moments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 1)])
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(6))


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def moments(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Some for the layers; each is told from the others by its values."""
    return {
        name: {
            kind: torch.arange(p.numel(), dtype=torch.float32).view(p.shape) + 100 * i + 1000 * j
            for j, kind in enumerate(state.MOMENTS)
        }
        for i, (name, p) in enumerate(parameters(module).items())
        if name != "unused"
    }


def equal(found: Any, wanted: Any) -> bool:
    """The same names and values; DTensors are compared whole."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(equal(found[k], wanted[k]) for k in wanted)
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return torch.equal(whole, wanted)


def hashes(path: Path) -> dict[str, str]:
    return {
        file.name: hashlib.md5(file.read_bytes()).hexdigest()
        for file in (path / state.DIRECTORY).iterdir()
    }


def on_two_ranks(path: Path) -> list[dict[str, Any]]:
    """Load what one process saved, and save it twice; what each rank saw."""
    module = Small()
    ranks.shard(module, Machine(nproc=2))
    found, counters = state.load(path / "one", parameters(module))
    for name in ("two", "again"):
        state.save(path / name, found, counters)
    try:
        state.load(path / "foreign", parameters(module))
        refused = ""
    except InputError as error:
        refused = str(error)
    seen = {
        "sharded": all(isinstance(m, DTensor) for pair in found.values() for m in pair.values()),
        "equal": equal(found, moments(Small())),
        "counters": counters,
        "refused": refused,
    }
    return ranks.gather(seen)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state.save(tmp_path, moments(Small()), COUNTERS)
    return tmp_path


def test_a_state_comes_back_as_it_was(saved: Path) -> None:
    module = Small()
    found, counters = state.load(saved, parameters(module))
    assert equal(found, moments(module))
    assert list(found) == list(moments(module))
    assert counters == COUNTERS


def test_without_a_state_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert state.load(tmp_path, parameters(Small())) == ({}, {})


def test_the_same_state_gives_the_same_bytes_and_no_warning(saved: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.save(tmp_path / "elsewhere" / "deeper", moments(Small()), COUNTERS)
        state.load(saved, parameters(Small()))
    assert hashes(tmp_path / "elsewhere" / "deeper") == hashes(saved)


@pytest.mark.parametrize("change", ["lacks", "reshapes"])
def test_the_state_of_another_policy_is_refused(saved: Path, change: str) -> None:
    known = parameters(Small())
    if change == "lacks":
        del known["layers.1.weight"]
    else:
        known["layers.1.weight"] = nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"knows a layers\.1\.weight .* another policy; remove it"):
        state.load(saved, known)


@pytest.mark.parametrize("broken", ["no metadata", "noise", "cut", "no data", "a kind is missing"])
def test_a_broken_state_is_refused(saved: Path, broken: str) -> None:
    metadata, data = (saved / state.DIRECTORY / name for name in (".metadata", "__0_0.distcp"))
    if broken == "no metadata":
        metadata.unlink()
    elif broken == "noise":
        metadata.write_bytes(b"no state")
    elif broken == "cut":
        data.write_bytes(data.read_bytes()[:2000])
    elif broken == "no data":
        data.unlink()
    else:
        whole = pickle.loads(metadata.read_bytes())
        del whole.state_dict_metadata["exp_avg_sq.layers.0.bias"]
        metadata.write_bytes(pickle.dumps(whole))
    with pytest.raises(InputError, match="is not an optimizer state that update wrote"):
        state.load(saved, parameters(Small()))


def test_a_state_that_would_run_code_is_refused(saved: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    (saved / state.DIRECTORY / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match="has no place in an optimizer state"):
        state.load(saved, parameters(Small()))
    assert not (tmp_path / "sprung").exists()


def test_a_failed_save_is_an_ordinary_error(tmp_path: Path) -> None:
    (tmp_path / state.DIRECTORY).write_text("a file where the directory should be")
    with pytest.raises(FileExistsError):
        state.save(tmp_path, moments(Small()), COUNTERS)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    module = Small()
    state.save(tmp_path / "one", moments(module), COUNTERS)
    state.save(tmp_path / "foreign", {"x": moments(module)["layers.0.bias"]}, COUNTERS)
    for seen in ranks.launch(on_two_ranks, {"path": tmp_path}, Machine(nproc=2)):
        assert seen["sharded"]
        assert seen["equal"]
        assert seen["counters"] == COUNTERS
        assert "knows a x that this model has not" in seen["refused"]
    assert set(hashes(tmp_path / "two")) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert hashes(tmp_path / "two") == hashes(tmp_path / "again")
    found, counters = state.load(tmp_path / "two", parameters(module))
    assert equal(found, moments(module))
    assert counters == COUNTERS
