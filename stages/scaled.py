"""A model of the same architecture, scaled down, with random weights: to rehearse a run with.

Kept are the kind of model, how many queries share a key, whether embedding and head are one matrix,
biases and rotary settings; small are layers, widths, context and, unless the model's own tokenizer
is at hand, the vocabulary.
"""

from pathlib import Path
from typing import Any

from stages import policy, warmstart
from stages.errors import InputError
from stages.memory import Architecture

LAYERS, KV_HEADS = 2, 2
HEAD_DIM = 32  # the smallest that vLLM's attention takes on a CPU
# what depends on the number of layers, or on the context, and the ids of another tokenizer
LEFT_OUT = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("dtype", "torch_dtype")


def small(config: dict[str, Any], *, positions: int) -> dict[str, Any]:
    """The config.json of the scaled model, but for its tokenizer's vocabulary."""
    model = Architecture.of(config)
    kv_heads = min(KV_HEADS, model.kv_heads)
    heads = kv_heads * model.heads // model.kv_heads
    hidden = heads * HEAD_DIM
    wide = HEAD_DIM * max(1, round(model.intermediate / model.hidden * hidden / HEAD_DIM))
    kept = {
        name: value
        for name, value in config.items()
        if name not in (*LEFT_OUT, *TOKEN_IDS, *DTYPES)
    }
    return kept | {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": wide,
        "max_position_embeddings": positions,
    }


def run(
    *, out: Path, config: dict[str, Any], positions: int, tokenizer: Path | None
) -> dict[str, float]:
    """Write the scaled model of the config.json `config` to `out`, a policy directory.

    Args:
        positions: tokens of the longest sequence.
        tokenizer: a directory that has one, with a chat template; None: the embedded one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokens: Any = (
        warmstart.build_tokenizer(warmstart.Config(max_positions=max(256, positions)))
        if tokenizer is None
        else AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    )
    if tokens.eos_token_id is None:
        raise InputError(f"{tokenizer} has a tokenizer without an end token")
    shape = small(config, positions=positions) | {"vocab_size": len(tokens)}
    kind = shape.pop("model_type")
    ids = {name: getattr(tokens, name) for name in TOKEN_IDS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **shape, **ids), dtype=torch.float32
        )
    model.generation_config = GenerationConfig(
        eos_token_id=ids["eos_token_id"], pad_token_id=ids["pad_token_id"]
    )
    tokens.save_pretrained(out)
    model.save_pretrained(out)
    policy.check(out)
    return {"parameters": float(model.num_parameters())}


def has_tokenizer(path: Path) -> bool:
    """Whether a model's directory has a tokenizer of its own."""
    return any((path / name).is_file() for name in policy.TOKENIZERS)
