"""Low-rank adapters (LoRA): trained beside frozen weights, merged into those that others load.

An adapted policy is a plain Hugging Face directory of merged weights, with `lora/` beside them: the
adapter in peft's format and, under `lora/base/`, the weights that it was attached to.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import policy as policies
from stages.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LORA, BASE = "lora", "lora/base"


def base(policy: Path) -> Path:
    """Where the weights lie that an adapter is attached to: without one, the policy's own."""
    return policy / BASE if (policy / BASE).is_dir() else policy


def attached(
    model: "PreTrainedModel", policy: Path, *, rank: int | None, alpha: float
) -> "PreTrainedModel":
    """`model` as it is without `rank`; else with the policy's adapter, or one that begins at zero.

    Raises `InputError` if the policy has an adapter and the settings ask for another, or none.
    """
    if not (policy / LORA).is_dir():
        return _adapted(model, rank=rank, alpha=alpha) if rank else model
    from peft import PeftConfig, PeftModel

    known: Any = PeftConfig.from_pretrained(str(policy / LORA))
    if (rank, alpha) != (known.r, known.lora_alpha):
        raise InputError(
            f"{policy} has an adapter of lora_rank {known.r} and lora_alpha {known.lora_alpha}, "
            f"the settings say {rank} and {alpha}: keep them, or remove {policy / LORA} to go on "
            "from the merged weights"
        )
    return PeftModel.from_pretrained(model, str(policy / LORA), is_trainable=True)


def _adapted(model: "PreTrainedModel", *, rank: int, alpha: float) -> "PreTrainedModel":
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the adapter's first half is random: the same on every rank and run
        return get_peft_model(model, config)


def save(model: "PreTrainedModel", weights: "dict[str, Tensor]", out: Path, *, like: Path) -> None:
    """Write the policy with `weights`, the whole tensors of `model`'s parameters, to `out`."""
    if not hasattr(model, "peft_config"):
        policies.save(model, weights, out, like=like)
        return
    from peft import PeftModel, get_peft_model_state_dict

    model.save_pretrained(out / LORA, state_dict=get_peft_model_state_dict(model, weights))
    origin = base(like)
    (out / BASE).mkdir(parents=True)
    policies.link(origin, out / BASE)
    whole = PeftModel.from_pretrained(
        policies.load_model(origin, device="cpu"), str(out / LORA)
    ).merge_and_unload()
    policies.save(whole, dict(whole.named_parameters()), out, like=like)
