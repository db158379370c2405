"""A policy on disk: a plain Hugging Face directory, with the optimizer's state beside it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import tables
from stages.errors import InputError, NonFinite

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
STATE = ("optimizer", "lora")  # directories that only the next update reads
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
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # by family
SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what the trainer ignores
PROBE = "probe"  # a table: what these very weights compute, to prove engines by
MODEL = ("config.json", *COMPANIONS, *WEIGHTS)


def check(path: Path) -> None:
    """Raise `InputError` unless `path` holds a config, a tokenizer and weights."""
    if not path.is_dir():
        raise InputError(f"{path} is no directory; a policy is a Hugging Face model directory")
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any((path / name).is_file() for name in TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json)")
    if not any(any(path.glob(pattern)) for pattern in (WEIGHTS[0], WEIGHTS[-1])):
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


class TemplateError(ValueError):
    """The chat template does not take these messages; the text is its own complaint."""


def check_template(tokenizer: "Tokenizer", settings: dict[str, Any]) -> None:
    """Raise `InputError` unless there is a chat template, and it reads every one of `settings`."""
    try:
        template = tokenizer.get_chat_template(settings.get("chat_template"), settings.get("tools"))
    except ValueError as error:
        raise InputError(
            f"the policy's tokenizer has no chat template to use ({error}), and nothing is guessed "
            "of how its prompts are written; put one into chat_template.jinja beside "
            "tokenizer.json, such as {% for m in messages %}{{ m.content }}{% endfor %} for the "
            "bare text, or give it with the setting rollout.template={chat_template: …}"
        ) from error
    for name in settings:
        if name != "chat_template" and name not in template:
            raise InputError(
                f"template.{name}: the policy's chat template does not read it, so it would change "
                "nothing; look for the name in its chat_template.jinja"
            )


def encode(tokenizer: "Tokenizer", messages: list[dict[str, str]], **settings: Any) -> list[int]:
    """The token ids of a chat up to where the answer begins, special tokens included once.

    `settings` go to the chat template. Where the tokenizer begins texts with a BOS, one BOS comes
    first, whether the template spells none, one or two. Raises `TemplateError`.
    """
    from jinja2.exceptions import TemplateError as Complaint

    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **settings
        )
    except (Complaint, TypeError, ValueError, LookupError, AttributeError) as error:
        raise TemplateError(f"{error}") from error
    bos = tokenizer.bos_token_id
    if bos is None or (ids[:1] != [bos] and tokenizer("")["input_ids"][:1] != [bos]):
        return ids
    spelled = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[spelled:]]


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


def link(path: Path, out: Path) -> None:
    """The same model in another directory, without a second copy of its bytes where possible."""

    def linked(file: Path, copy: Path) -> None:
        try:
            os.link(file, copy)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(file, copy)

    _copy(path, out, MODEL, by=linked)


def context_length(path: Path) -> int:
    """How many tokens, prompt and response together, the model is made for."""
    check(path)
    config = _json(path / "config.json")
    config = config | (config.get("text_config") or {})
    for name in CONTEXTS:
        if isinstance(length := config.get(name), int):
            return length
    raise InputError(f"{path / 'config.json'} has no max_position_embeddings")


def digest(path: Path) -> str:
    """A fingerprint of what the policy computes: its config and weights."""
    check(path)
    weights = sorted(path.glob(WEIGHTS[0])) or sorted(path.glob("pytorch_model*.bin"))
    files = (path / "config.json", *weights)
    return _digest(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=16)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of files of that size and time: weights are large, and asked for more than once."""
    config, *weights = (file for file, _, _ in files)
    whole = hashlib.sha256(config.read_bytes())
    for file in weights:
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()[:16]


def probe(path: Path) -> "pl.DataFrame | None":
    """Token sequences with the log-probs at temperature 1 that the trainer computes for them."""
    return tables.read(path, PROBE) if (path / PROBE).is_dir() else None


def architecture(path: Path) -> str:
    """A fingerprint of all but the weights that an engine is started with: config, tokenizer."""
    check(path)
    whole = hashlib.sha256(json.dumps(_json(path / "config.json"), sort_keys=True).encode())
    for name in TOKENIZERS:
        if (path / name).is_file():
            whole.update((path / name).read_bytes())
    return whole.hexdigest()[:16]


def tied(path: Path) -> bool:
    """Whether embedding and head are one matrix; many a config.json leaves that to its class."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return bool(config.get_text_config().tie_word_embeddings)


def scaled_logits(config: Any) -> str | None:
    """The name of what a model does to the logits after the head, which no trainer here does."""
    return next((name for name in SCALED if getattr(config, name, None) not in (None, 1.0)), None)


def load_model(path: Path, *, device: str, attention: str = "sdpa") -> "PreTrainedModel":
    """The model with float32 weights on `device`, dropout off (eval mode)."""
    check(path)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise InputError(f"{path} does not load as a causal language model: {error}") from error
    absent = sorted(loading["missing_keys"])  # transformers would make them up
    if absent:
        raise InputError(f"{path}: the weights lack {', '.join(absent)}")
    return model.to(device).eval()


def save(model: "PreTrainedModel", weights: "dict[str, Tensor]", out: Path, *, like: Path) -> None:
    """Write `weights`, whole tensors by parameter name, and the model's config to `out`; tokenizer
    and generation config as in `like`.

    Raises `NonFinite`, before anything is written, if a weight is not a finite number.
    """
    from huggingface_hub import save_torch_state_dict

    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise NonFinite(f"{name} has weights that are not finite; nothing was saved")
    persistent = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    save_torch_state_dict({n: t.contiguous() for n, t in (weights | buffers).items()}, out)
    model.config.dtype = "float32"
    model.config.save_pretrained(out)
    _copy(like, out, COMPANIONS)


def copy(path: Path, out: Path, *, without: Iterable[str] = ()) -> None:
    """The same policy, byte for byte, optimizer state, adapter and probe included.

    Args:
        without: directories of these that stay behind.
    """
    _copy(path, out, MODEL)
    for directory in {*STATE, PROBE}.difference(without):
        if (path / directory).is_dir():
            shutil.copytree(path / directory, out / directory)


def _copy(
    source: Path,
    out: Path,
    patterns: Iterable[str],
    *,
    by: Callable[[Path, Path], object] = shutil.copyfile,
) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            by(file, out / file.name)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold one JSON object")
    return content
