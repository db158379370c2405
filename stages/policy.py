"""A policy on disk: a plain Hugging Face directory, with the optimizer's state beside it."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import InputError, NonFinite
from stages.settings import Machine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
OPTIMIZER = "optimizer.pt"
# what describes the policy beside its weights; copied, so that an update cannot alter it
COMPANIONS = (
    *TOKENIZERS,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)


def check(path: Path) -> None:
    """Raise `InputError` unless `path` holds a config, a tokenizer and safetensors weights."""
    if not path.is_dir():
        raise InputError(f"{path} is no directory; a policy is a Hugging Face model directory")
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any((path / name).is_file() for name in TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json)")
    if not any(path.glob(WEIGHTS[0])):
        missing.append("weights (model.safetensors)")
    if missing:
        raise InputError(
            f"{path} is no policy: it lacks {', '.join(missing)}; "
            "save model and tokenizer there with save_pretrained"
        )


def tokenizer(path: Path) -> "Tokenizer":
    """The policy's tokenizer, with its chat template."""
    check(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def encode(tokenizer: "Tokenizer", messages: list[dict[str, str]]) -> list[int]:
    """The token ids of a chat up to where the answer begins, special tokens included once."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def eos_ids(path: Path) -> list[int]:
    """Every id that ends a response: those of generation_config.json and the tokenizer's own."""
    source = path / "generation_config.json"
    declared = _json(source if source.exists() else path / "config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    known = dict.fromkeys([*ids, tokenizer(path).eos_token_id])  # in order, once each
    found = [int(token) for token in known if token is not None]
    if not found:
        raise InputError(f"{path} names no end token: set eos_token_id in generation_config.json")
    return found


def context_length(path: Path) -> int:
    """How many tokens, prompt and response together, the model is made for."""
    check(path)
    config = _json(path / "config.json")
    length = config.get("max_position_embeddings")
    if not isinstance(length, int):
        raise InputError(f"{path / 'config.json'} has no max_position_embeddings")
    return length


def digest(path: Path) -> str:
    """A fingerprint of what the policy computes: its config and weights."""
    check(path)
    whole = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob(WEIGHTS[0])):
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:16]


def load_model(path: Path, machine: Machine) -> "PreTrainedModel":
    """The model with float32 weights on the machine's device, dropout off (eval mode)."""
    check(path)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{path} does not load as a causal language model: {error}") from error
    absent = sorted(loading["missing_keys"])  # transformers would make them up
    if absent:
        raise InputError(f"{path}: the weights lack {', '.join(absent)}")
    return model.to(machine.device).eval()


def save(model: "PreTrainedModel", out: Path, *, like: Path) -> None:
    """Write the weights and config to `out`, and tokenizer and generation config as in `like`.

    Raises `NonFinite`, before anything is written, if a weight is not a finite number.
    """
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise NonFinite(f"{name} has weights that are not finite; nothing was saved")
    # transformers loads generation configs that it refuses to save: `like`'s is copied instead
    model.generation_config = type(model.generation_config)()
    model.save_pretrained(out)
    (out / "generation_config.json").unlink()
    _copy(like, out, COMPANIONS)


def copy(path: Path, out: Path) -> None:
    """The same policy, byte for byte, optimizer state included."""
    _copy(path, out, ("config.json", *COMPANIONS, *WEIGHTS, OPTIMIZER))


def save_optimizer(
    out: Path, *, optimizer_steps: int, moments: "dict[str, dict[str, Tensor]]"
) -> None:
    """Write AdamW's `moments` (exp_avg, exp_avg_sq by parameter name) and the step counter."""
    import torch

    moments = {
        name: {kind: moment.cpu() for kind, moment in pair.items()}
        for name, pair in moments.items()
    }
    torch.save({"optimizer_steps": optimizer_steps, "moments": moments}, out / OPTIMIZER)


def load_optimizer(path: Path) -> "tuple[int, dict[str, dict[str, Tensor]]]":
    """What `save_optimizer` wrote; (0, {}) for a policy that was never updated."""
    import torch

    if not (path / OPTIMIZER).exists():
        return 0, {}
    try:
        state = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
        return state["optimizer_steps"], state["moments"]
    except Exception as error:  # torch.load raises whatever its unpickler meets
        raise InputError(
            f"{path / OPTIMIZER} is not an optimizer state that update wrote ({error}); "
            "restore it, or remove it to start the optimizer afresh"
        ) from error


def _copy(source: Path, out: Path, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold one JSON object")
    return content
