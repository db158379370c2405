"""Several processes, on a random Qwen3 model of a few thousand weights; gloo, no GPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stages import progress, ranks
from stages.errors import InputError
from stages.settings import Machine

if TYPE_CHECKING:  # ranks that need no model start sooner without it
    from transformers import Qwen3ForCausalLM

VOCABULARY = 20
TWO = Machine(nproc=2)

torch.set_num_threads(1)


# --- what the ranks run ------------------------------------------------------------------------


class Scorer(nn.Module):
    """Log-probs of every next token; all weights are used inside `forward`."""

    def __init__(self, model: "Qwen3ForCausalLM") -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BS: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
        logits = nn.functional.linear(hidden, self.model.get_output_embeddings().weight)
        logprobs = logits.float().log_softmax(-1)[:, :-1]
        return logprobs.gather(-1, ids_BS[:, 1:, None]).squeeze(-1).clone()  # FSDP2 wants no view


def build(tied: bool = False) -> "Qwen3ForCausalLM":
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def build_on_main(tied: bool) -> "Qwen3ForCausalLM":
    assert ranks.is_main()
    return build(tied)


def optimizer_step(scorer: nn.Module) -> dict[str, Any]:
    """One step on eight sequences, shared among the ranks, in micro-batches of two."""
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-4, fused=True)
    ids_BS = torch.randint(VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(1))
    for micro in ids_BS[ranks.rank() :: ranks.size()].split(2):
        (-scorer(micro).sum() / ids_BS[:, 1:].numel()).backward()
    norm: Any = nn.utils.clip_grad_norm_(scorer.parameters(), 0.5)
    optimizer.step()
    return {
        "norm": float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
        "weights": ranks.full_weights(scorer),
    }


def train(tied: bool, machine: Machine) -> dict[str, Any]:
    return optimizer_step(ranks.sharded(partial(build_on_main, tied), Scorer, machine))


def together(text: str) -> dict[str, Any]:
    """All that two ranks do when nothing goes wrong, in one launch."""
    progress.report(1, 2, text)
    here = torch.tensor([ranks.rank() + 1.0, -ranks.rank()])
    scorer = ranks.sharded(build, Scorer, TWO)
    return {
        "gathered": ranks.gather((ranks.rank(), ranks.size(), ranks.is_main())),
        "total": ranks.total(here.clone()).tolist(),
        "smallest": ranks.smallest(here.clone()).tolist(),
        "largest": ranks.largest(here.clone()).tolist(),
        "threads": torch.get_num_threads(),
        "shards": {name: p.to_local().shape for name, p in scorer.named_parameters()},
        "elsewhere": ranks.gather(ranks.full_weights(scorer) is None),
        "untied": train(False, TWO),
        "tied": train(True, TWO),
    }


def appear(path: Path) -> None:
    """Leave the pid in `path`, and meet."""
    (path / f"{os.getpid()}").touch()
    ranks.gather(None)


def wait_for_ever() -> None:
    """In a collective that a peer does not join."""
    if ranks.rank() == 0:
        ranks.total(torch.ones(1))
    time.sleep(3600)


def be_killed(path: Path) -> None:
    appear(path)
    if ranks.rank() == 1:
        print("the last words", file=sys.stderr, flush=True)
        (path / "time").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever()


def stay(path: Path) -> None:
    appear(path)
    wait_for_ever()


def broken() -> "Qwen3ForCausalLM":
    raise InputError("the weights lack a tensor")


def load_broken(path: Path) -> None:
    appear(path)
    ranks.sharded(broken, Scorer, TWO)


def name_nodes() -> list[str]:
    return ranks.gather(os.environ["GROUP_RANK"])


def gone(path: Path) -> bool:
    """Whether the two processes that appeared have ended."""
    pids = [int(file.name) for file in path.iterdir() if file.name.isdigit()]
    return len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


def await_(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- one process -------------------------------------------------------------------------------


def test_one_process_runs_the_function_here_without_a_group() -> None:
    assert ranks.launch(os.getpid, {}, Machine()) == os.getpid()
    assert not dist.is_initialized()
    assert (ranks.rank(), ranks.size(), ranks.is_main()) == (0, 1, True)
    ones = torch.ones(2)
    assert ranks.total(ones) is ranks.smallest(ones) is ranks.largest(ones) is ones
    assert ranks.gather("x") == ["x"]


@pytest.fixture
def lone_group() -> Iterator[None]:
    """A process group of this process alone: sharding without its cost."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_group")
def test_every_decoder_layer_is_a_group_of_its_own() -> None:
    scorer = ranks.sharded(build, Scorer, Machine())
    layers = ranks.decoder_layers(scorer)
    assert [type(layer).__name__ for layer in layers] == ["FSDPQwen3DecoderLayer"] * 2
    embeddings = scorer.model.get_input_embeddings()
    assert not isinstance(embeddings, FSDPModule)
    assert isinstance(scorer, FSDPModule)


@pytest.mark.usefixtures("lone_group")
def test_buffers_that_no_state_dict_holds_are_kept() -> None:
    found = dict(ranks.sharded(build, Scorer, Machine()).named_buffers())
    wanted = dict(Scorer(build()).named_buffers())
    assert any(name.endswith("inv_freq") for name in wanted)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.usefixtures("lone_group")
def test_full_weights_are_float32_also_after_a_forward_pass_in_bfloat16() -> None:
    scorer = ranks.sharded(build, Scorer, Machine(dtype="bfloat16"))
    with torch.no_grad():
        logprobs = scorer(torch.arange(8)[None])
    exact = Scorer(build())
    gap = (logprobs - exact(torch.arange(8)[None])).abs().max()
    assert 1e-4 < gap < 0.2
    found = ranks.full_weights(scorer)
    assert found is not None
    for name, weight in exact.named_parameters():
        assert torch.equal(found[name], weight)


# --- two processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    """What `together` returns, and the progress that was heard."""
    heard: list[tuple[int, int, str]] = []
    token = progress.listener.set(lambda *report: heard.append(report))
    try:
        return ranks.launch(together, {"text": "steps"}, TWO) | {"heard": heard}
    finally:
        progress.listener.reset(token)


@pytest.mark.slow
def test_collectives_give_every_rank_the_same(pair: dict[str, Any]) -> None:
    assert pair["gathered"] == [(0, 2, True), (1, 2, False)]
    assert pair["total"] == [3.0, -1.0]
    assert pair["smallest"] == [1.0, -1.0]
    assert pair["largest"] == [2.0, 0.0]
    assert pair["threads"] == 1


@pytest.mark.slow
def test_progress_of_one_rank_reaches_the_listener(pair: dict[str, Any]) -> None:
    assert pair["heard"] == [(1, 2, "steps")]


@pytest.mark.slow
def test_each_rank_holds_half_of_every_weight(pair: dict[str, Any]) -> None:
    for name, weight in Scorer(build()).named_parameters():
        assert pair["shards"][name].numel() * 2 == weight.numel()
    assert pair["elsewhere"] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_two_ranks_step_as_one_process_does(pair: dict[str, Any], kind: str) -> None:
    wanted = train(kind == "tied", Machine())
    before = dict(Scorer(build(kind == "tied")).named_parameters())
    found = pair[kind]
    assert wanted["norm"] > 0.5  # it was clipped
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-6)
    assert found["weights"].keys() == wanted["weights"].keys() == before.keys()
    for name, weight in wanted["weights"].items():
        assert (found["weights"][name] - weight).abs().max() < 1e-6, name
        assert (before[name] - weight).abs().max() > 1e-5, name


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_ends_all_within_seconds_and_its_log_is_quoted(tmp_path: Path) -> None:
    died = r"rank 1 ended with signal SIGKILL; its log ends:\n.*the last words"
    with pytest.raises(ranks.RankDied, match=died):
        ranks.launch(be_killed, {"path": tmp_path}, TWO)
    assert time.time() - float((tmp_path / "time").read_text()) < 10
    assert gone(tmp_path)


@pytest.mark.slow
def test_an_exception_of_one_rank_arrives_as_itself_and_no_rank_hangs(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(InputError, match="lack a tensor") as caught:
        ranks.launch(load_broken, {"path": tmp_path}, TWO)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 0:")
    assert "in broken" in note
    assert gone(tmp_path)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.fixture
def python() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts processes that can import this module."""
    started = []

    def start(*arguments: str) -> "subprocess.Popen[bytes]":
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        started.append(subprocess.Popen([sys.executable, *arguments], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_terminated_launcher_dies_and_takes_its_ranks_along(
    python: Callable[..., "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    code = (
        "import pathlib, test_ranks as t\n"
        f"t.ranks.launch(t.stay, {{'path': pathlib.Path({str(tmp_path)!r})}}, t.TWO)"
    )
    launcher = python("-c", code)
    await_(lambda: len(list(tmp_path.iterdir())) == 2, seconds=120)
    launcher.terminate()
    assert launcher.wait(10) == -signal.SIGTERM
    assert gone(tmp_path)


# --- two nodes ---------------------------------------------------------------------------------


def free_port() -> int:
    return dist.TCPStore("localhost", 0, is_master=True).port


@pytest.mark.slow
def test_another_node_joins_by_torchrun_and_gets_the_job(
    python: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    endpoint = f"localhost:{free_port()}"
    machine = Machine(nnodes=2, rdzv_endpoint=endpoint, rdzv_id="test")
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test")
    run = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    other = python(*run, *meeting, "-m", "stages.ranks")
    assert ranks.launch(name_nodes, {}, machine) == ["0", "1"]
    assert other.wait(30) == 0


def test_several_nodes_need_a_meeting_point() -> None:
    with pytest.raises(InputError, match="rdzv_endpoint"):
        ranks.launch(name_nodes, {}, Machine(nnodes=2))
