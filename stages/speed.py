"""How fast and how big an optimizer step was: a row of `timings`, which no digest depends on."""

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stages import ranks
from stages.responses import Response
from stages.settings import Machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# dense bfloat16 FLOP/s of one device by a part of its name, from the makers' data sheets
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}


class Clock:
    """What one optimizer step took, once it is over."""

    seconds = 0.0

    def __init__(self, machine: Machine, model: "PreTrainedModel") -> None:
        self.machine, self.model = machine, model

    def row(self, responses: Sequence[Response]) -> dict[str, float | None]:
        """Of a step on `responses`: seconds, tokens (prompts too) per second, memory, and MFU."""
        lengths = [len(r) for r in responses]
        peak = self.peak_flops()
        used = training_flops(self.model, lengths) / self.seconds / ranks.size()
        return {
            "seconds": self.seconds,
            "tokens_per_second": sum(lengths) / self.seconds,
            "peak_memory_gib": self.peak_bytes() / 2**30,
            "mfu": used / peak if peak else None,
        }

    def peak_bytes(self) -> float:
        """On CUDA what torch's tensors held at most; on CPU the process, since it began."""
        if self.machine.device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        import torch

        return torch.cuda.max_memory_allocated()

    def peak_flops(self) -> float | None:
        if self.machine.device == "cpu":
            return None
        import torch

        name = torch.cuda.get_device_name()
        return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


@contextmanager
def measured(machine: Machine, model: "PreTrainedModel") -> Iterator[Clock]:
    """Measure the block; work still queued on the device is waited for."""
    clock = Clock(machine, model)
    wait = _waiter(machine)
    wait()
    started = time.perf_counter()
    yield clock
    wait()
    clock.seconds = time.perf_counter() - started


def _waiter(machine: Machine) -> Any:
    if machine.device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def training_flops(model: "PreTrainedModel", lengths: Sequence[int]) -> float:
    """Of one forward and backward pass: 6 per weight and token, and causal attention's.

    The embedding is a lookup; the head multiplies, also where it shares the embedding's weights.
    Attention: 2 products of S²/2 · heads · head_dim, 2 FLOP each, three times (PaLM, appendix B).
    """
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 6 * config.num_hidden_layers * heads * head_size
    return sum(6 * weights * length + attention * length**2 for length in lengths)
