"""Processes that train together: launched as torchrun does, FSDP2 over all of them.

With `nproc` and `nnodes` 1 nothing of this happens: a function is called, collectives do nothing.

The other nodes of several join each launch (every update is one) with as many processes:

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT \
        --rdzv-id=dapo -m stages.ranks

They get function and arguments from the launching node. Paths must mean the same files everywhere,
so the nodes share a file system.
"""

import atexit
import copy
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import progress
from stages.errors import InputError
from stages.settings import Machine

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import Store
    from transformers import PreTrainedModel

MEETING_S = 120  # until a node brings the job
SILENCE = timedelta(minutes=30)  # of a collective, for instance while rank 0 loads weights
POLL_S = 0.1
LINGER_S = 1.0  # a failed rank's connections outlive the next poll: it is seen before its victims
STOPPING_S = 5  # for ranks that SIGTERM does not end
LOG_TAIL = 1000  # characters


class RankDied(RuntimeError):
    """A rank ended without an exception: killed, out of memory, or crashed in native code."""


# --- launching ---------------------------------------------------------------------------------


def launch(function: Callable[..., Any], arguments: dict[str, Any], machine: Machine) -> Any:
    """`function(**arguments)` on every rank of the machine at once; returns what rank 0 returns.

    Function and arguments are pickled: the function belongs to an importable module. What the
    ranks print appears here; reports of progress reach this process' listener.

    Raises what the first failing rank raised (with its traceback as a note), or `RankDied`; all
    ranks of this node have ended by then.
    """
    if machine.nproc == 1 and machine.nnodes == 1:
        return function(**arguments)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    job = pickle.dumps((function, arguments, machine))
    alone = machine.rdzv_endpoint is None
    if alone and machine.nnodes > 1:
        raise InputError("machine.nnodes is above 1: set machine.rdzv_endpoint to HOST:PORT")
    with _signals(), tempfile.TemporaryDirectory(prefix="ranks_") as scratch, _reports() as reports:
        config = LaunchConfig(
            min_nodes=machine.nnodes,
            max_nodes=machine.nnodes,
            nproc_per_node=machine.nproc,
            run_id=machine.rdzv_id,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint=machine.rdzv_endpoint or "localhost:0",
            local_addr="localhost" if alone else None,
            max_restarts=0,
            monitor_interval=POLL_S,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=f"{scratch}/logs", redirects=Std.ALL, tee=Std.ALL),
            log_line_prefix_template="[rank ${rank}] ",
            shutdown_timeout=STOPPING_S,
        )
        try:
            results = elastic_launch(config, _enter)(job, scratch, reports)
        except SignalException:
            raise
        except Exception as error:
            raise _cause(error, Path(scratch)) from None
    return results[min(results)]


def _enter(job: bytes | None, scratch: str | None, reports: Connection | None) -> Any:
    """A rank, from its start: join the others, run the job, return rank 0's result."""
    import torch.distributed as dist

    store, rank, size = next(iter(dist.rendezvous("env://", timeout=SILENCE)))
    try:
        function, arguments, machine = pickle.loads(_exchanged(job, store))
        _join(store, rank, size, machine)
        if reports and os.environ["LOCAL_RANK"] == "0":
            progress.listener.set(lambda *report: reports.send(report))
        result = [function(**arguments)]
        dist.broadcast_object_list(result)
        dist.destroy_process_group()
        atexit.register(os._exit, 0)  # spares the seconds in which the interpreter falls apart
        return result[0]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # some of torch's are no Exception
        _fail(error, rank, store, scratch)


def _exchanged(job: bytes | None, store: "Store") -> bytes:
    """The one job, from whichever ranks have it."""
    if job is None:
        try:
            store.wait(["job"], timedelta(seconds=MEETING_S))
        except RuntimeError as error:
            raise InputError(
                f"no node brought a job within {MEETING_S} s: start an update with "
                "machine.nnodes and machine.rdzv_endpoint on one of them"
            ) from error
        return store.get("job")
    if store.compare_set("job", "", job) != job:  # type: ignore[arg-type]  # bytes are welcome
        raise InputError("two nodes brought different jobs: choose another machine.rdzv_id for one")
    return job


def _join(store: "Store", rank: int, size: int, machine: Machine) -> None:
    """Make the process group; NCCL for tensors on GPUs, gloo for the others and for objects."""
    import torch

    torch.set_num_threads(machine.threads)
    backend, device = "gloo", None
    if machine.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=SILENCE, device_id=device
    )


def _fail(error: BaseException, rank: int, store: "Store", scratch: str | None) -> None:
    """End this process; whoever launched it learns of the first failure of all ranks."""
    error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
    own = first = _pickled(error)
    with suppress(RuntimeError):  # the store has ended with the node that held it
        first = store.compare_set("failure", "", own)  # type: ignore[arg-type]
    if first == own:
        traceback.print_exception(error)
    if scratch:
        path = _failure(Path(scratch), rank)
        path.with_suffix(".draft").write_bytes(first)
        path.with_suffix(".draft").rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LINGER_S)
    os._exit(1)  # no farewell: other ranks may be waiting in a collective for ever


def _failure(scratch: Path, rank: int) -> Path:
    return scratch / f"failure-{rank}"


def _pickled(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            plain.add_note(note)
        return pickle.dumps(plain)
    return pickled


def _cause(error: Exception, scratch: Path) -> BaseException:
    """What the rank raised that was the first to end, or how it died and its last words."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not isinstance(error, ChildFailedError):  # another node, which held the store, has ended
        found = sorted(scratch.glob("failure-*[0-9]"), key=lambda file: file.stat().st_mtime)
        return pickle.loads(found[0].read_bytes()) if found else error
    rank, failure = error.get_first_failure()
    if _failure(scratch, rank).exists():
        return pickle.loads(_failure(scratch, rank).read_bytes())
    code = failure.exitcode
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    logs = sorted(scratch.glob(f"logs/*/*/{failure.local_rank}/std*.log"))  # stderr, stdout
    words = "\n".join(text for log in logs if (text := log.read_text(errors="replace").strip()))
    return RankDied(f"rank {rank} ended with {end}; its log ends:\n{words[-LOG_TAIL:]}")


@contextmanager
def _signals() -> Iterator[None]:
    """Elastic's signal handlers end the ranks; the signal then does here what it does without."""
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in taken}
    caught = None
    try:
        yield
    except SignalException as exception:
        caught = exception
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught.sigval)
        raise caught  # the signal is one that this process ignores


@contextmanager
def _reports() -> Iterator[Connection | None]:
    """Where a rank sends its progress to this process' listener; None: nobody listens."""
    listener = progress.listener.get()
    if listener is None:
        yield None
        return
    ours, theirs = Pipe(duplex=False)

    def forward() -> None:
        while report := ours.recv():
            listener(*report)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield theirs
    finally:
        theirs.send(None)
        thread.join(timeout=STOPPING_S)
        ours.close()
        theirs.close()


# --- collectives; nothing happens in a process that is alone -----------------------------------


def _grouped() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if _grouped() else 0


def size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if _grouped() else 1


def is_main() -> bool:
    return rank() == 0


def total(tensor: "Tensor") -> "Tensor":
    """The sum over ranks, in place; the same bits on every rank."""
    return _reduced(tensor, "SUM")


def smallest(tensor: "Tensor") -> "Tensor":
    """The elementwise minimum over ranks, in place."""
    return _reduced(tensor, "MIN")


def largest(tensor: "Tensor") -> "Tensor":
    """The elementwise maximum over ranks, in place."""
    return _reduced(tensor, "MAX")


def _reduced(tensor: "Tensor", operation: str) -> "Tensor":
    import torch.distributed as dist

    if _grouped():
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
    return tensor


def gather(thing: Any) -> list[Any]:
    """Every rank's picklable `thing`, in the order of ranks, on every rank."""
    import torch.distributed as dist

    if not _grouped():
        return [thing]
    things = [None] * size()
    dist.all_gather_object(things, thing)
    return things


# --- sharding ----------------------------------------------------------------------------------


def sharded(
    load: "Callable[[], PreTrainedModel]",
    wrap: "Callable[[PreTrainedModel], nn.Module]",
    machine: Machine,
) -> "nn.Module":
    """`wrap(load())` on the machine's device, each rank holding its part of every weight.

    Only rank 0 loads; the others get its modules without weights, then their part of each weight:
    no rank but 0 ever holds the whole model, and rank 0 holds it in CPU memory. What adds hooks to
    the model, as gradient checkpointing does, belongs to `wrap`: modules travel pickled.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if not _grouped():
        return wrap(load()).to(machine.device)
    model = load() if is_main() else None
    sent = [_skeleton(model) if model is not None else None]
    dist.broadcast_object_list(sent)
    skeleton: Any = sent[0]
    wrapped = wrap(skeleton)
    weights: dict[str, Any] = {} if model is None else _weights(model, skeleton, wrapped)
    buffers = dict(wrapped.named_buffers())
    shard(wrapped, machine)
    wrapped.to_empty(device=machine.device)
    for name, buffer in buffers.items():
        wrapped.get_buffer(name).copy_(buffer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(wrapped, weights, options=options)
    return wrapped


def _skeleton(model: "nn.Module") -> "nn.Module":
    """A copy with all parameters on the meta device: its pickle is small. Buffers are copied."""
    import torch

    bare = {
        id(parameter): torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, bare)


def _weights(
    model: "nn.Module", skeleton: "nn.Module", wrapped: "nn.Module"
) -> "dict[str, Tensor]":
    """The model's parameters, under the names that its skeleton's have in `wrapped`."""
    own = dict(model.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in skeleton.named_parameters(remove_duplicate=False)}
    return {
        name: own[names[id(parameter)]].detach()
        for name, parameter in wrapped.named_parameters(remove_duplicate=False)
    }


def shard(module: "nn.Module", machine: Machine) -> None:
    """FSDP2, in place: one group of weights per decoder layer, and one of all others.

    Weights, gradients and optimizer state are split over the ranks along the first dimension.
    A gradient is the sum of the ranks' gradients, not their mean.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(machine.device, (size(),))
    policy = MixedPrecisionPolicy()
    if machine.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*decoder_layers(module), module]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums


def decoder_layers(module: "nn.Module") -> "list[nn.Module]":
    """The blocks that transformers says must not be split over devices."""
    names = {
        name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    return [p for p in module.modules() if names & {kind.__name__ for kind in type(p).__mro__}]


def full_weights(module: "nn.Module") -> "dict[str, Tensor] | None":
    """Every parameter whole, float32 and on the CPU, by name: on rank 0; None on the others.

    A collective, one parameter at a time: other ranks hold the largest one for a moment.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward pass without a backward leaves bfloat16 copies in place
    weights = {}
    for name, parameter in module.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if is_main():
            weights[name] = whole.float().cpu()
    return weights if is_main() else None


if __name__ == "__main__":
    _enter(None, None, None)
