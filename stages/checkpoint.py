"""Somebody's model directory as a first policy: what can be known of it before anything starts."""

import json
from pathlib import Path
from typing import Any

from stages import policy as policies
from stages.errors import InputError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAMPLE = "What is 12 + 34?"  # that any tokenizer has tokens for


def check(path: Path, *, template: dict[str, Any]) -> None:
    """Raise `InputError`, with the way out, unless a policy can be made of the directory.

    Its architecture is a causal language model that transformers knows and the trainer can score;
    its weights are whole; its tokenizer reads, writes and renders chats with the settings
    `template`; its vocabulary holds every id of the tokenizer; and something ends a response.
    """
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise InputError(
            f"{path} is an adapter without its model: merge it (peft's merge_and_unload), and save "
            "model and tokenizer with save_pretrained"
        )
    policies.check(path)
    vocabulary = _check_architecture(path)
    _check_weights(path)
    tokenizer = _tokenizer(path)
    if len(tokenizer) > vocabulary:
        raise InputError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens and the model's embedding "
            f"{vocabulary} rows (vocab_size in config.json): they belong to two models, or call "
            "model.resize_token_embeddings(len(tokenizer)) and save it again"
        )
    if not tokenizer.decode(tokenizer.encode(SAMPLE), skip_special_tokens=True).strip():
        raise InputError(f"{path}: the tokenizer gives nothing back of '{SAMPLE}'")
    if beyond := [token for token in policies.eos_ids(path) if token >= vocabulary]:
        raise InputError(
            f"{path}: the end token {beyond[0]} is outside the vocabulary, 0 to {vocabulary - 1}: "
            "correct eos_token_id in generation_config.json"
        )
    policies.context_length(path)
    policies.check_template(tokenizer, template)


def _check_architecture(path: Path) -> int:
    """The size of the vocabulary, if the model's class can be trained."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers import __version__ as version
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise InputError(
            f"{path / 'config.json'} is of no model that transformers {version} knows, and code "
            f"from a model's directory is not run: {error}"
        ) from error
    known = KNOWN.get(config.model_type, ())
    names = config.architectures or ["no architectures"]
    if config.is_encoder_decoder or names[0] not in ((known,) if isinstance(known, str) else known):
        raise InputError(
            f"{path / 'config.json'} says {names[0]}, which is no causal language model of "
            f"transformers {version}; expected architectures such as LlamaForCausalLM"
        )
    if scaled := policies.scaled_logits(config):
        raise InputError(f"{path}: models with {scaled} are not supported")
    return int(config.get_text_config().vocab_size)


def _check_weights(path: Path) -> None:
    """Every file of an index is there, and every safetensors file is one, whole."""
    from safetensors import SafetensorError, safe_open

    for index in (path / name for name in INDEXES if (path / name).is_file()):
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is no index of weights: {error!r}") from error
        if missing := sorted(name for name in files if not (path / name).is_file()):
            raise InputError(
                f"{index} names {', '.join(missing)}, not there: {len(missing)} of {len(files)} "
                "files are missing; fetch them again"
            )
    for file in sorted(path.glob(policies.WEIGHTS[0])):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{file} ({file.stat().st_size} bytes) is no whole safetensors file ({error}); "
                "fetch it again (a file of git-lfs needs `git lfs pull`)"
            ) from error


def _tokenizer(path: Path) -> "policies.Tokenizer":
    try:
        return policies.tokenizer(path)
    except Exception as error:  # each kind of tokenizer has errors of its own
        raise InputError(f"{path}: the tokenizer does not load: {error}") from error
